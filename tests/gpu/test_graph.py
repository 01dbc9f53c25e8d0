"""Steps of decodes in buckets, on buffers that stay where they are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")

import torch

from gpu_validate.attention.base import build_attention
from gpu_validate.graph import DecodeGraphs, buckets
from gpu_validate.matrices import Matrices
from gpu_validate.options import Options
from gpu_validate.payload import fill_random
from gpu_validate.pool import PagedPool
from gpu_validate.program import StepWork
from gpu_validate.replay import replay
from gpu_validate.step import StepRunner
from gpu_validate.verify import MismatchError
from sim.errors import InputError
from sim.serving.models import get_model
from tests.support.replay import TINY, logged


def test_buckets():
    assert buckets(1) == [1]
    assert buckets(2) == [1, 2]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(20) == [1, 2, 4, 8, 16, 20]
    assert buckets(256)[-3:] == [224, 240, 256]
    assert buckets(1024)[-2:] == [960, 1024]
    for most in range(1, 600):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    assert buckets(0) == []


def test_the_smallest_bucket_with_room_is_played():
    played: list[int] = []
    prepared: list[int] = []
    fixed = [torch.zeros(3)]
    graphs = DecodeGraphs(prepared.append, played.append, 6, torch.device("cpu"), lambda: fixed)
    assert not graphs.captured
    assert prepared == [6, 4, 2, 1]
    assert played == []
    for rows in range(1, 7):
        graphs.replay(rows)
    assert played == [1, 2, 4, 4, 6, 6]
    assert [graphs.bucket(rows) for rows in range(1, 7)] == played
    graphs.check_addresses()
    fixed[0] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="allocated again"):
        graphs.check_addresses()


def decodes(rows: int, lengths: int = 6) -> StepWork:
    """Return a step of decodes, each row in two blocks of its own."""
    table = np.arange(1, 2 * rows + 1, dtype=np.int32).reshape(rows, 2)
    slots = (table[:, (lengths - 1) // 4] * 4 + (lengths - 1) % 4).astype(np.int64)
    ones = np.ones(rows, np.int32)
    numbers = np.arange(rows, dtype=np.int64)
    return StepWork(0, numbers, ones, lengths * ones, table, slots, numbers + 10, numbers)


def runner(*, graphs: bool, matrices: bool = False) -> StepRunner:
    pool = PagedPool(TINY, num_blocks=20, block_size=4, dtype="fp32")
    fill_random(pool)
    attention = build_attention("sdpa", pool, 6, 2, capture=graphs)
    weights = Matrices(TINY, 16, dtype="fp32") if matrices else None
    return StepRunner(TINY, pool, attention, matrices=weights, max_batch=6, max_tokens=16, graphs=graphs)


@pytest.mark.parametrize("matrices", [False, True])
def test_a_bucket_gives_what_the_same_rows_give_alone(matrices: bool):
    """Rows behind the last write nothing and read nothing, whatever stood in their place before."""
    eager, recorded = runner(graphs=False), runner(graphs=True, matrices=matrices)
    for rows in (6, 5, 1, 3, 2):
        before = [kv.clone() for kv in recorded.pool.kv]
        work = decodes(rows)
        eager.run(work)
        recorded.run(work)
        assert recorded.bucket == {6: 6, 5: 6, 1: 1, 3: 4, 2: 2}[rows]
        for layer in range(2):
            assert torch.allclose(eager.out[layer][:rows], recorded.out[layer][:rows], atol=1e-6)
            assert not recorded.out[layer][rows : recorded.bucket].any()
            # All that changed in the pool are the slots of the rows, the null block not among them.
            changed = (before[layer] != recorded.pool.kv[layer]).flatten(3).any(-1).any(0)
            written = {(int(slot) // 4, int(slot) % 4) for slot in work.slots}
            assert {tuple(at) for at in changed.nonzero().tolist()} <= written
            assert torch.equal(eager.pool.kv[layer], recorded.pool.kv[layer])
            assert not recorded.pool.kv[layer][:, 0].any()
    assert recorded.graphs is not None
    recorded.graphs.check_addresses()
    recorded.out[1] = recorded.out[1].clone()
    with pytest.raises(RuntimeError, match="allocated again"):
        recorded.graphs.check_addresses()


def test_capturing_writes_nothing():
    plain, recorded = runner(graphs=False), runner(graphs=True)
    assert all(torch.equal(one, other) for one, other in zip(plain.pool.kv, recorded.pool.kv, strict=True))


def test_a_chunk_beside_decodes_is_played_eagerly():
    """And sees what a decoding row of the same step has just written to a block that both list."""
    work = decodes(2)
    chunk = np.array([[2, 9]], np.int32)  # the second block of row 0, and one of its own
    both = StepWork(
        0,
        np.arange(3),
        np.array([1, 1, 2], np.int32),
        np.array([6, 6, 6], np.int32),
        np.concatenate([work.block_table, chunk]),
        np.concatenate([work.slots, [36, 37]]),
        np.arange(4),
        np.arange(4),
    )
    for graphs in (False, True):
        one = runner(graphs=graphs)
        one.run(both)
        assert one.bucket == 2
        k, v = one.pool.read(1, torch.tensor([8, 9, 10, 11, 36, 37]))
        scores = torch.einsum("thd,lhd->thl", one._chunk_q[:2], k.repeat_interleave(2, 1)) / 4
        scores[0, :, 5] = -torch.inf
        expected = torch.einsum("thl,lhd->thd", scores.softmax(-1), v.repeat_interleave(2, 1))
        out = one._attend(1, one.chunks[0])
        assert torch.allclose(out, expected, atol=1e-5)
        assert torch.equal(k[1], one._k[1][0])


def test_a_replay_with_graphs_compares_them_with_eager_kernels():
    log = logged()
    report = replay(log, TINY, Options(dtype="bf16", verify=True, graph=True))
    assert report.graph == ("captured" if report.device.startswith("cuda") else "recorded")
    assert report.graph_checks == report.graph_replays > 20
    assert replay(log, TINY, Options(dtype="bf16", graph=False)).graph == "off"


def test_a_graph_that_plays_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch):
    def stale(self: DecodeGraphs, rows: int) -> None:
        """Play a step, and then what it would have given for another query."""
        self._steps[self.bucket(rows)]()
        outputs = self._fixed()[4:6]
        outputs[1].mul_(1.001)

    monkeypatch.setattr(DecodeGraphs, "replay", stale)
    with pytest.raises(MismatchError, match="graph and eager attention differ in bytes"):
        replay(logged(requests=((0, 20, 6),)), TINY, Options(dtype="fp32", verify=True, graph=True, sample=1e-9))


def test_matrices_are_as_large_as_the_model_says():
    weights = Matrices(TINY, 8, dtype="fp32")
    parts: list[Any] = [*weights._qkv, *weights._o, *weights._up, *weights._down]
    assert sum(part.numel() for part in parts) == TINY.layer_matrix_parameters
    assert weights._head.numel() == TINY.head_parameters
    assert weights.qkv(0, 5).shape == (5, (2 + 2) * 16)
    assert weights.layer(1, 5).shape == (5, 16)
    assert weights.head(3).shape == (3, 64)
    held = sum(part.numel() * 4 for part in [*parts, weights._head, weights._hidden])
    assert held <= Matrices.bytes_needed(TINY, 8, "fp32") <= held + 8 * 4 * (3 * 16 + 4 * 16 + 3 * 32)
    weights.all_layers(8)
    assert torch.isfinite(weights.layer(0, 8)).all()


def test_matrices_of_experts_are_refused():
    model = get_model("gpt-oss-20b")
    for build in (Matrices, Matrices.bytes_needed):
        with pytest.raises(InputError, match="gpt-oss-20b has experts: the matrices computed here are those of dense"):
            build(model, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["paged", "auto"])
def test_captured_graphs_on_a_gpu(attention: str):
    for dtype in ("bf16", "fp16"):
        options = Options(device="cuda", dtype=dtype, attention=attention, verify=True, graph=True)
        report = replay(logged(), TINY, options)
        assert report.graph == "captured"
        assert report.graph_checks > 20
        assert report.queue == "stream"
