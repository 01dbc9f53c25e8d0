"""The commands of the torch harness, as plain functions.

Each parameter says in its annotation what it is for. From that ``gpu_validate.cli`` makes commands of ``vtoken``, and
``python -m gpu_validate`` the same commands for machines that have neither typer nor the simulator's other needs. Torch
is imported when a command runs, and not before.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sim.errors import InputError

if TYPE_CHECKING:
    from gpu_validate.player import ReplayReport

__all__ = ["COMMANDS", "Flag", "calibrate", "replay", "validate"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Flag:
    """What a parameter is called on the command line, and what for.

    Parameters
    ----------
    help
        What it does.
    metavar
        What its value is called.
    names
        The flag, if not the parameter's name with dashes; for a switch, ``--on/--off``.
    """

    help: str
    metavar: str = ""
    names: str = ""


ATTENTION = "Attention backend: flashinfer, paged, sdpa, or auto for what suits the device."
MOVER = "What copies tokens: triton, torch, or auto."


def replay(
    events: Annotated[Path, Flag("KV event log of `vtoken run --events`: .parquet, or .npz.", "FILE")],
    model: Annotated[str | None, Flag("Model preset; the one in the log unless given.", "NAME")] = None,
    device: Annotated[str, Flag("cuda, cuda:1, cpu, or auto: a GPU if there is one.", "DEVICE")] = "auto",
    dtype: Annotated[str | None, Flag("Pool: bf16, fp16, fp32, fp8; the log's unless given.", "NAME")] = None,
    attention: Annotated[str, Flag(ATTENTION, "NAME")] = "auto",
    mover: Annotated[str, Flag(MOVER, "NAME")] = "auto",
    queue: Annotated[str, Flag("Where copies run: stream, thread, deferred, sync, or auto.", "NAME")] = "auto",
    steps: Annotated[
        str | None, Flag("Play steps A to B - 1 only; the pool is filled as it was before A.", "A:B")
    ] = None,
    verify: Annotated[bool, Flag("Judge bytes of tokens and attention's output after every step.")] = False,
    sample: Annotated[float, Flag("Share of tokens and rows that --verify judges.", "SHARE")] = 1.0,
    visible: Annotated[
        str, Flag("What queries see: listed (every written slot, as stock kernels) or live.", "NAME")
    ] = "listed",
    graph: Annotated[bool, Flag("Play decodes as CUDA graphs, or kernel by kernel.", names="--graph/--eager")] = False,
    matrices: Annotated[bool, Flag("Compute the model's matrix products too.")] = False,
    layers: Annotated[int | None, Flag("Cut the model to so many layers, to save memory.", "N")] = None,
    seed: Annotated[int, Flag("Seed of random contents and draws.", "N")] = 0,
    out: Annotated[Path | None, Flag("Write the result as JSON.", "FILE")] = None,
    quiet: Annotated[bool, Flag("No progress on standard error.")] = False,
) -> int:
    """Replay a KV event log on a real paged pool, and compare it with the simulator step by step."""
    need_torch("replay")
    import dataclasses

    from gpu_validate.device import find_device
    from gpu_validate.options import Options
    from gpu_validate.replay import replay as play
    from gpu_validate.verify import MismatchError
    from sim.kv.event_file import EventFile
    from sim.progress import Progress
    from sim.serving.models import get_model

    log = EventFile(events)
    name = model or log.model
    if not name:
        raise InputError(f"{events}: the log does not say whose KV cache it was: give --model")
    whole = get_model(name)
    if layers is not None and not 1 <= layers <= whole.layers:
        raise InputError(f"--layers: expected 1 to {whole.layers} for {whole.name}, got {layers}")
    options = Options(
        device=_device(device),
        dtype=dtype or log.kv_dtype or "bf16",
        attention=attention,
        mover=mover,
        queue=queue,
        steps=_range(steps),
        verify=verify,
        sample=sample,
        visible=visible,
        graph=graph,
        matrices=matrices,
        seed=seed,
    )
    progress = Progress(None if quiet else sys.stderr, "events")
    doing = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal doing
        if what != doing:
            doing = what
            progress.unit = {"checking": "events", "playing": "steps"}[what]
            progress.start(total)
        progress.update(done, what)

    try:
        report = play(
            log,
            dataclasses.replace(whole, layers=layers or whole.layers),
            options,
            layers_of_model=whole.layers,
            progress=tell,
        )
    except MismatchError as error:
        progress.clear()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted while {doing or 'reading'}: {progress.done:,} {progress.unit} done", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        progress.clear()
    place = find_device(options.device)
    if out is not None:
        made = {"command": shlex.join(["vtoken", *sys.argv[1:]]), "date": datetime.date.today().isoformat()}
        result = made | report.to_dict() | {"device_name": place.name, "versions": place.versions}
        try:
            out.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"{out}: cannot write it: {error.strerror}") from None
    _print(report, place.name)
    return 0


def calibrate(
    out: Annotated[Path, Flag("Cost profile to write (JSON).", "FILE")],
    model: Annotated[str, Flag("Model preset.", "NAME")] = "llama-3.1-8b",
    device: Annotated[str, Flag("cuda, cuda:1, cpu, or auto: a GPU if there is one.", "DEVICE")] = "auto",
    dtype: Annotated[str, Flag("Pool and weights: bf16, fp16, fp32, fp8.", "NAME")] = "bf16",
    block_size: Annotated[int, Flag("Token slots a block.", "N")] = 16,
    attention: Annotated[str, Flag(ATTENTION, "NAME")] = "auto",
    mover: Annotated[str, Flag(MOVER, "NAME")] = "auto",
    memory: Annotated[float, Flag("Share of the free memory for pool and weights.", "SHARE")] = 0.6,
    quick: Annotated[bool, Flag("A third of the shapes and times.")] = False,
    rows: Annotated[Path | None, Flag("Write every measurement, too.", "CSV")] = None,
    seed: Annotated[int, Flag("Seed of contents and orders.", "N")] = 0,
) -> int:
    """Measure attention, copies and matrix products on this device, and fit a cost profile."""
    need_torch("calibrate")
    from gpu_validate.loop import run_calibrate

    return run_calibrate(
        out=out,
        model=model,
        device=_device(device),
        dtype=dtype,
        block_size=block_size,
        attention=attention,
        mover=mover,
        memory=memory,
        quick=quick,
        rows=rows,
        seed=seed,
    )


def validate(
    events: Annotated[Path, Flag("KV event log of `vtoken run --events`: .parquet, or .npz.", "FILE")],
    profile: Annotated[Path, Flag("Cost profile of `vtoken calibrate`.", "FILE")],
    device: Annotated[str, Flag("cuda, cuda:1, cpu, or auto: a GPU if there is one.", "DEVICE")] = "auto",
    tolerance: Annotated[float, Flag("Largest difference of the total time; beyond it exit 1.", "SHARE")] = 0.1,
    repeat: Annotated[int, Flag("Times that the log is played.", "N")] = 5,
    steps: Annotated[str | None, Flag("Play steps A to B - 1 only.", "A:B")] = None,
    attention: Annotated[str, Flag(ATTENTION, "NAME")] = "auto",
    mover: Annotated[str, Flag(MOVER, "NAME")] = "auto",
    lookahead: Annotated[int, Flag("Steps that are read off the log before they are played.", "N")] = 64,
    out: Annotated[Path | None, Flag("Write tables, picture and report.", "DIR")] = None,
) -> int:
    """Compare the simulator's step times with those measured on this device."""
    need_torch("validate")
    from gpu_validate.loop import run_validate

    return run_validate(
        events=events,
        profile=profile,
        device=_device(device),
        tolerance=tolerance,
        repeat=repeat,
        steps=steps,
        attention=attention,
        mover=mover,
        lookahead=lookahead,
        out=out,
    )


