"""Trace files that are not what they should be: one line that says what, where, and what was expected."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sim.errors import InputError
from sim.workload import Trace, read_trace, write_trace

HEAD = "req_id,arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 4, "hash_ids": [0]}\n'


def error_of(path: Path, **options: str) -> str:
    """Return the one-line message of reading a file that must be refused."""
    with pytest.raises(InputError) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        # canonical CSV
        (HEAD, "", "no rows"),
        (HEAD + "a,0,5\n", ":2", "3 fields, expected 4"),
        (HEAD + "a,0,5,5\nb,1,-5,5\n", ":3", "'prompt_tokens': expected a token count from 0 to 2**31 - 1, got '-5'"),
        (HEAD + "a,0,5,0\n", ":2", "'output_tokens': expected at least 1 token"),
        (HEAD + "a,0,5,5\n\nb,1,,5\n", ":4", "'prompt_tokens' is missing"),
        (HEAD + "a,0,5,5\nb,1,5,five\n", ":3", "'output_tokens': expected a whole number of tokens, got 'five'"),
        (HEAD + "a,0,5,2.5\n", ":2", "whole number"),
        (HEAD + "a,0,5,99999999999999999999\n", ":2", "whole number"),
        (HEAD + "a,nan,5,5\n", ":2", "'arrival_s': expected a time in seconds, got 'nan'"),
        (HEAD + "a,inf,5,5\n", ":2", "time in seconds"),
        (HEAD + "a,1e300,5,5\n", ":2", "time in seconds"),
        (HEAD + "a,-1,5,5\n", ":2", "time of at least 0 s"),
        (HEAD + "a,,5,5\n", ":2", "'arrival_s' is missing"),
        (HEAD + "a,2,5,5\nb,1,5,5\n", ":3", "not before the previous row's"),
        (HEAD + 'a,0,5,"5\n', ":2", "unclosed quote"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_hashes\n0,5,5,1 x\n", ":2", "64-bit whole numbers"),
        ("arrival_s,prompt_tokens,output_tokens,hash_tokens\n0,5,5,16\n1,5,5,32\n", ":3", "16 as in the first row"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_hash\n0,5,5,1\n", ":1", "did you mean 'prefix_hashes'?"),
        ("arrival_s,arrival_s,prompt_tokens,output_tokens\n0,0,5,5\n", ":1", "'arrival_s' comes twice"),
        # which column is wrong, of which format
        ("req_id,arrival,prompt_tokens,output_tokens\na,0,5,5\n", ":1", "did you mean 'arrival_s'?"),
        ("req_id,arrival_s,prompt_token,output_tokens\na,0,5,5\n", ":1", "did you mean 'prompt_tokens'?"),
        ("TIMESTAMP,ContextToken,GeneratedTokens\n", ":1", "of azure, column 'ContextTokens' is missing"),
        ("Timestamp,Request tokens,Response token\n5,1,1\n", ":1", "did you mean 'Response tokens'?"),
        ("a,b,c\n1,2,3\n", ":1", "not a known trace format"),
        ("just words\n", ":1", "not a known trace format"),
        ('{"some": "object"}\n', ":1", "not a known trace format"),
        ("[1, 2, 3]", ":1", "not a known trace format"),
        ('{"timestamp": 0, "input_len', ":1", "line 1 is not a JSON object"),
        # other people's formats
        (AZURE, "", "holds no requests"),
        (AZURE + "2023-11-16 18:15:46,5,5\n2023-13-16 18:15:46,5,5\n", ":3", "a date and time that exist"),
        (AZURE + "yesterday,5,5\n", ":2", "'TIMESTAMP': expected YYYY-MM-DD"),
        (AZURE + "2023-11-16 18:15:46,-5,5\n", ":2", "'ContextTokens'"),
        (AZURE + "2023-11-16 18:15:46,5,\n", ":2", "'GeneratedTokens' is missing"),
        (AZURE + "2023-11-16 18:15:46,0,5\n", "", "no row is left: left out 1 of 1 rows"),
        (MOONCAKE + "{oops\n", ":2", "not valid JSON"),
        (MOONCAKE + "[1]\n", ":2", "expected one JSON object a line, got list"),
        (MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', ":2", "NaN is not a number"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 1, "output_length": 1}\n', ":2", "'timestamp'"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "1", "output_length": 1}\n', ":2", "'input_length'"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', ":2", "'output_length': expected a token count"),
        (MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 1}\n', ":2", "got True"),
        (MOONCAKE + '{"timestamp": 1, "output_length": 1}\n', ":2", "expected exactly one of input_length"),
        (MOONCAKE + '{"input_length": 1, "output_length": 1}\n', ":2", "'timestamp' is missing"),
        (MOONCAKE.replace("[0]", "[0.5]"), ":1", "'hash_ids': expected a list of whole numbers"),
        (MOONCAKE + '{"a":' * 5000 + "1" + "}" * 5000 + "\n", ":2", "nested too deeply"),
        ('[{"id": 1, "conversations": 3}]', "", "item 1: field 'conversations'"),
        ('[{"conversations": []}, {"conver', "", "item 2: not valid JSON"),
        ('[{"conversations": []} {}]', "", "expected ',' or ']' after item 1"),
        ('{"id": "s", "block_size": 64, "requests": [{"t": 0, "in": 5}]}', "", "requests[0]: field 'out'"),
        ('{"id": "s", "block_size": 64, "requests": 3}', "", "'requests': expected a list"),
        ('{"hist": {"input_tokens": {"x": 1}}, "rate_per_window": {"0": 1, "9": 1}}', "", "'input_tokens'"),
        ('{"hist": {"input_tokens": {"1": 1}}, "rate_per_window": {}}', "", "'rate_per_window'"),
    ],
)
def test_wrong_content(tmp_path: Path, content: str, where: str, what: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    message = error_of(path)
    assert f"{path}{where}" in message
    assert what in message


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_empty_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert "the file is empty" in error_of(tmp_path / "t.csv")
    assert "the file is empty" in error_of(tmp_path / "t.csv", format="canonical")


def test_a_misspelt_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "absent.csv")
    assert "is a directory" in error_of(tmp_path)
    for name in ("canonical", "mooncake", "sharegpt", "azure"):
        assert "is a directory" in error_of(tmp_path, format=name)
    with pytest.raises(InputError, match="no such file"):
        read_trace("x" * 5000)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "a,0,5,5\n")
    path.chmod(0)
    assert "Permission denied" in error_of(path)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_gzip(tmp_path: Path, share: float) -> None:
    lines = "".join(f"{i},{i},{i * 7919 % 4000 + 1},5\n" for i in range(20_000))
    packed = gzip.compress((HEAD + lines).encode())
    (tmp_path / "t.csv.gz").write_bytes(packed[: int(len(packed) * share)])
    message = error_of(tmp_path / "t.csv.gz")
    assert "truncated" in message


def test_a_damaged_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress((HEAD + "a,0,5,5\n" * 1000).encode()))
    packed[-8] ^= 0xFF
    (tmp_path / "t.csv.gz").write_bytes(packed)
    assert "damaged gzip" in error_of(tmp_path / "t.csv.gz", format="canonical")


def test_binary_junk(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(bytes(range(256)) * 64)
    assert "binary data" in error_of(tmp_path / "junk")
    (tmp_path / "late").write_bytes(HEAD.encode() + b"a,0,5,5\n" * 20_000 + b"\0\0\n")
    assert ":20002: binary data" in error_of(tmp_path / "late")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(HEAD.encode() + b"a,0,5,5\n\xff\xfe,1,5,5\n")
    assert ":3: not UTF-8 text" in error_of(tmp_path / "t.csv")
    (tmp_path / "t.json").write_bytes(b'[{"conversations": [{"value": "\xff"}]}]')
    assert "not UTF-8" in error_of(tmp_path / "t.json")


@pytest.mark.parametrize("start", [HEAD + "a,0,5,5\n", MOONCAKE, '[{"conversations": [{"value": "', '{"prompt": "', ""])
def test_a_line_of_100_mb_is_refused_and_not_kept(tmp_path: Path, start: str) -> None:
    path = tmp_path / "long"
    with path.open("w") as file:
        file.write(start)
        for _ in range(100):
            file.write("9" * 2**20)
    tracemalloc.start()
    message = error_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert any(what in message for what in ("16 MiB", "line 1 is longer than 64 KiB", "line 1 is not a JSON object"))
    assert peak < 150 * 2**20, "a few copies of 16 MiB, whatever the length of the line"


def test_parquet_faults(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = {"arrival_s": [0.0, 1.0], "prompt_tokens": [5, 5], "output_tokens": [5, 5]}
    path = tmp_path / "t.parquet"

    def message(**columns: list[object]) -> str:
        pq.write_table(pa.table(good | columns), path)
        return error_of(path)

    assert "row 2, field 'arrival_s': expected a time not before" in message(arrival_s=[2.0, 1.0])
    assert "row 2, field 'arrival_s': expected a time of at least 0 s, got nan" in message(
        arrival_s=[0.0, float("nan")]
    )
    assert "row 1, field 'arrival_s'" in message(arrival_s=[None, 1.0])
    assert "row 2, field 'prompt_tokens': expected a whole number of at least 1, got 0" in message(prompt_tokens=[1, 0])
    assert "row 1, field 'output_tokens'" in message(output_tokens=[None, 3])
    assert "row 1, field 'output_tokens'" in message(output_tokens=["x", "y"])
    assert "'prefix_hashes'" in message(prefix_hashes=["1 2", "3"])
    assert "no rows" in message(arrival_s=[], prompt_tokens=[], output_tokens=[])
    pq.write_table(pa.table({"arrival": [0.0], "prompt_tokens": [1], "output_tokens": [1]}), path)
    assert "did you mean 'arrival_s'?" in error_of(path)
    write_trace(Trace(np.array([0]), np.array([1]), np.array([1])), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged Parquet" in error_of(path)
