"""The shapes to measure: chosen so that each term of a cost has shapes in which it alone decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

__all__ = ["Beside", "Decode", "Prefill", "Repack", "Step", "Sweep", "designed"]


class Decode(NamedTuple):
    """Decode attention: requests of ``live`` live tokens on average; of the slots they have written a share is dead."""

    batch: int
    live: int
    dead: float = 0.0
    scattered: bool = True
    ragged: bool = False


class Prefill(NamedTuple):
    """Prefill attention: ``tokens`` new tokens of each request, behind ``context`` computed ones."""

    batch: int
    tokens: int
    context: int = 0


class Repack(NamedTuple):
    """A token copy, all layers in one launch."""

    tokens: int
    scattered: bool = True


class Beside(NamedTuple):
    """Decode steps with a token copy beside them."""

    batch: int
    live: int
    tokens: int


class Step(NamedTuple):
    """A whole step: a ragged batch that decodes, and a request that prefills ``prefill`` tokens behind ``context``."""

    batch: int
    live: int
    prefill: int = 0
    context: int = 0


@dataclass(frozen=True)
class Sweep:
    """All shapes.

    Attributes
    ----------
    tokens
        Tokens through the layers' matrices.
    sequences
        Sequences through the output projection.
    copy_bytes
        Of the plain copies, whose rate is what a repack is held against.
    """

    decode: tuple[Decode, ...]
    prefill: tuple[Prefill, ...]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    repack: tuple[Repack, ...]
    beside: tuple[Beside, ...]
    steps: tuple[Step, ...]
    copy_bytes: tuple[int, ...]

    @property
    def most_batch(self) -> int:
        """Largest batch."""
        return 1 + max(*(d.batch for d in self.decode), *(s.batch for s in self.steps), *(b.batch for b in self.beside))

    @property
    def most_tokens(self) -> int:
        """Most tokens of one step."""
        return max(
            *self.tokens, *(p.batch * p.tokens for p in self.prefill), *(s.batch + s.prefill for s in self.steps)
        )

    @property
    def longest(self) -> int:
        """Most written slots of one request."""
        decode = (math.ceil((1.5 if shape.ragged else 1) * shape.live / (1 - shape.dead)) for shape in self.decode)
        prefill = (shape.tokens + shape.context for shape in self.prefill)
        steps = (max(math.ceil(1.5 * shape.live), shape.prefill + shape.context) for shape in self.steps)
        return max(*decode, *prefill, *steps, *(shape.live for shape in self.beside)) + 1

    @property
    def slots(self) -> int:
        """Token slots that the largest shape needs, before they are rounded up to blocks."""
        decode = (round(d.batch * d.live / (1 - d.dead)) for d in self.decode)
        prefill = (shape.batch * (shape.tokens + shape.context) for shape in self.prefill)
        steps = (shape.batch * shape.live + shape.prefill + shape.context for shape in self.steps)
        beside = (shape.batch * shape.live + 4 * shape.tokens for shape in self.beside)
        return max(*decode, *prefill, *steps, *beside, *(4 * shape.tokens for shape in self.repack))


@dataclass(frozen=True)
class _Grid:
    """What the shapes for a kind of device are put together from."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]
    contexts: tuple[int, ...]
    repacks: tuple[int, ...]
    tokens: tuple[int, ...]
    copies: tuple[int, ...]
    base: Decode


_CPU = _Grid(
    batches=(1, 2, 4, 8, 16, 32),
    lengths=(16, 64, 128, 256, 512),
    chunks=(8, 32, 64, 128, 256),
    contexts=(0, 128, 384),
    repacks=(16, 64, 256, 1024, 2048),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 320),
    copies=(1 << 18, 1 << 20, 1 << 22),
    base=Decode(8, 128),
)
_CUDA = _Grid(
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    lengths=(128, 512, 1024, 2048, 4096, 8192, 16384),
    chunks=(32, 128, 512, 1024, 2048),
    contexts=(0, 1024, 4096),
    repacks=(64, 256, 1024, 4096, 16384, 65536),
    tokens=(1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096),
    copies=(1 << 26, 1 << 28, 1 << 30, 1 << 32),
    base=Decode(64, 1024),
)


def designed(kind: str, *, capacity: int, max_len: int, quick: bool = False) -> Sweep:
    """Return the shapes for a device.

    Parameters
    ----------
    kind
        ``cpu`` (a toy model) or ``cuda``.
    capacity
        Token slots that there is room for; what needs more is left out.
    max_len
        Longest request of the model.
    quick
        About a third of the shapes.
    """
    grid = _CPU if kind == "cpu" else _CUDA
    batches, lengths, chunks, contexts = grid.batches, grid.lengths, grid.chunks, grid.contexts
    repacks, tokens, copies, base = grid.repacks, grid.tokens, grid.copies, grid.base
    if quick:
        batches, lengths, chunks, contexts = batches[::2], lengths[::2], chunks[::2], contexts[:2]
        repacks, tokens, copies = repacks[::2], (*tokens[::3], tokens[-1]), copies[:2]

    def fits(batch: int, length: float) -> bool:
        return 1.5 * length < max_len and batch * length <= capacity

    # Every second one ragged, as batches are that have been running for a while.
    places = product(enumerate(batches), enumerate(lengths))
    decode = [Decode(b, n, ragged=b > 1 and (i + j) % 2 == 1) for (i, b), (j, n) in places if fits(b, n)]
    decode += [base]
    extra = [base._replace(dead=share) for share in (0.25, 0.5, 0.75)]
    extra += [base._replace(batch=b, scattered=False) for b in (1, base.batch, 2 * base.batch)]
    decode += [d for d in extra if fits(d.batch, d.live / (1 - d.dead))]
    prefill = [
        Prefill(b, n, c)
        for b, n, c in product((1, 2, 4), chunks, contexts)
        if fits(b, n + c) and b * n <= chunks[-1] * (2 if kind == "cpu" else 1) and (b == 1 or c == 0)
    ]
    live = lengths[len(lengths) // 2]
    # Graphs are captured for powers of two: between them lie batches that are padded.
    between = tuple(3 * b // 2 for b in batches[1:-1:2])
    steps = [Step(b, n) for b, n in product((*batches, *between), lengths[::2]) if fits(b, n + 1)]
    steps += [
        Step(b, live, n, c) for b, n, c in product(batches[1::2], chunks[::2], contexts[:2]) if fits(b + 1, n + c)
    ]
    beside = [Beside(base.batch, base.live * k, n) for k in (1, 2) for n in repacks[1::2]]
    return Sweep(
        decode=tuple(dict.fromkeys(decode)),
        prefill=tuple(prefill),
        tokens=tokens,
        sequences=tuple(batches),
        repack=tuple(Repack(n, s) for n, s in product(repacks, (True, False)) if 4 * n <= capacity),
        beside=tuple(b for b in beside if fits(b.batch, b.live) and b.batch * b.live + 4 * b.tokens <= capacity),
        steps=tuple(s for s in steps if s.batch * (s.live + 1) + s.prefill + s.context <= capacity),
        copy_bytes=copies,
    )
