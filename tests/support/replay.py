"""Logs to be replayed on a pool, and a model small enough to do it often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.holes import holes_of
from sim.kv.prefix import PrefixCache
from sim.kv.repack import RepackPlan
from sim.serving.models import Model
from tests.support.serving import admit, alive, engine, trace

TINY = Model(
    name="tiny",
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=32,
    vocab=64,
    max_model_len=8192,
    published_parameters=None,
    source="made up",
)

PLANNED = {"plan": "planned", "scatter": "planned to scatter", "fill": "planned to fill"}

BATCH = tuple((0, 40 + 7 * k, 12 + 5 * k) for k in range(6))


def logged(**options: Any) -> KVEventLog:
    """Return the events of a run of a few requests in a pool that is small for them."""
    requests = options.pop("requests", BATCH)
    pairs = [[100 * (k // 2) + i for i in range(5)] for k in range(len(requests))]  # with 40 tokens in common
    source = trace(*requests, hashes=pairs if options.get("prefix_caching") else None, hash_tokens=8)
    few: dict[str, Any] = {
        "policy": "random",
        "budget": 0.5,
        "reclaimer": "vtoken:repack_when=always",
        "copy": "linear:per_token_s=200e-6",
        "blocks": 50,
        "block_size": 4,
        "headroom": 5,
        "max_num_batched_tokens": 64,
    }
    log = engine(source, logging=True, **(few | options)).run().events
    assert log is not None
    return log


class Driver:
    """Makes a lawful log by calling the cache at random, with no engine and no clock.

    Requests whose numbers leave the same remainder when divided by two consist of the same tokens. Copies take as many
    steps as they like and end in any order.

    With ``disorder`` tokens lose their order in memory: repacks are scattered and fill dead slots too, and with every
    other seed new tokens are written into dead slots.
    """

    def __init__(self, seed: int, *, size: int, blocks: int, steps: int, disorder: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.cache = KVCache(blocks, size, headroom_blocks=3, logging=True)
        self.prefix = PrefixCache(self.cache.store)
        self.disorder = disorder
        if disorder and seed % 2:
            self.cache.reuse_slots()
        self.rows: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.published: dict[int, int] = {}
        self.away: list[int] = []
        self.plans: list[RepackPlan] = []
        self.made: list[RepackPlan] = []
        """All plans, those of packs into free blocks too."""
        make = self.cache.repacker.make

        def keep(*arguments: Any, **more: Any) -> RepackPlan:
            self.made.append(make(*arguments, **more))
            return self.made[-1]

        self.cache.repacker.make = keep  # type: ignore[method-assign]
        self.count = 0
        self.happened: Counter[str] = Counter()
        for step in range(steps):
            tokens = self._schedule()
            self.cache.note(Kind.STEP, -1, step, tokens)
            self._publish()
            for _ in range(int(self.random.integers(0, 5))):
                self._between()
        for request in list(self.rows):
            self._leave(request, Kind.FINISH)
        while self.plans:
            self._land()
        self.log = self.cache.event_log()

    def _schedule(self) -> int:
        size, tokens = self.cache.block_size, 0
        for request in list(self.rows):
            if self.random.random() < 0.8:
                tokens += self._write(request, 1 if self.random.random() < 0.8 else int(self.random.integers(2, 20)))
                more = self.random.random() < 0.1 and not self._mixed(request)
                tokens += self._write(request, 2) if more else 0
        wanted = 4 + 2 * (self.random.random() < 0.3)
        while len(self.rows) < wanted and self.cache.pool.available_blocks > 8:
            request = self.away.pop(0) if self.away else self.count
            self.count += request == self.count
            prompt = int(self.random.integers(2, 30 + 2 * size))
            row = self.rows[request] = admit(self.cache, request, prompt)
            self.prefix.forget_taken()
            hits = self.prefix.find([_identity(request, i) for i in range((prompt - 1) // size)])
            hits = hits[: max(0, self.cache.pool.available_blocks - 4)]
            self.cache.share_blocks(row, hits)
            self.happened["shared"] += len(hits)
            self.cache.store.s.rows["decode_from"][row] = prompt
            self.length[request] = len(hits) * size
            self.published[request] = len(hits)
            tokens += self._write(request, prompt - self.length[request])
        return tokens

    def _write(self, request: int, tokens: int) -> int:
        row, size = self.rows[request], self.cache.block_size
        if self._mixed(request):
            tokens = 1
        room = self.cache.pool.available_blocks * size + -int(self.cache.store.s.rows[row]["written"]) % size
        into_hole = tokens == 1 and holes_of(self.cache.store.s, row) > 0
        tokens = tokens if into_hole else min(tokens, room)
        if tokens > 0:
            self.happened["wrote into a hole"] += into_hole
            self.cache.sync_new_tokens(row, tokens)
            self.length[request] += tokens
            self.prefix.forget_taken()
        return max(tokens, 0)

    def _mixed(self, request: int) -> bool:
        """Say whether the request's tokens are out of order in memory, so that it takes one at a time."""
        return bool(self.cache.store.s.rows[self.rows[request]]["mixed"])

    def _publish(self) -> None:
        size = self.cache.block_size
        for request, row in self.rows.items():
            if len(alive(self.cache, row)) == self.length[request]:
                new = range(self.published[request], self.length[request] // size)
                table = self.cache.block_table(row)
                self.prefix.publish([table[i] for i in new], [_identity(request, i) for i in new])
                self.published[request] = self.length[request] // size

    def _between(self) -> None:
        """Do one of the things that happen when a step has ended."""
        choices = ["die", "plan", "plan", "land", "pack", "leave", "leave", "copy out", "copy out"]
        what = self.random.choice(choices + ["scatter", "fill", "fill"] * self.disorder)
        if what == "land":
            if self.plans:
                self._land()
            return
        if not self.rows:
            return
        request = int(self.random.choice(sorted(self.rows)))
        row = self.rows[request]
        busy = any(plan.row == row and not plan.cancelled for plan in self.plans)
        if what in ("die", "plan", "scatter", "fill"):
            living = np.array(alive(self.cache, row))[:-1]
            share = self.random.choice([0.2, 0.6])
            self.cache.evict_tokens(row, living[self.random.random(len(living)) < share])
            self.happened["died mid-copy"] += busy
        if what in ("plan", "scatter", "fill") and not busy and (self.cache.pool.free_blocks or what == "fill"):
            most = int(self.random.integers(1, 8))
            if what == "fill":
                plan = self.cache.plan_fill(row, most_gain=most)
            else:
                plan = (self.cache.plan_repack if what == "plan" else self.cache.plan_scattered)(row, most)
            self.plans += [plan] if plan is not None else []
            self.happened[PLANNED[what]] += plan is not None
        elif what == "copy out" and self.cache.pool.free_blocks:
            self._copy_out(request)
        elif what == "pack" and not busy and not self._mixed(request) and not len(self.cache.store.s.holes):
            self.happened["packed"] += self.cache.pack(np.array([row]), counted=True)
        elif what == "leave" and self.random.random() < 0.5:
            self._leave(request, Kind.FINISH if self.random.random() < 0.5 else Kind.PREEMPT)

    def _copy_out(self, request: int) -> None:
        """Thin out a family until its shared blocks are worth copying out of."""
        family = [row for other, row in sorted(self.rows.items()) if other % 2 == request % 2]
        tables = [block for row in family for block in self.cache.block_table(row)]
        if len(tables) - len(set(tables)) < 3:
            return
        size = self.cache.block_size
        for place, row in enumerate(family):  # of a shared block each reader keeps another token
            self.cache.evict_tokens(row, [p for p in alive(self.cache, row)[:-1] if p % size != place % size])
        plans = self.cache.plan_copy_out(np.array(sorted(self.rows.values())), 12)
        self.plans += plans
        self.happened["copied out"] += bool(plans)

    def _land(self) -> None:
        at = int(self.random.integers(len(self.plans)))
        group = self.plans[at].group
        landing = list(group.plans) if group is not None else [self.plans[at]]
        for plan in landing:
            self.happened["landed after its request left"] += plan.cancelled
            self.cache.apply_moves(plan)
            self.happened["committed"] += not plan.cancelled
            self.happened["filled"] += not plan.cancelled and len(plan.targets) > 0
        self.plans = [plan for plan in self.plans if all(plan is not landed for landed in landing)]

    def _leave(self, request: int, kind: Kind) -> None:
        row = self.rows.pop(request)
        for plan in self.plans:
            if plan.row == row and not plan.cancelled:
                self.cache.cancel(plan)
        self.cache.close(row, kind, self.length[request])
        self.away += [request] if kind == Kind.PREEMPT else []
        self.happened[kind.name] += 1


def _identity(request: int, index: int) -> int:
    return hash((request % 2, index))
