"""A device whose times follow a known law: what calibration must find out, and what validation must agree with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from gpu_validate.device import Device
from gpu_validate.layouts import lengths_of, step_work
from gpu_validate.program import Fence, InPlace, Launch, StepWork
from gpu_validate.sweeps import Beside, Decode, Prefill, Repack, Step
from gpu_validate.timing import VirtualClock
from sim.serving.models import Model, get_model

LAW = MappingProxyType(
    {
        "step": 200e3,  # ns of a step beyond its parts
        "sequence": 900.0,
        "entry": 30.0,
        "weights": 2.0e6,  # ns of the matrices until they are bound by arithmetic
        "token": 9e3,
        "head": 150e3,
        "launch": 320e3,
        "byte": 0.25e-3,
        "attention_sequence": 5e3,
        "prefill_token": 400.0,
        "prefill_pair": 0.9,
        "copy_launch": 12e3,
        "scattered": 0.28e-3,
        "contiguous": 0.24e-3,
        "share": 0.4,
        "interference": 1.25,
        "dead": 0.9,
    }
)


@dataclass
class VirtualDevice:
    """Everything that calibration asks of a device, by the law above (one clock for all)."""

    model: Model = field(default_factory=lambda: get_model("llama-3.1-8b"))
    noise: float = 0.0
    seed: int = 0
    kv_dtype: str = "bf16"
    block_size: int = 16
    free_sequences: float = 16.0
    backends: dict[str, str] = field(default_factory=lambda: {"attention": "virtual", "mover": "virtual"})
    device: Device = field(default_factory=lambda: Device("virtual device", "cpu", 1 << 40, 0, None, {"virtual": "1"}))

    def __post_init__(self) -> None:
        self.clock = self.graph_clock = self.eager_clock = self.host_clock = VirtualClock(self.noise, self.seed)

    @property
    def token_bytes(self) -> int:
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * {"bf16": 2, "fp32": 4}[self.kv_dtype]

    def takes(self, ns: float):
        return lambda _: self.clock.advance(ns)

    # -- the law, written down anew: it is what the fits are tested against --------------------------------------------

    def gemm_ns(self, tokens: float) -> float:
        return max(LAW["weights"], LAW["token"] * tokens)

    def attention_ns(self, read: float, written: float, sequences: float) -> float:
        kv = (read + written) * self.token_bytes * LAW["byte"]
        beyond = max(0.0, sequences - self.free_sequences) * LAW["attention_sequence"]
        return LAW["launch"] + (kv**1.5 + beyond**1.5) ** (2 / 3)

    def prefill_ns(self, tokens: float, seqs: float, pairs: float, read: float) -> float:
        return max(0.0, tokens - seqs) * LAW["prefill_token"] + max(0.0, pairs - read) * LAW["prefill_pair"]

    def step_ns(self, tokens: float, seqs: float, read: float, pairs: float) -> float:
        own = LAW["step"] + LAW["sequence"] * seqs + LAW["entry"] * read / self.block_size
        parts = self.gemm_ns(tokens) + LAW["head"] + self.attention_ns(read, tokens, seqs)
        return own + parts + self.prefill_ns(tokens, seqs, pairs, read)

    def copy_ns(self, tokens: float, scattered: bool = True) -> float:
        rate = LAW["scattered"] if scattered else LAW["contiguous"]
        return LAW["copy_launch"] + 2 * self.token_bytes * tokens * rate

    # -- what is asked -------------------------------------------------------------------------------------------------

    def launch(self):
        return self.takes(2e3)

    def plain_copy(self, size: int):
        return self.takes(2e3 + 2 * size * LAW["contiguous"])

    def matrices(self, tokens: int):
        return self.takes(self.gemm_ns(tokens))

    def head(self, _sequences: int):
        return self.takes(LAW["head"])

    def decode_eagerly(self) -> bool:
        return False

    def decode(self, shape: Decode):
        lengths = lengths_of(shape)
        live = shape.live * shape.batch if shape.dead else int(lengths.sum())
        read = live + LAW["dead"] * (int(lengths.sum()) - live)
        return self.takes(self.attention_ns(read, 0, shape.batch) / self.model.layers)

    def prefill(self, shape: Prefill):
        tokens, read = shape.batch * shape.tokens, shape.batch * (shape.tokens + shape.context)
        pairs = shape.batch * (shape.tokens * shape.context + shape.tokens * (shape.tokens + 1) / 2)
        attention = self.attention_ns(read, tokens, shape.batch)
        return self.takes((attention + self.prefill_ns(tokens, shape.batch, pairs, read)) / self.model.layers)

    def repack(self, shape: Repack):
        return self.takes(self.copy_ns(shape.tokens, shape.scattered))

    def play(self, shapes: Sequence[Step]) -> np.ndarray:
        return self.run([step_work(shape, block_size=self.block_size, num_blocks=1 << 17) for shape in shapes])

    def upload(self, shape: Decode):
        entries = int((-(-lengths_of(shape) // self.block_size)).sum())
        return self.takes(30e3 + 2.0 * entries)

    def steps_of_decode(self, shape: Beside, count: int):
        read = shape.batch * shape.live
        one = self.step_ns(shape.batch, shape.batch, read, read)
        memory = LAW["weights"] + LAW["head"] + (read + shape.batch) * self.token_bytes * LAW["byte"]
        busy = 2 * self.token_bytes * shape.tokens * LAW["contiguous"]

        def contend(steps_ns: float, copy_ns: float) -> tuple[float, float]:
            delay = min(busy * memory / one, count * memory * LAW["share"] / (1 - LAW["share"]))
            beside = LAW["copy_launch"] + (copy_ns - LAW["copy_launch"]) / LAW["share"]
            return steps_ns + LAW["interference"] * delay, beside

        self.clock.contend = contend
        return self.takes(count * one)

    def run(self, steps: Iterable[StepWork]) -> np.ndarray:
        """Run the steps of a program, copies beside them, and return what each took in ns."""
        times = []
        left = busy = wall = 0.0
        token = 2 * self.token_bytes
        for work in steps:
            start = self.clock.now_ns
            for action in work.before:
                if isinstance(action, Launch):
                    busy = left = token * len(action.source) * LAW["contiguous"]
                    wall = LAW["copy_launch"] + token * len(action.source) * LAW["scattered"] / LAW["share"]
                elif isinstance(action, Fence):
                    left = 0.0
                elif isinstance(action, InPlace):
                    self.clock.advance(self.copy_ns(len(action.source)))
            read = float(work.kv_read_tokens)
            step = self.step_ns(work.tokens, work.seqs, read, float(work.attention_pairs))
            kv = (read + work.tokens) * self.token_bytes * LAW["byte"]
            memory = LAW["weights"] + LAW["head"] + kv
            if left > 0:
                most = memory * LAW["share"] / (1 - LAW["share"])
                longer = LAW["interference"] * min(left * memory / step, most)
                step += longer
                left -= step * busy / wall
            self.clock.advance(step)
            times.append(self.clock.now_ns - start)
        return np.array(times)
