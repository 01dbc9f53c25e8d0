"""The oracle refuses what cannot have happened: it is what all other tests of the control plane lean on."""

import pytest

from sim.kv.blocks import Why
from sim.kv.events import Kind as K
from sim.kv.replay import Replay, ReplayError

Event = tuple[int, int, int, int]


def admitted(*blocks: int, tokens: int, req: int = 0) -> list[Event]:
    """One request with these blocks of 4 slots and that many tokens."""
    return [(K.ADMIT, req, 0, tokens), *((K.ALLOC, req, block, 0) for block in blocks), (K.APPEND, req, 0, tokens)]


def thinned() -> list[Event]:
    """Three full blocks with one live token each, at the first slot, and a tail of two."""
    dead = [(K.EVICT, 0, p, 4 + p) for p in range(12) if p % 4]
    return [*admitted(1, 2, 3, 4, tokens=14), *dead]


def planned() -> list[Event]:
    sources = [(K.SOURCE, 0, block, 0) for block in (1, 2, 3)]
    return [*thinned(), (K.PLAN, 0, 0, 3), *sources, (K.RESERVE, 0, 5, 0)]


def moved() -> list[Event]:
    return [*planned(), (K.COPIED, 0, 0, 0), (K.MOVE, 0, 4, 20), (K.MOVE, 0, 8, 21), (K.MOVE, 0, 12, 22)]


def replay(events: list[Event]) -> Replay:
    out = Replay(4, 10)
    out.apply(events)
    out.check()
    return out


def test_a_lawful_repack_passes():
    frees = [(K.FREE, 0, block, Why.REPACK) for block in (1, 2, 3)]
    out = replay([*moved(), (K.COMMIT, 0, 0, 0), *frees])
    assert out.table(0) == [5, 4]
    assert out.requests[0].slots == {0: 20, 4: 21, 8: 22, 12: 16, 13: 17}
    assert out.requests[0].written == 6
    assert not out.plans
    assert sorted(out.holders) == [4, 5]


def test_a_lawful_cancellation_passes():
    out = replay([
        *planned(), (K.CANCEL, 0, 0, 0), (K.FINISH, 0, 14, 0), (K.FREE, 0, 4, Why.RELEASE),
        *((K.DEFER, 0, block, 0) for block in (3, 2, 1)), (K.COPIED, 0, 0, 0),
        *((K.FREE, 0, block, Why.CANCEL) for block in (5, 1, 2, 3)),
    ])  # fmt: skip
    assert not out.holders
    assert not out.tokens


