"""Where requests come from: a trace in memory, a file read in pieces, a generator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError, did_you_mean
from sim.registry import parse_spec
from sim.workload.generate import GeneratedSource, Generator, generators
from sim.workload.trace import Trace

__all__ = ["Lengths", "Mapped", "Source", "limit", "open_source", "read_lengths", "read_trace"]


class Source(Protocol):
    """A workload that can be read in pieces, any number of times, always the same."""

    @property
    def name(self) -> str:
        """What to call it in results."""
        ...

    @property
    def hash_tokens(self) -> int:
        """Prompt tokens that one prefix hash covers."""
        ...

    @property
    def total(self) -> int | None:
        """Number of requests, or None if it is not known beforehand."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, changed or estimated so far; complete once the source has been read."""
        ...

    def chunks(self) -> Iterator[Trace]:
        """Yield the requests in order of arrival."""
        ...


@dataclass(frozen=True, eq=False)
class Lengths:
    """What a file without arrival times holds: lengths, in the order of the file (int64[n] each)."""

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    session: list[str | None] | None = None
    name: str = "lengths"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def arriving(self, process: Generator, seed: int) -> Trace:
        """Return the trace in which these requests arrive by ``process``."""
        times = process.times(seed, len(self))
        return Trace(
            times, self.prompt_tokens, self.output_tokens, session=self.session, name=self.name, notes=self.notes
        )


class Mapped:
    """Another source with a function applied to each chunk.

    Parameters
    ----------
    source
        What to read.
    change
        Applied to each chunk; keeps the number of requests and their order.
    """

    def __init__(self, source: Source, change: Callable[[Trace], Trace]) -> None:
        self._source = source
        self._change = change
        self.name = source.name
        self.hash_tokens = source.hash_tokens
        self.total = source.total

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the source beneath."""
        return self._source.notes

    def chunks(self) -> Iterator[Trace]:
        """Yield the changed chunks."""
        return map(self._change, self._source.chunks())


class _Limited:
    """The first requests of another source."""

    def __init__(self, source: Source, n: int) -> None:
        self._source = source
        self._n = n
        self.name = source.name
        self.hash_tokens = source.hash_tokens
        self.total = None if source.total is None else min(n, source.total)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._source.notes

    def chunks(self) -> Iterator[Trace]:
        left = self._n
        for chunk in self._source.chunks():
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                return


def limit(source: Source, n: int) -> Source:
    """Return the first ``n`` requests of a source, without reading further than that."""
    if n < 1:
        raise InputError(f"head: expected at least 1 request, got {n}")
    return _Limited(source, n)


def read_trace(
    spec: str | os.PathLike[str], *, format: str | None = None, seed: int = 0, arrivals: str | None = None
) -> Trace:
    """Read a whole workload into memory; the arguments are those of :func:`open_source`."""
    source = open_source(spec, format=format, seed=seed, arrivals=arrivals)
    if isinstance(source, Trace):
        return source
    trace = Trace.concat(source.chunks(), name=source.name)
    return replace(trace, hash_tokens=source.hash_tokens, notes=tuple(source.notes))


def open_source(
    spec: str | os.PathLike[str], *, format: str | None = None, seed: int = 0, arrivals: str | None = None
) -> Source:
    """Open a workload.

    Parameters
    ----------
    spec
        A file in any known format (``.gz`` or not; Weka sessions also as a folder), ``"default"`` for the trace that is
        shipped with the package, or a generator such as ``"poisson:rate=16,n=10000,prompt=1000,output=200"``.
    format
        Name of the file's format; recognised by content when None.
    seed
        Seed of whatever has to be drawn.
    arrivals
        Arrival process such as ``"poisson:rate=4"`` for files that hold lengths only (it then is required), or for
        the starts of recorded sessions.

    Raises
    ------
    InputError
        If there is no such file or generator, the content is not what the format says, or ``arrivals`` is missing or
        has no use. Sources that stream raise it while they are read.
    """
    text = os.fspath(spec)
    name = text.partition(":")[0].strip()
    if not isinstance(spec, os.PathLike):
        if text == "default":
            from sim.workload.default import default_path

            _refuse(arrivals, "the default trace has arrival times of its own")
            return open_source(default_path(), format="canonical", seed=seed)
        if name in generators:
            if format is not None:
                raise InputError(f"{text!r} is a generator: a file format ({format!r}) has no meaning for it")
            _refuse(arrivals, f"{text!r} is a generator with arrival times of its own")
            return GeneratedSource(generators.build(text), seed, text)
    path = Path(text)
    if not os.path.exists(path):  # unlike Path.exists, also for names that are too long
        known = sorted({*generators, "default"})
        hint = did_you_mean(name, known) if os.sep not in name and "." not in name else ""
        raise InputError(f"{text}: no such file; generators are {', '.join(generators)}{hint}")
    from sim.workload.readers import Reading, reader_for

    reader = reader_for(path, format)
    process = None if arrivals is None else _arrival_process(arrivals)
    found = reader.read(path, Reading(seed=seed, arrivals=process))
    if isinstance(found, Lengths):
        if process is None:
            raise InputError(
                f"{path}: holds lengths only ({reader.name}): give an arrival process, as in --arrivals poisson:rate=4"
            )
        return found.arriving(process, seed)
    if not reader.starts_sessions:
        _refuse(arrivals, f"{path}: has arrival times of its own ({reader.name})")
    return found


def read_lengths(path: str | os.PathLike[str], *, format: str | None = None, seed: int = 0) -> Lengths | Trace:
    """Read the lengths in a file of any format, with or without arrival times."""
    from sim.workload.readers import Reading, reader_for

    file = Path(path)
    found = reader_for(file, format).read(file, Reading(seed=seed))
    if isinstance(found, Lengths | Trace):
        return found
    return replace(Trace.concat(found.chunks(), name=found.name), notes=tuple(found.notes))


def _refuse(arrivals: str | None, why: str) -> None:
    if arrivals is not None:
        raise InputError(f"arrivals {arrivals!r} cannot be used: {why}")


def _arrival_process(spec: str) -> Generator:
    """Build the generator that gives arrival times; its lengths must not be set, because the file has them."""
    _, given = parse_spec(spec)
    extra = sorted(set(given) - {"start_s"} & set(Generator.__dataclass_fields__))
    if extra:
        raise InputError(f"arrivals {spec!r}: {extra[0]} comes from the file, give only how requests arrive")
    return generators.build(spec)
