"""The oracle refuses what cannot have happened: it is what all other tests of the control plane lean on."""

import pytest

from sim.kv.blocks import Why
from sim.kv.events import Kind
from sim.kv.replay import Replay, ReplayError

Event = tuple[int, int, int, int]


def admitted(*blocks: int, tokens: int, req: int = 0) -> list[Event]:
    """One request with these blocks of 4 slots and that many tokens."""
    return [
        (Kind.ADMIT, req, 0, tokens),
        *((Kind.ALLOC, req, block, 0) for block in blocks),
        (Kind.APPEND, req, 0, tokens),
    ]


def thinned() -> list[Event]:
    """Three full blocks with one live token each, at the first slot, and a tail of two."""
    dead = [(Kind.EVICT, 0, p, 4 + p) for p in range(12) if p % 4]
    return [*admitted(1, 2, 3, 4, tokens=14), *dead]


def planned() -> list[Event]:
    sources = [(Kind.SOURCE, 0, block, 0) for block in (1, 2, 3)]
    return [*thinned(), (Kind.PLAN, 0, 0, 3), *sources, (Kind.RESERVE, 0, 5, 0)]


def moved() -> list[Event]:
    return [*planned(), (Kind.COPIED, 0, 0, 0), (Kind.MOVE, 0, 4, 20), (Kind.MOVE, 0, 8, 21), (Kind.MOVE, 0, 12, 22)]


def filling() -> list[Event]:
    """Have the tokens of blocks 2 and 3 on their way into dead slots of block 1."""
    sources = [(Kind.SOURCE, 0, block, 0) for block in (2, 3)]
    return [*thinned(), (Kind.PLAN, 0, 0, 2), *sources, (Kind.TARGET, 0, 1, 0)]


def filled() -> list[Event]:
    return [*filling(), (Kind.COPIED, 0, 0, 0), (Kind.MOVE, 0, 8, 6), (Kind.MOVE, 0, 12, 5)]


def shared(*readers: int) -> list[Event]:
    """Three blocks of 12 tokens written by request 0, which these requests share."""
    hits = [[(Kind.ADMIT, req, 12, 0), *((Kind.SHARE, req, block, 0) for block in (1, 2, 3))] for req in readers]
    return [*admitted(1, 2, 3, tokens=12), *(event for hit in hits for event in hit)]


def grouped() -> list[Event]:
    """Two readers with one live token in each of the three blocks, about to copy out of them together."""
    dead = [(Kind.EVICT, req, p, 4 + p) for req in (0, 1) for p in range(12) if p % 4 != req]
    plans: list[Event] = []
    for req in (0, 1):
        plans += [(Kind.PLAN, req, req, 3), (Kind.GROUP, req, req, 0)]
        plans += [(Kind.SOURCE, req, block, req) for block in (1, 2, 3)]
        plans += [(Kind.RESERVE, req, 5 + req, req)]
    return [*shared(1), *dead, *plans]


def taken(req: int) -> list[Event]:
    """One of the two copies out takes effect."""
    moves = [(Kind.MOVE, req, 4 + 4 * k + req, 4 * (5 + req) + k) for k in range(3)]
    frees = [(Kind.FREE, req, block, Why.REPACK) for block in (1, 2, 3)]
    return [(Kind.COPIED, req, req, 0), *moves, (Kind.COMMIT, req, req, 0), *frees]


def replay(events: list[Event]) -> Replay:
    out = Replay(4, 10)
    out.apply(events)
    out.check()
    return out


def test_a_lawful_repack_passes():
    frees = [(Kind.FREE, 0, block, Why.REPACK) for block in (1, 2, 3)]
    out = replay([*moved(), (Kind.COMMIT, 0, 0, 0), *frees])
    assert out.table(0) == [5, 4]
    assert out.requests[0].slots == {0: 20, 4: 21, 8: 22, 12: 16, 13: 17}
    assert out.requests[0].written == 6
    assert not out.plans
    assert sorted(out.holders) == [4, 5]


