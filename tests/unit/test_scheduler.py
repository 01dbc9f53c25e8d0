from __future__ import annotations

import numpy as np
import pytest

from sim.errors import InputError
from sim.kv.cache import KVCache
from sim.kv.replay import Replay
from sim.kv.state import H
from sim.serving.limits import Limits
from sim.serving.request import RequestState
from sim.serving.scheduler import Scheduler, W
from tests.support.serving import MS, keep_only, recorded, recount, trace


def waiting(number: int, prompt: int, output: int = 100) -> RequestState:
    return RequestState(number, str(number), 0, prompt, output, number + 1, length=prompt)


def begun(scheduler: Scheduler, *prompts: int) -> list[int]:
    """Admit requests, compute their prompts, and give each its first token; return their rows."""
    for number, prompt in enumerate(prompts):
        scheduler.waiting.append(waiting(number, prompt))
    scheduler.schedule()
    assert scheduler.num_running == len(prompts)
    step(scheduler)
    return scheduler.running[: len(prompts)].tolist()


def step(scheduler: Scheduler) -> None:
    """Apply a step as the engine does: a token for everybody whose tokens are all computed."""
    for row in scheduler.running[: scheduler.num_running].tolist():
        record = scheduler.cache.store.s.rows[row]
        if record["sched"] and record["computed"] == record["length"]:
            record["length"] += 1
            record["produced"] += 1
            if not record["decode_from"]:
                record["decode_from"] = record["computed"]
        record["sched"] = 0


# -- token budget and chunked prefill ----------------------------------------------------------------------------------


