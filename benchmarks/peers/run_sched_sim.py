"""What sched-sim simulates; run by the interpreter of its own environment: ``run_sched_sim.py REQUESTS``.

Its preset for an A100 (Llama-3-8B), and its defaults: chunked prefill, 512 tokens and at most 32 requests a step. (Its
preset for an H100 holds a 70B model.)
"""

import random
import sys

from sched_sim.core.event_engine import Simulator  # type: ignore[import-not-found]
from sched_sim.core.request import Request  # type: ignore[import-not-found]
from sched_sim.hardware.presets import get_hardware_profile  # type: ignore[import-not-found]
from sched_sim.schedulers.factory import create_scheduler  # type: ignore[import-not-found]

RATE = 8.0
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 200


def main() -> None:
    draw = random.Random(42)
    hardware = get_hardware_profile("a100")
    requests = []
    clock_s = 0.0
    for number in range(int(sys.argv[1])):
        clock_s += draw.expovariate(RATE)
        requests.append(
            Request(
                request_id=str(number), arrived_at=clock_s, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS
            )
        )
    simulator = Simulator(hardware, create_scheduler("chunked", hardware))
    simulator.submit_workload(requests)
    metrics = simulator.run()
    if metrics.completed_requests != len(requests):
        sys.exit(f"only {metrics.completed_requests} of {len(requests)} requests completed")


if __name__ == "__main__":
    main()
