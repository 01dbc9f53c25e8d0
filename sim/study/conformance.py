"""What every eviction policy has to keep to, as checks that can be run over any: those of other packages as well.

>>> from sim.study.conformance import check_policy
>>> check_policy("h2o:recent=0.25")

In a test suite, one test a check::

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_policy(check):
        CHECKS[check]("my_policy")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.kv.cache import KVCache
from sim.kv.events import Kind, KVEventLog
from sim.kv.policies import EvictionPolicy, ScorePolicy, policies
from sim.kv.replay import Replay
from sim.kv.units import ONE_UNIT, Units
from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention import build_attention
from sim.serving.engine import Engine
from sim.study.config import SimConfig
from sim.study.run import build_engine

__all__ = ["CHECKS", "ConformanceError", "check_policy", "serve", "serve_units"]

Deaths = list[tuple[int, int]]
_SEVERAL = Units(4, 2)
Judge = Callable[[View, NDArray[np.int64], NDArray[np.int64]], None]

_BUDGETS = (
    # Prompt, share, tokens: ordinary ones, then a prompt of one token, a budget of one, more budget than tokens, and
    # less than sinks, recent tokens and the newest take together.
    (200, 0.3, 0),
    (200, 0.7, 0),
    (57, 0.0, 20),
    (1, 0.5, 0),
    (1, 0.0, 1),
    (3, 0.0, 2),
    (300, 0.0, 1),
    (10, 0.0, 10_000),
    (64, 0.0, 5),
    (40, 0.05, 0),
)


class ConformanceError(AssertionError):
    """A policy does not keep to what every policy has to."""


def check_policy(spec: str) -> None:
    """Run every check over the policy that ``spec`` describes.

    Raises
    ------
    ConformanceError
        That names the check and what went wrong; the first one.
    InputError
        If there is no such policy.
    """
    for check in CHECKS.values():
        check(spec)


def serve(policy: EvictionPolicy, attention: Any, prompt: int, steps: int, **settings: Any) -> list[list[int]]:
    """Return the positions alive after the prompt and after each decode step, as the engine would have them.

    Parameters
    ----------
    policy, attention
        The policy, and the attention model or None.
    prompt, steps
        Prompt tokens, decode steps.
    settings
        Any of: ``share`` and ``tokens``, the budget; ``key``, where the request's random draws come from; ``before``,
        how many other requests lie before it in the token table; ``size``, slots of a block; ``judge``, called with
        (view, victims, counts) before they die.
    """
    return [unit for (unit,) in serve_units(policy, attention, prompt, steps, **settings)]


def serve_units(
    policy: EvictionPolicy,
    attention: Any,
    prompt: int,
    steps: int,
    *,
    share: float = 1.0,
    tokens: int = 0,
    key: int = 1,
    before: int = 0,
    size: int = 4,
    units: Units = ONE_UNIT,
    judge: Judge | None = None,
) -> list[list[list[int]]]:
    """Return the positions alive after the prompt and after each decode step, for each unit, as the engine has them.

    Takes what :func:`serve` takes, and ``units``: what decides alone which tokens live.
    """
    columns = (*policy.columns, *(attention.columns if attention is not None else ()))
    cache = KVCache(4000 * units.count, size, columns=columns, units=units)
    for k in range(before):
        _write(cache, cache.bundle(cache.open(9 + k, 9 + k, 37 + k, 1)), 37 + k)
    bundle = cache.bundle(cache.open(0, key, prompt, steps + 1))
    _write(cache, bundle, prompt)
    rows = np.array(bundle)
    cache.store.s.rows["decode_from"][rows] = prompt
    seen = []
    for step in range(steps + 1):
        if step:
            _write(cache, bundle, 1)
        view = cache.view(rows, share, tokens, attention)
        if step == 0:
            if attention is not None:
                attention.begin(view)
            policy.begin(view)
        elif not policy.prompt_only:
            policy.observe(view)
        if not (step and policy.prompt_only):
            view.keep[:] = policy.allot(view)
            over, excess = view.over_budget()
            if len(over):
                victims, counts = policy.select(over, excess)
                if judge is not None:
                    judge(over, victims, counts)
                cache.evict_cells(over.row, victims, counts)
        if step == 0:
            cache.trim_cells(rows)
        records, position = cache.store.s.rows[rows], cache.store.s.position
        seen.append([position[first : first + n].tolist() for first, n in records[["start", "live"]].tolist()])
    return seen


def _write(cache: KVCache, rows: range, tokens: int) -> None:
    for row in rows:
        cache.sync_new_tokens(row, tokens)


def _units(policy: EvictionPolicy) -> Units:
    """Return the units under which a policy is judged: some of both kinds where it tells them apart."""
    return _SEVERAL if policy.splits else ONE_UNIT


def _require(holds: bool, spec: str, what: str) -> None:
    if not holds:
        raise ConformanceError(f"policy {spec}: {what}")


def _model(policy: EvictionPolicy, name: str = "synthetic") -> Any:
    return build_attention(name) if policy.attends or policy.needs else None


def _is_a_value(spec: str) -> None:
    """Equal specifications make equal policies, which can be hashed."""
    policy = policies.build(spec)
    _require(policy.name == spec.partition(":")[0], spec, f"its name is {policy.name!r}")
    same = policies.build(spec)
    _require(policy == same and hash(policy) == hash(same), spec, "two of the same are not equal; freeze the dataclass")


def _keeps_to_its_budget(spec: str, attention: str = "synthetic", units: Units | None = None) -> None:
    """After its turn a request holds what its budget allows, and always its newest token; the dead stay dead."""
    policy = policies.build(spec)
    if not policy.evicts:
        return
    units = units or _units(policy)
    steps = max(30, 5 * policy.every // 2)
    for prompt, share, tokens in _BUDGETS:
        where = f"{spec}, prompt {prompt}, budget {share or tokens}"
        model = _model(policy, attention)
        seen = serve_units(policy, model, prompt, steps, share=share, tokens=tokens, units=units)
        before: list[list[int]] = [[]] * units.count
        for step, now in enumerate(seen):
            length = prompt + step
            grown = [len(unit) + 1 if step else prompt for unit in before]
            keep = tokens or max(1, int(np.ceil(share * length - 1e-9)))
            bounds = [_bounds(policy, step, n, keep) for n in grown]
            held = [(len(unit), *bound) for unit, bound in zip(now, bounds, strict=True)]
            # Among the units the budget may go where the policy likes.
            for live, most, least in np.array(held).sum(axis=0, keepdims=True) if policy.splits else held:
                _require(least <= live <= most, where, f"{live} tokens live at length {length}, budget {keep}")
            for unit, old in zip(now, before, strict=True):
                _require(unit[-1] == length - 1, where, f"the newest token died at length {length}")
                _require(step == 0 or set(unit[:-1]) <= set(old), where, f"a dead token lives again at length {length}")
            before = now


def _bounds(policy: EvictionPolicy, step: int, grown: int, keep: int) -> tuple[int, int]:
    """Return the most and the least tokens that may be alive after a step, of ``grown`` before the eviction."""
    if step and policy.prompt_only:
        return grown, grown
    most = max(keep, policy.granule)
    if policy.every > 1:
        # A turn that was left out, because too little was over the budget, makes it two periods.
        most = most + 2 * policy.every - 1 if step >= policy.every else grown
    return min(most, grown), min(grown, max(1, keep - policy.granule + 1))


def _spares_what_it_protects(spec: str) -> None:
    """No token that ``protect`` names dies while the budget has room for it."""
    policy = policies.build(spec)
    if not isinstance(policy, ScorePolicy):
        return

    def judge(view: View, victims: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        oldest, newest = policy.protect(view)
        recent = np.maximum(1, np.minimum(newest, view.keep) if len(newest) else 1)
        first = np.maximum(0, np.minimum(oldest, view.keep - recent) if len(oldest) else 0)
        low, high = np.repeat(view.start + first, counts), np.repeat(view.start + view.n - recent, counts)
        _require(bool(np.all((low <= victims) & (victims < high))), spec, "a protected token dies")

    for prompt, share, tokens in _BUDGETS:
        steps = max(30, 5 * policy.every // 2)
        serve_units(
            policy, _model(policy), prompt, steps, share=share, tokens=tokens, units=_units(policy), judge=judge
        )


def _does_not_see_the_layout(spec: str) -> None:
    """Who dies depends neither on blocks nor on where the request lies; and it is the same every time."""
    policy = policies.build(spec)
    if not policy.evicts:
        return
    steps = max(40, 5 * policy.every // 2)
    for attention in ("synthetic", "uniform"):
        model = _model(policy, attention)
        units = _units(policy)
        want = serve_units(policy, model, 150, steps, share=0.4, key=77, units=units)
        for size, before in ((4, 0), (1, 0), (16, 3), (64, 1)):
            got = serve_units(policy, model, 150, steps, share=0.4, key=77, size=size, before=before, units=units)
            _require(got == want, spec, f"other deaths with blocks of {size} and {before} requests before, {attention}")


def _decides_for_each_request_alone(spec: str) -> None:
    """Lose the same tokens in a batch of three and alone."""
    policy = policies.build(spec)
    if not policy.evicts:
        return
    prompts = (60, 133, 17)

    def victims(which: tuple[int, ...]) -> dict[int, list[list[int]]]:
        model = _model(policy)
        cache = KVCache(500, 16, columns=(*policy.columns, *(model.columns if model else ())), units=_units(policy))
        bundles = [cache.bundle(cache.open(k, request_key(3, k), prompts[k], 10)) for k in which]
        for k, bundle in zip(which, bundles, strict=True):
            _write(cache, bundle, prompts[k])
            cache.store.s.rows["decode_from"][bundle.start : bundle.stop] = prompts[k]
        view = cache.view(np.concatenate(bundles), 0.4, 0, model)
        if model is not None:
            model.begin(view)
        policy.begin(view)
        view.keep[:] = policy.allot(view)
        over, excess = view.over_budget()
        dead, counts = policy.select(over, excess)
        split = np.split(cache.store.s.position[dead], np.cumsum(counts)[:-1])
        lost = dict(zip(over.row.tolist(), split, strict=True))
        return {
            k: [lost[row].tolist() if row in lost else [] for row in bundle]
            for k, bundle in zip(which, bundles, strict=True)
        }

    together = victims((0, 1, 2))
    for k in range(3):
        _require(victims((k,)) == {k: together[k]}, spec, f"request {k} loses other tokens alone than in a batch")


_PROMPT = 150
_GRANULARITY: dict[str, dict[str, Any]] = {
    "": {},
    "layer": {"granularity": "per_layer", "simulated_layers": 4},
    "head": {"granularity": "per_head", "simulated_layers": 1},
}
"""Settings under which a policy's ``splits`` has something to split."""