def test_long_prompts_are_computed_in_chunks_behind_running_requests():
    steps, outcome, _ = recorded(trace((0, 10, 5), (0, 25, 2)), max_num_batched_tokens=12)
    assert [s.tokens for s in steps] == [{0: 10, 1: 2}, {0: 1, 1: 11}, {0: 1, 1: 11}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    assert outcome.requests["ttft_s"].tolist() == pytest.approx([0.001, 0.004])


def test_one_prompt_takes_no_more_than_the_threshold():
    steps, _, _ = recorded(trace((0, 20, 1), (0, 5, 2)), long_prefill_token_threshold=8)
    assert [s.tokens for s in steps] == [{0: 8, 1: 5}, {0: 8, 1: 1}, {0: 4}]


def test_a_step_never_takes_more_tokens_than_it_may():
    steps, _, _ = recorded(
        trace(*((0, 3 + 7 * k, 9) for k in range(12))), max_num_batched_tokens=16, max_num_seqs=5
    )  # fmt: skip
    assert max(sum(s.tokens.values()) for s in steps) == 16
    assert max(len(s.running) for s in steps) == 5


def test_work_is_counted_for_the_cost_model():
    scheduler = Scheduler(KVCache(100, 4), Limits(max_num_batched_tokens=16))
    scheduler.waiting.extend([waiting(0, 10), waiting(1, 9)])
    scheduler.schedule()
    # 10 tokens of an empty request, then 6 of the second: pairs 1 + .. + 10, and 1 + .. + 6; 3 blocks and 2.
    assert scheduler.work.tolist() == [16, 2, 16, 55 + 21, 0, 3 + 2]
    step(scheduler)
    rows = scheduler.running[:2].tolist()
    keep_only(scheduler.cache, rows[0], [0, 9])  # the middle block is free; two dead slots in the others... are read
    scheduler.schedule()
    # Request 0 reads its 6 written slots and a new one; request 1 three more, behind 6.
    assert scheduler.work[[W.TOKENS, W.SEQS, W.KV_READ]].tolist() == [4, 2, 7 + 9]
    assert scheduler.work[W.PAIRS] == (6 + 1) + (3 * 6 + 6)


# -- order and preemption ----------------------------------------------------------------------------------------------


def test_first_come_first_served_and_nobody_overtakes():
    """The second does not fit beside the first; the third would, and waits all the same."""
    steps, outcome, _ = recorded(trace((0, 40, 20), (0, 60, 2), (0, 4, 2)), blocks=7)
    assert outcome.summary["preemptions"] == 0
    first = next(k for k, s in enumerate(steps) if 1 in s.running)
    assert all(s.running == [0] and s.waiting == [1, 2] for s in steps[:first])
    assert first == 20
    assert steps[first].tokens == {1: 60, 2: 4}


def test_the_latest_is_preempted_and_nothing_is_admitted_in_that_step():
    """Seven blocks of 4. Two requests of 13 tokens need 4 blocks each: the second goes, and waits before the third."""
    steps, outcome, engine = recorded(
        trace((0, 12, 6), (0, 12, 6), (3 * MS, 4, 2)), blocks=8, block_size=4, logging=True
    )
    assert [s.preempted for s in steps[:2]] == [[], [1]]
    assert steps[1].running == [0]
    assert steps[1].waiting == [1]
    # Blocks are free for the third when it comes, but the second is before it.
    third = next(s for s in steps if s.now_ns == 3 * MS)
    assert (third.running, third.waiting) == ([0], [1, 2])
    assert outcome.requests["preemptions"].tolist() == [0, 1, 0]
    assert outcome.requests["recomputed_tokens"].tolist() == [0, 12, 0]
    again = next(s for s in steps[2:] if 1 in s.tokens)
    assert again.tokens[1] == 13, "its prompt and the token it had produced"
    assert (outcome.requests["output_tokens"] == [6, 6, 2]).all()
    Replay.of(engine.cache.event_log())


def test_nothing_is_admitted_in_a_step_that_preempted_even_if_it_fits():
    """Without reservation a first chunk of the victim itself would fit on the blocks that it has just given up."""
    steps, _, _ = recorded(
        trace((0, 12, 6), (0, 12, 6), (0, 4, 2)),
        blocks=8,
        block_size=4,
        reserve_full_prompt=False,
        max_num_batched_tokens=12,
        max_num_seqs=2,
    )
    at = next(k for k, s in enumerate(steps) if s.preempted)
    assert steps[at].preempted == [1]
    assert steps[at].running == [0]
    assert steps[at].free_blocks == 3
    assert steps[at].waiting == [1, 2], "it waits before those who came later"
    assert steps[at + 1].tokens == {0: 1, 1: 11}


def test_a_preempted_request_keeps_its_first_token_time():
    _, outcome, _ = recorded(trace((0, 12, 6), (0, 12, 6)), blocks=8, block_size=4)
    assert outcome.requests["ttft_s"].tolist() == [0.001, 0.001]
    assert outcome.requests["queue_s"].tolist() == [0, 0]
    assert outcome.requests["output_tokens"].tolist() == [6, 6]


def test_a_request_that_is_its_own_victim_ends_the_scan():
    """The last running request itself lacks a block."""
    scheduler = Scheduler(KVCache(8, 4), Limits())
    rows = begun(scheduler, 11, 12)
    scheduler.schedule()
    assert scheduler.preempted == []
    assert scheduler.num_running == 2
    step(scheduler)
    # 12 + 13 tokens take 3 + 4 blocks: all there are. Request 0 takes no block now but one later.
    assert scheduler.cache.pool.free_blocks == 0
    scheduler.schedule()
    assert [state.ordinal for state in scheduler.preempted] == [1]
    assert scheduler.running[: scheduler.num_running].tolist() == rows[:1]
    assert int(scheduler.cache.store.s.rows[rows[0]]["sched"]) == 1


# -- admission ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "admitted"), [(True, [0]), (False, [0, 1])])
def test_the_whole_prompt_must_fit_unless_told_otherwise(reserve: bool, admitted: list[int]):
    steps, outcome, _ = recorded(
        trace((0, 40, 4), (0, 40, 4)), blocks=6, reserve_full_prompt=reserve, max_num_batched_tokens=50
    )  # fmt: skip
    assert steps[0].running == admitted
    assert outcome.summary["finished"] == 2


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, [0, 1, 2]), (0.2, [0, 1]), (0.6, [0])])
def test_the_watermark_is_left_free_while_anything_runs(watermark: float, admitted: list[int]):
    """20 blocks with block 0; three prompts of 6 blocks each."""
    steps, _, _ = recorded(trace(*[(0, 96, 2)] * 3), blocks=20, watermark=watermark)
    assert steps[0].running == admitted


def test_the_watermark_does_not_keep_a_lone_request_out():
    steps, outcome, _ = recorded(trace((0, 16 * 19 - 1, 2)), blocks=20, watermark=0.9)
    assert outcome.summary["finished"] == 1
    assert steps[0].free_blocks == 0


