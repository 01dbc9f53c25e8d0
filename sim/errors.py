"""The one kind of error a user can cause, and the hint that goes with it; and what can happen to a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "NoProgressError", "RunFailedError", "did_you_mean"]


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line: what is wrong, where (file, line, field), what was expected. The command line prints it as
    ``error: ...`` and exits with 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NoProgressError(RuntimeError):
    """The simulated system can make no further step; the message names what cannot move and why.

    The command line prints it as ``error: ...`` and exits with 3.
    """


class RunFailedError(RuntimeError):
    """A run of a sweep or a search failed; the message says which and why. What was finished is kept."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string.

    Parameters
    ----------
    name
        What the user wrote.
    known
        The names that exist.
    """
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
