"""The torch harness on a machine that has torch and NumPy and little else, and kernels where there is no numba."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sim.kv.events import KVEventLog
from tests.support.replay import logged

ROOT = Path(__file__).parents[2]

ABSENT = (
    "simpy", "numba", "pyarrow", "pydantic", "typer", "click", "rich",
    "sim.study", "sim.cli", "sim.workload", "sim.serving.engine", "sim.serving.scheduler",
)  # fmt: skip

BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in {ABSENT!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(code: str, *arguments: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == expected, done.stderr
    return done


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = logged(requests=((0, 40, 12), (0, 47, 9)), blocks=32)
    log.model, log.kv_dtype = "toy", "bf16"
    for name in ("events.npz", "events.parquet"):
        log.save(tmp_path_factory.getbasetemp() / name)
    return tmp_path_factory.getbasetemp()


def test_a_log_is_replayed_and_verified_there(log: Path):
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")
    code = BLOCK + "from gpu_validate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    out = log / "report.json"
    done = run(code, "replay", "--events", str(log / "events.npz"), "--device", "cpu", "--verify", "--out", str(out))
    assert "equal to the simulator's, block for block" in done.stdout
    assert '"tokens_verified": ' in out.read_text()
    assert done.stderr == ""
    assert "usage: python -m gpu_validate replay" in run(code, "replay", "--help").stdout
    done = run(code, "replay", "--events", str(log / "events.parquet"), expected=2)
    assert done.stderr == (
        f"error: {log / 'events.parquet'}: Parquet needs pyarrow: install it, or give the log as .npz\n"
    )


def test_every_module_of_the_harness_is_imported_there():
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[gpu]'")
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "gpu_validate").rglob("*.py"))
        if path.stem not in ("__init__", "__main__") and path != ROOT / "gpu_validate" / "cli.py"
    ]
    needs = {"flashinfer": "flashinfer", "triton": "triton"}
    code = (
        BLOCK
        + f"""
import importlib
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert error.name in {list(needs)!r}, (module, error)
assert "simpy" not in sys.modules
"""
    )
    run(code)


CACHE = """
import hashlib
import numpy as np
from sim.kv.cache import KVCache
from sim.kv.events import Kind
from sim.kv.replay import Replay

random = np.random.default_rng(3)
cache = KVCache(60, 4, headroom_blocks=4, logging=True)
rows = []
for ordinal in range(3):
    rows.append(cache.open(ordinal, key=ordinal + 1, length=40, target=100))
    cache.note(Kind.ADMIT, ordinal, 0, 40)
    cache.sync_new_tokens(rows[-1], 40)
plans = []
for step in range(12):
    for row in rows:
        start, live = (int(cache.store.s.rows[row][field]) for field in ("start", "live"))
        living = cache.store.s.position[start : start + live - 1]
        cache.evict_tokens(row, living[random.random(len(living)) < 0.2].astype(np.int64))
    landed = [plan for plan in plans if random.random() < 0.5]
    for plan in landed:
        cache.apply_moves(plan)
    plans = [plan for plan in plans if plan not in landed]
    plans += [plan for row in rows if (plan := cache.plan_repack(row, 4)) is not None]
    for row in rows:
        cache.sync_new_tokens(row, 1)
cache.pack(np.array([row for row in rows if cache.store.s.rows[row]["plan"] < 0], np.int64))
log = cache.event_log()
Replay.of(log)
kinds = set(log.records["kind"].tolist())
assert {Kind.COMMIT, Kind.MOVE, Kind.EVICT} <= kinds, kinds
print(len(log), hashlib.sha256(log.records.tobytes()).hexdigest())
"""


def test_the_control_plane_does_the_same_without_numba():
    compiled, plain = run(CACHE), run(BLOCK + CACHE)
    assert plain.stdout == compiled.stdout
    assert int(plain.stdout.split()[0]) > 200
    assert compiled.stderr == ""
    assert plain.stderr == "note: numba is not installed: kernels run as plain Python, the same but slow\n"


def test_reading_a_log_says_nothing_about_numba(log: Path):
    code = (
        BLOCK
        + """
from pathlib import Path
from sim.kv.event_file import EventFile
from gpu_validate.program import Program
print(Program(EventFile(Path(sys.argv[1]))).check().steps)
"""
    )
    done = run(code, str(log / "events.npz"))
    assert done.stderr == ""
    assert int(done.stdout) == sum(KVEventLog.load(log / "events.npz").records["kind"] == 1)