def test_no_more_run_than_may():
    steps, _, _ = recorded(trace(*[(0, 10, 3)] * 5), max_num_seqs=2)
    assert [len(s.running) for s in steps] == [2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_headroom_is_not_admitted_on():
    steps, _, _ = recorded(
        trace((0, 64, 2), (0, 64, 2)), policy="random", reclaimer="vtoken", budget=0.9, blocks=10, headroom=2
    )  # fmt: skip
    assert steps[0].running == [0]
    assert min(s.free_blocks for s in steps) >= 2


def test_what_running_prompts_are_about_to_take_is_not_admitted_on():
    """Trap 17. The first prompt has 2 of its 8 blocks so far; the 6 are promised to it, and the second has to wait."""

    def first_steps(policy: str, reclaimer: str) -> list[list[int]]:
        steps, _, _ = recorded(
            trace((0, 128, 3), (0, 96, 3)), policy=policy, reclaimer=reclaimer, blocks=13,
            max_num_batched_tokens=32, long_prefill_token_threshold=16,
        )  # fmt: skip
        return [s.running for s in steps[:3]]

    assert first_steps("random", "naive") == [[0], [0], [0]]
    # vLLM counts what is allocated only, and takes it in.
    assert first_steps("full", "none") == [[0, 1], [0, 1], [0, 1]]


def test_a_request_ends_at_the_longest_length_that_is_served():
    _, outcome, engine = recorded(
        trace((0, 20, 100), (0, 31, 5), (0, 32, 5), (0, 5, 3)), max_model_len=32, logging=True
    )
    # Of prompt and output together at most 32 tokens; a prompt of 32 leaves room for none.
    assert outcome.requests["output_tokens"].tolist() == [12, 1, 0, 3]
    assert outcome.requests["status"].tolist() == ["finished", "finished", "refused", "finished"]
    Replay.of(engine.cache.event_log())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("long_prefill_token_threshold", -1),
    ],
)
def test_limits_that_mean_nothing_are_refused(field: str, value: float):
    with pytest.raises(InputError, match=field):
        Limits(**{field: value})


# -- copies in flight --------------------------------------------------------------------------------------------------


def short_of_blocks(copy: bool) -> Scheduler:
    """Three requests of 16 tokens fill 12 of 13 blocks of 4; two of them need another one.

    The first has one live token in each of its blocks, so that a repack in flight (into the last free block) brings
    back four.
    """
    scheduler = Scheduler(KVCache(14, 4, headroom_blocks=1), Limits())
    rows = begun(scheduler, 16, 16, 16)
    keep_only(scheduler.cache, rows[0], [3, 7, 11, 15])
    if copy:
        plan = scheduler.cache.plan_repack(rows[0], 1)
        assert plan is not None
        assert plan.gain == 3
        scheduler.plans = [plan]
    assert scheduler.cache.pool.free_blocks == (0 if copy else 1)
    return scheduler


def test_without_a_copy_under_way_the_latest_pays():
    scheduler = short_of_blocks(copy=False)
    scheduler.schedule()
    assert [state.ordinal for state in scheduler.preempted] == [2]


def test_blocks_on_their_way_back_are_waited_for():
    """Trap 24: nobody is preempted for what a copy under way brings back, and the batch is not emptied."""
    scheduler = short_of_blocks(copy=True)
    for _ in range(3):
        scheduler.schedule()
        assert scheduler.preempted == []
        assert scheduler.num_running == 3
        assert scheduler.work[W.TOKENS] == 0
        assert scheduler.wanted_blocks == 2  # one, and the headroom that the destination was taken from
    scheduler.cache.apply_moves(scheduler.plans.pop())
    scheduler.schedule()
    assert scheduler.preempted == []
    assert scheduler.work[W.SEQS] == 3
    recount(scheduler.cache)


def test_nobody_is_admitted_while_a_running_request_waits_for_a_copy():
    """The first wants two blocks and one is to be had: that one is not for a newcomer, who would fit on it."""
    scheduler = Scheduler(KVCache(16, 4, headroom_blocks=1), Limits())
    rows = begun(scheduler, 16, 13, 13)
    keep_only(scheduler.cache, rows[0], [3, 7, 11, 15])
    scheduler.plans = [scheduler.cache.plan_repack(rows[0], 1)]  # type: ignore[list-item]
    scheduler.cache.store.s.rows[rows[0]]["length"] += 4
    scheduler.waiting.append(waiting(3, 4))
    assert scheduler.cache.pool.available_blocks == 1
    scheduler.schedule()
    assert scheduler.work[W.SEQS] == 2
    assert scheduler.num_running == 3
    step(scheduler)
    scheduler.cache.apply_moves(scheduler.plans.pop())
    scheduler.schedule()
    assert scheduler.num_running == 4
    assert scheduler.work[W.TOKENS] == 5 + 2 + 4


