"""A cost profile for a model from published kernel times, with the errors of its laws on what they did not see.

- Decode attention: the rows of the model's head shape, or of the nearest (:func:`near_heads`). The tables' buffers were
  read again and again, so that rows below the size of the L2 cache are about the cache: they get a law of their own,
  which the profile leaves out, since in a step each layer's KV comes from memory. Beyond the end of the grid, which is
  ragged (half a million slots at most), time follows the bytes.
- Prefill attention: the same, with tokens and pairs.
- Matrices: by shape (:mod:`sim.serving.gemm_grid`), summed up over a layer.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.serving.aiconfigurator import DEVICES, Table, Tables
from sim.serving.fit import Fitted, errors, fit_attention, fit_curve, fit_prefill
from sim.serving.gemm_grid import GemmGrid
from sim.serving.models import Model
from sim.serving.profile import CostProfile, Curve, Errors, Figure, Provenance

__all__ = ["Evidence", "build_profile", "decode_fit", "matrices", "near_heads", "prefill_fit", "speaks_of"]

MULTIPROCESSORS = 132
CACHE_BYTES = 50e6
"""Multiprocessors and L2 cache: NVIDIA's H100 architecture paper (SXM5). The H200 has the same processor."""
BLOCK_SIZE = 16
CURVE_TOLERANCE = 0.03
"""A little below the error of the matrices' times themselves."""
STEP_OVERHEAD_NS, SEQUENCE_OVERHEAD_NS = 0.8e6, 4.8e3
"""Host, sampling and small kernels: see ``host`` in :func:`_provenances`."""
COPY_BYTES_PER_S = {"h100-sxm": 0.9 * 3.35e12, "h200-sxm": 4.3e12}
"""Of a device-to-device copy, read and written: see ``copy`` there."""
ASSUMED, DATASHEET = datetime.date(2026, 11, 29), datetime.date(2022, 3, 22)

Floats = NDArray[np.float64]
KV_NAMES = {"bf16": "bfloat16", "fp8": "fp8"}


@dataclass(frozen=True)
class Evidence:
    """How well a kernel's law does on measurements that it did not see.

    Attributes
    ----------
    kernel, n, error
        What, on how many measurements, and how far off.
    extrapolated
        Share of the model's time in this kernel that lies beyond the table.
    where
        Which rows of the table, or what is beyond it.
    """

    kernel: str
    n: int
    error: Errors
    extrapolated: float
    where: str


@dataclass(frozen=True)
class Heads:
    """Rows of a table (bool[n]) for a head shape, and what they are."""

    rows: NDArray[np.bool_]
    kv_heads: int
    exact: bool
    text: str

    def note(self, model: Model) -> str:
        """Say what stands for the model's heads, if they are not in the table."""
        wanted = f"{model.heads} query and {model.kv_heads} KV heads"
        return "" if self.text.startswith(wanted) else f"for {wanted}: {self.text}"


def near_heads(table: Table, heads: int, kv_heads: int, head_dim: int, kv_dtype: str) -> Heads:
    """Find the rows of full attention for a head shape.

    KV heads that are not in the table: the nearest number of them, with as many query heads a KV head. Query heads that
    are not: the next below and above.

    Raises
    ------
    InputError
        If the table has no row for the head size or the KV type.
    """
    if kv_dtype not in KV_NAMES:
        raise InputError(f"KV type {kv_dtype!r}: the tables have {', '.join(KV_NAMES)}")
    chosen = (
        (table["window_size"] == 0) & (table["head_dim"] == head_dim) & (table["kv_cache_dtype"] == KV_NAMES[kv_dtype])
    )
    if not chosen.any():
        raise InputError(f"head size {head_dim} with a {kv_dtype} cache is not in the table")
    there = np.unique(table["num_key_value_heads"][chosen]).astype(np.float64)
    kv = int(there[np.abs(np.log(there / kv_heads)).argmin()])
    chosen &= table["num_key_value_heads"] == kv
    wanted = heads * kv / kv_heads
    there = np.unique(table["num_heads"][chosen]).astype(np.float64)
    below, above = there[there <= wanted], there[there >= wanted]
    ends = sorted({float(part) for part in (*below[-1:], *above[:1])})
    chosen &= np.isin(table["num_heads"], ends)
    names = " and ".join(f"{end:.0f}" for end in ends)
    return Heads(chosen, kv, kv == kv_heads, f"{names} query and {kv} KV heads of {head_dim}")


def _bytes(model: Model, kv_heads: int) -> int:
    """Return bytes of K and V of one token in one layer with ``kv_heads`` heads."""
    return 2 * kv_heads * model.kv_format.vector_bytes(model.head_dim)


