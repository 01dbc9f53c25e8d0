"""Replay on a pool: right logs pass, and each kind of wrong device is found out."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")

import torch

from gpu_validate.__main__ import main
from gpu_validate.mover import TorchMover
from gpu_validate.observer import StepObserver
from gpu_validate.options import Options
from gpu_validate.player import Player
from gpu_validate.pool import PagedPool
from gpu_validate.program import Fence, InPlace, Launch, Program, StepWork
from gpu_validate.replay import ReplayReport, replay
from gpu_validate.step import StepRunner
from gpu_validate.streams import DeferredQueue, SyncQueue
from gpu_validate.verify import MismatchError, Shadow, reference
from sim import cli
from sim.errors import InputError
from sim.kv.events import Kind, KVEventLog
from sim.kv.reclaim import reclaimers
from sim.serving.models import get_model
from tests.support.replay import BATCH, TINY, Driver, logged

VTOKEN = "vtoken:repack_when=always"
ALL = (
    *sorted(set(reclaimers.names()) - {"vtoken", "stall"}),
    VTOKEN,
    "stall:repack_when=always",
    VTOKEN + ",layout=scattered",
    VTOKEN + ",layout=fill",
    "reuse+vtoken:at_once=0",
    "reuse+vtoken:layout=ordered",
    "reuse+vtoken:layout=scattered",
)
IN_PLACE = ("sync", "ideal")
COPYING = tuple(name for name in ALL if "vtoken" in name or "stall" in name)


def verified(log: KVEventLog, queue: Callable[..., Any] | None = None, **options: Any) -> ReplayReport:
    return replay(log, TINY, Options(**({"dtype": "fp32", "verify": True} | options)), queue=queue)


@pytest.mark.parametrize("reclaimer", ALL)
@pytest.mark.parametrize("how", ["fp32 listed", "bf16 live", "fp16 listed", "fp8 live"])
def test_every_reclaimer_and_dtype(reclaimer: str, how: str):
    dtype, visible = how.split()
    options: dict[str, Any] = {"policy": "full", "budget": 1.0} if reclaimer == "none" else {}
    blocks, size = (128, 1) if reclaimer == "token" else (32, 4)
    requests = ((0, 40, 12), (0, 47, 9), (0, 30, 14))
    log = logged(reclaimer=reclaimer, requests=requests, blocks=blocks, block_size=size, **options)
    report = verified(log, dtype=dtype, visible=visible)
    kinds = log.records["kind"]
    assert report.steps == report.layouts_checked == (kinds == Kind.STEP).sum()
    reused = (kinds == Kind.REUSE).sum()
    assert (reused > 0) == reclaimer.startswith("reuse")
    assert report.tokens_written == log.records["b"][kinds == Kind.APPEND].sum() + reused
    assert report.tokens_copied == report.tokens_seen_moved == log.records["b"][kinds == Kind.PLAN].sum()
    assert (report.tokens_copied > 0) == (reclaimer in COPYING)
    assert report.tokens_moved_in_place == ((kinds == Kind.MOVE).sum() if reclaimer in IN_PLACE else 0)
    assert (report.tokens_moved_in_place > 0) == (reclaimer in IN_PLACE)
    # What is moved between two steps is there before the next one reads.
    filled = visible == "listed" and (kinds == Kind.TARGET).any() and reclaimer != "reuse+vtoken"
    assert (report.outputs_undefined or 0) > 0 if filled else report.outputs_undefined == 0
    per_token = 2 * 2 * 16 * {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}[dtype] + (16 if dtype == "fp8" else 0)
    assert report.bytes_moved == 2 * per_token * (report.tokens_copied + report.tokens_moved_in_place)
    assert report.pool_bytes == 128 * per_token
    assert (report.attention, report.mover, report.queue, report.visible) == ("sdpa", "torch", "thread", visible)
    assert report.max_error is not None
    assert 0 < report.max_error < 0.02


def test_preemption_prefixes_and_asynchronous_scheduling():
    reclaimer = VTOKEN + ",shared_blocks=copy_out"
    log = logged(prefix_caching=True, async_scheduling=True, budget=0.6, blocks=26, reclaimer=reclaimer)
    kinds = set(log.records["kind"].tolist())
    assert {Kind.SHARE, Kind.PREEMPT, Kind.COMMIT} <= kinds
    verified(log, queue=lambda mover, observer: DeferredQueue(mover, observer, last=True))


@pytest.mark.parametrize("reclaimer", COPYING)
@pytest.mark.parametrize("when", ["at once", "between", "last"])
def test_slow_and_reordered_copies(reclaimer: str, when: str):
    def make(mover: Any, observer: Any) -> SyncQueue:
        return SyncQueue(mover) if when == "at once" else DeferredQueue(mover, observer, last=when == "last")

    for visible, late in (("listed", True), ("live", False)):
        log = logged(reclaimer=reclaimer, async_scheduling=late, blocks=40, requests=BATCH[:4])
        report = verified(log, make, visible=visible, graph=late)
        assert report.tokens_copied > 0
        assert (report.outputs_verified or 0) > 20


FILL = "reuse+vtoken:at_once=0"


def test_dead_slots_that_a_copy_fills_are_undefined(monkeypatch: pytest.MonkeyPatch):
    """Judged as if they were not, a row that lists them is found to read something else."""
    log = logged(reclaimer=FILL, blocks=60)
    assert (verified(log, SyncQueue).outputs_undefined or 0) > 5
    assert verified(log, SyncQueue, visible="live").outputs_undefined == 0
    monkeypatch.setattr(Shadow, "filling", lambda *_: False)
    with pytest.raises(MismatchError, match="attention is"):
        verified(log, SyncQueue)
    verified(log, SyncQueue, visible="live")


def test_a_graph_and_its_eager_twin_may_see_different_dead_slots(monkeypatch: pytest.MonkeyPatch):
    """A copy goes on between the two: they are compared only where kernels mask its slots."""

    class Waiting(DeferredQueue):
        def go_on(self) -> None:
            for first in list(self._left):
                self._advance(first, 1.0)

    compare = Player._compare_with_eager

    def late(self: Player, work: StepWork) -> None:
        assert isinstance(self.queue, Waiting)
        self.queue.go_on()
        compare(self, work)

    def make(mover: Any, observer: Any) -> Waiting:
        return Waiting(mover, observer, last=True)

    monkeypatch.setattr(Player, "_compare_with_eager", late)
    log = logged(reclaimer=FILL, blocks=60)
    listed, live = (verified(log, make, visible=visible, graph=True) for visible in ("listed", "live"))
    assert 0 < listed.graph_checks < live.graph_checks == live.graph_replays


def test_a_destination_that_is_read_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """A block that stays listed is told from one that no table may list before the fence."""
    log = logged(reclaimer=FILL, blocks=60)
    act = Shadow.act

    def forgetful(self: Shadow, action: Any) -> None:
        act(self, dataclasses.replace(action, listed=action.listed[:0]) if isinstance(action, Launch) else action)

    monkeypatch.setattr(Shadow, "act", forgetful)
    with pytest.raises(MismatchError, match="a block is read that a copy in flight fills"):
        verified(log)


def test_a_copy_over_a_live_token_is_found_out(monkeypatch: pytest.MonkeyPatch):
    log = logged(reclaimer=FILL, blocks=60)
    act = Shadow.act

    def aimed_badly(self: Shadow, action: Any) -> None:
        act(self, action)
        for launch in self.pending.values():
            launch.target[:] ^= 1

    monkeypatch.setattr(Shadow, "act", aimed_badly)
    with pytest.raises(MismatchError, match="a copy in flight writes over a live token"):
        verified(log, check=False)


@pytest.mark.parametrize("queue", ["sync", "thread", "deferred"])
@pytest.mark.parametrize("lookahead", [0, 7])
def test_queues_and_lookahead_make_no_difference(queue: str, lookahead: int):
    log = logged(requests=((0, 40, 12), (0, 47, 9), (0, 30, 14)), blocks=32)
    report = replay(log, TINY, Options(dtype="fp32", verify=True, queue=queue, lookahead=lookahead))
    assert report.tokens_copied > 0
    assert report.queue == queue


@pytest.mark.parametrize("visible", ["listed", "live"])
def test_chunks_of_requests_that_have_lost_tokens(visible: str):
    """No engine writes several tokens at once behind dead ones; the device can."""
    log = Driver(2, size=4, blocks=60, steps=12).log
    dead = 0
    for work in Program(log, live=True):
        lost = work.lengths - work.live_mask(4).sum(1)
        dead += int((~work.decode & (lost > 0)).sum())
    assert dead > 3
    verified(log, visible=visible)


def test_the_copy_of_a_cancelled_plan_may_run_up_to_its_fence():
    log = Driver(5, size=4, blocks=60, steps=20).log
    assert (log.records["kind"] == Kind.CANCEL).any()
    verified(log, queue=lambda mover, observer: DeferredQueue(mover, observer, last=True))


class LateQueue(SyncQueue):
    """Copies some plans when steps have gone by behind their fence: what a missing fence would let happen."""

    name = "late"

    def __init__(self, mover: Any, observer: Any, plans: Sequence[int], wait: int) -> None:
        super().__init__(mover, observer)
        self.plans, self.wait = set(plans), wait
        self.held: dict[int, Launch] = {}
        self.due: list[tuple[int, Launch]] = []

    def launch(self, launch: Launch) -> None:
        first = 0
        for plan, count in zip(launch.plans, launch.counts, strict=True):
            part = slice(first, first + count)
            one = Launch((plan,), (count,), launch.source[part], launch.target[part])
            if plan in self.plans:
                self.held[plan] = one
            else:
                super().launch(one)
            first += count

    def fence(self, plans: Sequence[int]) -> None:
        self.due += [(self.wait, self.held.pop(plan)) for plan in plans if plan in self.held]

    def tick(self) -> None:
        for left, launch in self.due:
            if not left:
                super().launch(launch)
        self.due = [(left - 1, launch) for left, launch in self.due if left]

    def close(self) -> None:
        for _, launch in self.due:
            super().launch(launch)


class Ticking(StepObserver):
    def __init__(self) -> None:
        self.queue: LateQueue | None = None

    def moved(self, work: StepWork) -> None:
        del work
        assert self.queue is not None
        self.queue.tick()


def played_late(log: KVEventLog, plans: Sequence[int], wait: int) -> ReplayReport:
    ticking = Ticking()

    def make(mover: Any, observer: Any) -> LateQueue:
        ticking.queue = LateQueue(mover, observer, plans, wait)
        return ticking.queue

    # Without the check at the fence, which would see at once that nothing has arrived.
    options = Options(dtype="fp32", verify=True, check=False)
    return replay(log, TINY, options, observer=ticking, queue=make)


def ends(log: KVEventLog) -> tuple[list[int], list[int]]:
    """Return the plans that took effect, and those that were cancelled, in the order of their fences."""
    rows = log.records
    cancelled = set(rows["a"][rows["kind"] == Kind.CANCEL].tolist())
    fenced = rows["a"][rows["kind"] == Kind.COPIED].tolist()
    return [plan for plan in fenced if plan not in cancelled], [plan for plan in fenced if plan in cancelled]


def test_a_copy_that_comes_behind_its_fence_is_found_out():
    log = logged()
    committed, _ = ends(log)
    assert played_late(log, committed, wait=0).tokens_copied > 0  # before the step behind the fence: in time
    with pytest.raises(MismatchError, match=r"other bytes|attention is"):
        played_late(log, committed, wait=1)


def test_a_late_copy_into_a_block_that_was_freed_is_found_out():
    """Trap 6: nobody reads what a cancelled copy brings, but its destination has a new owner."""
    for seed in range(12):
        log = Driver(seed, size=4, blocks=34, steps=20).log
        _, cancelled = ends(log)
        if not cancelled:
            continue
        try:
            played_late(log, cancelled, wait=2)
        except MismatchError as error:
            # No live token was written where it should not be, until the copy came.
            assert re.search("other bytes|attention is", str(error))  # noqa: PT017
            played_late(log, cancelled, wait=0)
            return
    pytest.fail("in no case had the block a new owner")


@pytest.mark.parametrize("where", ["fp32 k", "fp32 v", "fp8 k", "fp8 v", "fp8 k_scale", "fp8 v_scale"])
def test_one_wrong_byte_is_found_out(where: str, monkeypatch: pytest.MonkeyPatch):
    dtype, what = where.split()
    run = StepRunner.run

    def spoilt(self: StepRunner, work: StepWork, observer: Any = None) -> None:
        run(self, work, observer)
        if work.step == 5:
            plane = next(plane for plane in self.pool.planes if plane.what == what and plane.layer == 1)
            plane.rows[int(work.slots[0]), 1] ^= 1

    monkeypatch.setattr(StepRunner, "run", spoilt)
    with pytest.raises(MismatchError, match=rf"step 5, layer 1: expected token .* its {what} has other bytes \(1 such"):
        verified(logged(requests=((0, 20, 12),)), dtype=dtype, sample=1.0)


def test_scales_that_stay_behind_are_found_out():
    class Forgetful(TorchMover):
        def _copy(self, src: Any, dst: Any) -> None:
            for plane in self.pool.planes[:4]:
                plane.rows.index_copy_(0, dst, plane.rows.index_select(0, src))

    log = logged(requests=((0, 60, 10),))
    with pytest.raises(MismatchError, match="missing behind the fence"):
        verified(log, dtype="fp8", queue=lambda mover, _: SyncQueue(Forgetful(mover.pool)))
    with pytest.raises(MismatchError, match="scale has other bytes"):
        verified(log, dtype="fp8", check=False, queue=lambda mover, _: SyncQueue(Forgetful(mover.pool)))
    verified(log, dtype="fp8", queue=lambda mover, _: SyncQueue(TorchMover(mover.pool)))


def test_a_mover_that_does_nothing_is_found_out():
    """Trap 14, and without payloads: the bytes are not there behind the fence."""

    class Idle(TorchMover):
        def _copy(self, src: Any, dst: Any) -> None:
            pass

    with pytest.raises(MismatchError, match="missing behind the fence"):
        verified(logged(), verify=False, queue=lambda mover, _: SyncQueue(Idle(mover.pool)))


def test_copies_left_out_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SyncQueue, "_copy", lambda *_: None)
    with pytest.raises(MismatchError, match="the device copied 0 tokens and moved 0 in place, expected"):
        verified(logged(), verify=False, check=False, queue=SyncQueue)


def test_another_layout_on_the_device_is_found_out(monkeypatch: pytest.MonkeyPatch):
    plan = StepRunner._plan

    def swapped(self: StepRunner, work: StepWork) -> None:
        wrong = dataclasses.replace(work, block_table=work.block_table.copy())
        if work.step == 4:
            wrong.block_table[0, :2] = wrong.block_table[0, 1::-1]
        plan(self, wrong)

    monkeypatch.setattr(StepRunner, "_plan", swapped)
    log = logged(requests=((0, 20, 12),), policy="full", budget=1.0, reclaimer="none")
    with pytest.raises(
        MismatchError, match=r"step 4, request 0: the device reads 24 slots of blocks \[2, 1, 3, 4, 5, 6\]"
    ):
        verified(log, verify=False)


def test_attention_to_what_is_not_to_be_seen_is_found_out(monkeypatch: pytest.MonkeyPatch):
    log = logged(requests=((0, 40, 20),), reclaimer="naive")
    verified(log, visible="listed")
    verified(log, visible="live")
    # Kernels that see dead slots, judged as if they did not; and the other way about.
    build = Player.__init__

    def other(self: Player, *arguments: Any) -> None:
        build(self, *arguments)
        assert self.verifier is not None
        self.verifier._visible = {"live": "listed", "listed": "live"}[self.verifier._visible]

    monkeypatch.setattr(Player, "__init__", other)
    for visible in ("listed", "live"):
        with pytest.raises(MismatchError, match="attention is"):
            verified(log, visible=visible)


def test_a_move_in_place_in_the_wrong_order_is_found_out(monkeypatch: pytest.MonkeyPatch):
    """One by one from the last to the first: what a slot holds is overwritten before it has moved on."""

    def backwards(self: TorchMover, src: Any, dst: Any) -> None:
        for i in reversed(range(len(src))):
            self.move(src[i : i + 1], dst[i : i + 1], check=False)

    log = logged(reclaimer="sync", requests=((0, 40, 12),))
    monkeypatch.setattr(TorchMover, "move_in_place", backwards)
    with pytest.raises(MismatchError, match="other bytes"):
        verified(log)


@pytest.mark.parametrize("reclaimer", [VTOKEN, FILL, "sync"])
@pytest.mark.parametrize("verify", [True, False])
def test_any_range_of_steps(reclaimer: str, verify: bool):
    log = logged(requests=((0, 40, 12), (0, 47, 9), (0, 30, 14)), blocks=32, reclaimer=reclaimer, prefix_caching=True)
    works = list(Program(log))
    copying, in_flight = [], 0
    for work in works:
        for action in work.before:
            in_flight += {Launch: 1, Fence: -1, InPlace: 0}[type(action)]
        copying.append(in_flight > 0)
    last = works[-1].step
    for first in range(1, last, 5 if verify else 3):
        report = replay(log, TINY, Options(dtype="fp32", steps=(first, first + 6), verify=verify))
        assert report.first_step == first
        assert report.last_step == min(first + 5, last)
        assert report.steps == sum(first <= work.step < first + 6 for work in works)
    assert reclaimer == "sync" or sum(copying) > 3, "no range began beside a copy"


@pytest.mark.parametrize("steps", [(90, 91), (1000, 2000)])
def test_steps_that_the_log_has_not(steps: tuple[int, int]):
    with pytest.raises(InputError, match=r"steps \d+:\d+: the log has steps 0 to \d+"):
        verified(logged(requests=((0, 40, 12),)), steps=steps)


def test_a_share_is_judged_when_asked():
    log = logged()
    whole, some = verified(log), verified(log, sample=0.2)
    assert whole.outputs_verified is not None
    assert some.outputs_verified is not None
    assert 0 < some.outputs_verified < 0.4 * whole.outputs_verified
    assert some.sample == 0.2
    assert some.tokens_verified == pytest.approx(0.2 * whole.tokens_verified, rel=0.2)  # type: ignore[operator]


def test_without_verification_nothing_is_verified_and_all_is_counted():
    report = verified(logged(), verify=False, matrices=True)
    assert report.tokens_verified is None
    assert report.max_error is None
    assert report.layouts_checked == report.steps
    assert report.tokens_seen_moved == report.tokens_copied > 0
    unchecked = verified(logged(), verify=False, check=False)
    assert unchecked.layouts_checked == 0
    assert unchecked.tokens_seen_moved is None
    assert unchecked.tokens_copied == report.tokens_copied


def test_an_observer_is_told_in_order():
    calls: list[tuple[str, Any]] = []

    class Notes(StepObserver):
        def __getattribute__(self, name: str) -> Any:
            if hasattr(StepObserver, name) and not name.startswith("_"):
                return lambda what: calls.append((name, what))
            return super().__getattribute__(name)

    log = logged(requests=((0, 40, 12), (0, 47, 9)))
    replay(log, TINY, Options(dtype="fp32", queue="sync"), observer=Notes())
    works = list(Program(log))
    told = [name for name, _ in calls]
    assert told.count("begin") == told.count("end") == told.count("moved") == len(works)
    launches = sum(isinstance(action, Launch) for work in works for action in work.before)
    assert launches > 0
    assert told.count("launched") == told.count("copy_begin") == told.count("copy_end") >= launches
    first = told.index("launched")
    step = [name for name in told[: first + 1][::-1]]
    assert step[:4] == ["launched", "copy_end", "copy_begin", "begin"]
    steps = [name for name in told if name in ("begin", "moved", "uploaded", "planned", "end")]
    assert steps == ["begin", "moved", "uploaded", "planned", "end"] * len(works)


@pytest.mark.slow
def test_our_own_kernels():
    """In Triton's interpreter where there is no GPU: few steps, of which one waits for a copy."""
    log = logged(requests=((0, 40, 12), (0, 47, 9)), blocks=32)
    fenced = next(work.step for work in Program(log) if any(isinstance(action, Fence) for action in work.before))
    options = Options(
        dtype="bf16", attention="paged", mover="triton", verify=True, graph=True, steps=(fenced - 1, fenced + 5)
    )
    report = replay(log, get_model("toy"), options)
    assert (report.attention, report.mover, report.queue) == ("paged", "triton", "sync")
    assert report.tokens_copied > 0
    assert report.steps == 6
    assert report.graph_checks > 2


