"""Where made-up tokens lie: block tables, steps, and plans of the simulator's own planner."""

import numpy as np
import pytest

pytest.importorskip("torch")

from gpu_validate.layouts import decode_layout, lengths_of, place, repack_blocks, repack_moves, step_work
from gpu_validate.moves import check_moves, overlaps
from gpu_validate.sweeps import Decode, Step, designed
from sim.errors import InputError


@pytest.mark.parametrize("shape", [Decode(1, 1), Decode(4, 40), Decode(5, 100, ragged=True), Decode(3, 20, 0.75)])
@pytest.mark.parametrize("scattered", [True, False])
def test_each_block_is_listed_once_and_all_tokens_have_room(shape: Decode, scattered: bool) -> None:
    layout = decode_layout(shape._replace(scattered=scattered), block_size=16, num_blocks=200)
    widths = -(-layout.lengths // 16)
    listed = layout.block_table[np.arange(layout.block_table.shape[1]) < widths[:, None]]
    assert len(np.unique(listed)) == len(listed) == widths.sum()
    assert listed.min() >= 1
    assert listed.max() < 200
    assert layout.read_tokens == layout.lengths.sum()
    if len(listed) > 2:
        assert (np.diff(listed) == 1).all() != scattered


def test_dead_slots_are_listed_too() -> None:
    assert lengths_of(Decode(2, 100, dead=0.75)).tolist() == [400, 400]


def test_a_ragged_batch_has_the_average_that_was_asked_for() -> None:
    lengths = lengths_of(Decode(8, 128, ragged=True))
    assert lengths.mean() == 128
    assert (lengths.min(), lengths.max()) == (64, 192)


def test_placements_do_not_share_blocks_while_there_is_room() -> None:
    tables = [decode_layout(Decode(4, 40), block_size=16, num_blocks=60, placement=k).block_table for k in range(4)]
    blocks = np.concatenate([table.ravel() for table in tables])
    assert len(np.unique(blocks)) == len(blocks)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(InputError, match="need 4 blocks, the pool has 3"):
        place(np.array([33, 16], np.int32), block_size=16, num_blocks=4)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("tokens", [64, 1000, 4096])
@pytest.mark.parametrize("num_blocks", [None, 2000])
def test_moves_are_lawful_and_free_blocks(tokens: int, scattered: bool, num_blocks: int | None) -> None:
    if num_blocks is None:
        num_blocks = repack_blocks(tokens, block_size=16)
    moves = repack_moves(tokens, block_size=16, num_blocks=num_blocks, scattered=scattered)
    check_moves(moves.source, moves.destination, num_blocks, 16)
    assert not overlaps(moves.source, moves.destination)
    assert 0.97 * tokens <= moves.tokens <= tokens + 16
    # Destinations are filled one after the other, from their first slot on.
    np.testing.assert_array_equal(moves.destination % 16, np.arange(moves.tokens) % 16)
    freed = len(np.unique(moves.source // 16)) - len(np.unique(moves.destination // 16))
    assert moves.freed_blocks == freed > 0


def test_scattered_moves_come_from_all_over_the_pool() -> None:
    apart, together = (repack_moves(1024, num_blocks=2000, scattered=scattered) for scattered in (True, False))
    # Neighbours in a plan are neighbours in memory within a run of live tokens, and else far apart.
    near = np.abs(np.diff(together.source)) <= 16
    assert near.all()
    assert (np.abs(np.diff(apart.source)) > 16).mean() > 0.1


def test_other_placements_of_a_copy_lie_elsewhere() -> None:
    for scattered in (True, False):
        first, second = (repack_moves(64, num_blocks=2000, scattered=scattered, placement=k) for k in range(2))
        assert not set(first.source // 16) & set(second.source // 16)


@pytest.mark.parametrize(
    "shape", [Step(1, 16), Step(8, 64), Step(3, 40, prefill=32), Step(3, 40, prefill=20, context=50)]
)
def test_a_step_is_what_a_replay_would_be_given(shape: Step) -> None:
    work = step_work(shape, block_size=16, num_blocks=400)
    assert work.seqs == shape.batch + (shape.prefill > 0)
    assert work.tokens == shape.batch + shape.prefill
    assert work.decode.sum() == shape.batch
    decodes = lengths_of(Decode(shape.batch, shape.live, ragged=True)) + 1
    chunk = shape.prefill * shape.context + shape.prefill * (shape.prefill + 1) // 2
    assert work.kv_read_tokens == decodes.sum() + (shape.prefill and shape.prefill + shape.context)
    assert work.attention_pairs == decodes.sum() + chunk
    # Each written slot is one of the row's last ones, in a block of its table.
    row = np.repeat(np.arange(work.seqs), work.query_tokens)
    np.testing.assert_array_equal(work.block_table[row, work.positions // 16], work.slots // 16)
    np.testing.assert_array_equal(work.positions % 16, work.slots % 16)
    assert len(np.unique(work.slots)) == work.tokens


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_all_shapes_fit_what_they_were_designed_for(kind: str, quick: bool) -> None:
    capacity = 8192 if kind == "cpu" else 600_000
    sweep = designed(kind, capacity=capacity, max_len=8192 if kind == "cpu" else 131_072, quick=quick)
    assert sweep.slots <= capacity
    blocks = 2 + sweep.slots // 16 + 2 * sweep.most_batch
    for shape in sweep.decode:
        assert decode_layout(shape, block_size=16, num_blocks=blocks).lengths.max() <= sweep.longest
        assert shape.batch <= sweep.most_batch
    for step in sweep.steps:
        work = step_work(step, block_size=16, num_blocks=blocks)
        assert work.lengths.max() <= sweep.longest
        assert work.tokens <= sweep.most_tokens
    for copy in sweep.repack:
        assert repack_blocks(copy.tokens, block_size=16) <= blocks
    if not quick:
        assert len(sweep.steps) >= 20
        assert {copy.tokens for copy in sweep.repack} >= ({64, 65536} if kind == "cuda" else {16, 1024})
        assert any(shape.dead for shape in sweep.decode)
        assert any(not shape.scattered for shape in sweep.decode)
