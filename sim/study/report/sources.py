"""Which KV events a page draws block maps from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sim.errors import InputError
from sim.study.config import SimConfig

__all__ = ["EventSource", "event_sources"]

FILE = "events.parquet"
FOLDER = "events"
"""Of a sweep's directory: runs in it that kept their events are taken along."""


class EventSource(NamedTuple):
    """A log, and what to call it."""

    label: str
    path: Path


def event_sources(directory: Path, given: Sequence[str]) -> list[EventSource]:
    """Return the logs to draw: those that were named, or else those that lie in the directory.

    The latter are ``DIR/events.parquet`` of a run, and ``DIR/events/*/events.parquet``, runs that were put into a
    sweep's directory.

    Parameters
    ----------
    directory
        Of the run or the sweep.
    given
        Each ``FILE``, ``DIR`` of a run, or one of these behind ``LABEL=``. A log beside its run's ``config.json`` is
        called by policy, budget and reclaimer unless it has a label.

    Raises
    ------
    InputError
        If one is not there.
    """
    if given:
        sources = [_named(text) for text in given]
    else:
        paths = [directory / FILE, *sorted(directory.glob(f"{FOLDER}/*/{FILE}"))]
        sources = [EventSource(_label(path), path) for path in paths if path.is_file()]
    return _told_apart(sources)


def _named(text: str) -> EventSource:
    # Labels and paths may hold "=": the first one behind which something lies ends the label.
    ends = [0, *(place for place, letter in enumerate(text, 1) if letter == "=")]
    end = next((end for end in ends if Path(text[end:]).exists()), ends[-1])
    label, path = text[: max(0, end - 1)], Path(text[end:])
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise InputError(f"--events {text}: no file {path}; vtoken run ... --events --out DIR writes one")
    return EventSource(label or _label(path), path)


def _label(path: Path) -> str:
    """Return policy, budget and reclaimer of the run that a log lies in; the folder's name if it says nothing."""
    try:
        fields = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))["config"]
        return SimConfig.from_fields(fields).label
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return path.parent.name if path.name == FILE else path.stem


def _told_apart(sources: list[EventSource]) -> list[EventSource]:
    """Add a number to labels that occur more than once."""
    labels = [source.label for source in sources]
    return [
        source._replace(label=f"{label} ({labels[: place + 1].count(label)})") if labels.count(label) > 1 else source
        for place, (label, source) in enumerate(zip(labels, sources, strict=True))
    ]