def test_all_of_a_copys_blocks_count_as_on_their_way():
    """The headroom of 3 is lent to a plan of 6 sources: all 6 come back, and what is short counts the headroom too."""
    scheduler = Scheduler(KVCache(20, 4, headroom_blocks=3), Limits())
    rows = begun(scheduler, 24, 32)
    keep_only(scheduler.cache, rows[0], range(1, 24, 2))
    plan = scheduler.cache.plan_repack(rows[0], 3)
    assert plan is not None
    assert (len(plan.sources), len(plan.destinations)) == (6, 3)
    scheduler.plans = [plan]
    assert scheduler.cache.pool.available_blocks == -1
    # 9 tokens of the second take 3 blocks: 4 are missing, more than the plan's gain of 3.
    scheduler.cache.store.s.rows[rows[1]]["length"] += 8
    scheduler.schedule()
    assert scheduler.preempted == []
    assert scheduler.num_running == 2
    scheduler.cache.apply_moves(scheduler.plans.pop())
    assert scheduler.cache.pool.available_blocks == 5
    scheduler.schedule()
    assert scheduler.work[W.TOKENS] == 1 + 9
    assert scheduler.cache.pool.available_blocks == 1


def test_more_than_is_on_its_way_does_preempt_but_one_only():
    """The victim's blocks wait behind the fence; that they are not free yet costs nobody else the place."""
    scheduler = short_of_blocks(copy=False)
    rows = scheduler.running[:3].tolist()
    keep_only(scheduler.cache, rows[2], [3, 7, 11, 15])
    plan = scheduler.cache.plan_repack(rows[2], 1)
    assert plan is not None
    scheduler.plans = [plan]
    # 13 tokens take 4 blocks, and the headroom lacks one: 5 are missing. The copy brings 4 back; with the victim's
    # destination it is 5.
    scheduler.cache.store.s.rows[rows[0]]["length"] += 12
    scheduler.schedule()
    assert [state.ordinal for state in scheduler.preempted] == [2]
    assert plan.cancelled
    assert plan.deferred == 4
    assert scheduler.num_running == 2
    recount(scheduler.cache)
    scheduler.schedule()
    assert scheduler.preempted == [], "five blocks are on their way: not one more is preempted"


def test_events_of_a_step_fit_however_many_blocks_preemptions_give_back():
    """Kernels write events without asking for room: the log must have it, a victim's hundreds of FREEs included."""
    source = trace(*((0, 100, 200) for _ in range(40)))
    _, _, engine = recorded(
        source, blocks=4200, block_size=1, max_num_seqs=40, max_num_batched_tokens=4096, logging=True
    )
    s = engine.cache.store.s
    assert s.header[H.EVENTS] <= len(s.events)
    Replay.of(engine.cache.event_log())


def test_room_for_events_is_made_again_after_a_preemption():
    cache = KVCache(60, 1, logging=True)
    scheduler = Scheduler(cache, Limits(max_num_batched_tokens=64))
    begun(scheduler, 20, 20, 18)
    scheduler.limits = Limits(max_num_batched_tokens=4)
    asked = []
    reserve = cache.store.reserve_events
    kernel_needs = 2 * 4 + 2 * 3

    def watch(more: int) -> None:
        asked.append(more)
        reserve(more)

    cache.store.reserve_events = watch  # type: ignore[method-assign]
    scheduler.schedule()
    assert len(scheduler.preempted) == 1
    closing = 18 + 1
    assert asked.index(closing) < len(asked) - 1, "nothing was reserved after the victim's blocks had been told"
    assert asked[asked.index(closing) + 1] >= min(kernel_needs, 3)


# -- prefix caching ----------------------------------------------------------------------------------------------------


def test_a_preempted_request_finds_its_own_blocks_again():
    requests = trace((0, 32, 20), (0, 33, 20), hashes=[[1, 2], [3, 4, 5]])
    steps, outcome, engine = recorded(requests, blocks=7, prefix_caching=True, logging=True)
    assert outcome.summary["preemptions"] >= 1
    assert outcome.requests["cached_tokens"].tolist() == [0, 0]
    replay = Replay.of(engine.cache.event_log())
    assert not replay.holders
    again = [s for s in steps if s.tokens.get(1, 0) > 1]
    assert len(again) >= 2
    assert again[-1].tokens[1] < 33, "what is still cached is not computed again"


def test_totals_of_prefix_caching_are_right_at_every_step():
    class Look:
        def scheduled(self, engine):
            recount(engine.cache)

        def applied(self, engine, finished):
            del finished
            recount(engine.cache)

    rng = np.random.default_rng(2)
    hashes = [[1, 2, *rng.integers(10, 13, 6).tolist()] for _ in range(30)]
    source = trace(*((k * MS, 100 + k, 12) for k in range(30)), hashes=hashes)
    from tests.support.serving import engine

    run = engine(source, blocks=40, prefix_caching=True, observer=Look(), max_num_batched_tokens=64, logging=True)
    outcome = run.run()
    assert outcome.summary["finished"] == 30
    assert outcome.summary["cached_tokens"] > 0
    assert outcome.summary["preemptions"] > 0
    Replay.of(run.cache.event_log())
