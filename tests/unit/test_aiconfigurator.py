"""AIConfigurator's tables: read from both layouts, refused in one line, and fitted; the real ones where they are."""

from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim.cli import main
from sim.errors import InputError
from sim.serving.aiconfigurator import Tables, read_tables
from sim.serving.fit import attention_ns
from sim.serving.gemm_grid import GemmGrid
from sim.serving.models import MODELS, get_model
from sim.serving.profile import FIGURES, SHIPPED, load_profile, shipped_names
from sim.serving.published import build_profile, decode_fit, matrices, near_heads, prefill_fit, speaks_of

SHARED = Path(__file__).parents[3] / "shared" / "reference" / "aiconfigurator"
needs_tables = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real tables to fit to")

LAUNCH, BYTE, WAVE = 19_000.0, 3.2e-4, 3_600.0
"""The law that the made-up tables follow: ns of a launch, a byte, and a wave of 132 KV heads."""
GRID = (128, 512, 1024, 4096, 16384)
TOKENS = (1, 16, 64, 256, 1024, 8192)


def attention(kernel: str) -> pd.DataFrame:
    rows = []
    lengths = (63, 255, 1023, 4095, 16383) if kernel == "generation" else (16, 128, 512, 2048, 8192)
    shapes = [(32, 8, 128), (24, 4, 128), (32, 4, 128), (8, 8, 64), (12, 4, 64)]
    for (heads, kv_heads, size), batch, length in itertools.product(shapes, (1, 4, 16, 64, 256), lengths):
        token = 2 * kv_heads * size * 2
        if kernel == "generation":
            kv = batch * (length + 2) * token
            launch, rate = (0.7 * LAUNCH, 0.6 * BYTE) if kv < 50e6 else (LAUNCH, BYTE)  # from the cache, or not
            ns = float(attention_ns(kv * rate, batch, launch, WAVE * kv_heads / 132, 132 / kv_heads))
        else:
            new, pairs = batch * (length - 1), batch * length * (length - 1) / 2
            ns = 12_000 + heads * (0.4 * new + 7e-4 * pairs) + 2 * batch * length * token * BYTE
        isl, step = (1, length) if kernel == "generation" else (length, 0)
        rows.append((batch, isl, step, heads, kv_heads, size, 0, "bfloat16", ns / 1e6))
        rows.append((batch, isl, step, heads, kv_heads, size, 128, "bfloat16", 77.0))  # a window: not ours
        rows.append((batch, isl, step, heads, kv_heads, size, 0, "fp8", ns / 2e6))
    names = "batch_size isl step num_heads num_key_value_heads head_dim window_size kv_cache_dtype latency"
    return pd.DataFrame(rows, columns=names.split())


def gemm_ns(m: float, n: float, k: float) -> float:
    """Return a product of powers, which interpolation of logarithms gives back exactly."""
    return 5.0 * n * k * m**0.25 / 1e3