def _output(spec: str) -> int:
    """Return the most output tokens of a request: enough for two turns."""
    return max(60, 2 * policies.build(spec).every + 20)


def _engine(spec: str, **changes: Any) -> Engine:
    """Build a small simulation."""
    config = SimConfig(
        trace=f"poisson:rate=200,n=10,prompt=uniform:20:{_PROMPT},output=uniform:5:{_output(spec)}",
        policy=spec,
        budget=0.4,
        block_size=8,
        kv_blocks=2000,
        **_GRANULARITY[policies.build(spec).splits],
    )
    return build_engine(config.replace(**changes), logging=True)


def _run(spec: str, **changes: Any) -> tuple[dict[str, Any], KVEventLog]:
    """Run a small simulation and judge every event of it."""
    outcome = _engine(spec, **changes).run()
    assert outcome.events is not None
    _require(not Replay.of(outcome.events).holders, spec, "blocks are held when everything is done")
    return outcome.summary, outcome.events


def _deaths(log: KVEventLog) -> Deaths:
    """Return (request, position) of every death, in order of requests and positions."""
    dead = log.records[log.records["kind"] == Kind.EVICT]
    return sorted(zip(dead["req"].tolist(), dead["a"].tolist(), strict=True))


def _dies_alike_under_every_reclaimer(spec: str) -> None:
    """Who dies is the same whatever becomes of the slots, and whoever runs beside a request."""
    if not policies.build(spec).evicts:
        return
    naive = _deaths(_run(spec, reclaimer="naive")[1])
    _require(bool(naive), spec, "nothing dies")
    others: dict[str, dict[str, Any]] = {
        "vtoken": {"reclaimer": "vtoken", "repack_when": "always"},
        "sync": {"reclaimer": "sync"},
        "ideal": {"reclaimer": "ideal"},
        "naive, one request at a time": {"reclaimer": "naive", "max_num_seqs": 1},
    }
    for name, changes in others.items():
        _require(_deaths(_run(spec, **changes)[1]) == naive, spec, f"other deaths under {name} than under naive")


