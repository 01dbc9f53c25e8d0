"""Plays the steps of a program on a device, one by one, and has them judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_validate.attention.base import build_attention
from gpu_validate.matrices import Matrices
from gpu_validate.mover import build_mover
from gpu_validate.observer import StepObserver
from gpu_validate.options import Options
from gpu_validate.payload import fill_random
from gpu_validate.pool import PagedPool
from gpu_validate.program import Action, Facts, Fence, Launch, StepWork
from gpu_validate.step import StepRunner
from gpu_validate.streams import CopyQueue, build_queue
from gpu_validate.verify import MismatchError, Shadow, Verifier, check_layout
from sim.errors import InputError
from sim.kv.events import Events
from sim.serving.models import Model

__all__ = ["Player", "ReplayReport"]


@dataclass
class ReplayReport:
    """What was played, on what, and what was seen.

    Attributes
    ----------
    events, steps, first_step, last_step
        Of the log: all events; of the steps played: how many, and their numbers.
    tokens_written, tokens_copied, tokens_moved_in_place
        On the device.
    tokens_seen_moved
        Of the copied ones those whose bytes were found at their destination when the fence was passed; None without
        the check.
    bytes_moved
        Read and written by copies and moves.
    layouts_checked
        Steps after which the layout that the kernels read was equal to the simulator's, block for block.
    tokens_verified, outputs_verified, max_error
        Of payloads and attention; the error is a share of the largest value that could be seen. None without verify.
    outputs_undefined
        Rows whose attention was not judged: it read dead slots into which a copy in flight wrote.
    graph_replays
        Steps that were played by a captured graph, or by the same body without capture.
    """

    model: str
    layers: int
    layers_of_model: int
    device: str
    dtype: str
    attention: str
    mover: str
    queue: str
    visible: str
    graph: str
    matrices: bool
    block_size: int
    num_blocks: int
    pool_bytes: int
    events: int = 0
    steps: int = 0
    first_step: int = 0
    last_step: int = 0
    tokens_written: int = 0
    tokens_copied: int = 0
    tokens_seen_moved: int | None = None
    tokens_moved_in_place: int = 0
    bytes_moved: int = 0
    plans: int = 0
    layouts_checked: int = 0
    tokens_verified: int | None = None
    outputs_verified: int | None = None
    outputs_undefined: int | None = None
    max_error: float | None = None
    sample: float | None = None
    graph_replays: int = 0
    graph_checks: int = 0
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


class Player:
    """Pool, kernels, queue and judges of one replay."""

    def __init__(
        self,
        log: Events,
        model: Model,
        options: Options,
        facts: Facts,
        observer: StepObserver | None,
        queue: Callable[..., CopyQueue] | None,
    ) -> None:
        self.options = options
        self.observer = observer
        self.pool = PagedPool(
            model,
            num_blocks=log.num_blocks,
            block_size=log.block_size,
            dtype=options.dtype,
            device=options.device,
        )
        attention = build_attention(
            options.attention,
            self.pool,
            max(facts.max_decodes, 1),
            max(facts.max_blocks, 1),
            masked=options.visible == "live",
            capture=options.graph,
        )
        if options.graph and not attention.capturable:
            raise InputError(f"attention {attention.name!r} cannot be captured in a graph here")
        self.mover = build_mover(options.mover, self.pool)
        self.runner = StepRunner(
            model,
            self.pool,
            attention,
            matrices=Matrices(model, facts.max_tokens, device=options.device, dtype=options.dtype, seed=options.seed)
            if options.matrices
            else None,
            max_batch=facts.max_decodes,
            max_tokens=facts.max_tokens,
            graphs=options.graph,
            payload=options.verify,
            seed=options.seed,
        )
        if queue is not None:
            self.queue = queue(self.mover, observer)
        else:
            self.queue = build_queue(options.queue, self.mover, options.device, observer, seed=options.seed)
        self.shadow = Shadow(self.pool.num_slots)
        self.verifier = (
            Verifier(
                self.pool,
                self.runner,
                self.shadow,
                visible=options.visible,
                sample=options.sample,
                seed=options.seed,
            )
            if options.verify
            else None
        )
        self._busy = np.zeros(log.num_blocks, np.int32)
        """Copies in flight that read or fill each block."""
        self._filled = np.zeros(log.num_blocks, np.bool_)
        """Blocks that copies in flight fill, and no table lists."""
        self._begun = False
        self._moved = 0
        graphs = self.runner.graphs
        self.report = ReplayReport(
            model=model.name,
            layers=model.layers,
            layers_of_model=model.layers,
            device=str(self.pool.device),
            dtype=self.pool.dtype.name,
            attention=attention.name,
            mover=self.mover.name,
            queue=self.queue.name,
            visible=options.visible,
            graph="off" if graphs is None else "captured" if graphs.captured else "recorded",
            matrices=options.matrices,
            block_size=log.block_size,
            num_blocks=log.num_blocks,
            pool_bytes=self.pool.nbytes,
            events=facts.events,
            tokens_seen_moved=0 if options.check else None,
            sample=options.sample if options.verify else None,
        )

    def skip(self, work: StepWork) -> None:
        """Take note of a step that is not played."""
        for action in work.before:
            self.shadow.act(action)
        self.shadow.write(work)

    def play(self, work: StepWork) -> None:
        """Play a step and judge it."""
        if not self._begun:
            self._begin(work)
        if self.observer is not None:
            self.observer.begin(work)
        self.act_all(work.before)
        if self.observer is not None:
            self.observer.moved(work)
        # By the order of the log; a kernel in a queue could not be asked.
        if self._busy[work.slots // self.pool.block_size].any():
            raise MismatchError(f"step {work.step}: a block is written that a copy in flight reads or fills")
        if self._filled[work.block_table].any():
            raise MismatchError(f"step {work.step}: a block is read that a copy in flight fills")
        self.runner.run(work, self.observer)
        if self.observer is not None:
            self.observer.end(work)
        self.shadow.write(work)
        report = self.report
        report.steps += 1
        report.last_step = work.step
        report.tokens_written += work.tokens
        if self.runner.graphs is not None and len(self.runner.rows) and not self.runner.chunks:
            report.graph_replays += 1
        if self.options.check:
            check_layout(work, self.runner)
            report.layouts_checked += 1
        if self.verifier is not None:
            self.verifier.check(work)
            self._compare_with_eager(work)

    def act_all(self, actions: Iterable[Action]) -> None:
        """Do what happens between two steps."""
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action)
            elif isinstance(action, Fence):
                self._fence(action)
            else:
                self.mover.move_in_place(action.source, action.target)
                self._moved += len(action.source)
                self.shadow.act(action)

    def finish(self, *, whole: bool, facts: Facts) -> None:
        """Fill the report, and compare what was moved with what the log says (trap 14: nothing moves, and nobody sees).

        Raises
        ------
        MismatchError
            If they differ.
        """
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)
        report = self.report
        report.tokens_copied, report.tokens_moved_in_place = self.queue.tokens, self._moved
        report.bytes_moved = 2 * self.pool.token_bytes * (report.tokens_copied + report.tokens_moved_in_place)
        if self.verifier is not None:
            report.tokens_verified = self.verifier.tokens
            report.outputs_verified = self.verifier.outputs
            report.outputs_undefined = self.verifier.undefined
            report.max_error = self.verifier.max_error
        done = report.tokens_copied, report.tokens_moved_in_place
        if whole and done != (facts.tokens_planned, facts.tokens_moved_in_place):
            raise MismatchError(
                f"the device copied {done[0]:,} tokens and moved {done[1]:,} in place, expected "
                f"{facts.tokens_planned:,} and {facts.tokens_moved_in_place:,}"
            )

    def _begin(self, work: StepWork) -> None:
        """Put the pool into the state before the first step that is played."""
        self._begun = True
        self.report.first_step = work.step
        if self.verifier is not None:
            self.verifier.fill()
        else:
            fill_random(self.pool, self.options.seed)
        pending = list(self.shadow.pending.values())
        self.shadow.pending.clear()
        for launch in pending:
            self._launch(launch)

    def _launch(self, launch: Launch) -> None:
        source, target = launch.source, launch.target
        if len(np.unique(target)) != len(target) or np.isin(target, source).any():
            raise MismatchError(f"plans {launch.plans}: a slot is copied to twice, or read and written")
        if self._busy[np.unique(target // self.pool.block_size)].any():
            raise MismatchError(f"plans {launch.plans}: a block is filled that a copy in flight uses")
        self.shadow.act(launch)
        for plan in launch.plans:
            self._use(self.shadow.pending[plan], 1)
        self.queue.launch(launch)
        self.report.plans += len(launch.plans)
        if self.observer is not None:
            self.observer.launched(launch)

    def _fence(self, fence: Fence) -> None:
        self.queue.fence(fence.plans)
        if self.observer is not None:
            self.observer.fenced(fence)
        for plan in fence.plans:
            launch = self.shadow.pending[plan]
            self._use(launch, -1)
            if self.report.tokens_seen_moved is not None:
                self.report.tokens_seen_moved += self._see(launch)
        self.shadow.act(fence)

    def _use(self, launch: Launch, sign: int) -> None:
        size = self.pool.block_size
        filled = np.unique(launch.target // size)
        self._busy[np.unique(launch.source // size)] += sign
        self._busy[filled] += sign
        self._filled[np.setdiff1d(filled, launch.listed)] = sign > 0

    def _see(self, launch: Launch) -> int:
        """Return how many tokens of a copy that was waited for are where they should be: all, or it is an error."""
        for first in range(0, len(launch.source), 1024):
            source, target = (
                torch.from_numpy(slots[first : first + 1024]).to(self.pool.device)
                for slots in (launch.source, launch.target)
            )
            if not torch.equal(self.pool.raw(source), self.pool.raw(target)):
                raise MismatchError(f"plan {launch.plans[0]}: tokens are missing behind the fence of their copy")
        return len(launch.source)

    def _compare_with_eager(self, work: StepWork) -> None:
        """Compare a graph's output with that of the same kernels issued one by one, byte for byte."""
        runner = self.runner
        if runner.graphs is None or not len(runner.rows) or runner.chunks:
            return
        listed = work.block_table[runner.rows].astype(np.int64)[..., None] * self.pool.block_size
        if self.options.visible == "listed" and self.shadow.filling(listed + np.arange(self.pool.block_size)):
            return  # what a copy in flight writes, one may read and not the other
        runner.graphs.check_addresses()
        captured = [out[: runner.bucket].clone() for out in runner.out]
        runner.forward(runner.bucket)
        for layer, (one, other) in enumerate(zip(captured, runner.out, strict=True)):
            if not torch.equal(one.view(torch.uint8), other[: runner.bucket].view(torch.uint8)):
                raise MismatchError(f"step {work.step}, layer {layer}: graph and eager attention differ in bytes")
        self.report.graph_checks += 1
