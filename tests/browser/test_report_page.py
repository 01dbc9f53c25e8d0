"""The page in a real browser, from a file: it plays, sorts, filters, obeys the keyboard, complains about nothing."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from sim.kv.events import KVEventLog
from sim.study.config import SimConfig
from sim.study.plots.style import SLOT_COLOURS
from sim.study.report import write_report
from sim.study.report.block_map import chosen_moments
from sim.study.spec import SweepSpec
from sim.study.store import Store
from tests.support import made_up
from tests.support.replay import logged
from tests.support.report import State, judged, same

pytest.importorskip("selenium", reason="needs selenium: pip install -e '.[test]'")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: make browser"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,1000",
)
EVIL = "h2o:note=</script ><script>window.stolen=1</script ><img src=x onerror='window.stolen=1'>"
SPEC = SweepSpec(
    grid={"policy": ["h2o", "random", EVIL], "budget": [0.3, 0.5], "reclaimer": ["naive", "vtoken"]},
    include=[{"policy": "full", "reclaimer": "none"}],
    name=EVIL,
)

Browser = Any


@pytest.fixture(scope="module")
def logs() -> dict[str, KVEventLog]:
    """Two runs of the same requests."""
    return {"naive": logged(reclaimer="naive"), f"vtoken {EVIL}": logged()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, logs: dict[str, KVEventLog]) -> Path:
    store = Store(tmp_path_factory.mktemp("sweep"))
    store.create()
    for run in SPEC.expand().runs:
        store.put(run.config_hash, made_up.result(run.config, 30, 60))
    (store.root / "sweep.json").write_text(json.dumps({"spec": SPEC.to_dict()}))
    events = []
    for number, (label, log) in enumerate(logs.items()):
        log.save(store.root / f"{number}.parquet")
        events.append(f"{label}={store.root / f'{number}.parquet'}")
    return write_report(store.root, events=events)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


def load(browser: Browser, path: Path) -> None:
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(
        lambda driver: driver.execute_script("return 'ready' in document.documentElement.dataset")
    )


@pytest.fixture
def browser(chromium: Browser, page: Path) -> Iterator[Browser]:
    """Load the page; whatever a test did, the console must be empty after it."""
    load(chromium, page)
    yield chromium
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return window.stolen === undefined")


def part(browser: Browser, name: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, f'[data-part="{name}"]')


def index(browser: Browser) -> int:
    return int(browser.execute_script("return report.player.index"))


def press(browser: Browser, *keys: str) -> None:
    browser.execute_script("document.activeElement.blur()")
    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def column(browser: Browser, head: str) -> list[str]:
    heads = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#runs [data-part=head] th")]
    place = next(i for i, text in enumerate(heads) if " ".join(text.split()).startswith(head))
    rows = browser.find_elements(By.CSS_SELECTOR, "#runs [data-part=body] tr")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[place].text for row in rows]


def head(browser: Browser, text: str) -> Any:
    buttons = browser.find_elements(By.CSS_SELECTOR, "#runs [data-part=head] button")
    return next(button for button in buttons if " ".join(button.text.split()).startswith(text))


def test_names_are_text_and_nothing_is_loaded(browser: Browser) -> None:
    assert EVIL in browser.find_element(By.TAG_NAME, "h1").text
    assert EVIL in column(browser, "policy")
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith(("data:", "blob:")) for name in loaded)


def test_the_table_sorts_by_click_and_by_keyboard(browser: Browser) -> None:
    def figures() -> list[float]:
        return [float(text.split()[0].replace(",", "")) for text in column(browser, "retained blocks")]

    assert len(figures()) == 13
    assert figures() != sorted(figures())
    head(browser, "retained blocks").click()
    assert figures() == sorted(figures())
    sorted_by = browser.find_element(By.CSS_SELECTOR, "th[aria-sort]")
    assert sorted_by.get_attribute("aria-sort") == "ascending"
    browser.switch_to.active_element.send_keys(Keys.ENTER)  # the head keeps the focus
    assert figures() == sorted(figures(), reverse=True)
    head(browser, "policy").click()
    assert column(browser, "policy") == sorted(column(browser, "policy"))


def test_changes_against_naive_stand_behind_figures(browser: Browser) -> None:
    cells = dict(zip(column(browser, "reclaimer"), column(browser, "retained blocks"), strict=True))
    assert "\N{MINUS SIGN}" in cells["vtoken"]
    assert "%" in cells["vtoken"]
    assert "%" not in cells["naive"]


def test_the_table_filters(browser: Browser) -> None:
    assert part(browser, "status").text == "13 of 13 runs"
    part(browser, "search").send_keys("random vtok")
    assert part(browser, "status").text == "2 of 13 runs"
    assert set(column(browser, "policy")) == {"random"}
    facets = {
        label.text.split("\n")[0].strip(): label.find_element(By.TAG_NAME, "select")
        for label in browser.find_elements(By.CSS_SELECTOR, '[data-part="facets"] label')
    }
    assert set(facets) == {"policy", "keeps", "reclaimer"}
    Select(facets["keeps"]).select_by_visible_text("0.3")
    assert part(browser, "status").text == "1 of 13 runs"
    link = part(browser, "csv").get_attribute("href")
    assert link.startswith("data:text/csv")
    names, row = csv.reader(io.StringIO(unquote(link.partition(",")[2])))
    values = dict(zip(names, row, strict=True))
    config = SimConfig(policy="random", budget=0.3, reclaimer="vtoken")
    assert (values["policy"], values["keeps"], values["config_hash"]) == ("random", "0.3", config.hash())
    expected = made_up.result(config, 30, 60).summary["retained_blocks_mean"]
    assert float(values["retained_blocks_mean"]) == pytest.approx(expected)
    part(browser, "clear").click()
    assert part(browser, "status").text == "13 of 13 runs"


def test_all_columns_and_the_command_of_a_run(browser: Browser) -> None:
    few = len(browser.find_elements(By.CSS_SELECTOR, "#runs [data-part=head] th"))
    part(browser, "all-columns").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#runs [data-part=head] th")) > 2 * few
    browser.execute_script("document.querySelector('#runs [data-part=body] button').scrollIntoView()")
    button = browser.find_element(By.CSS_SELECTOR, "#runs [data-part=body] button")
    button.click()
    assert browser.find_element(By.CSS_SELECTOR, "#details pre").text.startswith("vtoken run")
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not browser.find_element(By.ID, "details").is_displayed()
    assert browser.switch_to.active_element == button


def test_it_plays_to_the_end(browser: Browser) -> None:
    Select(part(browser, "speed")).select_by_visible_text("60 frames/s")
    press(browser, Keys.HOME)
    assert index(browser) == 0
    start = float(part(browser, "slider").get_attribute("value"))
    press(browser, " ")
    assert part(browser, "play").get_attribute("aria-pressed") == "true"
    WebDriverWait(browser, 60).until(lambda driver: part(driver, "play").get_attribute("aria-pressed") == "false")
    assert index(browser) == int(browser.execute_script("return report.player.times.length")) - 1 > 20
    assert float(part(browser, "slider").get_attribute("value")) > start
    part(browser, "play").click()  # from the start again
    WebDriverWait(browser, 60).until(lambda driver: index(driver) > 0)
    press(browser, " ")
    stopped = index(browser)
    assert part(browser, "play").get_attribute("aria-pressed") == "false"
    assert index(browser) == stopped


def test_keys(browser: Browser) -> None:
    last = int(browser.execute_script("return report.player.times.length")) - 1
    press(browser, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert index(browser) == 1
    press(browser, Keys.END)
    assert index(browser) == last
    press(browser, Keys.ARROW_RIGHT)
    assert index(browser) == last
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_LEFT).key_up(Keys.SHIFT).perform()
    assert index(browser) == last - 10
    part(browser, "slider").click()
    part(browser, "slider").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert index(browser) == 1
    part(browser, "search").send_keys(" n", Keys.ARROW_RIGHT)  # what is typed is text
    assert index(browser) == 1
    browser.execute_script("document.querySelector('#configuration').scrollIntoView()")
    press(browser, Keys.ARROW_RIGHT)  # the maps are out of view: the key is the page's
    assert index(browser) == 1
    browser.execute_script("window.scrollTo(0, 0)")
    size = browser.execute_script("return report.player.views[0].size")
    press(browser, "-")
    assert browser.execute_script("return report.player.views[0].size") < size


def test_repacks_are_jumped_to(browser: Browser) -> None:
    press(browser, Keys.HOME)
    seen = []
    for _ in range(3):
        press(browser, "n")
        seen.append(index(browser))
        assert (
            browser.execute_script(
                "const {pools} = report.player, pool = pools.get(1);return pool.frames.from[pool.at].length"
            )
            > 0
        )
        assert " moved " in part(browser, "events").text
    assert seen == sorted(set(seen))
    press(browser, "p")
    assert index(browser) == seen[1]
    press(browser, Keys.END, "n")
    assert part(browser, "events").text == "no repack after this"


def test_what_is_drawn_is_what_happened(browser: Browser, logs: dict[str, KVEventLog]) -> None:
    """The page's own reader of the streams, there and back, against the interpreter of the events."""
    script = """
        const [which, frame] = arguments, pool = report.player.pools.get(which);
        pool.seek(frame);
        const size = pool.map.block_size, slots = [...Array(size).keys()];
        return [...pool.role.keys()].map((block) => [pool.role[block], pool.written[block], pool.owner[block],
            slots.filter((slot) => pool.slotIsLive(block, slot)), pool.liveSlots[block]]);
    """
    for which, log in enumerate(logs.values()):
        moments = chosen_moments(log, 600)
        for frame in (0, len(moments) - 1, len(moments) // 2, 5, 33, 32, 16):
            shown = browser.execute_script(script, which, frame)
            assert all(len(live) == count for *_, live, count in shown)
            states = [State(role, wrote, frozenset({owner}), frozenset(live)) for role, wrote, owner, live, _ in shown]
            assert all(map(same, states, judged(log, moments[frame]))), (which, frame)


def colours(browser: Browser, view: int = 0) -> set[str]:
    """Return the colours of a map's pixels."""
    return set(
        browser.execute_script(
            """
            const canvas = report.player.views[arguments[0]].canvas;
            const copy = new OffscreenCanvas(canvas.width, canvas.height);
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(canvas, 0, 0);
            const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
            return [...seen].slice(0, 500);
            """,
            view,
        )
    )


def rgb(colour: str) -> str:
    return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def test_live_dead_and_free_are_on_the_canvas(browser: Browser) -> None:
    browser.execute_script("report.player.go(Math.floor(report.player.times.length / 2))")
    assert {rgb(SLOT_COLOURS[name]) for name in ("live", "dead", "free")} <= colours(browser)


def test_two_maps_are_locked_in_time(browser: Browser) -> None:
    shown = "return report.player.shown.map((pool) => [pool.frames.time_s[pool.at], pool.frames.time_s[pool.at + 1]])"
    for place in (0, 7, 20):
        browser.execute_script(f"report.player.go({place})")
        time = browser.execute_script("return report.player.time")
        for at, following in browser.execute_script(shown):
            assert at <= time + 1e-6 or place == 0
            assert following is None or following > time
    assert len([each for each in browser.find_elements(By.CLASS_NAME, "map") if each.is_displayed()]) == 2
    Select(part(browser, "right")).select_by_visible_text("none")
    WebDriverWait(browser, 10).until(
        lambda driver: len([each for each in driver.find_elements(By.CLASS_NAME, "map") if each.is_displayed()]) == 1
    )


def test_a_block_is_told_by_pointer_and_by_number(browser: Browser, logs: dict[str, KVEventLog]) -> None:
    (frame,) = [browser.execute_script("return report.player.pools.get(0).at")]
    log = next(iter(logs.values()))
    known = judged(log, chosen_moments(log, 600)[frame])
    block = next(block for block, state in enumerate(known) if state.live and len(state.live) < state.written)
    part(browser, "inspect").send_keys(str(block))
    (owner,) = known[block].owners
    live, dead = len(known[block].live), known[block].written - len(known[block].live)
    said = part(browser, "inspected").text
    assert f"block {block}: in the table of request {owner}" in said
    assert f"{live} of 4 slots live, {dead} dead" in said
    canvas = browser.find_element(By.CSS_SELECTOR, ".map canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    size = browser.execute_script("return report.player.views[0].size")
    columns = browser.execute_script("return report.player.views[0].columns")
    x = block % columns * size + size // 2 - canvas.size["width"] / 2
    y = block // columns * size + size // 2 - canvas.size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    tip = browser.find_element(By.CLASS_NAME, "tip")
    assert tip.is_displayed()
    assert tip.text.splitlines()[0] == f"block {block}: in the table of request {owner}"


def background(browser: Browser) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


def emulate(browser: Browser, **features: str) -> None:
    listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})