@pytest.mark.parametrize(
    ("events", "message"),
    [
        pytest.param([*admitted(1, tokens=4), (K.ALLOC, 0, 1, 0)], "block 1 is in use", id="block given twice"),
        pytest.param([*admitted(1, tokens=4), *admitted(1, tokens=4, req=1)[:2]], "is in use", id="block of another"),
        pytest.param(admitted(0, tokens=4)[:2], "block 0 is not in the pool", id="null block"),
        pytest.param(admitted(10, tokens=4)[:2], "block 10 is not in the pool", id="block outside the pool"),
        pytest.param(admitted(1, tokens=5), "index out of range", id="more tokens than slots"),
        pytest.param([*admitted(1, tokens=3), (K.APPEND, 0, 2, 1)], "next logical position is 3", id="position again"),
        pytest.param([*admitted(1, tokens=3), (K.APPEND, 0, 4, 1)], "next logical position is 3", id="position left out"),
        pytest.param([*admitted(1, tokens=3), (K.EVICT, 0, 1, 6)], "token 1 is at 5", id="death at another slot"),
        pytest.param([*admitted(1, tokens=3), *[(K.EVICT, 0, 1, 5)] * 2], "token 1 is at None", id="death twice"),
        pytest.param([*admitted(1, tokens=3), (K.FREE, 0, 1, Why.DEATH)], "are left in block 1", id="free while alive"),
        pytest.param([*admitted(1, tokens=3), (K.FREE, 0, 2, Why.DEATH)], "does not hold it", id="free of no block of its"),
        pytest.param([*admitted(1, tokens=3), (K.FINISH, 0, 3, 0), (K.APPEND, 0, 3, 1)], "no table", id="append after end"),
        pytest.param([*admitted(1, tokens=3), (K.ADMIT, 0, 0, 3)], "admitted already", id="admitted twice"),
        pytest.param([*admitted(1, tokens=3), (K.SHARE, 0, 2, 0)], "behind computed tokens", id="late prefix hit"),
        pytest.param([*planned(), (K.MOVE, 0, 4, 20)], "its plan is not ready", id="I3: move before the copy"),
        pytest.param([*planned(), (K.COPIED, 0, 0, 0), (K.MOVE, 0, 16, 20)], "not in the plan", id="move from elsewhere"),
        pytest.param([*moved()[:-1], (K.COMMIT, 0, 0, 0)], "are left in block 3", id="I1: commit leaves a token behind"),
        pytest.param([*moved()[:-1], (K.MOVE, 0, 12, 21)], "slot 21 holds a live token", id="I2: two tokens in a slot"),
        pytest.param([*moved()[:-1], (K.MOVE, 0, 13, 22)], ": 13", id="move of a dead token"),
        pytest.param([*moved(), (K.COMMIT, 0, 0, 1)], "not where it says", id="commit at another place"),
        pytest.param([*planned(), (K.COMMIT, 0, 0, 0)], "it is not ready", id="I3: commit before the copy"),
        pytest.param([*planned(), (K.PLAN, 0, 1, 1)], "in flight", id="I4: two plans of one request"),
        pytest.param([*planned(), (K.SOURCE, 0, 1, 0)], "another plan uses it", id="I4: block in two plans"),
        pytest.param([*planned(), (K.RESERVE, 0, 4, 0)], "is in use", id="destination in use"),
        pytest.param([*planned(), (K.FREE, 0, 1, Why.DEATH)], "a copy in flight uses it", id="free of a source in flight"),
        pytest.param([*planned(), (K.FREE, 0, 5, Why.CANCEL)], "still copies", id="free of a destination in flight"),
        pytest.param([*planned(), (K.FINISH, 0, 14, 0), (K.FREE, 0, 1, Why.RELEASE)], "in flight uses it", id="not deferred"),
        pytest.param([*planned(), (K.DEFER, 0, 4, 0)], "no copy uses it", id="deferred without a copy"),
        pytest.param([*moved(), (K.COPIED, 0, 0, 0)], "copied already", id="copied twice"),
        pytest.param([*planned(), (K.CANCEL, 0, 0, 0), (K.CANCEL, 0, 0, 0)], "cancelled already", id="cancelled twice"),
        pytest.param([*planned(), (K.CANCEL, 0, 0, 0), (K.COPIED, 0, 0, 0), (K.COMMIT, 0, 0, 0)], "not ready", id="commit of a cancelled plan"),
        pytest.param([*thinned(), (K.PACK, 0, 4, 0)], "5 tokens are alive", id="pack that did not close all gaps"),
    ],
)  # fmt: skip
def test_what_cannot_have_happened_is_refused(events: list[Event], message: str):
    out = Replay(4, 10)
    out.apply(events[:-1])
    with pytest.raises(ReplayError, match=message) as caught:
        out.apply(events[-1:])
    assert K(events[-1][0]).name in str(caught.value)


def test_a_commit_that_frees_nothing_is_refused():
    """Two sources into two destinations."""
    events = [
        *admitted(1, 2, tokens=8), (K.EVICT, 0, 0, 4), (K.PLAN, 0, 0, 7), (K.SOURCE, 0, 1, 0), (K.SOURCE, 0, 2, 0),
        (K.RESERVE, 0, 3, 0), (K.RESERVE, 0, 4, 0), (K.COPIED, 0, 0, 0),
        *((K.MOVE, 0, 4 + p, 11 + p) for p in range(1, 8)),
    ]  # fmt: skip
    out = Replay(4, 10)
    out.apply(events)
    with pytest.raises(ReplayError, match="it frees no block"):
        out.apply([(K.COMMIT, 0, 0, 0)])


def test_writing_into_a_block_that_is_being_copied_is_refused():
    out = Replay(4, 10)
    out.apply([*admitted(1, 2, tokens=6), (K.PLAN, 0, 0, 6), (K.SOURCE, 0, 1, 0), (K.SOURCE, 0, 2, 0)])
    with pytest.raises(ReplayError, match="block 2 is being copied"):
        out.apply([(K.APPEND, 0, 6, 1)])


def test_a_leaked_block_is_found_at_the_end():
    out = Replay(4, 10)
    out.apply([*admitted(1, 2, tokens=8), (K.PREEMPT, 0, 8, 0), (K.FREE, 0, 2, 0), *admitted(3, 4, tokens=8)])
    with pytest.raises(ReplayError, match="blocks held differ"):
        out.check()


def test_the_message_says_which_event():
    with pytest.raises(ReplayError, match=r"event 3 \(EVICT req=0 a=7 b=0\): "):
        replay([*admitted(1, tokens=2), (K.EVICT, 0, 7, 0)])
