"""Views for attention models, and the shortest possible policies to look at what a model's attention does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.kv.view import View
from sim.serving.attention import AttentionModel

SHARED = Path(__file__).parents[3] / "shared" / "attention"


def view_of(
    model: AttentionModel,
    rows: Sequence[NDArray[np.int64]],
    keys: Sequence[int],
    prompts: Sequence[int],
    gap: int = 0,
) -> View:
    """Return a view of requests with these live positions, each row ``gap`` cells after the one before."""
    n = np.array([len(row) for row in rows], np.int64)
    start = gap + np.concatenate([[0], np.cumsum(n + gap)[:-1]]).astype(np.int64) if len(rows) else n
    cells = int(n.sum()) + gap * (len(rows) + 1)
    position = np.zeros(cells, np.int32)
    for first, row in zip(start, rows, strict=True):
        position[first : first + len(row)] = row
    length = np.array([row[-1] + 1 for row in rows], np.int64)
    numbers = np.stack([np.arange(len(rows)), start, n, length, np.array(prompts, np.int64), n]).astype(np.int64)
    columns = {name: np.zeros(cells, np.float32) for name in model.columns}
    return View(numbers, np.array(keys, np.uint64), position, columns, np.zeros((2, cells), np.float32))


def prompt_view(model: AttentionModel, lengths: Sequence[int], keys: Sequence[int] | None = None, gap: int = 0) -> View:
    """Return a view of prompts that have just been computed."""
    rows = [np.arange(length) for length in lengths]
    return view_of(model, rows, range(1, len(rows) + 1) if keys is None else keys, lengths, gap)


def split(view: View, out: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the cells of each request."""
    return [out[s : s + n].copy() for s, n in zip(view.start, view.n, strict=True)]


def attended(model: AttentionModel, view: View) -> list[NDArray[np.float32]]:
    """Return the attention of each request's newest query."""
    out = np.zeros(len(view.position), np.float32)
    model.begin(view)
    model.attend(view, out)
    return split(view, out)


def accumulated(model: AttentionModel, view: View) -> list[NDArray[np.float32]]:
    """Return each prompt's column sums."""
    out = np.zeros(len(view.position), np.float32)
    model.begin(view)
    model.accumulated(view, out)
    return split(view, out)


def queried(model: AttentionModel, view: View, back: int) -> list[NDArray[np.float32]]:
    """Return the attention of each prompt's query ``back`` before its last."""
    out = np.full(len(view.position), np.nan, np.float32)
    model.begin(view)
    model.query(view, back, out)
    return split(view, out)


def h2o_sets(
    model: AttentionModel, key: int, prompt: int, generated: int, ratio: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the tokens that H2O keeps at the end of the prompt and after the last decode step.

    Half of the budget of ``ceil(ratio * length)`` goes to the newest tokens, half to the most attended.
    """
    total = prompt + generated
    score, live = np.zeros(total), np.zeros(total, bool)
    view = prompt_view(model, [total], [key])
    view.prompt[:] = prompt
    view.n[:] = view.length[:] = prompt
    out = np.zeros(total, np.float32)
    model.begin(view)
    model.accumulated(view, out)
    score[:prompt] = out[:prompt]
    live[:prompt] = True
    at_end = live
    for length in range(prompt, total + 1):
        if length > prompt:
            live[length - 1] = True
            view.n[:] = view.length[:] = length
            model.attend(view, out)
            share = np.where(live[:length], out[:length], 0)
            score[:length] += share / share.sum()
        budget = int(np.ceil(ratio * length - 1e-9))
        old = np.flatnonzero(live[: length - budget // 2])
        excess = int(live.sum()) - budget
        live[old[np.argsort(score[old], kind="stable")[:excess]]] = False
        if length == prompt:
            at_end = live[:prompt].copy()
    return at_end, live


def dead_blocks(live: NDArray[np.bool_], size: int) -> float:
    """Return the percentage of blocks in which nothing lives."""
    padded = np.zeros(-(-len(live) // size) * size, bool)
    padded[: len(live)] = live
    return 100 * float((~padded.reshape(-1, size).any(axis=1)).mean())
