"""Small caches and engines, and the recount that judges them: for the tests of the control plane and of the engine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.kv.blocks import emit
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.holes import holes_of
from sim.kv.policies import policies
from sim.kv.reclaim import Reclaimer, reclaimers
from sim.kv.state import H
from sim.kv.units import ONE_UNIT, Units
from sim.serving.attention import build_attention
from sim.serving.ballots import Ballots
from sim.serving.copy import copy_costs
from sim.serving.cost import step_costs
from sim.serving.engine import Budget, Engine
from sim.serving.limits import Limits
from sim.serving.scheduler import Scheduler
from sim.workload.trace import Trace

MS = 1_000_000


@dataclass
class Steps:
    """Ends a run that takes more steps than it may: an observer for :class:`sim.serving.engine.Engine`."""

    most: int

    def scheduled(self, engine: Engine) -> None:
        assert engine.step < self.most, f"still running after {self.most} steps"

    def applied(self, engine: Engine, finished: int) -> None:
        pass


def trace(*requests: tuple[int, int, int], hashes: list[list[int]] | None = None, hash_tokens: int = 16) -> Trace:
    """Make a trace of (arrival_ns, prompt, output)."""
    columns = np.array(requests, np.int64).reshape(-1, 3).T
    prefixes = None if hashes is None else [np.array(h, np.int64) for h in hashes]
    return Trace(*columns, prefix_hashes=prefixes, hash_tokens=hash_tokens)


def same_prompts(source: Trace) -> Callable[[int, int, int], bool]:
    """Return the question whether two requests of a trace begin with the same tokens, for :class:`Replay`."""

    def token(number: int, position: int) -> object:
        hashes = [] if source.prefix_hashes is None else source.prefix_hashes[number]
        if position >= source.prompt_tokens[number]:
            return "generated"
        span = position // source.hash_tokens
        return int(hashes[span]) if span < len(hashes) else ("of", number)

    return lambda a, b, tokens: all(token(a, p) == token(b, p) for p in range(tokens))


def engine(
    source: Trace,
    *,
    policy: str = "full",
    reclaimer: str | Reclaimer = "none",
    budget: float = 1.0,
    budget_tokens: int = 0,
    blocks: int = 1000,
    block_size: int = 16,
    headroom: int = 0,
    step: str = "linear:base_s=0.001,per_token_s=0",
    copy: str = "linear:per_token_s=0",
    attention: str = "uniform",
    seed: int = 0,
    logging: bool = False,
    observer: Any = None,
    progress: Any = None,
    units: Units = ONE_UNIT,
    one_table: bool = False,
    **limits: Any,
) -> Engine:
    """Put an engine together; ``blocks`` counts block 0. With ``one_table`` units share a block table."""
    policy_ = policies.build(policy)
    model = build_attention(attention) if policy_.attends or policy_.needs else None
    columns = (*policy_.columns, *(model.columns if model is not None else ()))
    ballots = Ballots(units, block_size, columns) if one_table else None
    cache = KVCache(
        blocks,
        block_size,
        columns=columns if ballots is None else ballots.shared_columns,
        tracked=policy_.evicts,
        headroom_blocks=headroom,
        logging=logging,
        units=units if ballots is None else ONE_UNIT,
    )
    return Engine(
        source=source,
        scheduler=Scheduler(cache, Limits(**limits), source.hash_tokens),
        policy=policy_,
        budget=Budget(budget, budget_tokens),
        reclaimer=reclaimers.build(reclaimer) if isinstance(reclaimer, str) else reclaimer,
        attention=model,
        step_cost=step_costs.build(step),
        copy_cost=copy_costs.build(copy),
        ballots=ballots,
        seed=seed,
        observer=observer,
        progress=progress,
    )


def open_rows(cache: KVCache) -> list[int]:
    """Return the rows that belong to a request."""
    free = {row for first in cache._free_rows for row in cache.bundle(first)}
    return sorted(set(range(len(cache.store.s.rows))) - free)


def recount(cache: KVCache) -> None:
    """Count everything that the cache keeps a count of again, the slow way."""
    s = cache.store.s
    size = cache.block_size
    free = cache.pool.free_order()
    assert len(free) == len(set(free)) == s.header[H.FREE]
    assert 0 not in free
    assert not s.blocks["ref"][free].any()
    used = set(range(1, len(s.blocks))) - set(free)
    assert (s.blocks["ref"][sorted(used)] > 0).all()
    # The free list backwards.
    block, backwards = int(s.blocks[0]["prev"]), []
    while block:
        backwards.append(block)
        block = int(s.blocks[block]["prev"])
    assert backwards[::-1] == free

    rows = open_rows(cache)
    tables = {row: cache.block_table(row) for row in rows}
    listed = {block for table in tables.values() for block in table}
    assert listed <= used
    assert s.header[H.IN_TABLES] == len(listed)
    assert s.header[H.LIVE] == s.blocks["live"][sorted(listed)].sum()
    assert s.header[H.WRITTEN] == s.blocks["written"][sorted(listed)].sum()
    tally = Counter(block for table in tables.values() for block in table)
    assert {block: int(s.blocks["tables"][block]) for block in used if s.blocks["tables"][block]} == tally
    assert (s.blocks["ref"] >= s.blocks["tables"]).all()
    assert not s.blocks["tables"][free].any()
    assert s.header[H.EVENTS] <= len(s.events)

    cells = []
    readers: Counter[int] = Counter()
    for row, table in tables.items():
        record = s.rows[row]
        assert len(set(table)) == len(table)
        assert record["written"] == s.blocks["written"][table].sum()
        assert record["live"] == s.blocks["live"][table].sum() or max(tally[block] for block in table) > 1
        assert max(0, len(table) - 1) * size <= record["written"] or len(table) <= s.header[H.KEPT]
        assert record["written"] <= len(table) * size
        if not record["tracked"]:
            continue
        start, end = int(record["start"]), int(record["start"] + record["live"])
        assert record["origin"] <= start
        assert end <= record["origin"] + record["cap"]
        cells.append((int(record["origin"]), int(record["origin"] + record["cap"])))
        assert (np.diff(s.position[start:end]) > 0).all()
        index = {block: k for k, block in enumerate(table)}
        physical = [index[slot // size] * size + slot % size for slot in s.slot[start:end].tolist()]
        assert len(physical) == len(set(physical)), "two tokens in one slot"
        assert record["mixed"] or physical == sorted(physical), "out of order"
        assert not physical or max(physical) < record["written"]
        if len(s.holes):
            _recount_holes(cache, row, set(s.slot[start:end].tolist()))
        readers.update(s.slot[start:end].tolist())
    if cells:
        live = Counter(slot // size for slot in readers)
        known = {block for row, table in tables.items() if s.rows[row]["tracked"] for block in table}
        assert {block: int(s.blocks["live"][block]) for block in known if s.blocks["live"][block]} == live
        if len(s.readers):
            counted = np.repeat(s.blocks["cached"] == 1, size)
            assert {int(k): int(s.readers[k]) for k in np.flatnonzero(s.readers * counted)} == {
                slot: count for slot, count in readers.items() if counted[slot]
            }
        cells.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(cells))
        assert cells[-1][1] <= cache.arena.top <= len(s.position)


def _recount_holes(cache: KVCache, row: int, living: set[int]) -> None:
    """Compare the dead slots that a row may write into with those that there are."""
    s = cache.store.s
    size = cache.block_size
    lists = s.holes[len(s.blocks) * size :][row * (size + 1) : (row + 1) * (size + 1)].tolist()
    found: dict[int, int] = {}  # block -> its list
    for dead in range(1, size + 1):
        block, before = lists[dead], 0
        while block:
            assert s.blocks["prev"][block] == before
            assert block not in found
            found[block] = dead
            before, block = block, int(s.blocks["next"][block])
    expected: dict[int, int] = {}
    left = int(s.rows[row]["written"])
    for block in cache.block_table(row):
        written = min(size, left)
        left -= written
        if s.blocks["cached"][block]:
            continue
        dead_slots = {block * size + offset for offset in range(written)} - living
        assert set(s.holes[block * size : block * size + len(dead_slots)].tolist()) == dead_slots
        if dead_slots and not s.blocks["busy"][block]:
            expected[block] = len(dead_slots)
    assert found == expected
    assert lists[0] == sum(expected.values()) == holes_of(s, row)


def admit(cache: KVCache, ordinal: int, length: int, target: int = 1000) -> int:
    """Open a request and say so in the log, as the scheduler does; return its row."""
    row = cache.open(ordinal, key=ordinal + 1, length=length, target=target)
    cache.store.reserve_events(1)
    emit(cache.store.s, int(Kind.ADMIT), ordinal, 0, length)
    return row


def fill(cache: KVCache, tokens: int, ordinal: int = 0, target: int = 1000) -> int:
    """Admit a request and write ``tokens`` tokens; return its row."""
    row = admit(cache, ordinal, tokens, target)
    cache.sync_new_tokens(row, tokens)
    return row


def alive(cache: KVCache, row: int) -> list[int]:
    """Return the logical positions of the row's live tokens."""
    record = cache.store.s.rows[row]
    start = int(record["start"])
    return cache.store.s.position[start : start + int(record["live"])].tolist()