def decode_fit(table: Table, model: Model) -> tuple[Fitted, Heads]:
    """Fit one layer's decode attention for a model's head shape and KV type."""
    near = near_heads(table, model.heads, model.kv_heads, model.head_dim, model.kv_format.name)
    batch, length, time = (table[name][near.rows].astype(np.float64) for name in ("batch_size", "step", "latency"))
    length += table["isl"][near.rows].astype(np.float64)
    fitted = fit_attention(
        batch * (length + 1) * _bytes(model, near.kv_heads),  # the new token's K and V are written, too
        batch,
        time,
        free_sequences=MULTIPROCESSORS / near.kv_heads,
        cache_bytes=CACHE_BYTES,
    )
    return fitted, near


def prefill_fit(table: Table, model: Model, ns_per_byte: float) -> tuple[Fitted, Heads]:
    """Fit one layer's prefill attention, beyond what ``ns_per_byte`` explains; figures are for one query head."""
    near = near_heads(table, model.heads, model.kv_heads, model.head_dim, model.kv_format.name)
    rows = near.rows & (table["isl"] > 1)
    batch, length, heads, time = (
        table[name][rows].astype(np.float64) for name in ("batch_size", "isl", "num_heads", "latency")
    )
    tokens = batch * (length - 1)
    pairs = batch * length * (length - 1) / 2
    known = 2 * batch * length * _bytes(model, near.kv_heads) * ns_per_byte
    return fit_prefill(tokens * heads, pairs * heads, time, known_ns=known), near