def test_an_interrupted_replay_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    play = Player.play

    def interrupted(self: Player, work: StepWork) -> None:
        if work.step == 7:
            raise KeyboardInterrupt
        play(self, work)

    log = logged(requests=((0, 40, 12),))
    log.save(tmp_path / "events.npz")
    monkeypatch.setattr(Player, "play", interrupted)
    threads = threading.active_count()
    for run in (main, cli.main):
        command = ["replay", "--events", str(tmp_path / "events.npz"), "--model", "toy", "--out", str(tmp_path / "out")]
        assert run(command) == 130
        captured = capsys.readouterr()
        assert captured.err == "interrupted while playing: 7 steps done\n"
        assert captured.out == ""
    assert not (tmp_path / "out").exists()
    assert threading.active_count() == threads


def test_a_mismatch_ends_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SyncQueue, "_copy", lambda *_: None)
    logged().save(tmp_path / "events.npz")
    assert main(["replay", "--events", str(tmp_path / "events.npz"), "--model", "toy"]) == 1
    assert re.fullmatch(r"error: plan \d+: tokens are missing .*\n", capsys.readouterr().err)


def test_what_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = logged(requests=((0, 40, 12), (0, 47, 9)), blocks=32)
    log.model, log.kv_dtype = "toy", "fp16"
    log.save(tmp_path / "events.npz")
    out = tmp_path / "report.json"
    given = [
        "replay",
        "--events",
        str(tmp_path / "events.npz"),
        "--verify",
        "--layers",
        "1",
        "--graph",
        "--out",
        str(out),
    ]
    assert main([*given, "--sample", "0.5"]) == 0
    printed = capsys.readouterr().out
    for line in ("toy, 1 of 2 layers, fp16; matrix products off", "copies thread, graph recorded", "50% of tokens"):
        assert line in printed
    report = json.loads(out.read_text())
    steps = int((log.records["kind"] == Kind.STEP).sum())
    assert report["layers"] == 1
    assert report["steps"] == report["layouts_checked"] == steps
    assert report["versions"]["torch"] == torch.__version__
    assert report["tokens_copied"] > 0


