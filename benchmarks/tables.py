"""``python -m benchmarks.tables``: what it takes a CPU to prepare block tables for a step, by their number and length.

Three ways: the ids of one new block written into each table's row, as vLLM's ``BlockTable.append_row`` does it; the
whole of each row written anew, as after a repack; and all rows copied at once, as ``commit_block_table`` does it (into
memory here, over PCIe there).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

REPEATS = 7


def prepare(tables: int, blocks: int) -> tuple[float, float, float]:
    """Return microseconds a table: one block appended, all written anew, all rows copied."""
    rows = np.zeros((tables, 2 * blocks), np.int32)
    counts = np.zeros(tables, np.int32)
    other = np.zeros_like(rows)
    ids = list(range(1, blocks + 1))

    def append() -> None:
        counts[:] = blocks
        for row in range(tables):
            start = counts[row]
            counts[row] += 1
            rows[row, start : start + 1] = ids[:1]

    def write() -> None:
        for row in range(tables):
            counts[row] = blocks
            rows[row, :blocks] = ids

    def copy() -> None:
        other[:, :blocks] = rows[:, :blocks]

    return _least_us(append, tables), _least_us(write, tables), _least_us(copy, tables)


def _least_us(work: Callable[[], None], tables: int) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - start)
    return min(times) / tables / 1e3


def main() -> None:
    """Print a line for each number of tables and of blocks in one."""
    print("tables  blocks each  append (us a table)  write anew  copy all")
    for tables in (1024, 8192, 32768):
        for blocks in (16, 64, 256):
            append, write, copy = prepare(tables, blocks)
            print(f"{tables:6}  {blocks:11}  {append:19.2f}  {write:10.2f}  {copy:8.3f}")


if __name__ == "__main__":
    main()
