"""Finding a preset by the name a user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sim.errors import InputError, did_you_mean

__all__ = ["find_preset"]

T = TypeVar("T")


def find_preset(kind: str, name: str, presets: Mapping[str, T], aliases: Mapping[str, str]) -> T:
    """Return the preset called ``name``, whatever its case.

    Parameters
    ----------
    kind
        What the presets are, for the message ("model").
    name
        What the user wrote: a name or an alias.
    presets
        Presets by name, in lower case.
    aliases
        Other names, in lower case, with the name each stands for.

    Raises
    ------
    InputError
        If there is none; the message lists what there is.
    """
    wanted = name.strip().lower()
    wanted = aliases.get(wanted, wanted)
    if wanted not in presets:
        hint = did_you_mean(wanted, [*presets, *aliases])
        raise InputError(f"unknown {kind} {name!r}: expected one of {', '.join(presets)}{hint}")
    return presets[wanted]
