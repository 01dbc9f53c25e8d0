"""Event logs that cannot be replayed: one line that says what, where, and what was expected; nothing is done first."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpu_validate.__main__ import main
from gpu_validate.program import Program
from sim.errors import InputError
from sim.kv.event_file import EventFile
from sim.kv.events import EVENT, Kind, KVEventLog
from sim.kv.replay import Replay
from tests.support.replay import logged

ROOT = Path(__file__).parents[2]
FORMS = [".parquet", ".npz"]


@pytest.fixture(scope="module")
def log() -> KVEventLog:
    log = logged(requests=((0, 40, 12), (0, 30, 8)))
    log.model, log.kv_dtype = "toy", "bf16"
    return log


@pytest.fixture(params=FORMS)
def path(request: pytest.FixtureRequest, tmp_path: Path, log: KVEventLog) -> Path:
    path = tmp_path / f"events{request.param}"
    log.save(path)
    return path


def refused(path: Path) -> str:
    """Return the one line with which a file is refused, when it is opened or when it is read."""
    with pytest.raises(InputError) as caught:
        list(EventFile(path).chunks())
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def changed(path: Path, columns: dict[str, Any] | None = None, meta: dict[str, str | None] | None = None) -> Path:
    """Write the file anew with other columns or other metadata; None leaves one out."""
    if path.suffix == ".npz":
        with np.load(path) as archive:
            members = {name: archive[name] for name in archive.files}
        members |= {f"meta.{name}": value if value is None else np.array(value) for name, value in (meta or {}).items()}
        members |= columns or {}
        np.savez(path, **{name: value for name, value in members.items() if value is not None})
        return path
    table = pq.read_table(path)
    text = {key.decode(): value.decode() for key, value in table.schema.metadata.items()} | (meta or {})
    arrays = {name: table[name] for name in table.column_names} | (columns or {})
    table = pa.table({name: array for name, array in arrays.items() if array is not None})
    pq.write_table(table.replace_schema_metadata({k: v for k, v in text.items() if v is not None}), path)
    return path


def test_both_forms_hold_the_same(path: Path, log: KVEventLog):
    file = EventFile(path)
    assert (len(file), file.block_size, file.num_blocks) == (len(log), 4, 50)
    assert (file.model, file.kv_dtype) == ("toy", "bf16")
    parts = list(file.chunks(100))
    assert [len(part) for part in parts[:-1]] == [100] * (len(log) // 100)
    assert (np.concatenate(parts) == log.records).all()
    assert (np.concatenate(list(file.chunks())) == log.records).all()
    assert (KVEventLog.load(path).records == log.records).all()
    Replay.of(file)


def test_a_log_of_nothing(tmp_path: Path):
    for form in FORMS:
        path = tmp_path / f"none{form}"
        KVEventLog(np.zeros(0, EVENT), 4, 50).save(path)
        assert len(KVEventLog.load(path)) == 0


def test_a_log_from_before_the_count_was_in_it(path: Path, log: KVEventLog):
    file = EventFile(changed(path, meta={"events": None, "model": None, "kv_dtype": None}))
    assert len(file) == len(log)
    assert file.model == ""


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"vtoken.kv_events": "7"}, "KV event log version 7, expected 3"),
        ({"vtoken.kv_events": None}, "KV event log version None, expected 3"),
        ({"block_size": "0"}, "block_size: expected a whole number of at least 1, got '0'"),
        ({"block_size": "-4"}, "block_size: expected a whole number of at least 1, got '-4'"),
        ({"num_blocks": "1"}, "num_blocks: expected a whole number of at least 2, got '1'"),
        ({"num_blocks": None}, "num_blocks: expected a whole number of at least 2, got ''"),
        ({"num_blocks": "9" * 30}, "num_blocks: expected a whole number"),
        ({"events": "9999"}, "truncated: "),
        ({"events": "many"}, "events: expected a whole number"),
    ],
)
def test_metadata(path: Path, meta: dict[str, str | None], message: str):
    assert message in refused(changed(path, meta=meta))


def test_fewer_rows_than_said(path: Path, log: KVEventLog):
    columns: dict[str, Any] = {name: log.records[name][:-5] for name in EVENT.names or ()}
    assert refused(changed(path, columns)) == f"truncated: {len(log) - 5:,} events, expected {len(log):,}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", 99, "event 7, column 'kind': expected 1 to 21, got 99"),
        ("kind", 0, "event 7, column 'kind': expected 1 to 21, got 0"),
        ("req", -2, "event 7, column 'req': expected a request, or -1 for STEP, got -2"),
        ("a", -1, "event 7, column 'a': expected at least 0, got -1"),
        ("b", 2**40, "event 7, column 'b': expected 32-bit numbers, got 1099511627776"),
        ("time_ns", -5, "event 7, column 'time_ns': expected at least 0, got -5"),
    ],
)
def test_numbers_that_have_no_place(path: Path, log: KVEventLog, name: str, value: int, message: str):
    column = log.records[name].astype(np.int64)
    column[7] = value
    assert refused(changed(path, {name: column})) == message


def test_columns(path: Path, log: KVEventLog):
    floats = log.records["a"].astype(float)
    assert refused(changed(path, {"a": floats})) == "column 'a': expected whole numbers, got float64"
    assert refused(changed(path, {"a": None})) == "column 'a' is missing, expected time_ns, kind, req, a, b"


def test_empty_fields(tmp_path: Path, log: KVEventLog):
    log.save(tmp_path / "events.parquet")
    column = pa.array([None, *log.records["a"][1:].tolist()], pa.int32())
    assert "column 'a' has empty fields" in refused(changed(tmp_path / "events.parquet", {"a": column}))


def test_columns_of_different_lengths(tmp_path: Path, log: KVEventLog):
    log.save(tmp_path / "events.npz")
    assert "different lengths" in refused(changed(tmp_path / "events.npz", {"a": log.records["a"][:-1]}))


def test_a_file_cut_off(path: Path):
    whole = path.read_bytes()
    for share in (0.0, 0.3, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        assert "not a KV event log" in refused(path)


def test_a_file_with_a_damaged_page(path: Path, log: KVEventLog):
    """Found out at the latest when the events are read, or as events that are none."""
    whole = bytearray(path.read_bytes())
    for at in range(60, len(whole) // 2, 400):
        spoilt = whole.copy()
        spoilt[at : at + 20] = bytes(b ^ 0xFF for b in spoilt[at : at + 20])
        path.write_bytes(spoilt)
        records = log.records
        with contextlib.suppress(InputError):
            records = KVEventLog.load(path).records
        assert (records == log.records).all()  # if they were read, then the damage was where nobody reads


def test_other_files(tmp_path: Path):
    for form in FORMS:
        path = tmp_path / f"other{form}"
        path.write_text("req_id,arrival_s\n")
        assert "not a KV event log" in refused(path)
        assert refused(tmp_path / f"missing{form}") == "no such file"
        (tmp_path / f"folder{form}").mkdir()
        assert refused(tmp_path / f"folder{form}") == "no such file"
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    assert "one array, not several" in refused(tmp_path / "one.npz")


class Bomb:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return (exec, ("raise AssertionError('unpickled')",))


def test_a_pickle_is_never_loaded(tmp_path: Path, log: KVEventLog):
    path = tmp_path / "events.npz"
    log.save(path)
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files}
    np.savez(path, **(members | {"a": np.array([Bomb()], dtype=object)}))
    assert "allow_pickle=False" in refused(path)
    # An archive whose member is a pickle, and a file that is one.
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kind.npy", b"\x80\x04K\x01.")
    assert "not a KV event log" in refused(path)
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    path.write_bytes(buffer.getvalue())
    assert "allow_pickle=False" in refused(path)


def test_nothing_in_the_project_loads_a_pickle():
    loads = re.compile(r"\bpickle\b|torch\.load|allow_pickle\s*=\s*True|np\.load\((?!.*allow_pickle=False)|read_pickle")
    for folder in ("sim", "gpu_validate"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text().splitlines()
            wrong = [line for line in lines if loads.search(line)]
            assert not wrong, path


# -- the same from the command line, and what only the events themselves show ------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; return its line."""
    code = main(["replay", "--quiet", *arguments])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").strip()


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was allocated")

    for name in ("empty", "zeros", "full", "ones", "zeros_like", "empty_like", "arange"):
        monkeypatch.setattr(torch, name, refuse)


