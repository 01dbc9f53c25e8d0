"""Pictures: they say what the data say, label their axes, cover nothing, and have the same bytes each time."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from sim.errors import InputError
from sim.kv.events import KVEventLog
from sim.kv.policies import policies
from sim.study import plots
from sim.study.config import SimConfig
from sim.study.plots.medium import PAPER, SCREEN, STYLES, current_style, use_style
from sim.study.plots.pool import MOST_BLOCKS, _classes, window
from sim.study.plots.style import (
    FORMATS,
    OTHER_POLICIES,
    POLICY_LOOKS,
    RAMP_COLOURS,
    RECLAIMER_LOOKS,
    SLOT_COLOURS,
    caption_of,
    edge_colour,
    policy_colour,
    policy_marker,
    reclaimer_line,
    save,
)
from sim.study.result import RunResult
from sim.study.spec import SweepSpec
from sim.study.store import Store
from tests.support import made_up
from tests.support.replay import logged

SPEC = SweepSpec(
    grid={"policy": ["h2o", "streaming_llm"], "budget": [0.3, 0.5], "reclaimer": ["naive", "vtoken", "ideal"]},
    seeds=[0, 1],
    include=[{"policy": "full", "reclaimer": "none"}],
)


@pytest.fixture(scope="module")
def result() -> RunResult:
    return made_up.result(SimConfig(kv_blocks=1000), requests=60, steps=300)


@pytest.fixture(scope="module")
def group() -> list[RunResult]:
    return [made_up.result(SimConfig(reclaimer=name), 60, 100) for name in ("naive", "vtoken", "ideal")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("sweep"))
    store.create()
    for run in SPEC.expand().runs:
        store.put(run.config_hash, made_up.result(run.config, 30, 60))
    return store


def figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


def check(figure: Figure) -> None:
    """Check what holds for every picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    panels = [axes for axes in figure.axes if axes.axison]
    legends = [*figure.legends, *(axes.get_legend() for axes in panels)]
    for axes, legend in itertools.product(panels, [legend for legend in legends if legend is not None]):
        assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
    for artist in (*legends, *(axes.title for axes in panels)):
        if artist is not None and artist.get_window_extent(renderer).width > 1:
            box = artist.get_window_extent(renderer)
            assert box.x0 >= -1
            assert box.x1 <= figure.bbox.x1 + 1


def test_every_picture_of_a_run_is_labelled_and_covers_nothing(result: RunResult) -> None:
    names = []
    for name, figure in plots.run_figures(result):
        names.append(name)
        check(figure)
        for axes in figure.axes:
            assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title("left")
    assert names == ["slots", "block_liveness", "retained_blocks", "concurrency", "latency", "pool"]


def test_every_picture_of_a_sweep_covers_nothing(sweep: Store) -> None:
    names = []
    for name, figure in plots.sweep_figures(sweep):
        names.append(name)
        check(figure)
        assert figure.get_suptitle()
    assert names == [
        "fragmentation",
        "retained_blocks",
        "concurrency",
        "throughput",
        "latency",
        "slots",
        "block_liveness",
        "retained_blocks_cdf",
        "retained_blocks_paired",
        "pool",
    ]


def test_slots_add_up_to_the_pool(result: RunResult) -> None:
    axes = plots.slots_over_time(result)
    assert "simulated time (s)" in axes.get_xlabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "free",
        "tail, not yet written",
        "dead",
        "live",
    ]
    top = max(path.vertices[:, 1].max() for layer in axes.collections for path in layer.get_paths())
    assert top == pytest.approx(1000 * 16)
    dead = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert dead.max() == pytest.approx((result.steps["live_slots"] + result.steps["dead_slots"]).max())


def test_copies_in_flight_are_a_layer_of_their_own() -> None:
    result = made_up.result(SimConfig(kv_blocks=1000), 10, 50)
    result.steps["reserved_blocks"][10:] = 7
    result.steps["free_blocks"][10:] -= 7
    axes = plots.slots_over_time(result)
    assert [text.get_text() for text in axes.get_legend().get_texts()][1] == "copy destination"