def keep_only(cache: KVCache, row: int, positions: Iterable[int]) -> None:
    """Kill all live tokens but these."""
    cache.evict_tokens(row, sorted(set(alive(cache, row)) - set(positions)))


def same_state(cache: KVCache) -> tuple[bytes, ...]:
    """Return everything the cache holds, to compare before and after (only what is in use of the arena)."""
    s = cache.store.s
    parts = [s.header, s.blocks, s.rows, s.table]
    if cache.tracked:
        parts += [s.position[: cache.arena.top], s.slot[: cache.arena.top], s.columns[:, : cache.arena.top].copy()]
    return tuple(part.tobytes() for part in parts)


@dataclass
class Step:
    """What one step was given."""

    now_ns: int
    running: list[int]
    tokens: dict[int, int]
    waiting: list[int]
    preempted: list[int]
    used_blocks: int
    free_blocks: int


class Recorder(Steps):
    """Keeps what every step was given; requests by their number in arrival order."""

    def __init__(self, most: int = 100_000) -> None:
        super().__init__(most)
        self.steps: list[Step] = []
        self.ends_ns: list[int] = []

    def scheduled(self, engine: Engine) -> None:
        super().scheduled(engine)
        scheduler, rows = engine.scheduler, engine.cache.store.s.rows
        running = scheduler.running[: scheduler.num_running].tolist()
        by_number = {int(rows[row]["ordinal"]): int(rows[row]["sched"]) for row in running}
        self.steps.append(
            Step(
                engine.now_ns,
                list(by_number),
                {number: tokens for number, tokens in by_number.items() if tokens},
                [state.ordinal for state in scheduler.waiting],
                [state.ordinal for state in scheduler.preempted],
                engine.cache.pool.used_blocks,
                engine.cache.pool.free_blocks,
            )
        )

    def applied(self, engine: Engine, finished: int) -> None:
        del finished
        self.ends_ns.append(engine.now_ns)


def recorded(source: Trace, **options: Any) -> tuple[list[Step], Any, Engine]:
    """Run an engine; return its steps, the outcome, and the engine."""
    recorder = Recorder()
    run = engine(source, observer=recorder, **options)
    outcome = run.run()
    return recorder.steps, outcome, run
