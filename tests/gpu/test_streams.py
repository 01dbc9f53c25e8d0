"""Copy queues: when copies run, and that fences wait for them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")

import torch

from gpu_validate.program import Launch
from gpu_validate.streams import QUEUES, DeferredQueue, SyncQueue, ThreadQueue, build_queue, choose_queue
from sim.errors import InputError


class Mover:
    """Copies in a dictionary, and takes down what it was asked to do."""

    name = "notes"

    def __init__(self) -> None:
        self.moves: list[tuple[int, int]] = []
        self.calls = 0
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def move(self, src: Any, dst: Any, *, check: bool = True) -> None:
        assert not check
        assert self.gate.wait(10)
        self.calls += 1
        self.threads.add(threading.get_ident())
        self.moves += zip(src.tolist(), dst.tolist(), strict=True)

    def move_in_place(self, *_: Any) -> None:
        raise AssertionError("not by a queue")


def launch(*plans: int, tokens: int = 4) -> Launch:
    source = 100 * plans[0] + np.arange(tokens * len(plans))
    return Launch(plans, (tokens,) * len(plans), source, source + 50)


def moves(one: Launch) -> list[tuple[int, int]]:
    return list(zip(one.source.tolist(), one.target.tolist(), strict=True))


def test_sync_copies_at_once():
    mover = Mover()
    queue = SyncQueue(mover)
    queue.launch(launch(1))
    assert mover.moves == moves(launch(1))
    queue.fence((1,))
    queue.close()
    assert queue.tokens == 4


def test_a_thread_copies_beside_whoever_launched_and_the_fence_waits():
    mover = Mover()
    queue = ThreadQueue(mover)
    mover.gate.clear()
    queue.launch(launch(1))
    queue.launch(launch(2, 3))
    assert mover.moves == []  # nobody waited for it
    threading.Timer(0.05, mover.gate.set).start()
    queue.fence((1,))
    assert mover.moves[:4] == moves(launch(1))
    queue.fence((2, 3))
    assert mover.moves == moves(launch(1)) + moves(launch(2, 3))
    assert threading.get_ident() not in mover.threads
    queue.close()
    assert queue.tokens == 12


def test_an_error_of_a_copy_is_raised_at_its_fence_or_at_the_end():
    class Broken(Mover):
        def move(self, *_: Any, **__: Any) -> None:
            raise ValueError("no copy today")

    for end in ("fence", "close"):
        queue = ThreadQueue(Broken())
        queue.launch(launch(1))
        with pytest.raises(ValueError, match="no copy today"):
            queue.fence((1,)) if end == "fence" else queue.close()
        if end == "fence":
            queue.close()


def test_deferred_copies_all_of_it_once_by_the_fence_in_many_ways():
    orders, counts, early = set(), set(), 0
    for seed in range(40):
        mover = Mover()
        queue = DeferredQueue(mover, seed=seed)
        queue.launch(launch(1))
        queue.launch(launch(2, 3))
        early += len(mover.moves) > 0
        queue.fence((3,))  # of a launch of two plans: all of it has to be there
        assert set(moves(launch(2, 3))) <= set(mover.moves)
        queue.fence((1,))
        queue.fence((2,))
        assert sorted(mover.moves) == sorted(moves(launch(1)) + moves(launch(2, 3)))
        assert queue.tokens == 12
        orders.add(tuple(mover.moves))
        counts.add(mover.calls)
    assert len(orders) == 40
    assert len(counts) > 1
    assert 0 < early < 40


def test_deferred_to_the_last_moment():
    mover = Mover()
    queue = DeferredQueue(mover, last=True)
    queue.launch(launch(1))
    queue.launch(launch(2))
    assert mover.moves == []
    queue.fence((2,))
    assert sorted(mover.moves) == sorted(moves(launch(2)))
    queue.close()
    assert sorted(mover.moves) == sorted(moves(launch(1)) + moves(launch(2)))


def test_every_queue_by_name():
    assert choose_queue("auto", "cpu") == "thread"
    assert choose_queue("auto", "cuda") == "stream"
    assert choose_queue("stream", "cuda:1") == "stream"
    assert choose_queue("auto", "cpu", "triton") == "sync"
    with pytest.raises(InputError, match="one thread"):
        choose_queue("thread", "cpu", "triton")
    for name in QUEUES[1:]:
        queue = build_queue(name, Mover(), "cpu")
        assert queue.name == name
        queue.close()
    for name, device, message in (
        ("stream", "cpu", "does not work on cpu"),
        ("thread", "cuda", "does not work on cuda"),
        ("defered", "cpu", "did you mean 'deferred'"),
    ):
        with pytest.raises(InputError, match=message):
            choose_queue(name, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_copies_behind_what_was_issued_and_the_fence_holds_what_follows_back():
    from gpu_validate.mover import build_mover
    from gpu_validate.pool import PagedPool
    from tests.support.replay import TINY

    pool = PagedPool(TINY, num_blocks=64, block_size=4, dtype="fp32", device="cuda")
    queue = build_queue("auto", build_mover("auto", pool), "cuda")
    work = Launch((7,), (4,), np.arange(8, 12), np.arange(40, 44))
    for value in (1.0, 2.0, 3.0):
        for kv in pool.kv:
            torch.cuda._sleep(20_000_000)
            kv.fill_(value)  # behind a kernel that takes a while
        queue.launch(work)
        queue.fence(work.plans)
        there = pool.raw(torch.arange(40, 44, device="cuda")).clone()
        for kv in pool.kv:
            kv.zero_()  # the copy has read by now
        expected = torch.full_like(pool.raw(torch.arange(4, device="cuda")).view(torch.float32), value)
        assert torch.equal(there.view(torch.float32), expected)
    queue.close()
