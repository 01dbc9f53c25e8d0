"""FlashInfer's wrapper, driven against a stand-in.

FlashInfer needs a GPU and a compiler. The stand-in below has the signatures of flashinfer-python 0.6.8 as far as we
call them and keeps its rules (fixed batch size in graph mode, buffers of the right size, planned types); it computes
with float32 softmax from the same buffers. That the real one is called correctly is what this can show, not that it
computes correctly: on a machine with a GPU and FlashInfer, test_the_real_one does.
"""

import importlib.util
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_validate.attention.base import build_attention  # noqa: E402
from gpu_validate.attention.flashinfer import FlashInferDecode, workspace_bytes  # noqa: E402
from gpu_validate.attention.sdpa import SdpaDecode  # noqa: E402
from gpu_validate.payload import queries  # noqa: E402
from gpu_validate.pool import PagedPool  # noqa: E402
from sim.errors import InputError  # noqa: E402
from sim.serving.models import get_model  # noqa: E402
from tests.support.pools import filled, toy  # noqa: E402


class StandIn:
    """BatchDecodeWithPagedKVCacheWrapper, as far as it is used."""

    made: list["StandIn"] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        assert kv_layout == "NHD"
        assert use_cuda_graph
        assert paged_kv_indptr_buffer is not None
        assert paged_kv_indices_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.tensor_cores = use_tensor_cores
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.plans: list[dict[str, Any]] = []
        StandIn.made.append(self)

    @property
    def batch(self) -> int:
        return len(self.buffers[2])

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert len(last_page_len) == self.batch
        assert len(indices) == indptr[-1] <= len(self.buffers[1])
        assert int(indptr.diff().min()) >= 1
        assert int(last_page_len.min()) >= 1
        assert int(last_page_len.max()) <= page_size
        self.buffers[0].copy_(indptr)
        self.buffers[1][: len(indices)].copy_(indices)
        self.buffers[2].copy_(last_page_len)
        self.heads = num_qo_heads, num_kv_heads, head_dim, page_size
        self.types = q_data_type, kv_data_type
        self.plans.append({"indptr": indptr.tolist(), "indices": indices.tolist(), "last": last_page_len.tolist()})

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        k, v = paged_kv_cache
        heads, kv_heads, head_dim, page = self.heads
        assert q.shape == out.shape == (self.batch, heads, head_dim)
        assert (q.dtype, k.dtype) == self.types
        assert out.dtype == q.dtype
        assert k.shape == v.shape == (k.shape[0], page, kv_heads, head_dim)
        indptr, indices, last = self.buffers
        for row in range(self.batch):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * page + int(last[row])
            keys, values = (part[pages].flatten(0, 1)[:length].float() for part in (k, v))
            keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q[row].float(), keys) / math.sqrt(head_dim), -1)
            out[row] = torch.einsum("hl,lhd->hd", weights, values).to(out.dtype)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    StandIn.made = []
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=StandIn))
    return StandIn


SMALL = {"workspace": 64}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_attends_to_what_the_table_lists(stand_in: type[StandIn], dtype: str) -> None:
    pool = filled(toy(heads=6, kv_heads=2), 14, 16, dtype)
    attention = build_attention("flashinfer", pool, 4, 5, capture=True, **SMALL)
    reference = SdpaDecode(pool, 4, 5)
    assert (attention.name, attention.masks, attention.capturable) == ("flashinfer", False, True)
    q = queries(0, torch.arange(4), 1, pool.model, dtype)
    for table, lengths, rows in (
        ([[9, 8, 7], [5, 0, 0], [1, 2, 0]], [33, 0, 32], 4),
        ([[3]], [16], 1),
        ([[4, 5, 6, 7, 8], [1, 2, 3, 0, 0]], [80, 41], 2),
    ):
        plan = np.array(table, np.int32), np.array(lengths, np.int32)
        for one in (attention, reference):
            one.plan(*plan, rows=rows)
        got, want = (one.run(1, q[:rows], torch.full_like(q[:rows], 7.0)) for one in (attention, reference))
        np.testing.assert_allclose(got.float(), want.float(), rtol=2**-7, atol=2**-7)
        for row in range(rows):
            if row >= len(lengths) or lengths[row] == 0:
                assert not got[row].any()  # the null block's value
        read = attention.layout()
        expected = reference.layout()
        assert read[0].tolist() == expected[0].tolist()
        assert read[1].tolist() == expected[1].tolist()
    assert all(wrapper.tensor_cores for wrapper in stand_in.made)


def test_a_plan_in_flashinfers_terms(stand_in: type[StandIn]) -> None:
    pool = filled(toy(), 14, 16)
    attention = build_attention("flashinfer", pool, 4, 5, **SMALL)
    attention.plan(np.array([[9, 8, 7], [5, 6, 0]], np.int32), np.array([33, 32], np.int32), rows=3)
    assert stand_in.made[-1].plans == [{"indptr": [0, 3, 5, 6], "indices": [9, 8, 7, 5, 6, 0], "last": [1, 16, 1]}]


