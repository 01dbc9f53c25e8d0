"""The page as a file: whole, loading nothing, running nothing that was not written here, saying what the data say."""

from __future__ import annotations

import html.parser
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sim import cli
from sim.study.config import SimConfig
from sim.study.report import page, write_report
from sim.study.report.settings import spec_toml
from sim.study.report.summary import command, frame_of_run, run_table
from sim.study.spec import SweepSpec
from sim.study.store import Store
from sim.study.tables import markdown
from tests.support import made_up
from tests.support.replay import logged

EVIL = "h2o:note=</script ><script>window.stolen=1</script ><img src=x onerror='window.stolen=1'>"
SPEC = SweepSpec(
    base={"gpu_memory_utilization": 0.3},
    grid={"policy": ["h2o", EVIL], "budget": [0.3, 0.5], "reclaimer": ["naive", "vtoken"]},
    include=[{"policy": "full", "reclaimer": "none"}],
    name='<b>"mine"</b>',
)
VOID = {"meta", "input", "img", "br", "link"}
SVG = {"path"}


class Checker(html.parser.HTMLParser):
    """Checks that elements are closed in order and that no name is given twice; collects what refers elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        assert len(given) == len(attrs), f"{tag}: an attribute twice"
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given[name] or "" for name in ("src", "href", "action", "data") if name in given]
        assert not [name for name in given if name.startswith("on")], tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG, attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(path: Path) -> tuple[str, Checker]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    return text, checker


def data_of(text: str) -> dict[str, object]:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    assert "<" not in match[1]  # "</script " would end the element, too
    value = json.loads(match[1])
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("sweep"))
    store.create()
    for run in SPEC.expand().runs:
        store.put(run.config_hash, made_up.result(run.config, 30, 60))
    (store.root / "sweep.json").write_text(json.dumps({"format": 1, "spec": SPEC.to_dict(), "runs": []}))
    logged().save(store.root / "events.parquet")
    return store.root


@pytest.fixture(scope="module")
def report(sweep: Path) -> Path:
    return write_report(sweep, events=[f"{EVIL}={sweep / 'events.parquet'}"])


def test_the_page_is_whole_and_refers_to_nothing_outside(report: Path) -> None:
    text, checker = checked(report)
    assert checker.tags.count("script") == 2
    assert len(checker.links) > 10
    assert all(link.startswith(("#", "data:image/")) for link in checker.links)
    assert re.findall(r"\w+://[\w.-]+", re.sub(r"base64,[\w+/=]+", "", text)) == []
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_names_from_outside_stay_text(report: Path) -> None:
    text, checker = checked(report)
    assert "<b>" not in text
    assert "</script ><script>window.stolen" not in text
    assert text.count("window.stolen=1") > 3
    assert checker.tags.count("img") == sum(link.startswith("data:image/") for link in checker.links)
    data = data_of(text)
    assert EVIL in json.dumps(data["table"])
    assert data["maps"][0]["label"] == EVIL  # type: ignore[index]


def test_what_looks_like_a_name_of_the_template_is_left_alone() -> None:
    assert page._filled("{{a}}-{{b}}", {"a": "{{b}}", "b": "x"}) == "{{b}}-x"


def test_the_same_directory_gives_the_same_bytes(sweep: Path, report: Path, tmp_path: Path) -> None:
    again = write_report(sweep, tmp_path / "again.html", events=[f"{EVIL}={sweep / 'events.parquet'}"])
    assert again.read_bytes() == report.read_bytes()


def test_the_table_has_the_figures_of_the_store(sweep: Path) -> None:
    frame, _ = Store(sweep).frame()
    data = run_table(frame)
    names = [column["name"] for column in data["columns"]]
    assert names[:3] == ["policy", "keeps", "reclaimer"]
    assert len(data["rows"]) == len(frame) == 9
    place = {name: i for i, name in enumerate(names)}
    rows = {row[place["config_hash"]]: row for row in data["rows"]}
    for _, run in frame.iterrows():
        row = rows[run["config_hash"]]
        assert row[place["retained_blocks_mean"]] == run["retained_blocks_mean"]
        assert row[place["e2e_s_p95"]] == run["e2e_s_p95"]
    changes = [row[place["retained_blocks_mean_vs_naive"]] for row in data["rows"]]
    of = [row[place["reclaimer"]] for row in data["rows"]]
    assert all(change == 0 for change, reclaimer in zip(changes, of, strict=True) if reclaimer == "naive")
    assert all(change < -0.2 for change, reclaimer in zip(changes, of, strict=True) if reclaimer == "vtoken")
    assert [change for change, reclaimer in zip(changes, of, strict=True) if reclaimer == "none"] == [None]
    columns = {column["name"]: column for column in data["columns"]}
    assert {name for name, column in columns.items() if column["facet"]} == {"policy", "keeps", "reclaimer"}
    assert columns["retained_blocks_mean"]["change"] == "retained_blocks_mean_vs_naive"
    assert columns["e2e_s_p95"]["unit"] == "s"
    assert columns["requests_per_s"]["unit"] == "1/s"
    assert all(column["number"] for name, column in columns.items() if name.endswith("_mean"))


def test_the_means_are_those_that_results_prints(sweep: Path, report: Path) -> None:
    frame, _ = Store(sweep).frame()
    text, _ = checked(report)
    printed = [line for line in markdown(frame).splitlines() if line.startswith("| h2o |")]
    assert len(printed) == 2 * 6  # budgets times figures
    for line in printed:
        for cell in line.strip("| ").split(" | "):
            assert f">{cell}</td>" in text


def test_a_command_makes_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    for config in (
        SimConfig(),
        SimConfig(policy="random", budget_tokens=77, prefix_caching=True, reserve_full_prompt=False, seed=4),
        SimConfig(policy="full", reclaimer="none", trace="a b'c.csv", kv_blocks=90),
        SimConfig(budget_memory="1GiB", low_watermark=0.25),
    ):
        words = shlex.split(command(config))
        assert words[:2] == ["vtoken", "run"]
        assert cli.main(["config", "show", *words[2:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == config.model_dump()


def test_the_specification_reads_back() -> None:
    assert SweepSpec.from_dict(tomllib.loads(spec_toml(SPEC))) == SPEC


def test_a_run_without_events_says_how_to_get_a_map(tmp_path: Path) -> None:
    config = SimConfig(policy="random", kv_blocks=500)
    made_up.result(config, 20, 40).save(tmp_path / "run")
    text, _ = checked(write_report(tmp_path / "run"))
    assert f"{command(config)} --events --out RUN" in text
    assert data_of(text)["maps"] == []
    assert "kv_blocks" in text
    made_up.result(config, 20, 40).save(tmp_path / "run")  # a page in it does not keep a run from being replaced
    assert not (tmp_path / "run" / "report.html").exists()


def test_logs_in_the_directory_are_found(sweep: Path, tmp_path: Path) -> None:
    for name, reclaimer in (("one", "naive"), ("two", "vtoken"), ("three", "vtoken")):
        folder = sweep / "events" / name
        made_up.result(SimConfig(reclaimer=reclaimer), 20, 40).save(folder)
        logged(reclaimer=reclaimer).save(folder / "events.parquet")
    text, _ = checked(write_report(sweep, tmp_path / "page.html"))
    labels = [each["label"] for each in data_of(text)["maps"]]  # type: ignore[attr-defined]
    # The sweep's own, and the folders by name; equal labels are told apart.
    assert labels[1:] == ["h2o keeping 0.5, naive", "h2o keeping 0.5, vtoken (1)", "h2o keeping 0.5, vtoken (2)"]
    assert len(labels) == 4


def test_large_vector_pictures_are_pixels(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.study.report.figures.MOST_SVG_BYTES", 60_000)
    _, checker = checked(write_report(sweep, tmp_path / "page.html"))
    kinds = {link.partition(";")[0] for link in checker.links if link.startswith("data:")}
    assert kinds == {"data:image/png", "data:image/svg+xml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/missing"], "missing: expected the directory of a run or a sweep, there is none"),
        (["{tmp}"], "config.json: no such file"),
        (["{sweep}", "--events", "a={tmp}/none.parquet"], "--events a="),
        (["{sweep}", "--events", "{sweep}/runs"], "no file"),
        (["{sweep}", "--events", "{tmp}/text.parquet"], "not a KV event log"),
        (["{sweep}", "--out", "{tmp}"], "it is a directory"),
        (["{sweep}", "--out", "{tmp}/no/page.html"], "there is no directory"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    arguments: list[str], message: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.parquet").write_text("none")
    before = sorted(tmp_path.rglob("*"))
    words = [word.format(tmp=tmp_path, sweep=sweep) for word in arguments]
    assert cli.main(["report", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_one_run_is_a_row_with_its_configuration() -> None:
    config = SimConfig(policy="random", kv_blocks=500)
    data = run_table(frame_of_run(made_up.result(config, 20, 40)))
    assert len(data["rows"]) == 1
    assert not any(column["facet"] for column in data["columns"])
    row = dict(zip((column["name"] for column in data["columns"]), data["rows"][0], strict=True))
    assert (row["policy"], row["kv_blocks"], row["command"]) == ("random", 500, command(config))


def test_the_demo_draws_a_setting_of_its_sweep() -> None:
    demo = Path(__file__).parents[2] / "experiments" / "demo"
    settings = [run.config for run in SweepSpec.from_toml(demo / "sweep.toml").expand().runs]
    for reclaimer in ("naive", "vtoken"):
        assert SimConfig.from_toml(demo / "events.toml", reclaimer=reclaimer).replace(head=None) in settings
