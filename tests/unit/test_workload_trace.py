"""Traces in memory, and the canonical files they are kept in."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import InputError
from sim.workload import Request, Trace, open_source, read_trace, write_trace

labels = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\n\0"), min_size=1, max_size=8)


@st.composite
def traces(draw: st.DrawFn, latest_ns: int = 2**62) -> Trace:
    """Draw a trace with every optional column present or absent."""
    arrivals = sorted(draw(st.lists(st.integers(0, latest_ns), min_size=1, max_size=12)))
    n = len(arrivals)
    tokens = st.lists(st.integers(1, 2**31 - 1), min_size=n, max_size=n)
    ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(lambda h: np.array(h, np.int64))
    return Trace(
        np.array(arrivals, np.int64),
        np.array(draw(tokens)),
        np.array(draw(tokens)),
        draw(st.none() | st.lists(labels, min_size=n, max_size=n)),
        draw(st.none() | st.lists(ids, min_size=n, max_size=n)),
        draw(st.none() | st.lists(st.none() | labels, min_size=n, max_size=n)),
        draw(st.sampled_from([16, 64, 512])),
    )


def small(n: int = 10) -> Trace:
    return Trace(np.arange(n) * 10**9, np.arange(1, n + 1) * 100, np.full(n, 7))


@given(trace=traces())
@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet"])
def test_files_give_back_every_nanosecond_and_label(
    trace: Trace, ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trip") / f"t{ending}"
    assert write_trace(trace, path) == len(trace)
    back = read_trace(path)
    assert back.same_requests(trace)


@given(ns=st.integers(0, 2**62))
def test_seconds_in_csv_keep_nanoseconds_of_any_time(ns: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("time") / "t.csv"
    write_trace(Trace(np.array([ns]), np.array([1]), np.array([1])), path)
    assert read_trace(path).arrival_ns.tolist() == [ns]


@given(trace=traces(), size=st.integers(1, 5))
def test_chunks_join_to_the_whole(trace: Trace, size: int) -> None:
    chunks = list(trace.chunks(size))
    assert all(len(chunk) <= size for chunk in chunks)
    assert Trace.concat(chunks).same_requests(trace)
    assert Trace.from_requests(trace.requests(), hash_tokens=trace.hash_tokens).same_requests(trace)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_streamed_file_comes_in_pieces_that_know_their_place(tmp_path: Path, ending: str) -> None:
    write_trace(small(10), tmp_path / f"t{ending}")
    source = open_source(tmp_path / f"t{ending}")
    pieces = list(source.chunks(4))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert [piece.first for piece in pieces] == [0, 4, 8]
    assert Trace.concat(pieces).same_requests(small(10))
    assert Trace.concat(source.chunks(3)).same_requests(small(10)), "a second reading starts over"


def test_labels_default_to_ordinals_also_in_chunks_and_selections() -> None:
    trace = small(5)
    assert [r.req_id for chunk in trace.chunks(2) for r in chunk.requests()] == ["0", "1", "2", "3", "4"]
    assert trace[np.array([True, False, False, True, False])].ids == ["0", "3"]
    assert trace[::2].ids == ["0", "2", "4"]
    assert trace[3:].ids == ["3", "4"]


def test_requests_hold_plain_python_values() -> None:
    trace = Trace(
        np.array([5]), np.array([3]), np.array([2]), ["a"], [np.array([7, 8])], ["s"], hash_tokens=16, name="one"
    )
    assert list(trace.requests()) == [Request("a", 5, 3, 2, (7, 8), "s")]
    assert trace.arrival_s.tolist() == [5e-9]


def test_columns_cannot_be_changed() -> None:
    trace = small()
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 1
    with pytest.raises(AttributeError):
        trace.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 1], [1], [1, 1]), "prompt_tokens has 1 entries"),
        (([-1, 1], [1, 1], [1, 1]), "arrival_ns must lie in"),
        (([2, 1], [1, 1], [1, 1]), "request 1 arrives before"),
        (([0, 1], [1, 0], [1, 1]), "request 1, prompt_tokens: expected 1"),
        (([0, 1], [1, 1], [1, 2**31]), "request 1, output_tokens: expected 1"),
        (([0.5, 1.0], [1, 1], [1, 1]), "array of integers"),
    ],
)
def test_a_wrong_trace_cannot_be_made(columns: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Trace(*(np.array(column) for column in columns))


def test_columns_that_are_not_needed_are_not_written(tmp_path: Path) -> None:
    write_trace(small(1), tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == "req_id,arrival_s,prompt_tokens,output_tokens\n0,0,100,7\n"


def test_what_a_hash_covers_survives_the_file(tmp_path: Path) -> None:
    trace = Trace(np.array([1]), np.array([40]), np.array([2]), prefix_hashes=[np.array([3, 4])], hash_tokens=16)
    for name in ("t.csv", "t.parquet"):
        write_trace(trace, tmp_path / name)
        assert open_source(tmp_path / name).hash_tokens == 16
    assert (tmp_path / "t.csv").read_text().splitlines()[1] == "0,0.000000001,40,2,3 4,16"


def test_packed_files_have_the_same_bytes_each_time(tmp_path: Path) -> None:
    write_trace(small(), tmp_path / "a.csv.gz")
    write_trace(small(), tmp_path / "b.csv.gz")
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    write_trace(small(), tmp_path / "a.csv")
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == (tmp_path / "a.csv").read_bytes()


def test_parquet_is_plain_for_other_tools(tmp_path: Path) -> None:
    import pandas as pd

    trace = Trace(np.array([1_500_000_000]), np.array([40]), np.array([2]), prefix_hashes=[np.array([3, 4])])
    write_trace(trace, tmp_path / "t.parquet")
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert list(table.columns) == ["req_id", "arrival_s", "prompt_tokens", "output_tokens", "prefix_hashes"]
    assert table.arrival_s.tolist() == [1.5]
    assert table.prefix_hashes[0].tolist() == [3, 4]


def test_csv_of_other_tools_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"\xef\xbb\xbfarrival_s,output_tokens,prompt_tokens,session,client\r\n"
        b'1e-3,2.0,10,"a, ""b""",x\r\n\r\n0.0020000004,3,11,,y\r\n'
    )
    trace = read_trace(path)
    assert list(trace.requests()) == [
        Request("0", 1_000_000, 10, 2, (), 'a, "b"'),
        Request("1", 2_000_000, 11, 3, (), None),
    ]
    assert trace.notes == ("ignored columns: client",)


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    bad = Trace(np.array([1]), np.array([1]), np.array([1]), ["two\nlines"])
    with pytest.raises(InputError, match="line end"):
        write_trace(bad, tmp_path / "t.csv")
    with pytest.raises(InputError, match=r"ends in \.csv"):
        write_trace(small(), tmp_path / "t.txt")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(small(), tmp_path / "absent" / "t.csv")
    assert list(tmp_path.iterdir()) == []
