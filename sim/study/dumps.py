"""Every step as text: what real vLLM's scheduler is compared with (tests/differential)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sim.errors import InputError
from sim.kv.state import H
from sim.serving.scheduler import W

if TYPE_CHECKING:
    from sim.serving.engine import Engine

__all__ = ["Dump"]

STEPS = (
    "step,clock_s,running,waiting,used_blocks,free_blocks,sched_tokens,sched_reqs,"
    "preempted_step,preempted_total,finished_total,preempted_ids\n"
)
TABLES = "step,req,computed_before,n_tokens,new_block_ids\n"


class Dump:
    """Writes a line a step, and a line for each request scheduled in it.

    A step's line is the state after it was scheduled and before its results were applied, which is what a GPU would
    see; only ``finished_total`` is that after the step. ``new_block_ids`` are a newly admitted request's whole table,
    cached blocks first, and otherwise the blocks added in this step. Where a request has several tables, the blocks of
    one are separated from those of the next by a semicolon. Blocks are those of the pool, whatever a unit's share.
    """

    def __init__(self, steps: TextIO | None, tables: TextIO | None) -> None:
        self._steps = steps
        self._tables = tables
        self._lines: deque[str] = deque()
        self._blocks: dict[tuple[int, int], list[int]] = {}
        for file, header in ((steps, STEPS), (tables, TABLES)):
            if file is not None:
                file.write(header)

    @classmethod
    @contextlib.contextmanager
    def open(cls, steps: Path | None, tables: Path | None) -> Iterator[Dump]:
        """Write to new files; they appear under their names when all is written.

        Raises
        ------
        InputError
            If a file cannot be written.
        """
        with contextlib.ExitStack() as stack:
            pending: list[tuple[Path, Path]] = []

            def file(path: Path | None) -> TextIO | None:
                if path is None:
                    return None
                part = path.with_name(path.name + ".part")
                try:
                    handle = part.open("w")
                except OSError as error:
                    raise InputError(f"{path}: cannot write it: {error.strerror}") from None
                pending.append((part, path))
                return stack.enter_context(handle)

            try:
                yield cls(file(steps), file(tables))
            except BaseException:
                for part, _ in pending:
                    part.unlink(missing_ok=True)
                raise
        for part, path in pending:
            part.replace(path)

    def scheduled(self, engine: Engine) -> None:
        """Write what the step was given."""
        scheduler = engine.scheduler
        s = scheduler.cache.store.s
        if self._tables is not None:
            self._write_tables(engine)
        if self._steps is not None:
            free = int(s.header[H.FREE])
            lost = sorted((state.req_id for state in scheduler.preempted), key=_natural)
            self._lines.append(
                f"{engine.step},{engine.clock_s:.6f},{len(scheduler.states)},{len(scheduler.waiting)},"
                f"{scheduler.cache.pool.used_blocks},{free},{scheduler.work[W.TOKENS]},{scheduler.work[W.SEQS]},"
                f"{len(lost)},{engine.preempted_total},{{}},{' '.join(lost)}\n"
            )

    def applied(self, engine: Engine, finished: int) -> None:
        """Write the line of the oldest step that has none yet."""
        del engine
        if self._steps is not None:
            self._steps.write(self._lines.popleft().format(finished))

    def _write_tables(self, engine: Engine) -> None:
        assert self._tables is not None
        scheduler = engine.scheduler
        rows = scheduler.cache.store.s.rows
        blocks: dict[tuple[int, int], list[int]] = {}
        units, size = scheduler.cache.units.count, scheduler.cache.block_size
        windows = scheduler.cache.units.window_of.tolist()
        for row in scheduler.running[: scheduler.num_running : units].tolist():
            state = scheduler.states[row]
            tables = [scheduler.cache.block_table(each) for each in scheduler.cache.bundle(row)]
            admission = state.ordinal, state.preemptions
            blocks[admission] = [len(table) for table in tables]
            tokens = int(rows[row]["sched"])
            if tokens:
                before = int(rows[row]["computed"]) - tokens
                known = self._blocks.get(admission, [0] * units)
                # A table with a window loses blocks at its other end.
                added = -(-(before + tokens) // size) - -(-before // size)
                new = [
                    table[max(0, len(table) - added) :] if window else table[count:]
                    for table, count, window in zip(tables, known, windows, strict=True)
                ]
                ids = ";".join(" ".join(map(str, each)) for each in new)
                self._tables.write(f"{engine.step},{state.req_id},{before},{tokens},{ids}\n")
        self._blocks = blocks


def _natural(req_id: str) -> tuple[int, str]:
    """Sort numbers as numbers."""
    return (int(req_id), "") if req_id.isdecimal() else (1 << 62, req_id)