def test_lawful_copies_into_holes_pass():
    frees = [(Kind.FREE, 0, block, Why.REPACK) for block in (2, 3)]
    out = replay([*filled(), (Kind.COMMIT, 0, 0, 1), *frees])
    assert out.table(0) == [1, 4]
    assert out.requests[0].slots == {0: 4, 4: 6, 8: 5, 12: 16, 13: 17}
    assert out.requests[0].written == 6
    assert not out.plans
    out.apply([(Kind.REUSE, 0, 14, 7), (Kind.APPEND, 0, 15, 1)])
    assert out.requests[0].slots == {0: 4, 4: 6, 8: 5, 12: 16, 13: 17, 14: 7, 15: 18}
    assert (out.requests[0].written, out.requests[0].length) == (7, 16)


def test_a_lawful_cancellation_of_copies_into_holes_passes():
    out = replay([
        *filling(), (Kind.CANCEL, 0, 0, 0), (Kind.FINISH, 0, 14, 0), (Kind.FREE, 0, 4, Why.RELEASE),
        *((Kind.DEFER, 0, block, 0) for block in (3, 2, 1)), (Kind.COPIED, 0, 0, 0),
        *((Kind.FREE, 0, block, Why.CANCEL) for block in (1, 2, 3)),
    ])  # fmt: skip
    assert not out.holders
    assert not out.plans


def test_sources_may_stand_apart():
    """Blocks 1 and 3 into 5, which takes the place of 1; 2 stays, and so does the tail."""
    events = [
        *thinned(), (Kind.PLAN, 0, 0, 2), (Kind.SOURCE, 0, 1, 0), (Kind.SOURCE, 0, 3, 0), (Kind.RESERVE, 0, 5, 0),
        (Kind.COPIED, 0, 0, 0), (Kind.MOVE, 0, 4, 20), (Kind.MOVE, 0, 12, 21), (Kind.COMMIT, 0, 0, 0),
        (Kind.FREE, 0, 1, Why.REPACK), (Kind.FREE, 0, 3, Why.REPACK),
    ]  # fmt: skip
    out = replay(events)
    assert out.table(0) == [5, 2, 4]
    assert out.requests[0].written == 10


def test_a_lawful_cancellation_passes():
    out = replay([
        *planned(), (Kind.CANCEL, 0, 0, 0), (Kind.FINISH, 0, 14, 0), (Kind.FREE, 0, 4, Why.RELEASE),
        *((Kind.DEFER, 0, block, 0) for block in (3, 2, 1)), (Kind.COPIED, 0, 0, 0),
        *((Kind.FREE, 0, block, Why.CANCEL) for block in (5, 1, 2, 3)),
    ])  # fmt: skip
    assert not out.holders
    assert not out.tokens


def test_a_lawful_copy_out_passes():
    out = replay([*grouped(), *taken(0), *taken(1)])
    assert (out.table(0), out.table(1)) == ([5], [6])
    assert out.requests[1].slots == {1: 24, 5: 25, 9: 26}
    assert sorted(out.holders) == [5, 6]
    assert not out.plans


def test_a_copy_out_without_the_one_that_left_passes():
    left = [(Kind.CANCEL, 1, 1, 0), (Kind.FINISH, 1, 12, 0), *((Kind.DEFER, 1, block, 0) for block in (3, 2, 1))]
    back = [(Kind.COPIED, 1, 1, 0), *((Kind.FREE, 1, block, Why.CANCEL) for block in (6, 1, 2, 3))]
    out = replay([*grouped(), *left, *taken(0), *back])
    assert sorted(out.holders) == [5]


def test_a_request_that_is_back_may_share_what_a_copy_still_reads_for_its_former_life():
    left = [
        (Kind.CANCEL, 0, 0, 0), (Kind.PREEMPT, 0, 14, 0), (Kind.FREE, 0, 4, Why.RELEASE),
        *((Kind.DEFER, 0, block, 0) for block in (3, 2, 1)), (Kind.ADMIT, 0, 4, 10), (Kind.SHARE, 0, 1, 0),
    ]  # fmt: skip
    frees = [(Kind.FREE, 0, block, Why.CANCEL) for block in (5, 1, 2, 3)]
    out = replay([*planned(), *left, (Kind.COPIED, 0, 0, 0), *frees])
    assert out.table(0) == [1]
    assert out.holders == {1: 1}


