"""Prefix cache: which blocks hold contents that another request may want.

vLLM's rule: the identity of a full block is the chain of everything before it and its own tokens. Traces do not give
tokens but hash ids of spans of the prompt, so the contents of a block are the ids of the spans it touches and how many
of its tokens belong to the prompt; generated tokens are all taken to be the same. A prompt without ids shares with
nobody.

Eviction changes tables, not contents: a published block keeps the K and V of all its tokens, whoever has evicted them,
until it is taken for something else, and a hit gives the new reader all of them alive. But K and V computed after a
request has evicted anything depend on what it evicted, which the identity does not say. So what a request fills after
its first eviction is never published, and neither is the destination of a repack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.jit import njit
from sim.kv.state import YIELDS, H, Store

__all__ = ["PrefixCache", "chain"]


def chain(
    known: NDArray[np.int64],
    until: int,
    *,
    block_size: int,
    prompt_tokens: int,
    hashes: Sequence[int],
    hash_tokens: int,
    owner: int,
) -> NDArray[np.int64]:
    """Return ``known``, the identities of a request's first blocks, extended to ``until`` blocks.

    Parameters
    ----------
    hashes
        One id for each ``hash_tokens`` tokens of the prompt; tokens behind the last id are shared with nobody.
    owner
        Number of the request: the identity of what nobody else has.
    """
    new = np.zeros(until - len(known), np.int64)
    ids = np.array(hashes, np.int64)
    parent = int(known[-1]) if len(known) else 0
    _chain(parent, len(known), new, block_size, prompt_tokens, ids, hash_tokens, owner)
    return np.concatenate([known, new])


@njit
def _chain(
    parent: int,
    block: int,
    out: np.ndarray,
    block_size: int,
    prompt_tokens: int,
    hashes: np.ndarray,
    hash_tokens: int,
    owner: int,
) -> None:
    identity = np.int64(parent)
    for i in range(len(out)):
        first = (block + i) * block_size
        last = max(first, min(first + block_size, prompt_tokens))
        begin = min(first // hash_tokens, len(hashes))
        end = max(begin, min(-(-last // hash_tokens), len(hashes))) if last > first else begin
        # Both lengths first, so that ids and an owner cannot be taken for one another.
        identity = _mix(_mix(identity, np.int64(last - first)), np.int64(end - begin))
        for k in range(begin, end):
            identity = _mix(identity, hashes[k])
        if last > max(first, len(hashes) * hash_tokens):
            identity = _mix(identity, np.int64(owner))
        out[i] = identity


@njit
def _mix(identity: np.int64, value: np.int64) -> np.int64:
    """Return 64 bits that depend on every bit of both (two rounds of xor, shift and multiply)."""
    x = (np.uint64(identity) + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(31)) ^ np.uint64(value)) * np.uint64(0x94D049BB133111EB)
    return np.int64(x ^ (x >> np.uint64(29)))


class PrefixCache:
    """Published blocks by identity; of several with the same, the one published first is found first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.count_readers()
        blocks = len(store.s.blocks)
        # A block has one identity, so a hash table of as many lists as there are blocks never fills up.
        self._ends = np.full((2, 1 << blocks.bit_length()), -1, np.int64)
        self._links = np.full((2, blocks), -1, np.int64)
        self._identity = np.zeros(blocks, np.int64)
        self._found = np.zeros(blocks, np.int64)
        self.free_found = 0
        """How many of the blocks found last are free: to share one uses it up."""
        self._names = np.zeros((0, 0), np.int64)  # of the blocks of each row
        self._done = np.zeros(0, np.int64)  # how many of them are published

    def publish(self, blocks: Sequence[int] | NDArray[Any], identities: Sequence[int] | NDArray[np.int64]) -> None:
        """Make full blocks findable, all of whose tokens are alive in the one table that lists them."""
        s = self._store.s
        for block, name in zip(blocks, identities, strict=True):
            _publish(s.blocks, s.readers, s.block_size, self._ends, self._links, self._identity, block, name)

    def enter(self, row: int, identities: NDArray[np.int64], published: int) -> None:
        """Take a row in, by the identities that its blocks will have; the first ``published`` are published already."""
        rows, width = self._store.s.table.shape
        if len(self._done) < rows or self._names.shape[1] < max(width, len(identities)):
            names = np.zeros((rows, max(width, len(identities))), np.int64)
            names[: len(self._names), : self._names.shape[1]] = self._names
            self._names = names
            self._done = np.concatenate([self._done, np.zeros(rows - len(self._done), np.int64)])
        self._names[row, : len(identities)] = identities
        self._done[row] = published

    def publish_rows(self, rows: NDArray[np.int64], *, results: bool) -> None:
        """Publish the blocks of these rows that are full of known tokens now; of a row that evicted anything, none.

        Parameters
        ----------
        rows
            int64[B], in the order in which they are to publish.
        results
            Whether the results of the oldest batch are being applied; if not, a step has just been scheduled.
        """
        s = self._store.s
        _publish_rows(
            s.blocks,
            s.readers,
            s.block_size,
            self._ends,
            self._links,
            self._identity,
            s.rows,
            s.table,
            rows,
            results,
            self._names,
            self._done,
        )

    def find(self, identities: Sequence[int] | NDArray[np.int64], most: int | None = None) -> list[int]:
        """Return the blocks that hold the longest known prefix of this chain; count the free ones in ``free_found``.

        Parameters
        ----------
        identities
            Of the chain's blocks.
        most
            How many of them to look for; all unless given.
        """
        names = np.asarray(identities, np.int64)
        count, self.free_found = _find(
            self._store.s.blocks,
            self._ends,
            self._links,
            self._identity,
            names,
            len(names) if most is None else most,
            self._found,
        )
        found: list[int] = self._found[:count].tolist()
        return found

    def forget_taken(self) -> None:
        """Drop the identities of blocks that were taken for new contents since the last call."""
        s = self._store.s
        dropped = int(s.header[H.DROPPED])
        if dropped:
            _forget(self._ends, self._links, self._identity, s.dropped, dropped)
            s.header[H.DROPPED] = 0


