"""How good the laws of the shipped cost profiles are: on what was held out, and beyond what was measured.

python experiments/08_kernel_laws/run.py [--path FOLDER]    checks.csv, laws.png

FOLDER holds NVIDIA AIConfigurator's tables (../shared/reference/aiconfigurator when not given).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.serving.aiconfigurator import Tables, read_tables
from sim.serving.fit import attention_ns, errors, fit_attention, fit_linear
from sim.serving.models import get_model
from sim.serving.published import CACHE_BYTES, MULTIPROCESSORS, decode_fit
from sim.study.plots.style import new_figure, save, styled

HERE = Path(__file__).parent
DEVICES = ("h100_sxm", "h200_sxm")
Shape = tuple[int, int, int]
"""Query heads, KV heads, head size."""
LLAMA: Shape = (32, 8, 128)
Floats = NDArray[np.float64]


def rows(tables: Tables, *shapes: Shape, kv: str = "bfloat16") -> tuple[Floats, Floats, Floats, Floats]:
    """Return batch, KV length, bytes and ns of full attention's decode rows of some head shapes."""
    table, chosen = tables.decode, []
    for heads, kv_heads, size in shapes:
        wanted = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "window_size": 0}
        keep = table["kv_cache_dtype"] == kv
        for name, value in wanted.items():
            keep &= table[name] == value
        batch, length, ns = (table[name][keep] for name in ("batch_size", "step", "latency"))
        chosen.append((batch, length + 1, batch * (length + 2) * kv_heads * size * 4, ns))
    batch, length, bytes_, ns = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    return batch, length, bytes_, ns


def predict(values: dict[str, float], batch: Floats, bytes_: Floats, kv_heads: int, fitted_kv_heads: int) -> Floats:
    """Return what a law says for another head shape: sequences cost in proportion to their KV heads."""
    sequence, free = values["sequence_ns"] * kv_heads / fitted_kv_heads, MULTIPROCESSORS / kv_heads
    cold = attention_ns(bytes_ * values["ns_per_byte"], batch, values["launch_ns"], sequence, free)
    warm = attention_ns(bytes_ * values["cached_ns_per_byte"], batch, values["cached_launch_ns"], sequence, free)
    return np.where(bytes_ < CACHE_BYTES, warm, cold)


def checks(tables: Tables) -> list[dict[str, Any]]:
    """Return one row a question."""
    found: list[dict[str, Any]] = []

    def note(question: str, n: int, error: Any) -> None:
        shares = {name: round(100 * value, 1) for name, value in dataclasses.asdict(error).items()}
        found.append({"device": tables.device, "question": question, "n": n, **shares})

    batch, _, bytes_, ns = rows(tables, LLAMA)
    ones = np.ones_like(ns)
    for question, columns in (
        ("launch + bytes", {"launch": ones, "byte": bytes_}),
        ("launch + bytes + sequences", {"launch": ones, "byte": bytes_, "sequence": batch}),
    ):
        note(f"{question}, held out", len(ns), fit_linear(columns, ns).error)
    law, _ = decode_fit(tables.decode, get_model("llama-3.1-8b"))
    note("the law, held out", law.n, law.error)
    cold = bytes_ >= CACHE_BYTES
    note("the law, held out, rows too large for the cache", int(cold.sum()), errors(law.held_out[cold], ns[cold]))
    fp8, _ = decode_fit(tables.decode, get_model("llama-3.1-8b", "fp8"))
    note("the law, held out, fp8 cache", fp8.n, fp8.error)
    batch_fp8, _, twice, ns_fp8 = rows(tables, LLAMA, kv="fp8")
    cold_fp8 = twice / 2 >= CACHE_BYTES
    by_bytes = predict(law.values, batch_fp8, twice / 2, 8, 8)
    for question, predicted in (
        ("bf16's law by bytes, fp8 cache, rows too large for the cache", by_bytes),
        ("the law, held out, fp8 cache, rows too large for the cache", fp8.held_out),
    ):
        note(question, int(cold_fp8.sum()), errors(predicted[cold_fp8], ns_fp8[cold_fp8]))

    def beyond(question: str, near: tuple[Shape, ...], far: Shape) -> None:
        batch, _, bytes_, ns = rows(tables, *near)
        values = fit_attention(
            bytes_, batch, ns, free_sequences=MULTIPROCESSORS / near[0][1], cache_bytes=CACHE_BYTES
        ).values
        batch, _, bytes_, ns = rows(tables, far)
        note(question, len(ns), errors(predict(values, batch, bytes_, far[1], near[0][1]), ns))

    beyond("query heads between two: 32 from 24 and 40", ((24, 4, 128), (40, 4, 128)), (32, 4, 128))
    beyond("four times the KV heads: 8 from 2", ((8, 2, 128),), LLAMA)
    beyond("eight times the KV heads: 8 from 1", ((4, 1, 128),), LLAMA)
    near = bytes_ < 3e8
    values = fit_attention(
        bytes_[near], batch[near], ns[near], free_sequences=MULTIPROCESSORS / 8, cache_bytes=CACHE_BYTES
    ).values
    far = ~near
    note(
        "up to seven times the bytes: above 0.3 GB from below",
        int(far.sum()),
        errors(predict(values, batch[far], bytes_[far], 8, 8), ns[far]),
    )
    return found


@styled
def draw(every: list[Tables], path: Path) -> None:
    """Draw decode attention of one layer against the KV length, measured and by the law."""
    figure = new_figure(9.0, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, tables in zip(panels, every, strict=True):
        batch, length, bytes_, ns = rows(tables, LLAMA)
        law, _ = decode_fit(tables.decode, get_model("llama-3.1-8b"))
        fitted = predict(law.values, batch, bytes_, 8, 8)
        cold = attention_ns(
            bytes_ * law.values["ns_per_byte"],
            batch,
            law.values["launch_ns"],
            law.values["sequence_ns"],
            MULTIPROCESSORS / 8,
        )
        for k, size in enumerate((1, 8, 32, 128, 512)):
            own = np.flatnonzero(batch == size)
            own = own[np.argsort(length[own])]
            colour = f"C{k}"
            panel.plot(length[own], ns[own] / 1e3, "o", color=colour, markersize=3.5, label=f"batch {size}")
            panel.plot(length[own], fitted[own] / 1e3, "-", color=colour, linewidth=1)
            warm = own[bytes_[own] < CACHE_BYTES]
            panel.plot(length[warm], cold[warm] / 1e3, ":", color=colour, linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{tables.hardware}, Llama-3.1-8B's heads, bf16")
        panel.set_xlabel("KV length, tokens")
    panels[0].set_ylabel("decode attention of one layer, us")
    panels[0].legend(fontsize=7.5)
    save(figure, path)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=HERE.parents[2] / "shared" / "reference" / "aiconfigurator")
    every = [read_tables(device, parser.parse_args().path) for device in DEVICES]
    table = pd.DataFrame([line for tables in every for line in checks(tables)])
    table.to_csv(HERE / "checks.csv", index=False)
    draw(every, HERE / "laws.png")
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