@pytest.mark.usefixtures("nothing_allocated")
def test_events_that_cannot_have_happened(tmp_path: Path, log: KVEventLog, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "events.npz"

    def spoilt(change: Callable[[np.ndarray], np.ndarray | None]) -> str:
        records = log.records.copy()
        given = change(records)
        spoilt = KVEventLog(records if given is None else given, 4, 50, model="toy", kv_dtype="bf16")
        spoilt.save(path)
        line = said(capsys, "--events", str(path))
        assert line.startswith(f"{path}: ")
        return line

    kinds = log.records["kind"]
    move = int(np.flatnonzero(kinds == Kind.MOVE)[0])
    living = int(np.flatnonzero((kinds == Kind.EVICT) & (np.arange(len(kinds)) > move))[0])

    def to_a_live_slot(records: np.ndarray) -> None:
        records["b"][move] = records["b"][living]

    line = spoilt(to_a_live_slot)
    assert re.search(rf"event {move} \(MOVE .*: (slot \d+ holds a live token|the copy brought|block \d+ is)", line)
    # Cut off in every way that a count does not show: in a step's tokens, between tokens and STEP, in a commit.
    append = int(np.flatnonzero(kinds == Kind.APPEND)[5])
    assert "truncated: it ends within the step behind step" in spoilt(lambda records: records[: append + 1])
    commit = int(np.flatnonzero(kinds == Kind.COMMIT)[0])
    assert "truncated: after" in spoilt(lambda records: records[:commit])
    assert "1 tokens were written for it" in spoilt(lambda records: np.delete(records, append))
    step = int(np.flatnonzero(kinds == Kind.STEP)[3])
    assert "not between the tokens of a step and its STEP" in spoilt(lambda records: np.delete(records, step))


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "toi"], "did you mean 'toy'"),
        (["--attention", "pagd"], "did you mean 'paged'"),
        (["--mover", "torhc"], "did you mean 'torch'"),
        (["--queue", "snyc"], "did you mean 'sync'"),
        (["--dtype", "fp61"], "did you mean 'fp16'"),
        (["--visible", "lvie"], "did you mean 'live'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--steps", "3"], "--steps: expected A:B, two step numbers, got '3'"),
        (["--steps", "9:3"], "steps: expected A:B with 0 <= A < B, got 9:3"),
        (["--steps", "900:901"], "steps 900:901: the log has steps 0 to"),
        (["--layers", "0"], "--layers: expected 1 to 2 for toy, got 0"),
        (["--layers", "3"], "--layers: expected 1 to 2 for toy, got 3"),
        (["--sample", "2"], "sample: expected a share"),
        (["--sample", "x"], "invalid float value"),
        (["--evnts", "x"], "unrecognized arguments: --evnts"),
    ],
)
def test_what_cannot_be_asked_for(
    arguments: list[str], message: str, tmp_path: Path, log: KVEventLog, capsys: pytest.CaptureFixture[str]
):
    log.save(tmp_path / "events.npz")
    assert message in said(capsys, "--events", str(tmp_path / "events.npz"), *arguments)


