"""Replay of a KV event log on a real paged pool.

Before anything is allocated the whole log is interpreted once: what is unlawful, truncated or too large is refused
then. Steps are then played one by one. Memory is bounded by the pool and by a few steps, not by the length of the log.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from gpu_validate.matrices import Matrices
from gpu_validate.memory import check_fits
from gpu_validate.observer import StepObserver
from gpu_validate.options import Options
from gpu_validate.player import Player, ReplayReport
from gpu_validate.pool import PagedPool
from gpu_validate.program import Facts, Program
from gpu_validate.step import StepRunner
from gpu_validate.streams import CopyQueue
from sim.errors import InputError
from sim.kv.events import Events
from sim.serving.models import Model

__all__ = ["Options", "ReplayReport", "replay"]

T = TypeVar("T")


def replay(
    log: Events,
    model: Model,
    options: Options | None = None,
    *,
    layers_of_model: int | None = None,
    facts: Facts | None = None,
    observer: StepObserver | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    queue: Callable[..., CopyQueue] | None = None,
) -> ReplayReport:
    """Play a log.

    Parameters
    ----------
    log
        The events.
    model
        Geometry of the pool.
    options
        How.
    layers_of_model
        Layers of the whole model, if ``model`` was cut.
    facts
        What :meth:`gpu_validate.program.Program.check` said of this log, if it was asked before.
    observer
        Told what happens.
    progress
        Called now and then with what is going on ("checking" events, "playing" steps), how many are done, and all.
    queue
        Makes the copy queue from the mover, in place of the one that the options name.

    Returns
    -------
    ReplayReport
        What was played and seen.

    Raises
    ------
    InputError
        If the log cannot be replayed like this; nothing has been allocated then.
    MismatchError
        If the device does not hold or compute what it should.
    """
    options = options if options is not None else Options()
    program = Program(
        log,
        live=options.verify or options.visible == "live",
        audit_every=int(options.verify),
    )
    if facts is None:
        facts = program.check(None if progress is None else lambda done, total: progress("checking", done, total))
    first, end = _range(options.steps, facts)
    check_fits(
        _parts(log, model, options, facts), options.device, lower="the layers (--layers) or the number of blocks"
    )
    player = Player(log, model, options, facts, observer, queue)
    player.report.layers_of_model = layers_of_model if layers_of_model is not None else model.layers
    started = time.perf_counter()
    try:
        works = itertools.takewhile(lambda work: work.step < end, program)
        for work in _ahead(works, options.lookahead):
            if work.step < first:
                player.skip(work)
                continue
            player.play(work)
            if progress is not None:
                progress("playing", work.step - first + 1, end - first)
        if end > facts.last_step:
            player.act_all(program.tail)
    finally:
        player.queue.close()
    player.finish(whole=options.steps is None, facts=facts)
    player.report.wall_s = time.perf_counter() - started
    return player.report


def _range(steps: tuple[int, int] | None, facts: Facts) -> tuple[int, int]:
    if steps is None:
        return facts.first_step, facts.last_step + 1
    first, end = steps
    if first > facts.last_step or end <= facts.first_step:
        raise InputError(f"steps {first}:{end}: the log has steps {facts.first_step} to {facts.last_step}")
    return max(first, facts.first_step), min(end, facts.last_step + 1)


def _parts(log: Events, model: Model, options: Options, facts: Facts) -> dict[str, int]:
    """Return the bytes that a replay needs, by what they are for."""
    size = {"num_blocks": log.num_blocks, "block_size": log.block_size, "dtype": options.dtype}
    parts = {
        f"KV pool of {log.num_blocks} blocks of {log.block_size}": PagedPool.bytes_needed(model, **size),  # type: ignore[arg-type]
        "buffers of a step": StepRunner.bytes_needed(model, options.dtype, facts.max_decodes, facts.max_tokens)
        + 8 * facts.max_seqs * facts.max_blocks,
    }
    if options.matrices:
        parts["weights and activations"] = Matrices.bytes_needed(model, facts.max_tokens, options.dtype)
    return parts


def _ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield the items, of which ``count`` and one have been made before the first is given out, and so on."""
    source = iter(items)
    while batch := deque(itertools.islice(source, count + 1)):
        while batch:
            yield batch.popleft()