def matrices(model: Model) -> dict[str, tuple[int, int]]:
    """Return (n, k) of a layer's weight matrices and of the output projection, which is called ``head``."""
    return {
        "qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden),
        "o": (model.hidden, model.heads * model.head_dim),
        "up": ((2 if model.gated_mlp else 1) * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
        "head": (model.vocab, model.hidden),
    }


def speaks_of(model: Model) -> bool:
    """Return whether the tables are read for models of this kind: dense, with full attention."""
    return model.latent is None and model.experts is None and not model.window


def build_profile(tables: Tables, model: Model) -> tuple[CostProfile, list[Evidence]]:
    """Make the profile of a model from a device's tables.

    What no table has is assumed, and its provenance says so.

    Raises
    ------
    InputError
        If the tables have no row for the model's head size or KV type, or it is not of the kind that is read here
        (:func:`speaks_of`).
    """
    if not speaks_of(model):
        raise InputError(f"{model.name}: the tables are read for dense models with full attention, keys and values")
    layers, kv_dtype = model.layers, model.kv_format.name
    decode, decode_rows = decode_fit(tables.decode, model)
    prefill, prefill_rows = prefill_fit(tables.prefill, model, decode.values["ns_per_byte"])
    grid = GemmGrid(tables.gemm)
    shapes = matrices(model)
    head = grid.times(*shapes.pop("head"))
    layer = sum((grid.times(n, k) for n, k in shapes.values()), np.zeros(len(grid.m)))
    gemm_points, _ = fit_curve(grid.m, layers * layer, CURVE_TOLERANCE)
    head_points, _ = fit_curve(grid.m, head, CURVE_TOLERANCE)
    by_shape, by_tokens = grid.held_out_shapes(), grid.held_out_tokens()
    matrix_error, matrix_n = errors(*by_shape), len(by_shape[0])

    outside = [name for name, (n, k) in shapes.items() if not grid.inside(n, k)]
    outside_ns = sum((grid.times(*shapes[name]) for name in outside), np.zeros(len(grid.m)))
    gemm_share = float((outside_ns / layer).mean())
    head_outside = not grid.inside(*matrices(model)["head"])

    def measured(fitted: Fitted, name: str, scale: float, note: str) -> Figure:
        return fitted.figure(name, "tables", scale=scale, note=note)

    def stated(value: float, note: str = "", provenance: str = "assumed") -> Figure:
        return Figure(float(f"{value:.6g}"), provenance, note=note)

    decode_note = decode_rows.note(model)
    prefill_note = prefill_rows.note(model)
    cold = f"below {CACHE_BYTES / 1e6:.0f} MB of KV a layer: extrapolated, the table's rows come from the L2 cache"
    slots = tables.decode["batch_size"] * tables.decode["step"] * decode_rows.rows
    largest = float(slots.max()) * _bytes(model, decode_rows.kv_heads)
    most = f"beyond {largest / 1e9:.2g} GB of KV a layer: extrapolated, in proportion"
    copy_ns = 1e9 / COPY_BYTES_PER_S[tables.hardware]
    profile = CostProfile(
        model=model.name,
        hardware=tables.hardware,
        kv_dtype=kv_dtype,
        block_size=BLOCK_SIZE,
        provenances=_provenances(tables, kv_dtype),
        step_overhead_ns=stated(STEP_OVERHEAD_NS, provenance="host"),
        sequence_overhead_ns=stated(SEQUENCE_OVERHEAD_NS, provenance="host"),
        gemm_ns=Curve(
            gemm_points, "tables", matrix_n, matrix_error, f"beyond the grid: {', '.join(outside)}" if outside else ""
        ),
        head_ns=Curve(head_points, "tables", matrix_n, matrix_error, "beyond the grid" if head_outside else ""),
        attention_launch_ns=measured(decode, "launch_ns", layers, "; ".join(filter(None, (cold, decode_note)))),
        attention_ns_per_byte=measured(decode, "ns_per_byte", 1.0, "; ".join(filter(None, (most, decode_note)))),
        attention_sequence_ns=measured(
            decode, "sequence_ns", layers * model.kv_heads / decode_rows.kv_heads, decode_note
        ),
        attention_free_sequences=stated(MULTIPROCESSORS / model.kv_heads, provenance="datasheet"),
        dead_slot_factor=stated(1.0, "attention reads every written slot of a block"),
        prefill_ns_per_token=measured(prefill, "ns_per_token", layers * model.heads, prefill_note),
        prefill_ns_per_pair=measured(prefill, "ns_per_pair", layers * model.heads, prefill_note),
        copy_launch_ns=stated(10e3),
        copy_ns_per_byte_scattered=stated(copy_ns, "taken to be as fast as for neighbours"),
        copy_ns_per_byte_contiguous=stated(copy_ns, provenance="copy"),
        copy_share=stated(0.5),
        copy_interference=stated(1.0),
        table_step_ns=stated(0.0, "part of step_overhead_ns"),
        table_entry_ns=stated(0.0, "part of step_overhead_ns"),
        score_step_ns=stated(0.0),
        score_request_ns=stated(0.0),
        score_pair_bytes=stated(44.0, "counted over the passes of R-KV's PyTorch code"),
    )
    assert decode.error is not None
    assert prefill.error is not None
    evidence = [
        Evidence("decode attention", decode.n, decode.error, float(not decode_rows.exact), decode_rows.text),
        Evidence("prefill attention", prefill.n, prefill.error, float(not prefill_rows.exact), prefill_rows.text),
        Evidence("matrices, shapes held out", matrix_n, matrix_error, gemm_share, _where(outside)),
        Evidence("matrices, tokens held out", len(by_tokens[0]), errors(*by_tokens), 0.0, "m inside the grid"),
        Evidence("output projection", matrix_n, matrix_error, float(head_outside), _where(["head"] * head_outside)),
    ]
    return profile, evidence


def _where(outside: list[str]) -> str:
    return f"beyond the grid: {', '.join(outside)}" if outside else "inside the grid"


def _provenances(tables: Tables, kv_dtype: str) -> dict[str, Provenance]:
    """Say where the figures come from."""
    device = DEVICES[tables.device][1]
    digests = {f"{table}_perf.parquet": f"sha256 {digest}" for table, digest in tables.digests.items()}
    types = "bf16" if kv_dtype == "bf16" else f"bf16 with a {kv_dtype} cache"
    source = f"NVIDIA AIConfigurator, measured kernels, {types} (github.com/ai-dynamo/aiconfigurator, Apache-2.0)"
    host = (
        "one factor fitted to what the kernels leave of R-KV's four runs of vLLM with full retention (Qwen2.5-Math-7B "
        "on an H100; experiments/04_rkv_stress), on 1 ms a step and 6 us a sequence; other models and devices are "
        "taken to be alike"
    )
    copied = "device-to-device copy on an H200: 4.3 TB/s, read and written"
    copy_kind: Literal["measured", "assumed"] = "measured"
    if tables.hardware != "h200-sxm":
        copied, copy_kind = "nine tenths of the datasheet's bandwidth, as measured on an H200", "assumed"
    return {
        "tables": Provenance(device, tables.date, source, versions={"vllm": tables.version, **digests}),
        "datasheet": Provenance(
            device,
            DATASHEET,
            f"NVIDIA H100 architecture paper: {MULTIPROCESSORS} multiprocessors "
            "(SXM5; the H200 has the same processor)",
            "datasheet",
        ),
        "host": Provenance("NVIDIA H100 80GB HBM3", ASSUMED, host, "assumed"),
        "copy": Provenance(device, ASSUMED, copied, copy_kind),
        "assumed": Provenance(device, ASSUMED, "our assumption: nobody measured it", "assumed"),
    }