def test_whose_prompt_a_cached_block_holds_is_asked():
    out = Replay(4, 10, lambda a, b, tokens: {a, b} == {0, 2} and tokens <= 8)
    out.apply([*shared(), (Kind.ADMIT, 2, 12, 0), (Kind.SHARE, 2, 1, 0), (Kind.SHARE, 2, 2, 0)])
    with pytest.raises(ReplayError, match="holds the prompt of 0"):
        out.apply([(Kind.SHARE, 2, 3, 0)])
    with pytest.raises(ReplayError, match="holds the prompt of 0"):
        out.apply([(Kind.ADMIT, 3, 12, 0), (Kind.SHARE, 3, 1, 0)])


UNLAWFUL: dict[str, tuple[list[Event], str]] = {
    "block given twice": ([*admitted(1, tokens=4), (Kind.ALLOC, 0, 1, 0)], "block 1 is in use"),
    "block of another": ([*admitted(1, tokens=4), *admitted(1, tokens=4, req=1)[:2]], "is in use"),
    "null block": (admitted(0, tokens=4)[:2], "block 0 is not in the pool"),
    "block outside the pool": (admitted(10, tokens=4)[:2], "block 10 is not in the pool"),
    "more tokens than slots": (admitted(1, tokens=5), "index out of range"),
    "position again": ([*admitted(1, tokens=3), (Kind.APPEND, 0, 2, 1)], "next logical position is 3"),
    "position left out": ([*admitted(1, tokens=3), (Kind.APPEND, 0, 4, 1)], "next logical position is 3"),
    "death at another slot": ([*admitted(1, tokens=3), (Kind.EVICT, 0, 1, 6)], "token 1 is at 5"),
    "death twice": ([*admitted(1, tokens=3), *[(Kind.EVICT, 0, 1, 5)] * 2], "token 1 is at None"),
    "free while alive": ([*admitted(1, tokens=3), (Kind.FREE, 0, 1, Why.DEATH)], "are left in block 1"),
    "free of no block of its": ([*admitted(1, tokens=3), (Kind.FREE, 0, 2, Why.DEATH)], "does not hold it"),
    "append after end": ([*admitted(1, tokens=3), (Kind.FINISH, 0, 3, 0), (Kind.APPEND, 0, 3, 1)], "no table"),
    "admitted twice": ([*admitted(1, tokens=3), (Kind.ADMIT, 0, 0, 3)], "admitted already"),
    "late prefix hit": ([*admitted(1, tokens=3), (Kind.SHARE, 0, 2, 0)], "behind computed tokens"),
    "hit of another position": (
        [*shared(), (Kind.ADMIT, 1, 4, 0), (Kind.SHARE, 1, 2, 0)],
        "slot 0 holds token 4, not 0",
    ),
    "hit of a block that was never full": (
        [*admitted(1, tokens=3), (Kind.ADMIT, 1, 4, 0), (Kind.SHARE, 1, 1, 0)],
        "slot 3 holds token -1, not 3",
    ),
    "hit of what was written after an eviction": (
        [
            *admitted(1, 2, tokens=6),
            (Kind.EVICT, 0, 0, 4),
            (Kind.APPEND, 0, 6, 2),
            (Kind.ADMIT, 1, 8, 0),
            (Kind.SHARE, 1, 1, 0),
            (Kind.SHARE, 1, 2, 0),
        ],
        "slot 2 was written after an eviction",
    ),
    "hit of a repacked block": (
        [
            *moved(),
            (Kind.COMMIT, 0, 0, 0),
            *((Kind.FREE, 0, block, Why.REPACK) for block in (1, 2, 3)),
            (Kind.ADMIT, 1, 4, 0),
            (Kind.SHARE, 1, 5, 0),
        ],
        "slot 1 holds token 4, not 1",
    ),
    "move in place inside a shared block": (
        [*shared(1), (Kind.EVICT, 0, 0, 4), (Kind.MOVE, 0, 5, 4)],
        "block 1 is shared",
    ),
    "a shared block as the source of one": (
        [*shared(1), (Kind.PLAN, 0, 0, 12), (Kind.SOURCE, 0, 1, 0)],
        "it is shared",
    ),
    "free of a source of one's own beside another reader": (
        [*grouped(), (Kind.FREE, 0, 1, Why.DEATH)],
        "a copy in flight uses it",
    ),
    "half of a group": ([*grouped(), *taken(0), (Kind.COPIED, 1, 1, 0), (Kind.CANCEL, 1, 1, 0)], "others of its group"),
    "a group that differs": (
        [*grouped(), (Kind.SOURCE, 1, 1, 1), (Kind.COPIED, 0, 0, 0)],
        "sources of its group differ",
    ),
    "a group beside a reader who stays": (
        [
            *grouped(),
            (Kind.ADMIT, 2, 12, 0),
            *((Kind.SHARE, 2, block, 0) for block in (1, 2, 3)),
            *taken(0),
            *taken(1)[:-3],
        ],
        "its group frees no block",
    ),
    "I3: move before the copy": ([*planned(), (Kind.MOVE, 0, 4, 20)], "its plan is not ready"),
    "move from elsewhere": ([*planned(), (Kind.COPIED, 0, 0, 0), (Kind.MOVE, 0, 16, 20)], "not in the plan"),
    "I1: commit leaves a token behind": ([*moved()[:-1], (Kind.COMMIT, 0, 0, 0)], "are left in block 3"),
    "I2: two tokens in a slot": ([*moved()[:-1], (Kind.MOVE, 0, 12, 21)], "slot 21 holds a live token"),
    "move of a dead token": ([*moved()[:-1], (Kind.MOVE, 0, 13, 22)], ": 13"),
    "commit at another place": ([*moved(), (Kind.COMMIT, 0, 0, 1)], "not where it says"),
    "I3: commit before the copy": ([*planned(), (Kind.COMMIT, 0, 0, 0)], "it is not ready"),
    "I4: two plans of one request": ([*planned(), (Kind.PLAN, 0, 1, 1)], "in flight"),
    "I4: block in two plans": ([*planned(), (Kind.SOURCE, 0, 1, 0)], "another plan uses it"),
    "destination in use": ([*planned(), (Kind.RESERVE, 0, 4, 0)], "is in use"),
    "free of a source in flight": ([*planned(), (Kind.FREE, 0, 1, Why.DEATH)], "a copy in flight uses it"),
    "free of a destination in flight": ([*planned(), (Kind.FREE, 0, 5, Why.CANCEL)], "still copies"),
    "not deferred": ([*planned(), (Kind.FINISH, 0, 14, 0), (Kind.FREE, 0, 1, Why.RELEASE)], "in flight uses it"),
    "deferred without a copy": ([*planned(), (Kind.DEFER, 0, 4, 0)], "no copy uses it"),
    "a hole that was never written": ([*thinned(), (Kind.REUSE, 0, 14, 18)], "it was never written"),
    "a hole that is none": ([*thinned(), (Kind.REUSE, 0, 14, 8)], "slot 8 holds a live token"),
    "a hole of another": ([*thinned(), *admitted(5, tokens=4, req=1), (Kind.REUSE, 1, 4, 5)], "block 1 is not in the"),
    "a position out of turn": ([*thinned(), (Kind.REUSE, 0, 15, 5)], "next logical position is 14"),
    "a hole of a shared block": ([*shared(1), (Kind.EVICT, 0, 0, 4), (Kind.REUSE, 0, 12, 4)], "block 1 is shared"),
    "a hole that a copy reads": ([*planned(), (Kind.REUSE, 0, 14, 5)], "block 1 is being copied"),
    "a hole that a copy fills": ([*filling(), (Kind.REUSE, 0, 14, 7)], "block 1 is being copied"),
    "hit of a block with a new token in a hole": (
        [
            *admitted(1, tokens=4),
            (Kind.EVICT, 0, 2, 6),
            (Kind.REUSE, 0, 4, 6),
            (Kind.ADMIT, 1, 4, 0),
            (Kind.SHARE, 1, 1, 0),
        ],
        "slot 2 holds token 4, not 2",
    ),
    "I3: into a hole before the copy": ([*filling(), (Kind.MOVE, 0, 8, 6)], "its plan is not ready"),
    "into a slot that is no hole": ([*filled()[:-1], (Kind.MOVE, 0, 12, 4)], "slot 4 holds a live token"),
    "into a block that is no target": (
        [*filled()[:-1], (Kind.MOVE, 0, 12, 18)],
        "block 3 is being copied, to somewhere else",
    ),
    "I4: a target in two plans": ([*filling(), (Kind.TARGET, 0, 1, 0)], "another plan uses it"),
    "I4: a source as a target": ([*filling(), (Kind.TARGET, 0, 2, 0)], "another plan uses it"),
    "a shared block as a target": (
        [*shared(1), (Kind.PLAN, 0, 0, 1), (Kind.TARGET, 0, 1, 0)],
        "it is shared",
    ),
    "free of a target in flight": ([*filling(), (Kind.EVICT, 0, 0, 4), (Kind.FREE, 0, 1, Why.DEATH)], "in flight uses"),
    "sources out of table order": (
        [
            *thinned(),
            (Kind.PLAN, 0, 0, 0),
            (Kind.SOURCE, 0, 2, 0),
            (Kind.SOURCE, 0, 1, 0),
            (Kind.COPIED, 0, 0, 0),
            (Kind.COMMIT, 0, 0, 1),
        ],
        "not in table order",
    ),
    "copied twice": ([*moved(), (Kind.COPIED, 0, 0, 0)], "copied already"),
    "cancelled twice": ([*planned(), (Kind.CANCEL, 0, 0, 0), (Kind.CANCEL, 0, 0, 0)], "cancelled already"),
    "commit of a cancelled plan": (
        [*planned(), (Kind.CANCEL, 0, 0, 0), (Kind.COPIED, 0, 0, 0), (Kind.COMMIT, 0, 0, 0)],
        "not ready",
    ),
    "step again": ([(Kind.STEP, -1, 4, 0), (Kind.STEP, -1, 4, 0)], "step 4 was before it"),
    "step of other tokens": ([*admitted(1, tokens=3), (Kind.STEP, -1, 0, 4)], "3 tokens were written for it"),
    "step of tokens that the one before had": (
        [*admitted(1, tokens=3), (Kind.STEP, -1, 0, 3), (Kind.STEP, -1, 1, 3)],
        "0 tokens were written for it",
    ),
    "no token": ([*admitted(1, tokens=3), (Kind.APPEND, 0, 3, 0)], "no token is written"),
    "done twice": ([*admitted(1, tokens=3), *[(Kind.FINISH, 0, 3, 0)] * 2], "done already"),
    "done twice, the second time without blocks": (
        [*admitted(1, tokens=3), (Kind.FINISH, 0, 3, 0), (Kind.FREE, 0, 1, Why.RELEASE), (Kind.FINISH, 0, 3, 0)],
        "done already",
    ),
    "back when it was done": (
        [*admitted(1, tokens=3), (Kind.FINISH, 0, 3, 0), (Kind.FREE, 0, 1, Why.RELEASE), (Kind.ADMIT, 0, 0, 3)],
        "it is done",
    ),
    "free of somebody unknown": ([(Kind.FREE, 7, 1, Why.RELEASE)], "request 7 does not hold it"),
    "move to its own slot": ([*admitted(1, tokens=3), (Kind.MOVE, 0, 4, 4)], "slot 4 holds a live token"),
    "move out of the table": ([*admitted(1, tokens=3), (Kind.MOVE, 0, 4, 20)], "block 5 is not in the table"),
    "move to where a copy reads": ([*planned(), (Kind.MOVE, 0, 16, 5)], "block 1 is shared or being copied"),
    "hit of what a cancelled copy wrote over": (
        [
            *shared(),
            (Kind.FINISH, 0, 12, 0),
            *((Kind.FREE, 0, block, Why.RELEASE) for block in (1, 2, 3)),
            *admitted(4, 5, tokens=8, req=1),
            (Kind.EVICT, 1, 0, 16),
            (Kind.PLAN, 1, 0, 3),
            (Kind.SOURCE, 1, 4, 0),
            (Kind.RESERVE, 1, 1, 0),
            (Kind.CANCEL, 1, 0, 0),
            (Kind.COPIED, 1, 0, 0),
            (Kind.FREE, 1, 1, Why.CANCEL),
            (Kind.ADMIT, 2, 4, 0),
            (Kind.SHARE, 2, 1, 0),
        ],
        "slot 0 holds token -1, not 0",
    ),
    "pack that did not close all gaps": ([*thinned(), (Kind.PACK, 0, 4, 0)], "5 tokens are alive"),
}