def test_light_and_dark(browser: Browser) -> None:
    try:
        emulate(browser, prefers_color_scheme="light")
        light = background(browser)
        emulate(browser, prefers_color_scheme="dark")
        dark = background(browser)
        assert light == "rgb(244, 245, 247)"
        assert dark == "rgb(15, 18, 21)"
        assert rgb("#2b3139") in colours(browser)  # the map's free blocks as well
        theme = browser.find_element(By.ID, "theme")
        theme.click()
        assert (theme.text, background(browser)) == ("Theme: light", light)
        assert rgb(SLOT_COLOURS["free"]) in colours(browser)
        theme.click()
        emulate(browser, prefers_color_scheme="light")
        assert (theme.text, background(browser)) == ("Theme: dark", dark)
    finally:
        emulate(browser)


def test_who_wants_less_motion_gets_a_slow_start(browser: Browser, page: Path) -> None:
    assert part(browser, "speed").get_attribute("value") == "10"
    try:
        emulate(browser, prefers_reduced_motion="reduce")
        load(browser, page)
        assert part(browser, "speed").get_attribute("value") == "2"
    finally:
        emulate(browser)


def test_everything_to_use_has_a_name_and_the_focus_shows(browser: Browser) -> None:
    controls = browser.find_elements(By.CSS_SELECTOR, "button, input, select, a, [role=img], [role=region], img")
    shown = [control for control in controls if control.is_displayed()]
    assert len(shown) > 60
    nameless = [control.get_attribute("outerHTML")[:90] for control in shown if not control.accessible_name.strip()]
    assert nameless == []
    assert "used" in browser.find_element(By.CSS_SELECTOR, ".map canvas").accessible_name
    press(browser, Keys.HOME)
    assert part(browser, "slider").get_attribute("aria-valuetext").startswith("step 0, ")
    ActionChains(browser).send_keys(Keys.TAB).perform()
    outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_sampling_is_said(browser: Browser, logs: dict[str, KVEventLog]) -> None:
    for log in logs.values():
        assert f"of {len(log):,} events" in part(browser, "sampled").text
    assert "all" in part(browser, "sampled").text


