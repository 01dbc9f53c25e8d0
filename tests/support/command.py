"""``vtoken`` called in the tests' process, for what needs no process of its own."""

from __future__ import annotations

import contextlib
import io

from sim.cli import main

__all__ = ["vtoken"]


def vtoken(*arguments: str) -> tuple[int, str]:
    """Return the exit code and what was said on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    return code, said.getvalue()