@pytest.mark.usefixtures("nothing_allocated")
def test_a_pool_that_does_not_fit(tmp_path: Path, log: KVEventLog, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "events.npz"
    KVEventLog(log.records, 4, 2**28, model="llama-3.1-70b", kv_dtype="bf16").save(path)
    line = said(capsys, "--events", str(path), "--device", "cpu")
    assert re.search(r"cpu has [\d.]+ GiB free, needed are 32\d{4}\.\d+ GiB \(KV pool of 268435456 blocks", line)


def test_a_log_without_a_model(tmp_path: Path, log: KVEventLog, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")
    KVEventLog(log.records, 4, 50).save(tmp_path / "events.npz")
    assert "give --model" in said(capsys, "--events", str(tmp_path / "events.npz"))


@pytest.mark.parametrize("command", ["replay", "calibrate", "validate"])
def test_without_torch_every_command_says_how_to_get_it(command: str):
    needed = {"replay": ["--events", "x"], "calibrate": ["--out", "x"]}
    needed["validate"] = [*needed["replay"], "--profile", "y"]
    for module in ("gpu_validate.__main__", "sim.cli"):
        call = f"from {module} import main; sys.exit(main({[command, *needed[command]]!r}))"
        code = f"import sys; sys.modules['torch'] = None; {call}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr == (
            f"error: {command} needs torch, which is not installed here: pip install 'vtoken-sim[gpu]'\n"
        )


def test_a_program_names_the_file(path: Path, log: KVEventLog):
    KVEventLog(log.records[:-1][::-1], 4, 50).save(path)
    with pytest.raises(InputError, match=re.escape(f"{path}: event 0 ")):
        Program(EventFile(path)).check()