def test_a_pool_that_is_mostly_free_is_cut_and_says_so() -> None:
    result = made_up.result(SimConfig(kv_blocks=1000), 10, 50)
    result.steps["free_blocks"] += 100_000
    axes = plots.slots_over_time(result)
    assert "the pool has 1,616,000" in axes.get_ylabel()
    assert axes.get_ylim()[1] == pytest.approx(1.3 * 16 * result.steps["used_blocks"].max())


def test_block_shares_add_up_to_one(result: RunResult) -> None:
    axes = plots.liveness_over_time(result)
    assert axes.get_ylim() == (0, 1)
    assert len(axes.collections) == 6
    assert axes.collections[-1].get_paths()[0].vertices[:, 1].max() == pytest.approx(1.0)


def test_pairs_are_the_same_request_in_both_runs() -> None:
    ours = {"req_id": np.array(["a", "b", "c", "d"], object), "retained_blocks": np.array([5.0, 8.0, 1.0, np.nan])}
    naive = {"req_id": np.array(["d", "b", "x", "a"], object), "retained_blocks": np.array([2.0, 10.0, 3.0, 10.0])}
    assert plots.paired_reduction(ours, naive).tolist() == pytest.approx([-0.2, -0.5])
    assert len(plots.paired_reduction({name: values[:0] for name, values in ours.items()}, naive)) == 0


def test_cdfs_have_a_line_a_reclaimer_in_the_colour_of_the_policy(group: list[RunResult]) -> None:
    axes = plots.retained_cdf(group)
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["naive", "vtoken", "ideal"]
    assert {line.get_color() for line in lines.values()} == {policy_colour("h2o")}
    assert np.median(lines["naive"].get_xdata()) > np.median(lines["vtoken"].get_xdata())
    change = plots.reduction_cdf(group)
    assert "median vtoken -" in change.get_title("left")
    assert [line.get_label() for line in change.get_lines()][:2] == ["vtoken", "ideal"]
    check(figure_of(change))


def test_bars_show_the_table(sweep: Store) -> None:
    table, _ = sweep.frame()
    figure = plots.retained_by_setting(table)
    panels = {axes.get_title("left"): axes for axes in figure.axes}
    assert list(panels) == ["full", "h2o", "streaming_llm"]
    heights = [bar.get_height() for bar in panels["h2o"].patches]
    rows = table[(table["policy"] == "h2o") & (table["budget"] == 0.3)]
    naive = rows[rows["reclaimer"] == "naive"]["retained_blocks_mean"].mean()
    assert heights[0] == pytest.approx(naive)
    assert len(heights) == 6
    assert panels["h2o"].patches[0].get_facecolor() == to_rgba(policy_colour("h2o"))
    assert len(panels["full"].patches) == 1


def test_looks_tell_policies_and_reclaimers_apart() -> None:
    assert set(policies.names()) <= set(POLICY_LOOKS)
    for part in range(2):
        assert len({look[part] for look in POLICY_LOOKS.values()}) == len(POLICY_LOOKS)
    for part in range(3):
        assert len({look[part] for look in RECLAIMER_LOOKS.values()}) == len(RECLAIMER_LOOKS)
    assert policy_colour("h2o:recent=0.2") == policy_colour("h2o")
    assert policy_colour("yours") == policy_colour("yours:x=1")
    assert policy_marker("tova:x=1") == policy_marker("tova") != policy_marker("h2o")
    assert reclaimer_line("vtoken:theta_f=0.1") != reclaimer_line("vtoken")
    assert reclaimer_line("yours") == reclaimer_line("yours")


def test_the_steps_from_dead_to_live_are_told_apart_without_hues() -> None:
    def lightness(colour: str) -> float:
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgba(colour)[:3]]
        return 116 * float(np.dot(linear, (0.2126, 0.7152, 0.0722))) ** (1 / 3) - 16

    steps = [lightness(colour) for colour in RAMP_COLOURS]
    assert all(darker < lighter - 2 for lighter, darker in itertools.pairwise(steps))
    assert RAMP_COLOURS[-1] == SLOT_COLOURS["live"]


