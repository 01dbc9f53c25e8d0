"""``vtoken profile``: make, show and list cost profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.screen import wide_console
from sim.errors import InputError

if TYPE_CHECKING:
    from sim.serving.profile import CostProfile
    from sim.serving.published import Evidence

__all__ = ["app"]

app = typer.Typer(help="Make and show cost profiles: what steps and copies cost on a device.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KVFormat = Annotated[str, typer.Option(help="Format of the KV cache: bf16 or fp8.")]


@app.command("from-aiconfigurator")
def from_aiconfigurator(
    device: Annotated[str, typer.Option(help="h100_sxm or h200_sxm.")],
    model: Annotated[str, typer.Option(help="Model preset, or 'all' for every one that the tables can speak of.")],
    out: Annotated[Path | None, typer.Option(help="File to write; a folder of MODEL.json with --model all.")] = None,
    path: Annotated[
        Path | None,
        typer.Option(help="Folder of the tables; that of the installed package aiconfigurator when not given."),
    ] = None,
    kv_dtype: KVFormat = "bf16",
    as_json: AsJson = False,
) -> None:
    """Fit a profile to NVIDIA AIConfigurator's measured kernels, and print its errors on what it did not see.

    [bold]Example:[/bold] vtoken profile from-aiconfigurator --device h100_sxm --model llama-3.1-8b --out h100.json
    """
    from sim.serving.aiconfigurator import read_tables
    from sim.serving.models import get_model
    from sim.serving.profile import save_profile
    from sim.serving.published import build_profile

    models = [get_model(name, kv_dtype) for name in (_all_models() if model == "all" else [model])]
    tables = read_tables(device, path)
    made = [(one, *build_profile(tables, one)) for one in models]
    if out is not None:
        if model == "all":
            _make_folder(out)
        for one, profile, _ in made:
            save_profile(profile, out / f"{one.name}.json" if model == "all" else out)
    rows = [{"model": one.name, **_row(line)} for one, _, evidence in made for line in evidence]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _table(f"{tables.device}, vLLM {tables.version}: absolute errors on measurements held out", rows)
    if out is not None:
        print(f"written to {out}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="FILE|DEVICE", help="A profile's file, or a device such as h100.")],
    model: Annotated[str, typer.Option(help="Model preset, for a device.")] = "llama-3.1-8b",
    kv_dtype: KVFormat = "bf16",
    as_json: AsJson = False,
) -> None:
    """Print a profile's figures: value, how it is known, from how many measurements, and how well."""
    from sim.serving.models import get_model
    from sim.serving.profile import dump_profile, load_profile
    from sim.serving.profile_cost import find_profile

    profile = load_profile(find_profile(name, get_model(model).name, kv_dtype))
    if as_json:
        print(dump_profile(profile), end="")
        return
    title = f"{profile.model}, KV {profile.kv_dtype}, on {profile.hardware or 'a device without a preset'}"
    _table(title, [_figure(profile, figure) for figure in _figures()])
    console = wide_console()
    for key, made in profile.provenances.items():
        versions = "".join(f", {library} {version}" for library, version in made.versions.items())
        text = f"{key} ({made.kind}): {made.source}; {made.device}, {made.date}{versions}"
        console.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the profiles that come along; runs use them unless told otherwise (step cost ``auto``)."""
    from sim.serving.profile import load_profile, shipped, shipped_names

    rows: list[dict[str, Any]] = []
    for hardware, model in shipped_names():
        files = [path for kv_dtype in ("bf16", "fp8") if (path := shipped(hardware, model, kv_dtype)) is not None]
        profile, *_ = profiles = [load_profile(path) for path in files]
        error = profile.attention_ns_per_byte.error
        rows.append(
            {
                "hardware": hardware,
                "model": model,
                "KV cache": ", ".join(each.kv_dtype for each in profiles),
                "measured figures": sum(profile.kind(figure) == "measured" for figure in _figures()),
                "assumed figures": sum(profile.kind(figure) == "assumed" for figure in _figures()),
                "decode attention, mean error": _percent(error.mean) if error is not None else "-",
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _table("Profiles that come along", rows)


def _figures() -> tuple[str, ...]:
    from sim.serving.profile import FIGURES

    return FIGURES


def _all_models() -> list[str]:
    """Return the names of the published models that the tables can speak of."""
    from sim.serving.models import MODELS
    from sim.serving.published import speaks_of

    return [name for name, model in MODELS.items() if speaks_of(model) and model.published_parameters is not None]


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot make the folder: {error.strerror or error}") from None


def _row(line: Evidence) -> dict[str, Any]:
    error = line.error
    return {
        "kernel": line.kernel,
        "n": line.n,
        "mean": _percent(error.mean),
        "median": _percent(error.median),
        "p90": _percent(error.p90),
        "max": _percent(error.max),
        "extrapolated": f"{line.extrapolated:.0%}",
        "rows": line.where,
    }


def _figure(profile: CostProfile, name: str) -> dict[str, Any]:
    from sim.serving.profile import Figure

    figure = getattr(profile, name)
    single = isinstance(figure, Figure)
    return {
        "figure": name,
        "value": f"{figure.value:.6g}" if single else _ends(figure.points),
        "95 % interval": " to ".join(f"{end:.4g}" for end in figure.interval) if single and figure.interval else "-",
        "from": figure.provenance,
        "kind": profile.kind(name),
        "n": figure.n if figure.n is not None else "-",
        "mean error": _percent(figure.error.mean) if figure.error is not None else "-",
        "note": figure.note,
    }


def _ends(points: tuple[tuple[int, float], ...]) -> str:
    (first, first_ns), (last, last_ns) = points[0], points[-1]
    return f"{first_ns / 1e6:.3g} ms at {first:,}, {last_ns / 1e6:.4g} ms at {last:,}; {len(points)} points"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    right = ("n", "mean", "median", "p90", "max", "extrapolated", "mean error")
    for key in rows[0]:
        table.add_column(key, justify="right" if key in right else "left")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    wide_console().print(table)