@pytest.mark.parametrize(("events", "message"), UNLAWFUL.values(), ids=UNLAWFUL)
def test_what_cannot_have_happened_is_refused(events: list[Event], message: str):
    out = Replay(4, 10)
    out.apply(events[:-1])
    with pytest.raises(ReplayError, match=message) as caught:
        out.apply(events[-1:])
    assert Kind(events[-1][0]).name in str(caught.value)


def test_a_commit_that_frees_nothing_is_refused():
    """Two sources into two destinations."""
    events = [
        *admitted(1, 2, tokens=8), (Kind.EVICT, 0, 0, 4), (Kind.PLAN, 0, 0, 7),
        (Kind.SOURCE, 0, 1, 0), (Kind.SOURCE, 0, 2, 0), (Kind.RESERVE, 0, 3, 0), (Kind.RESERVE, 0, 4, 0),
        (Kind.COPIED, 0, 0, 0),
        *((Kind.MOVE, 0, 4 + p, 11 + p) for p in range(1, 8)),
    ]  # fmt: skip
    out = Replay(4, 10)
    out.apply(events)
    with pytest.raises(ReplayError, match="it frees no block"):
        out.apply([(Kind.COMMIT, 0, 0, 0)])


def test_writing_into_a_block_that_is_being_copied_is_refused():
    out = Replay(4, 10)
    out.apply([*admitted(1, 2, tokens=6), (Kind.PLAN, 0, 0, 6), (Kind.SOURCE, 0, 1, 0), (Kind.SOURCE, 0, 2, 0)])
    with pytest.raises(ReplayError, match="block 2 is being copied"):
        out.apply([(Kind.APPEND, 0, 6, 1)])