def _survives_preemption(spec: str) -> None:
    """With a pool that is too small all requests end, twice alike, and a recomputed one has its budget again."""
    policy = policies.build(spec)
    longest = -(-(_PROMPT + _output(spec)) // 8) + 2
    settings: dict[str, Any] = {"reclaimer": "naive", "budget": 0.9}
    for share in (3.0, 2.0, 1.5, 1.0):
        settings["kv_blocks"] = int(share * longest)
        summary, log = _run(spec, **settings)
        if summary["preemptions"]:
            break
    _, again = _run(spec, **settings)
    _require(summary["preemptions"] > 0, spec, "nothing was preempted: the check needs a smaller pool")
    _require(summary["finished"] == summary["requests"], spec, "requests are not finished")
    _require(bool(np.array_equal(log.records, again.records)), spec, "two equal runs differ")
    if not policy.evicts:
        return
    units = _engine(spec, **settings).cache.units.count
    prompt, alive, written = (dict.fromkeys(range(summary["requests"] * units), 0) for _ in range(3))
    ended: Counter[int] = Counter()  # among the units of a request the budget may go where the policy likes
    for kind, req, a, b in zip(*(log.records[name].tolist() for name in ("kind", "req", "a", "b")), strict=True):
        if kind == Kind.ADMIT:
            prompt[req], alive[req], written[req] = a + b, 0, 0
            ended[req // units] = 0
        elif kind == Kind.APPEND:
            alive[req] += b
            written[req] += b
        elif kind == Kind.EVICT:
            alive[req] -= 1
        elif kind == Kind.FINISH and written[req] > prompt[req]:
            whole = prompt[req] if policy.prompt_only else written[req] - 1  # behind the last token nothing dies
            keep = max(int(np.ceil(0.9 * whole - 1e-9)), policy.granule) + written[req] - whole
            ended[req // units] += alive[req] - keep - (2 * policy.every if policy.every > 1 else 0)
    for req, over in ended.items():
        _require(over <= 0, spec, f"request {req} ends with {over} live tokens too many")


def _can_share_a_budget(spec: str) -> None:
    """Scores that compete across requests are not negative, and a request alone loses what it always does."""
    policy = policies.build(spec)
    if not getattr(policy, "pools", False):
        return
    assert isinstance(policy, ScorePolicy)

    def judge(view: View, *_: NDArray[np.int64]) -> None:
        score = policy.score(view)[view.start[0] : view.start[0] + view.n[0]]
        _require(bool(np.all(score >= 0) and np.isfinite(score).all()), spec, "a score is negative or not finite")

    serve(policy, _model(policy), 200, 40, share=0.3, judge=judge)
    alone = {"reclaimer": "naive", "max_num_seqs": 1}
    together = _deaths(_run(spec, budget_scope="batch", **alone)[1])
    _require(together == _deaths(_run(spec, **alone)[1]), spec, "other deaths with a budget shared with nobody")


def _stands_ties(spec: str) -> None:
    """Where all tokens look alike the budget holds just as well."""
    _keeps_to_its_budget(spec, "uniform")


def _keeps_to_its_budget_in_units(spec: str) -> None:
    """Keep to the budget when layers and heads decide by themselves, and decide differently in each."""
    policy = policies.build(spec)
    _keeps_to_its_budget(spec, units=_SEVERAL)
    if policy.evicts and _model(policy) is not None:
        (units,) = serve_units(policy, _model(policy), 600, 0, share=0.4, units=_SEVERAL)
        if any(len(unit) < 600 for unit in units):
            _require(len(set(map(tuple, units))) == len(units), spec, "two units keep the same tokens")


CHECKS: dict[str, Callable[[str], None]] = {
    "is a value": _is_a_value,
    "keeps to its budget": _keeps_to_its_budget,
    "spares what it protects": _spares_what_it_protects,
    "does not see the layout": _does_not_see_the_layout,
    "decides for each request alone": _decides_for_each_request_alone,
    "dies alike under every reclaimer": _dies_alike_under_every_reclaimer,
    "survives preemption": _survives_preemption,
    "stands ties": _stands_ties,
    "can share a budget if it says so": _can_share_a_budget,
    "keeps to its budget in units": _keeps_to_its_budget_in_units,
}
"""Every check by what it says of a policy; each takes the policy's specification and raises ConformanceError."""
