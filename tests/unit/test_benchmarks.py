"""The benchmarks' tools; nothing here measures time."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import __main__ as command
from benchmarks import peers, report
from benchmarks.child import ROOT, FailedError, run
from benchmarks.figures import Figure, best_and_median, missed
from benchmarks.reclaimers import CASES
from benchmarks.steps import count_events
from sim.kv.reclaim import reclaimers
from sim.kv.view import View
from sim.registry import parse_spec
from sim.study.config import SimConfig
from sim.study.run import build_engine
from sim.workload.trace import Trace

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_bounds_are_judged_by_the_value() -> None:
    figures = [
        Figure("a", "kept", 1.0, "x", most=1.0),
        Figure("a", "missed", 1.1, "x", best=0.9, most=1.0),
        Figure("a", "too few", 0.5, "x", least=1.0),
        Figure("a", "not measured", None, "x", most=1.0),
        Figure("a", "without a bound", 7.0, "x"),
    ]
    assert [figure.kept for figure in figures] == [True, False, False, None, None]
    assert [figure.name for figure in missed(figures)] == ["missed", "too few"]
    assert [figure.bound for figure in figures] == ["at most 1", "at most 1", "at least 1", "at most 1", ""]


def test_best_is_the_lowest() -> None:
    assert best_and_median([3.0, 1.0, 10.0]) == (1.0, 3.0)


def test_a_child_is_charged_for_its_cpu() -> None:
    idle = run([sys.executable, "-c", "print('done')"])
    busy = run([sys.executable, "-c", BUSY])
    assert idle.output == "done\n"
    assert busy.cpu_s >= 0.3
    assert busy.wall_s > 0


def test_grandchildren_are_charged_too() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    assert run([sys.executable, "-c", code]).cpu_s >= 0.3


def test_a_child_is_charged_for_its_memory() -> None:
    # From a small process, as the benchmarks do: Linux counts what the parent held, and pytest holds much.
    code = "from benchmarks.child import run; import sys; print(run([sys.executable, '-c', sys.argv[1]]).rss_bytes)"
    small, large = (
        int(run([sys.executable, "-c", code, child], env={"PYTHONPATH": str(ROOT)}).output)
        for child in ("pass", "kept = bytes(b'x') * (64 << 20)")
    )
    assert large - small > 48 << 20


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(FailedError, match=r"ended with 3: this is why$"):
        run([sys.executable, "-c", "import sys; print('this is why\\n', file=sys.stderr); sys.exit(3)"])


def test_events_are_counted_in_the_queue() -> None:
    trace = Trace(np.zeros(3, np.int64), np.full(3, 40), np.full(3, 10))
    engine = build_engine(SimConfig(policy="full", reclaimer="none", kv_blocks=100), trace)
    # One event starts the process and one ends it; each of the 10 steps is one.
    assert count_events(engine) == pytest.approx(12 / 10)


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "paged_eviction"])
def test_few_long_requests_take_cells_for_their_tokens(policy: str) -> None:
    """By the longest request a cell array of the batch would have 64 x 6,000; kernels go through what is there."""
    prompts = np.array([6000] * 4 + [64] * 60)
    trace = Trace(np.zeros(64, np.int64), prompts, np.full(64, 40))
    config = SimConfig(policy=policy, reclaimer="vtoken", budget_tokens=6000, kv_blocks=4000)
    engine = build_engine(config.replace(max_num_batched_tokens=1 << 15), trace)
    cells, live = [], []
    view = engine.cache.view

    def seen(rows: NDArray[np.int64], *budget: Any) -> View:
        if len(rows) == 64:
            cells.append(engine.cache.arena.top)
            live.append(int(engine.cache.store.s.rows["live"].sum()))
        return view(rows, *budget)

    setattr(engine.cache, "view", seen)  # noqa: B010 - an assignment to a method, which type checkers refuse
    engine.run()
    assert len(live) >= 39
    assert max(np.array(cells) / np.array(live)) < 2


def test_every_reclaimer_has_its_cost() -> None:
    assert {parse_spec(name)[0] for name in CASES} == set(reclaimers.names()) - {"none"}


def test_parts_keep_their_order() -> None:
    options = command._parser().parse_args(["--only", "start, steps"])
    assert options.only == ("steps", "start")


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "steps,speed"])
    assert "unknown part 'speed': expected some of steps, policies" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)])
def test_a_missed_bound_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, code: int
) -> None:
    monkeypatch.setattr(command, "_measure", lambda part, _: [Figure(part, "thing", value, "x", most=2.0)])
    assert command.main(["--only", "start"]) == code
    assert ("bound missed: thing: 3 x, at most 2" in capsys.readouterr().out) == bool(code)


def test_a_part_that_fails_is_an_error_but_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(part: str, _: bool) -> list[Figure]:
        if part == "sweep":
            raise FailedError("python ended with 1: it broke")
        return [Figure(part, "thing", 1.0, "x", most=2.0)]

    monkeypatch.setattr(command, "_measure", measure)
    assert command.main(["--only", "sweep,start"]) == 1
    out = capsys.readouterr().out
    assert "it broke" in out
    assert "thing" in out


def test_figures_are_saved_and_shown_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold figures\n{report.END}\nafter\n")
    figures = [Figure("steps", "thing", 12345.6, "timeouts", best=0.1234, most=2e4, note="so")]
    saved = report.write(figures, "python -m benchmarks --save")
    content = json.loads(saved.read_text())
    assert content["figures"][0]["kept"] is True
    assert saved.name.startswith(content["date"])
    report.update_readme(saved, readme)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old figures" not in text
    assert "| steps | thing | 12,346 | 0.123 | timeouts | at most 20000 | yes | so |" in text


def test_the_readme_has_a_place_for_the_figures() -> None:
    text = report.README.read_text()
    assert text.index(report.BEGIN) < text.index(report.END)


def test_a_peer_that_cannot_be_installed_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "_call", no_network)
    with pytest.raises(peers.NotAvailableError, match=r"^sched-sim==0\.2\.1 could not be installed: no route to host$"):
        peers.SCHED_SIM.install()
    assert not (tmp_path / "sched-sim" / "installed").exists()


def test_a_peer_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def install(command: list[object]) -> None:
        called.append(command)
        peers.SCHED_SIM.environment.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "_call", install)
    peers.SCHED_SIM.install()
    peers.SCHED_SIM.install()
    assert len(called) == 2  # one environment, one pip