def test_an_unknown_kind_is_named():
    with pytest.raises(ReplayError, match=r"event 0 \(unknown kind 99 req=1 a=2 b=3\)"):
        replay([(99, 1, 2, 3)])


def test_what_has_ended_is_forgotten():
    out = replay([*admitted(1, tokens=3), (Kind.FINISH, 0, 3, 0), (Kind.FREE, 0, 1, Why.RELEASE)])
    assert not out.requests
    assert not out.tokens
    # One whose last token came when it had been preempted has no block left to give back.
    gone = [(Kind.PREEMPT, 0, 3, 0), (Kind.FREE, 0, 1, Why.RELEASE)]
    assert replay([*admitted(1, tokens=3), *gone]).requests
    assert not replay([*admitted(1, tokens=3), *gone, (Kind.FINISH, 0, 3, 0)]).requests
    # A plan outlives its request until its fence.
    left = [(Kind.CANCEL, 0, 0, 0), (Kind.FINISH, 0, 14, 0), *((Kind.DEFER, 0, b, 0) for b in (1, 2, 3))]
    out = replay([*planned(), *left, (Kind.FREE, 0, 4, Why.RELEASE)])
    assert not out.requests
    assert out.plans
    out.apply([(Kind.COPIED, 0, 0, 0), *((Kind.FREE, 0, block, Why.CANCEL) for block in (5, 1, 2, 3))])
    out.check()
    assert not out.plans
    assert not out.holders


def test_a_leaked_block_is_found_at_the_end():
    out = Replay(4, 10)
    out.apply([*admitted(1, 2, tokens=8), (Kind.PREEMPT, 0, 8, 0), (Kind.FREE, 0, 2, 0), *admitted(3, 4, tokens=8)])
    with pytest.raises(ReplayError, match="blocks held differ"):
        out.check()


def test_the_message_says_which_event():
    with pytest.raises(ReplayError, match=r"event 3 \(EVICT req=0 a=7 b=0\): "):
        replay([*admitted(1, tokens=2), (Kind.EVICT, 0, 7, 0)])
