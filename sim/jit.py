"""Compiled kernels: ``njit``, a typed door to numba with this project's settings.

Every kernel of the project is decorated with :func:`njit` and nothing else, so that all of them are compiled alike:
cached on disk (a second process starts at once), IEEE arithmetic (no ``fastmath`` unless asked for), numpy's division
rules, the GIL released. ``NUMBA_DISABLE_JIT=1`` turns them into plain Python for a debugger or for coverage, and so
does a machine without numba: the results are the same to the byte, and take a hundred times as long.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import numpy as np

try:
    import numba
except ImportError:
    numba = None  # type: ignore[assignment]

__all__ = ["njit", "records"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def njit(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def njit(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def njit(function: Callable[P, R] | None = None, /, **options: Any) -> Any:
    """Compile a function without Python objects; use it bare or with numba's options.

    Parameters
    ----------
    function
        The function to compile.
    options
        Options of ``numba.njit``, such as ``inline="always"``, ``fastmath=True`` or ``boundscheck=True``; they
        override the settings above.

    Returns
    -------
    Callable
        The compiled function, with the type of the one it was given; with options, a decorator.
    """

    def compiled(target: Callable[P, R]) -> Any:
        if numba is None:
            return target
        settings: dict[str, Any] = {"cache": True, "error_model": "numpy", "nogil": True} | options
        try:
            kernel = numba.njit(**settings)(target)
        except RuntimeError as error:
            # Neither the package's folder nor the user's cache can be written: compile in memory, once a process.
            if "cannot cache function" not in str(error):
                raise
            return numba.njit(**(settings | {"cache": False}))(target)
        _stamp_with_what_is_compiled_in(kernel)
        return kernel

    return compiled if function is None else compiled(function)


def records(count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return ``count`` zeroed records whose fields kernels may write ``array[i].field``, compiled or not."""
    array = np.zeros(count, dtype)
    # Numba knows fields of plain arrays; Python knows them of record arrays only, which numba is slow to take.
    if numba is None:
        _say_slow()
        return array.view(np.recarray)
    return array.view(np.recarray) if getattr(numba.config, "DISABLE_JIT", 0) else array


@functools.cache
def _say_slow() -> None:
    print("note: numba is not installed: kernels run as plain Python, the same but slow", file=sys.stderr)


def _stamp_with_what_is_compiled_in(kernel: Any) -> None:
    """Have a cached kernel compiled again when something that was compiled into it changes in another file.

    Left alone, numba looks at the file of the kernel only: after an edit of a kernel that it calls, or of a constant
    that it imports, the old machine code would go on being loaded.
    """
    file = _cache_file(kernel)
    if file is not None:
        file._source_stamp = (file._source_stamp, *_compiled_in(kernel.py_func))


def _compiled_in(function: FunctionType) -> Iterator[Any]:
    """Yield a stamp of every kernel, and the value of every constant, that ``function`` names."""
    names = function.__code__.co_names
    values = [(name, function.__globals__.get(name)) for name in names]
    values += [(name, vars(value).get(name)) for _, value in values if isinstance(value, ModuleType) for name in names]
    for name, value in values:
        if isinstance(value, bool | int | float | complex | str | tuple | np.generic):
            yield name, repr(value)
        elif isinstance(value, np.ndarray):
            yield name, value.dtype.str, value.shape, value.tobytes()
        elif (file := _cache_file(value)) is not None:
            yield name, file._source_stamp


def _cache_file(kernel: Any) -> Any:
    """Return numba's record of where ``kernel`` is cached; None for anything that is not a cached kernel."""
    return getattr(getattr(kernel, "_cache", None), "_cache_file", None)