def test_the_reference_by_hand():
    """One query head of size 4, two keys; and one that sees the first only."""
    q = torch.zeros(2, 1, 4)
    q[:, 0, 0] = 2.0
    k = torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 0, 0, 0]]])
    v = torch.tensor([[[1.0, 2, 3, 4]], [[0.0, 0, 0, 8]]])
    out = reference(q, k, v, torch.tensor([[True, True], [True, False]]))
    weight = np.e / (np.e + 1)
    assert out[0, 0].tolist() == pytest.approx([weight, 2 * weight, 3 * weight, 4 * weight + 8 * (1 - weight)])
    assert out[1, 0].tolist() == [1, 2, 3, 4]


def test_query_heads_share_a_key_head_in_groups():
    q, k, v = torch.randn(1, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    out = reference(q, k, v, torch.ones(1, 3, dtype=torch.bool))
    for head in range(4):
        alone = reference(q[:, head : head + 1], k[:, head // 2 : head // 2 + 1], v[:, head // 2 : head // 2 + 1],
                          torch.ones(1, 3, dtype=torch.bool))  # fmt: skip
        assert torch.allclose(out[:, head], alone[:, 0])


def test_what_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    log = logged(requests=((0, 40, 12),))
    huge = dataclasses.replace(TINY, layers=1 << 20, kv_heads=1 << 10, heads=1 << 10)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was allocated")

    for name in ("empty", "zeros", "full", "ones", "randn", "empty_like", "zeros_like"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(PagedPool, "__init__", refuse)
    with pytest.raises(InputError, match=r"GiB free, needed are .*KV pool of 50 blocks of 4 .*lower the layers"):
        replay(log, huge, Options(dtype="fp32"))
    with pytest.raises(InputError, match="weights and activations"):
        replay(log, dataclasses.replace(TINY, intermediate=1 << 48), Options(matrices=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "unknown device 'gpu': expected cpu, cuda or cuda:1"),
        ({"device": "mps"}, "expected cpu, cuda"),
        ({"dtype": "bf61"}, "did you mean 'bf16'"),
        ({"attention": "spda"}, "did you mean 'sdpa'"),
        ({"mover": "trion"}, "did you mean 'triton'"),
        ({"queue": "thraed"}, "did you mean 'thread'"),
        ({"queue": "stream"}, "copy queue 'stream' does not work on cpu"),
        ({"visible": "alive"}, "did you mean 'live'"),
        ({"sample": 0.0}, "sample: expected a share greater than 0"),
        ({"sample": float("nan")}, "sample"),
        ({"steps": (5, 5)}, "steps: expected A:B with 0 <= A < B, got 5:5"),
        ({"lookahead": -1}, "lookahead"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with pytest.raises(InputError, match=r"device 'cuda': torch .* finds no CUDA device here; use cpu"):
        Options(device="cuda")