_FIRST, _LAST = 0, 1  # of a list
_NEXT, _PREVIOUS = 0, 1  # of a block


@njit
def _publish(
    blocks: np.ndarray,
    readers: np.ndarray,
    size: int,
    ends: np.ndarray,
    links: np.ndarray,
    identity: np.ndarray,
    block: int,
    name: int,
) -> None:
    """Put a block at the end of its list."""
    at = name & (ends.shape[1] - 1)
    last = ends[_LAST, at]
    identity[block] = name
    links[_PREVIOUS, block] = last
    links[_NEXT, block] = -1
    if last < 0:
        ends[_FIRST, at] = block
    else:
        links[_NEXT, last] = block
    ends[_LAST, at] = block
    blocks[block].cached = 1
    if len(readers) > 0:
        readers[block * size : (block + 1) * size] = 1


@njit
def _publish_rows(
    blocks: np.ndarray,
    readers: np.ndarray,
    size: int,
    ends: np.ndarray,
    links: np.ndarray,
    identity: np.ndarray,
    records: np.ndarray,
    table: np.ndarray,
    rows: np.ndarray,
    results: bool,
    names: np.ndarray,
    done: np.ndarray,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        record = records[row]
        if record.evicted > 0 or (results and record.flying != YIELDS) or (not results and record.sched == 0):
            continue
        if results:
            known = record.length - 1 - (record.ahead == YIELDS)
        else:
            known = min(record.computed, record.length - (record.flying == YIELDS))
        while (done[row] + 1) * size <= known:
            _publish(blocks, readers, size, ends, links, identity, table[row, done[row]], names[row, done[row]])
            done[row] += 1


@njit
def _find(
    blocks: np.ndarray,
    ends: np.ndarray,
    links: np.ndarray,
    identity: np.ndarray,
    names: np.ndarray,
    most: int,
    out: np.ndarray,
) -> tuple[int, int]:
    free: int = 0
    for i in range(most):
        block = ends[_FIRST, names[i] & (ends.shape[1] - 1)]
        while block >= 0 and identity[block] != names[i]:
            block = links[_NEXT, block]
        if block < 0:
            return i, free
        out[i] = block
        free += blocks[block].ref == 0
    return most, free


@njit
def _forget(ends: np.ndarray, links: np.ndarray, identity: np.ndarray, dropped: np.ndarray, count: int) -> None:
    """Take blocks out of their lists."""
    for i in range(count):
        block = dropped[i]
        at = identity[block] & (ends.shape[1] - 1)
        before, behind = links[_PREVIOUS, block], links[_NEXT, block]
        if before < 0:
            ends[_FIRST, at] = behind
        else:
            links[_NEXT, before] = behind
        if behind < 0:
            ends[_LAST, at] = before
        else:
            links[_PREVIOUS, behind] = before
