"""Prefix cache: which blocks hold contents that another request may want.

vLLM's rule: the identity of a full block is the chain of everything before it and its own tokens. Traces do not give
tokens but hash ids of spans of the prompt, so the contents of a block are the ids of the spans it touches and how many
of its tokens belong to the prompt; generated tokens are all taken to be the same. A prompt without ids shares with
nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.kv.state import H, Store

__all__ = ["PrefixCache", "chain"]


def chain(
    known: list[int],
    until: int,
    *,
    block_size: int,
    prompt_tokens: int,
    hashes: Sequence[int],
    hash_tokens: int,
    owner: int,
) -> None:
    """Extend ``known``, the identities of a request's first blocks, to ``until`` blocks.

    Parameters
    ----------
    hashes
        One id for each ``hash_tokens`` tokens of the prompt; empty if the prompt shares nothing.
    owner
        Number of the request: the identity of what nobody else has.
    """
    while len(known) < until:
        first = len(known) * block_size
        last = min(first + block_size, prompt_tokens)
        spans: tuple[object, ...] = ()
        if last > first:
            # A prompt without ids: a nested tuple, which no id is equal to.
            spans = tuple(hashes[first // hash_tokens : -(-last // hash_tokens)]) if hashes else ((owner,),)
        parent = known[-1] if known else 0
        known.append(hash((parent, max(0, last - first), spans)))


class PrefixCache:
    """Published blocks by identity; of several with the same, the one published first is found first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._blocks: dict[int, dict[int, None]] = {}
        self._identity: dict[int, int] = {}

    def publish(self, block: int, identity: int) -> None:
        """Make a full block findable."""
        self._blocks.setdefault(identity, {})[block] = None
        self._identity[block] = identity
        self._store.s.blocks[block]["cached"] = 1

    def find(self, identities: Sequence[int]) -> list[int]:
        """Return the blocks that hold the longest known prefix of this chain."""
        found: list[int] = []
        for identity in identities:
            blocks = self._blocks.get(identity)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def forget_taken(self) -> None:
        """Drop the identities of blocks that were taken for new contents since the last call."""
        s = self._store.s
        for block in s.dropped[: int(s.header[H.DROPPED])].tolist():
            identity = self._identity.pop(block)
            blocks = self._blocks[identity]
            del blocks[block]
            if not blocks:
                del self._blocks[identity]
        s.header[H.DROPPED] = 0