def test_one_wrapper_a_bucket_over_shared_buffers(stand_in: type[StandIn]) -> None:
    pool = filled(toy(), 14, 16)
    attention = build_attention("flashinfer", pool, 4, 5, **SMALL)
    table, lengths = np.array([[1, 2]], np.int32), np.array([20], np.int32)
    for rows in (1, 2, 4, 2, 4, 1):
        attention.plan(table, lengths, rows=rows)
    assert [wrapper.batch for wrapper in stand_in.made] == [1, 2, 4]
    for buffers in zip(*(wrapper.buffers for wrapper in stand_in.made), strict=True):
        assert len({buffer.data_ptr() for buffer in buffers}) == 1
    q = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="2 rows of queries, planned were 1"):
        attention.run(0, q, torch.empty_like(q))


def test_wrappers_are_kept_for_graphs_and_bounded_otherwise(stand_in: type[StandIn]) -> None:
    pool = filled(toy(), 14, 16)
    for capture, made_again in ((False, 1), (True, 0)):
        attention = build_attention("flashinfer", pool, 17, 2, capture=capture, **SMALL)
        assert attention.capturable == capture
        table, lengths = np.array([[1, 2]], np.int32), np.array([20], np.int32)
        for rows in range(1, 18):
            attention.plan(table, lengths, rows=rows)
        before = len(stand_in.made)
        attention.plan(table, lengths, rows=17)
        attention.plan(table, lengths, rows=1)
        assert len(stand_in.made) - before == made_again
        q = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
        assert attention.run(0, q, torch.full_like(q, 7.0)).abs().max() < 7.0


def test_the_workspace_grows_with_the_batch() -> None:
    llama = get_model("llama-3.1-8b")
    assert workspace_bytes(llama, 64, 132) == 128 * 2**20
    # 512 rows are 512 tiles, and 128 more: groups of 4 in tiles of 16.
    assert workspace_bytes(llama, 512, 132) == 32 * 640 * 16 * 129 * 4 + 2**20


def test_what_it_has_no_kernel_for_is_refused(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, message in (("fp8", "one scale a tensor, not one a token: fp8"), ("fp32", "16-bit keys and values")):
        pool = PagedPool(toy(), num_blocks=3, block_size=16, dtype=dtype)
        with pytest.raises(InputError, match=message):
            build_attention("flashinfer", pool, 1, 1)
    pool = PagedPool(toy(), num_blocks=3, block_size=16)
    with pytest.raises(InputError, match="cannot mask dead slots: choose paged or sdpa"):
        build_attention("flashinfer", pool, 1, 1, masked=True)
    monkeypatch.setattr(stand_in, "plan", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no nvcc")))
    with pytest.raises(InputError, match=r"does not work here \(no nvcc\): choose another"):
        build_attention("flashinfer", pool, 1, 1, **SMALL)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(InputError, match="cannot import flashinfer"):
        build_attention("flashinfer", pool, 1, 1, **SMALL)


def test_auto_falls_back_to_our_kernel(monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> None:
    monkeypatch.setattr("gpu_validate.attention.base.choose_attention", lambda *_: "flashinfer")
    # What the fallback then asks for.
    monkeypatch.setattr("gpu_validate.attention.base.build_attention", lambda name, *_, **options: (name, options))
    pool = PagedPool(toy(), num_blocks=3, block_size=16, dtype="fp8", device=kernel_device)
    assert build_attention("auto", pool, 1, 1, capture=True) == ("paged", {"capture": True})
    with pytest.raises(InputError, match="one scale a tensor"):
        build_attention("flashinfer", pool, 1, 1)


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason="needs a GPU and flashinfer"
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_real_one(dtype: str) -> None:
    pool = filled(toy(heads=8, kv_heads=2, head_dim=128), 200, 16, dtype, "cuda")
    attention, reference = FlashInferDecode(pool, 4, 40), SdpaDecode(pool, 4, 40)
    table = np.random.default_rng(0).permutation(np.arange(1, 200))[:120].reshape(3, 40).astype(np.int32)
    q = queries(0, torch.arange(4, device="cuda"), 1, pool.model, dtype)
    for lengths in ([640, 17, 300], [1, 640, 0]):
        for one in (attention, reference):
            one.plan(table, np.array(lengths, np.int32), rows=4)
        got, want = (one.run(1, q, torch.full_like(q, 7.0)) for one in (attention, reference))
        np.testing.assert_allclose(got.float().cpu(), want.float().cpu(), rtol=2**-6, atol=2**-7)
        assert not got[3].any()