def test_a_narrow_window_cuts_nothing(browser: Browser) -> None:
    size = browser.get_window_size()
    try:
        browser.set_window_size(520, 900)
        wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]
        press(browser, Keys.HOME, Keys.ARROW_RIGHT)
        assert index(browser) == 1
    finally:
        browser.set_window_size(size["width"], size["height"])


def test_a_page_without_maps(chromium: Browser, tmp_path: Path) -> None:
    made_up.result(SimConfig(kv_blocks=500), 20, 40).save(tmp_path / "run")
    load(chromium, write_report(tmp_path / "run"))
    assert "--events --out RUN" in chromium.find_element(By.ID, "map").text
    assert part(chromium, "status").text == "1 of 1 runs"
    ActionChains(chromium).send_keys(" ", "n").perform()
    assert chromium.get_log("browser") == []


def test_sampled_steps_and_a_large_pool(chromium: Browser, tmp_path: Path) -> None:
    log = logged()
    large = KVEventLog(log.records, log.block_size, 100_000)
    large.save(tmp_path / "events.parquet")
    made_up.result(SimConfig(kv_blocks=100_000), 20, 40).save(tmp_path / "run")
    page = write_report(tmp_path / "run", events=[str(tmp_path / "events.parquet")])
    load(chromium, page)
    assert chromium.execute_script("return report.player.views[0].size") == 2
    assert part(chromium, "legend-ramp").is_displayed()
    assert not part(chromium, "legend-parts").is_displayed()
    for _ in range(8):
        part(chromium, "zoom-in").click()
    assert part(chromium, "legend-parts").is_displayed()
    assert {rgb(SLOT_COLOURS[name]) for name in ("live", "free")} <= colours(chromium)
    scrolled = "return report.player.views[0].scroller.scrollTop"
    assert chromium.execute_script(scrolled) == 0
    part(chromium, "inspect").send_keys("99999")
    WebDriverWait(chromium, 10).until(lambda driver: driver.execute_script(scrolled) > 1000)
    part(chromium, "last-repack").click()
    WebDriverWait(chromium, 10).until(lambda driver: driver.execute_script(scrolled) < 1000)
    assert chromium.get_log("browser") == []