def gemm() -> pd.DataFrame:
    rows = [(m, n, k, "bfloat16", gemm_ns(m, n, k) / 1e6) for m in TOKENS for n in GRID for k in GRID]
    rows += [(m, n, k, "fp8", 99.0) for m, n, k, _, _ in rows]
    return pd.DataFrame(rows, columns=["m", "n", "k", "gemm_dtype", "latency"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables made by a known law, as a flat folder."""
    for kernel, table in (
        ("generation_attention", attention("generation")),
        ("context_attention", attention("context")),
        ("gemm", gemm()),
    ):
        table.to_parquet(tmp_path / f"h100_sxm_vllm_0.24.0_{kernel}_perf.parquet")
    return tmp_path


@pytest.fixture
def tables(folder: Path) -> Tables:
    return read_tables("h100_sxm", folder)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_times_are_in_ns(tables: Tables) -> None:
    assert (tables.hardware, tables.version, str(tables.date)) == ("h100-sxm", "0.24.0", "2026-09-01")
    row = (tables.gemm["m"] == 16) & (tables.gemm["n"] == 512) & (tables.gemm["k"] == 1024)
    assert tables.gemm["latency"][row][0] == pytest.approx(gemm_ns(16, 512, 1024))
    assert set(tables.digests) == {"generation_attention", "context_attention", "gemm"}


def as_installed(folder: Path, root: Path, version: str = "0.24.0") -> None:
    """Lay the tables out as the package does."""
    for kernel, part in (("generation_attention", "attention"), ("context_attention", "attention"), ("gemm", "gemm")):
        place = root / "systems" / "data" / "h100_sxm" / part / "vllm" / version
        place.mkdir(parents=True, exist_ok=True)
        source = folder / f"h100_sxm_vllm_0.24.0_{kernel}_perf.parquet"
        (place / f"{kernel}_perf.parquet").write_bytes(source.read_bytes())


def test_the_newest_version_of_the_package_layout(folder: Path, tmp_path: Path, tables: Tables) -> None:
    root = tmp_path / "package"
    as_installed(folder, root, "0.9.1")
    as_installed(folder, root, "0.24.0")
    found = read_tables("H100-SXM", root / "systems" / "data")
    assert found.version == "0.24.0"
    assert found.digests == tables.digests


def test_the_installed_package_is_found_but_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    as_installed(folder, site / "aiconfigurator_core")
    (site / "aiconfigurator_core" / "__init__.py").write_text("raise RuntimeError('imported')")
    about = site / "aiconfigurator_core-0.12.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 0.12.0\n")
    monkeypatch.syspath_prepend(str(site))
    assert importlib.metadata.version("aiconfigurator-core") == "0.12.0"
    assert read_tables("h100_sxm").version == "0.24.0"


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(InputError, match="pip install aiconfigurator-core, or name a folder with --path"):
        read_tables("h100_sxm")


GENERATION = "h100_sxm_vllm_0.24.0_generation_attention_perf.parquet"


def without(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.drop(columns=column)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"expected h100_sxm/attention/vllm/VERSION/generation_attention_perf\.parquet or"),
        (lambda path: path.write_text("no"), "expected a Parquet file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "expected a Parquet file"),
        (lambda path: without(attention("generation"), "step").to_parquet(path), "column 'step' is missing"),
        (
            lambda path: attention("generation").rename(columns={"latency": "latenzy"}).to_parquet(path),
            "column 'latency' is missing; did you mean 'latenzy'",
        ),
        (lambda path: attention("generation").assign(latency=0.0).to_parquet(path), "expected positive times"),
        (lambda path: attention("generation").assign(latency=np.nan).to_parquet(path), "expected numbers in every row"),
        (lambda path: attention("generation").assign(step="x").to_parquet(path), "'step': expected numbers"),
        (lambda path: attention("generation").head(0).to_parquet(path), "in at least one row"),
        (
            lambda path: path.rename(path.with_name(path.name.replace("0.24.0", "0.25.0"))),
            r"expected tables of one version of vLLM, got 0\.24\.0, 0\.25\.0",
        ),
    ],
)
def test_bad_tables_are_one_line(folder: Path, spoil: Any, message: str) -> None:
    spoil(folder / GENERATION)
    with pytest.raises(InputError, match=message) as caught:
        read_tables("h100_sxm", folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_names(folder: Path) -> None:
    with pytest.raises(InputError, match="expected one of h100_sxm, h200_sxm; did you mean 'h100_sxm'"):
        read_tables("h100_smx", folder)
    with pytest.raises(InputError, match="expected a folder"):
        read_tables("h100_sxm", folder / "none")
    with pytest.raises(InputError, match="found neither"):
        read_tables("h200_sxm", folder)


def test_tables_of_a_version_whose_date_nobody_knows(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.rename(path.with_name(path.name.replace("0.24.0", "0.30.0")))
    with pytest.raises(InputError, match=r"vLLM 0\.30\.0: expected a version known here: 0\.24\.0"):
        build_profile(read_tables("h100_sxm", folder), get_model("llama-3.1-8b"))


# ---- fits to the made-up tables --------------------------------------------------------------------------------------


def test_decode_gives_the_law_back(tables: Tables) -> None:
    """Cold rows follow the law; those of the cache do not disturb it."""
    fitted, near = decode_fit(tables.decode, get_model("llama-3.1-8b"))
    assert near.exact
    assert fitted.values["launch_ns"] == pytest.approx(LAUNCH, rel=1e-3)
    assert fitted.values["ns_per_byte"] == pytest.approx(BYTE, rel=1e-3)
    assert fitted.values["cached_launch_ns"] == pytest.approx(0.7 * LAUNCH, rel=1e-3)


def test_prefill_gives_the_law_back(tables: Tables) -> None:
    fitted, _ = prefill_fit(tables.prefill, get_model("llama-3.1-8b"), BYTE)
    assert fitted.values == pytest.approx({"launch_ns": 12_000, "ns_per_token": 0.4, "ns_per_pair": 7e-4})


def test_a_profile_has_all_layers(tables: Tables) -> None:
    model = get_model("llama-3.1-8b")
    profile, _ = build_profile(tables, model)
    assert profile.attention_launch_ns.value == pytest.approx(32 * LAUNCH, rel=1e-3)
    assert profile.attention_ns_per_byte.value == pytest.approx(BYTE, rel=1e-3)
    assert profile.attention_free_sequences.value == 132 / 8
    assert profile.prefill_ns_per_token.value == pytest.approx(32 * 32 * 0.4, rel=1e-2)
    shapes = matrices(model)
    n_times_k = sum(n * k for name, (n, k) in shapes.items() if name != "head")
    assert n_times_k * 32 == model.layer_matrix_parameters
    assert dict(profile.gemm_ns.points)[16] == pytest.approx(32 * gemm_ns(16, 1, n_times_k), rel=1e-5)
    assert dict(profile.head_ns.points)[1] == pytest.approx(gemm_ns(1, 128_256, 4096), rel=1e-5)


def test_sequences_of_heads_that_are_not_in_the_table(tables: Tables) -> None:
    """Eight heads of 64 stand for 32: a sequence brings four times the work, and four times fewer are free."""
    model = get_model("smollm2-1.7b")
    profile, evidence = build_profile(tables, model)
    eight, near = decode_fit(tables.decode, model)
    assert (near.kv_heads, near.exact) == (8, False)
    assert profile.attention_sequence_ns.value == pytest.approx(24 * 4 * eight.values["sequence_ns"], rel=1e-5)
    assert profile.attention_free_sequences.value == pytest.approx(132 / 32)
    assert "for 32 query and 32 KV heads: 8 query and 8 KV heads of 64" in profile.attention_ns_per_byte.note
    assert evidence[0].extrapolated == 1


@pytest.mark.parametrize(
    ("shape", "heads", "kv_heads"),
    [
        ((32, 8, 128), {32}, 8),
        ((28, 4, 128), {24, 32}, 4),  # between two
        ((64, 8, 128), {32}, 8),  # beyond the last
        ((9, 3, 64), {12}, 4),  # no 3 KV heads: the nearest, with as many query heads each
        ((32, 32, 64), {8}, 8),
    ],
)
def test_nearest_heads(tables: Tables, shape: tuple[int, int, int], heads: set[int], kv_heads: int) -> None:
    near = near_heads(tables.decode, *shape, "bf16")
    assert set(tables.decode["num_heads"][near.rows]) == heads
    assert set(tables.decode["num_key_value_heads"][near.rows]) == {kv_heads}
    assert set(tables.decode["window_size"][near.rows]) == {0}
    assert set(tables.decode["kv_cache_dtype"][near.rows]) == {"bfloat16"}


def test_heads_that_no_row_speaks_of(tables: Tables) -> None:
    with pytest.raises(InputError, match="head size 96 with a bf16 cache is not in the table"):
        near_heads(tables.decode, 32, 8, 96, "bf16")
    with pytest.raises(InputError, match="KV type 'int4'"):
        near_heads(tables.decode, 32, 8, 128, "int4")


def test_the_grid_gives_powers_back_inside_and_beyond(tables: Tables) -> None:
    grid = GemmGrid(tables.gemm)
    for n, k in ((512, 512), (700, 4096), (3000, 900), (128_256, 4096), (200_000, 40_000), (64, 64)):
        assert grid.times(n, k) == pytest.approx([gemm_ns(m, n, k) for m in TOKENS])
        assert grid.inside(n, k) == (n <= 16384 and k <= 16384 and n >= 128)
    predicted, measured = grid.held_out_shapes()
    assert predicted == pytest.approx(measured)
    assert len(measured) == len(TOKENS) * sum(n * k >= 2**20 for n in GRID[1:-1] for k in GRID[1:-1])


def test_a_hole_in_the_grid_is_stepped_over(folder: Path) -> None:
    table = gemm()
    table[~((table.n == 16384) & (table.k == 16384))].to_parquet(folder / "h100_sxm_vllm_0.24.0_gemm_perf.parquet")
    grid = GemmGrid(read_tables("h100_sxm", folder).gemm)
    assert np.isfinite(grid.times(10_000, 10_000)).all()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_from_aiconfigurator(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.json"
    words = ["profile", "from-aiconfigurator", "--device", "h100_sxm", "--path", str(folder), "--out", str(out)]
    assert main([*words, "--model", "qwen2.5-7b"]) == 0
    text = capsys.readouterr().out
    assert "24 and 32 query and 4 KV heads of 128" in text
    assert "beyond the grid: head" in text
    assert load_profile(out).model == "qwen2.5-7b"
    assert main(["profile", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in FIGURES)
    assert "assumed" in shown
    assert main([*words[:-1], str(tmp_path / "no" / "such" / "file"), "--model", "qwen2.5-7b"]) == 2


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "list", "--json"]) == 0
    assert capsys.readouterr().out.count('"hardware"') == len(shipped_names())
    assert main(["profile", "show", "h200", "--model", "qwen3-8b", "--json"]) == 0
    assert capsys.readouterr().out == (SHIPPED / "h200-sxm" / "qwen3-8b.json").read_text()


# ---- the real tables -------------------------------------------------------------------------------------------------

MODELS_OF_OURS = [model for model in MODELS.values() if model.published_parameters is not None and speaks_of(model)]


@pytest.mark.parametrize("name", ["minicpm3-4b", "deepseek-v2-lite", "gpt-oss-20b", "gemma-3-12b"])
def test_models_that_the_tables_are_not_read_for(tables: Tables, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: the tables are read for dense models with full attention"):
        build_profile(tables, get_model(name))


@pytest.fixture(scope="module")
def real() -> dict[str, Tables]:
    return {device: read_tables(device, SHARED) for device in ("h100_sxm", "h200_sxm")}


@needs_tables
@pytest.mark.parametrize("device", ["h100_sxm", "h200_sxm"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("model", MODELS_OF_OURS, ids=lambda model: model.name)
def test_errors_on_what_was_held_out(real: dict[str, Tables], device: str, kv_dtype: str, model: Any) -> None:
    """Decode: mean at most 8 %, median 6 %; matrices: mean at most 6 %, by shape and by number of tokens."""
    _, evidence = build_profile(real[device], get_model(model.name, kv_dtype))
    by_kernel = {line.kernel: line for line in evidence}
    decode, prefill = by_kernel["decode attention"], by_kernel["prefill attention"]
    assert decode.error.mean <= 0.08, decode
    assert decode.error.median <= 0.06, decode
    assert prefill.error.mean <= 0.10, prefill
    for kernel in ("matrices, shapes held out", "matrices, tokens held out"):
        assert by_kernel[kernel].error.mean <= 0.06, by_kernel[kernel]
        assert by_kernel[kernel].n > 20_000


@needs_tables
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("device", ["h100_sxm", "h200_sxm"])
def test_those_that_come_along_are_what_the_command_makes(
    device: str, kv_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``vtoken profile from-aiconfigurator --device h100_sxm --model all --out FOLDER``, up to the last digit."""
    words = ["profile", "from-aiconfigurator", "--device", device, "--path", str(SHARED), "--model", "all"]
    assert main([*words, "--kv-dtype", kv_dtype, "--out", str(tmp_path)]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    folder = SHIPPED / device.replace("_", "-") / ("" if kv_dtype == "bf16" else kv_dtype)
    along_files = sorted(folder.glob("*.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in along_files]
    for path in along_files:
        made, along = load_profile(tmp_path / path.name), load_profile(path)
        assert made.provenances == along.provenances
        for name in FIGURES:
            one, other = getattr(made, name), getattr(along, name)
            if hasattr(one, "value"):
                assert one.value == pytest.approx(other.value, rel=2e-5), (path.name, name)
            else:
                assert np.array(one.points) == pytest.approx(np.array(other.points), rel=2e-5), (path.name, name)