def test_pool_classes_are_the_quarters_of_a_block() -> None:
    live = np.array([0, 0, 1, 4, 5, 8, 9, 12, 13, 15, 16])
    owner = np.array([-1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    assert _classes(live, owner, 16).tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert _classes(np.array([0, 1]), np.array([0, 0]), 1).tolist() == [1, 6]


def test_of_a_large_pool_the_part_that_changed_is_shown() -> None:
    changed = np.zeros(3 * MOST_BLOCKS, bool)
    changed[-50:] = True
    shown = window(changed)
    assert len(shown) == MOST_BLOCKS
    assert changed[shown].all() or changed[shown].sum() == 50
    assert window(np.ones(10, bool)).tolist() == list(range(10))


def test_without_a_repack_there_is_no_pool_to_draw() -> None:
    with pytest.raises(InputError, match="no repack was committed"):
        plots.pool_before_after(made_up.result(SimConfig(reclaimer="naive"), 5, 10))


@pytest.mark.parametrize("file_format", FORMATS)
def test_equal_results_give_equal_pictures(tmp_path: Path, result: RunResult, file_format: str) -> None:
    for name in ("one", "two"):
        for figure_name, figure in plots.run_figures(result):
            (tmp_path / name).mkdir(exist_ok=True)
            save(figure, tmp_path / name / f"{figure_name}.{file_format}")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_the_style_of_the_program_around_is_left_alone(result: RunResult) -> None:
    with mpl.rc_context({"font.size": 33.0, "axes.titlesize": 44.0}):
        axes = plots.concurrency_over_time(result)
        assert mpl.rcParams["font.size"] == 33.0
    assert axes.title.get_fontsize() < 15
    assert "matplotlib.pyplot" not in sys.modules


def test_draws_into_axes_that_are_given(result: RunResult) -> None:
    axes = Figure().subplots()
    assert plots.concurrency_over_time(result, axes) is axes


def test_a_run_in_which_nothing_decoded_can_be_drawn() -> None:
    result = made_up.result(SimConfig(), 3, 5)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        result.requests[name][:] = np.nan
    result.requests["retained_blocks"][:] = 0
    result.requests["retained_blocks_peak"][:] = 0
    result.requests["retained_blocks_finish"][:] = 0
    for name in ("empty", "q1", "q2", "q3", "q4", "full"):
        result.liveness[name][:] = 0
    for _, figure in plots.run_figures(result):
        FigureCanvasAgg(figure).draw()


def test_plots_a_directory(tmp_path: Path, result: RunResult, sweep: Store) -> None:
    result.save(tmp_path / "run")
    paths = plots.plot_directory(tmp_path / "run")
    assert all(path.parent == tmp_path / "run" / "plots" and path.stat().st_size > 1000 for path in paths)
    assert len(plots.plot_directory(sweep.root, tmp_path / "pictures", file_format="svg")) == 10
    assert {path.suffix for path in (tmp_path / "pictures").iterdir()} == {".svg"}


def of_both(result: RunResult, sweep: Store) -> list[tuple[str, Figure]]:
    """Return every picture of a run and of a sweep."""
    return [
        *plots.run_figures(result),
        *plots.sweep_figures(sweep),
        ("block_map", plots.block_map_around_repack(logged())),
    ]


def sizes_of_text(figure: Figure) -> set[float]:
    texts = figure.findobj(
        lambda artist: isinstance(artist, Text) and artist.get_text().strip() and artist.get_visible()
    )
    return {text.get_fontsize() for text in texts}


def test_a_paper_has_columns_small_text_and_captions_of_its_own(result: RunResult, sweep: Store) -> None:
    with use_style("paper"):
        figures = of_both(result, sweep)
    for name, figure in figures:
        check(figure)
        assert figure.get_figwidth() in (3.33, 7.0), name
        assert sizes_of_text(figure) <= {7, 7.5, 8}, name
        assert figure.get_suptitle() == "", name
        assert caption_of(figure), name
        if len([axes for axes in figure.axes if axes.axison]) == 1:
            (axes,) = (axes for axes in figure.axes if axes.axison)
            assert not axes.get_title("left").startswith(result.config.label), name
    widths = {name: figure.get_figwidth() for name, figure in figures}
    assert widths["latency"] == widths["slots"] == 7.0  # the three columns of the sweep
    assert figures[0][1].get_figwidth() == 3.33


def test_what_both_styles_draw_is_the_same(result: RunResult) -> None:
    on_screen = plots.retained_cdf(result)
    with use_style("paper"):
        on_paper = plots.retained_cdf(result)
    assert on_screen.get_title("left") == caption_of(on_paper) == caption_of(on_screen)
    assert on_paper.get_title("left") == ""
    for ours, theirs in zip(on_screen.get_lines(), on_paper.get_lines(), strict=True):
        assert np.array_equal(ours.get_xdata(), theirs.get_xdata())
        assert ours.get_color() == theirs.get_color()
        assert ours.get_linewidth() > theirs.get_linewidth()


def test_sizes_are_the_columns_of_a_paper() -> None:
    assert SCREEN.size(6.0, 3.0) == (6.0, 3.0)
    assert [PAPER.size(width, 3.0)[0] for width in (1.0, 7.0, 7.5, 7.6, 10.0, 30.0)] == [3.33] * 3 + [7.0] * 3


def test_a_style_ends_with_its_block() -> None:
    with mpl.rc_context({"font.size": 33.0}):
        with use_style("paper"):
            assert current_style() is PAPER
            assert mpl.rcParams["pdf.fonttype"] == mpl.rcParams["ps.fonttype"] == 42
        assert mpl.rcParams["font.size"] == 33.0
        told = "expected one of screen, paper, got 'papr'; did you mean 'paper'"
        with pytest.raises(InputError, match=told), use_style("papr"):
            pass
    assert current_style() is SCREEN
    with pytest.raises(ZeroDivisionError), use_style("paper"):
        _ = 1 / 0
    assert current_style() is SCREEN


def test_a_pdf_for_a_paper_has_truetype_fonts_a_title_and_no_date(tmp_path: Path, result: RunResult) -> None:
    for name in ("one", "two"):
        with use_style("paper"):
            save(plots.slots_over_time(result), tmp_path / f"{name}.pdf")
    data = (tmp_path / "one.pdf").read_bytes()
    assert data == (tmp_path / "two.pdf").read_bytes()
    fonts = re.findall(rb"/Subtype /(Type3|Type1|TrueType|CIDFontType2)\b", data)
    assert fonts
    assert set(fonts) <= {b"TrueType", b"CIDFontType2"}
    assert b"STIXGeneral" in data
    assert b"CreationDate" not in data
    assert b"of allocated slots dead" in data


@pytest.mark.parametrize(
    ("style", "file_format", "suffix"), [("paper", None, "pdf"), ("screen", None, "png"), ("paper", "svg", "svg")]
)
def test_a_style_has_a_format_that_another_one_wins_over(
    tmp_path: Path, result: RunResult, style: str, file_format: str | None, suffix: str
) -> None:
    result.save(tmp_path / "run")
    for place in ("one", "two"):
        paths = plots.plot_directory(tmp_path / "run", tmp_path / place, style=style, file_format=file_format)
    assert {path.suffix for path in paths} == {f".{suffix}"}
    for path in paths:
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()
    with pytest.raises(InputError, match="got 'screan'; did you mean 'screen'"):
        plots.plot_directory(tmp_path / "run", style="screan")


def test_saves_under_names_that_tell_the_format(tmp_path: Path, result: RunResult) -> None:
    axes = plots.slots_over_time(result)
    save(axes, tmp_path / "one.png")
    save(figure_of(plots.slots_over_time(result)), tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    with pytest.raises(
        InputError, match=r"slots\.pfd: expected a name that ends with one of png, svg, pdf; did you mean"
    ):
        save(axes, tmp_path / "slots.pfd")
    with pytest.raises(InputError, match="cannot write there"):
        save(axes, tmp_path / "missing" / "slots.png")


@pytest.mark.parametrize("style", STYLES)
def test_many_policies_go_into_lines_that_a_page_has_room_for(tmp_path: Path, style: str) -> None:
    spec = SweepSpec(
        grid={
            "policy": ["h2o", "random", "scissorhands", "streaming_llm", "snapkv", "expected_attention"],
            "budget": [0.3, 0.5, 0.7],
            "reclaimer": ["naive", "reuse", "vtoken", "ideal"],
        }
    )
    store = Store(tmp_path)
    store.create()
    for run in spec.expand().runs:
        store.put(run.config_hash, made_up.result(run.config, 5, 5))
    table, _ = store.frame()
    with use_style(style):
        figures = [
            plots.retained_by_setting(table),
            plots.latency_by_setting(table),
            figure_of(plots.setting_bars(table)),
        ]
        figures += [figure_of(plots.latency_ranges(table))]
    for figure in figures:
        check(figure)
        for axes in figure.axes:
            # Of labels in two lines, the second one is what may run into the next one.
            for names, side in ((axes.get_xticklabels(), "x"), (axes.get_yticklabels(), "y")):
                written = [label for label in names if label.get_text().split("\n")[-1].strip()]
                boxes = sorted(getattr(label.get_window_extent(), f"interval{side}").tolist() for label in written)
                assert all(one[1] <= other[0] for one, other in itertools.pairwise(boxes)), boxes
    assert figures[0].get_figwidth() <= 12.6
    lines = {axes.get_position().y0 for axes in figures[0].axes}
    assert len(lines) == 2
    assert {axes.get_ylim() for axes in figures[0].axes} == {figures[0].axes[0].get_ylim()}


def test_hatches_show_on_every_policy() -> None:
    def lightness(colour: str) -> float:
        return float(np.dot(to_rgba(colour)[:3], (0.3, 0.59, 0.11)))

    for colour in {look[0] for look in (*POLICY_LOOKS.values(), *OTHER_POLICIES)}:
        assert abs(lightness(edge_colour(colour)) - lightness(colour)) > 0.25, colour


def test_what_is_neither_a_run_nor_a_sweep_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is none"):
        plots.plot_directory(tmp_path / "missing")
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        plots.plot_directory(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match="no finished run"):
        plots.plot_directory(tmp_path)
    with pytest.raises(InputError, match="expected one of png, svg, pdf, got 'pgn'; did you mean 'png'"):
        plots.plot_directory(tmp_path, file_format="pgn")


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path, result: RunResult) -> None:
    result.save(tmp_path / "run")
    with pytest.raises(InputError, match="cannot write there"):
        plots.plot_directory(tmp_path / "run", tmp_path / "run" / "summary.json" / "x")


def test_the_slots_around_a_repack(tmp_path: Path, result: RunResult) -> None:
    log = logged()
    figure = plots.block_map_around_repack(log, "mine")
    check(figure)
    title = figure.get_suptitle()
    used, live, dead = [], [], []
    for axes in figure.axes:
        numbers = [int(number) for number in re.findall(r"\d+", axes.get_title("left"))]
        for values, number in zip((used, live, dead), numbers, strict=True):
            values.append(number)
    assert used[0] - used[1] == int(re.search(r"frees (\d+) blocks", title)[1]) > 0
    assert live[0] == live[1]
    assert dead[0] > dead[1]
    assert title.startswith("mine: ")
    result.save(tmp_path / "run")
    log.save(tmp_path / "run" / "events.parquet")
    assert plots.plot_directory(tmp_path / "run")[-1].name == "block_map.png"


def test_of_a_large_pool_the_slots_of_a_part_are_drawn() -> None:
    log = logged()
    figure = plots.block_map_around_repack(KVEventLog(log.records, log.block_size, 5000))
    assert "(480 of 5,000 blocks shown)" in figure.get_suptitle()


def test_without_a_repack_there_are_no_slots_to_draw() -> None:
    with pytest.raises(InputError, match="no repack took effect"):
        plots.block_map_around_repack(logged(reclaimer="naive"))