COMMANDS: dict[str, Callable[..., int]] = {"replay": replay, "calibrate": calibrate, "validate": validate}


def need_torch(command: str) -> None:
    """Refuse to go on without torch.

    Raises
    ------
    InputError
        If it is not installed.
    """
    if sys.modules.get("torch", ...) is None or importlib.util.find_spec("torch") is None:
        raise InputError(f"{command} needs torch, which is not installed here: pip install 'vtoken-sim[gpu]'")


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None:
        raise InputError(f"--steps: expected A:B, two step numbers, got {text!r}")
    return int(match[1]), int(match[2])


def _print(report: ReplayReport, device_name: str) -> None:
    """Print what was played and seen as a table."""
    layers = f"{report.layers} layers"
    if report.layers != report.layers_of_model:
        layers = f"{report.layers} of {report.layers_of_model} layers"
    rows = [
        ("device", f"{device_name} ({report.device})"),
        ("model", f"{report.model}, {layers}, {report.dtype}; matrix products {'on' if report.matrices else 'off'}"),
        (
            "backends",
            f"attention {report.attention}, mover {report.mover}, copies {report.queue}, graph {report.graph}",
        ),
        ("pool", f"{report.num_blocks:,} blocks of {report.block_size}, {report.pool_bytes / 2**30:,.2f} GiB"),
        ("steps", f"{report.steps:,} ({report.first_step} to {report.last_step}), {report.graph_replays:,} by graph"),
        ("written", f"{report.tokens_written:,} tokens"),
        ("moved", f"{report.tokens_copied:,} tokens copied, {report.tokens_moved_in_place:,} in place"),
        ("layout", f"equal to the simulator's, block for block, after {report.layouts_checked:,} steps"),
    ]
    if report.tokens_verified is not None:
        rows += [
            ("tokens", f"{report.tokens_verified:,} times a live token's bytes were what its writer wrote"),
            (
                "attention",
                f"{report.outputs_verified:,} rows, largest error {report.max_error:.1e} of the largest value "
                f"({report.visible} slots visible)",
            ),
        ]
        if report.outputs_undefined:
            rows.append(
                ("undefined", f"{report.outputs_undefined:,} rows not judged: a copy wrote into slots they read")
            )
        if report.sample is not None and report.sample < 1:
            rows.append(("judged", f"{report.sample:.0%} of tokens and rows, drawn anew in each step"))
        if report.graph_checks:
            rows.append(("graph", f"same bytes as kernel by kernel, in {report.graph_checks:,} steps"))
    rows.append(("time", f"{report.wall_s:,.1f} s"))
    for name, text in rows:
        print(f"{name:<10}{text}")
