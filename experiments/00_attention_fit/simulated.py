"""What an attention model does to blocks: requests of the captures' lengths, policies of ``open_loop``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import open_loop
from measured import Measured, Table

from sim.kv.view import View
from sim.rng import request_key
from sim.serving.attention import AttentionModel


def sequence(model: AttentionModel, key: int, prompt: int, generated: int) -> tuple[Any, Any]:
    """Return what one request sees: float32[H + G, P + G] attention, all tokens live, and float32[P] column sums."""
    total, history = prompt + generated, min(open_loop.WINDOW, prompt)
    columns = {name: np.zeros(total, np.float32) for name in model.columns}

    keys = np.array([key], np.uint64)
    position = np.arange(total, dtype=np.int32)
    scratch = np.zeros((2, total), np.float32)

    def view(length: int) -> View:
        # Row, start, live tokens, length, prompt, budget.
        numbers = np.array([0, 0, length, length, prompt, length], np.int64).reshape(6, 1)
        return View(numbers, keys, position, columns, scratch)

    attention = np.zeros((history + generated, total), np.float32)
    accumulated = np.zeros(total, np.float32)
    model.begin(view(prompt))
    model.accumulated(view(prompt), accumulated)
    for back in range(history):
        model.query(view(prompt), back, attention[history - 1 - back])
    for step in range(generated):
        model.attend(view(prompt + step + 1), attention[history + step])
    return attention, accumulated[:prompt]


def simulate(
    model: AttentionModel,
    measured: Measured,
    seeds: Iterable[int],
    policies: tuple[str, ...] = tuple(open_loop.POLICIES),
) -> Table:
    """Return the model's mean fractions over requests with the lengths of the captures, ``seeds`` of each."""
    ends: dict[str, list[Any]] = {name: [] for name in policies}
    decode: dict[str, list[Any]] = {name: [] for name in policies}
    for seed in seeds:
        for ordinal, (prompt, generated) in enumerate(measured.sizes.values()):
            request = sequence(model, request_key(seed, ordinal), prompt, generated)
            for name, values in open_loop.run(*request, prompt, policies=policies).items():
                if ordinal < measured.at_end:
                    ends[name].append(values[:, 0] * 100)
                decode[name].append(values[:, 1:].mean(1) * 100)
    return {name: (np.mean(ends[name], 0), np.mean(decode[name], 0)) for name in policies}
