"""What an attention model is: who looks at which token, and how hard, without a neural network."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sim.errors import InputError
from sim.kv.policies.base import EvictionPolicy
from sim.kv.units import ONE_UNIT, Units
from sim.kv.view import View
from sim.registry import Registry

__all__ = ["AttentionModel", "attention_models", "build_attention", "check_signals"]


@runtime_checkable
class AttentionModel(Protocol):
    """Attention pooled over layers and heads: one probability for each live token of each request.

    Where layers or heads decide by themselves (``view.units``), each has a row of its own, with attention of its own.

    Open loop: a model gives the attention that the full cache would have had, renormalised over the tokens that are
    still live. What was evicted does not change what is generated later. Models write only cells of the view's
    requests, and what they write for a request depends on its key, its positions, its length and its own columns, never
    on the other requests of the batch or on where the row lies.

    A model may know more than attention, for policies that need it:

    - ``similarity(view, out)``: the mean cosine of each live token's key with the request's other live keys;
    - ``key_norms(view, newest, out)``, ``value_norms(view, newest, out)``: the norm of each live token's key or value,
      which never changes; with ``newest``, only that of the newest token is asked for;
    - ``expected(view, out)``: the attention that each prompt token can expect of the queries to come, from the
      statistics of the prompt's; ``out`` sums to 1 over a request. Asked for when :meth:`accumulated` is.

    A model that has such a method without always being able to answer says in ``signals`` which it can. One that does
    not know every layer or head refuses in ``check_units(policy, units)`` what it cannot tell.
    """

    columns: ClassVar[tuple[str, ...]]
    """Names of the float32 columns that the token table keeps for the model; 0 for a token just written."""

    def begin(self, view: View) -> None:
        """Fill the columns of requests whose prompt has just been computed (every token still live)."""

    def accumulated(self, view: View, out: NDArray[np.float32]) -> None:
        """Write what each token got from all queries of its prompt: ``out`` sums to the length over a request.

        Called between :meth:`begin` and the first eviction.
        """

    def query(self, view: View, back: int, out: NDArray[np.float32]) -> None:
        """Write the attention of the prompt's query at position ``length - 1 - back``.

        Sums to 1 over a request, with 0 for the tokens that come later; all 0 where the prompt has no such query.
        """

    def attend(self, view: View, out: NDArray[np.float32]) -> None:
        """Write the attention of the newest query over the live tokens: ``out`` sums to 1 over a request.

        The newest token is the last cell of its row; its columns are filled here. A model may also have
        ``attend_and_add(view, out, total)``, which adds the answer to ``total`` in the same pass over memory.
        """


_SIGNALS = {
    "similarity": "cosines of keys",
    "key_norms": "norms of keys",
    "value_norms": "norms of values",
    "expected": "statistics of queries",
}


def check_signals(policy: EvictionPolicy, model: Any, units: Units = ONE_UNIT) -> None:
    """Refuse a policy that needs what the model does not know, of these units.

    Raises
    ------
    InputError
        That says what is missing.
    """
    known = getattr(model, "signals", None)
    missing = [need for need in policy.needs if (need not in known if known is not None else not hasattr(model, need))]
    if missing:
        what = " and ".join(_SIGNALS.get(need, need) for need in missing)
        name = getattr(model, "name", model)
        hint = getattr(model, "without_signals", "use 'synthetic'")
        raise InputError(f"policy {policy.name!r} needs {what}, which attention {name!r} does not have: {hint}")
    check = getattr(model, "check_units", None)
    if check is not None and units.layers * units.heads > 1:
        check(policy, units)


attention_models: Registry[AttentionModel] = Registry(
    "attention model",
    "vtoken.attention_models",
    (
        "sim.serving.attention.recorded",
        "sim.serving.attention.synthetic",
        "sim.serving.attention.uniform",
    ),
)


def build_attention(spec: str, **extra: Any) -> AttentionModel:
    """Make the model that ``spec`` describes: ``synthetic``, ``uniform``, ``recorded:FILE`` or ``name:key=value,..``.

    Parameters
    ----------
    spec
        As :meth:`sim.registry.Registry.build` takes it. A class with a ``bare_parameter`` takes everything after the
        colon as that one parameter, so that a path needs no ``key=``.
    extra
        Values for fields that the caller knows.

    Raises
    ------
    InputError
        If the name, a parameter or the file cannot be used.
    """
    name, colon, rest = spec.partition(":")
    bare = getattr(attention_models.get(name.strip()), "bare_parameter", None)
    if bare is None or not colon or rest.strip().startswith(f"{bare}="):
        return attention_models.build(spec, **extra)
    return attention_models.build(name, **{bare: rest.strip()}, **extra)
