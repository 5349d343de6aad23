"""The report of a run that was killed twice: every number on it is in the run's files, and it looks as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools.report import runs
from tests.tools.report.browser import Browser
from worldsize.tools.report import words
from worldsize.tools.report.html import Facts
from worldsize.track.jsonl import latest, read

if TYPE_CHECKING:
    from collections.abc import Iterator

SCREENS = (
    ("desktop", 1280, 900, False),
    ("phone", 390, 844, False),
    ("dark", 1280, 900, True),
    ("phone-dark", 390, 844, True),
)
KEPT = os.environ.get("WORLDSIZE_SCREENSHOTS")
"""Where to leave the pictures for people."""


class Shown(HTMLParser):
    """What the page holds as JSON, what it says it shows of that, and all of its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown: list[tuple[str, str, str]] = []
        self.text, self._data, self._open, self.sources = "", "", "", list[str]()
        self._place: tuple[str, str] | None = None
        self.feed(text)
        self.facts = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where a number begins."""
        found = {name: value or "" for name, value in attrs}
        self._open = f"{tag}#{found.get('id', '')}"
        self.sources += [found[name] for name in ("src", "href") if name in found]
        if "data-is" in found:
            self._place = found["data-is"], found["data-as"]

    def handle_endtag(self, tag: str) -> None:
        """A number ends with its element."""
        del tag
        self._place, self._open = None, ""

    def handle_data(self, data: str) -> None:
        """Words, or the JSON."""
        if self._open == "script#facts":
            self._data += data
        elif not self._open.startswith(("script", "style")):
            self.text += data
        if self._place:
            self.shown.append((*self._place, data))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder, with its report."""
    folder = runs.killed_twice(tmp_path_factory.mktemp("report"))
    report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Shown:
    """Its page."""
    return Shown((run / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def facts(page: Shown) -> dict[str, Any]:
    """What the page knows of the run."""
    found: dict[str, Any] = page.facts["runs"][0]
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests that look."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def report(*folders: Path | str) -> subprocess.CompletedProcess[str]:
    """The command; in an interpreter that fails where torch is asked for."""
    code = "import sys; sys.modules['torch'] = None; from worldsize.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "report", *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def by_kind(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The run's events."""
    found = defaultdict(list)
    for row in read(run / "events.jsonl"):
        found[row["event"]].append(row)
    return found


def test_every_number_that_is_shown_is_in_the_pages_facts(page: Shown) -> None:
    """At its place, in its one way to be written."""
    facts = Facts(page.facts)
    assert len(page.shown) > 200
    assert [each for each in page.shown if each[2] != words.word(facts.get(each[0]), each[1])] == []


def test_curves_are_those_of_the_files(run: Path, facts: dict[str, Any]) -> None:
    """Of a step that was made twice the later number."""
    rows = read(run / "metrics.jsonl")
    for name in ("loss", "lr", "grad_norm", "error"):
        assert dict(zip(facts["series"][name]["x"], facts["series"][name]["y"], strict=True)) == latest(rows, name)
    assert facts["loss"] == latest(rows, "loss")[runs.TOTAL - 1]


def test_restarts_and_their_cost_are_those_of_the_events(run: Path, facts: dict[str, Any]) -> None:
    """Steps from the last commit to the kill; and device time: what was done in vain, and the start-up after it."""
    events, told = by_kind(run), facts["restarts"]
    assert tuple(row["step"] for row in events["resume"]) == runs.RESUMED
    assert [each["steps"] for each in told] == [
        killed - resumed for killed, resumed in zip(runs.KILLED, runs.RESUMED, strict=True)
    ]
    starts, failed = [*events["start"], *events["resume"]], events["failure"]
    metrics = read(run / "metrics.jsonl")
    for number, restart in enumerate(told):
        saved = max(row["time"] for row in metrics if row["attempt"] == number and row["step"] < runs.RESUMED[number])
        again = failed[number]["time"] - saved
        startup = starts[number + 1]["time"] - starts[number + 1]["began"]
        assert restart["again"] == pytest.approx(again, abs=2e-3)
        assert restart["startup"] == pytest.approx(startup, abs=2e-3)
        assert restart["down"] == pytest.approx(
            max(0.0, starts[number + 1]["began"] - failed[number]["time"]), abs=2e-3
        )
        assert restart["device_seconds"] == pytest.approx(2 * (again + startup), abs=1e-2)
    assert facts["lost_steps"] == 4
    held = sum(each["ended"] - each["began"] for each in facts["attempts"])
    good = held - sum(each["again"] for each in told) - sum(each["startup"] for each in facts["attempts"])
    assert facts["goodput"] == pytest.approx(good / held)


def test_times_are_those_of_the_files(run: Path, facts: dict[str, Any]) -> None:
    """By phase, by rank, and how fast it was."""
    rows = read(run / "times.jsonl")
    for phase in facts["phases"]:
        assert phase["most"] == pytest.approx(sum(row["phases"][phase["name"]][2] for row in rows))
    steps = sum(row["steps"] for row in rows)
    for rank in facts["by_rank"]:
        own = [row["by_rank"]["own"][rank["rank"]] for row in rows]
        assert rank["own"]["most"] == max(spread[3] for spread in own)
        assert rank["own"]["mean"] == pytest.approx(
            sum(spread[4] * row["steps"] for spread, row in zip(own, rows, strict=True)) / steps
        )
    last = [row for row in rows if row["attempt"] == 2]
    assert facts["speed"]["samples"] == pytest.approx(
        sum(row["samples"] for row in last) / sum(row["seconds"] for row in last)
    )
    assert facts["devices"]["peak"] == max(row["peak"][2] for row in rows)


def test_checkpoints_and_failures_are_those_of_the_events(run: Path, facts: dict[str, Any]) -> None:
    """Sizes, stalls; who failed and what class that is."""
    events = by_kind(run)
    assert [(each["step"], each["bytes"], each["stall"]) for each in facts["saves"]] == [
        (row["step"], row["bytes"], row["stall"]) for row in events["save"]
    ]
    assert facts["save_totals"]["mean"] == pytest.approx(mean(row["seconds"] for row in events["save"]))
    assert [(each["line"], each["ending"]) for each in facts["failures"]] == [
        (row["line"], row["ending"]) for row in events["failure"]
    ]
    assert [each["rank"] for each in facts["failures"]] == [0, 0]
    assert "SIGKILL" in facts["failures"][0]["line"]


def test_one_glance_says_how_it_is(page: Shown, facts: dict[str, Any]) -> None:
    """A sentence, and what to look at."""
    assert facts["verdict"] == "Finished at step 24 of 24. Restarted 2 times; 4 steps were made again."
    assert facts["level"] == "warn"
    titles = [each["title"] for each in facts["findings"]]
    assert titles[0] == "2 attempts failed"
    assert any(title.startswith("Rank 1 needs ") for title in titles)
    assert all(text in page.text for text in [facts["verdict"], *titles])


def test_settings_stand_there_and_differences_between_attempts_are_marked(run: Path, tmp_path: Path) -> None:
    """Here another precision of the second attempt, by hand."""
    folder = tmp_path / "other"
    (folder / "attempts").mkdir(parents=True)
    changed = read(run / "events.jsonl")
    resumed = next(row for row in changed if row["event"] == "resume")
    resumed["config"] |= {"precision": "bf16"}
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, changed)), encoding="utf-8")
    report(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    settings = {each["name"]: each for each in Shown(text).facts["runs"][0]["settings"]}
    assert settings["precision"] == {"name": "precision", "values": ["fp32", "bf16", "fp32"], "differs": True}
    assert settings["seed"]["differs"] is False
    assert text.count('<tr class="differs">') == 1


def test_a_page_asks_nobody(page: Shown) -> None:
    """No address in it but places in itself."""
    assert [source for source in page.sources if not source.startswith(("#", "data:"))] == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """In one line."""
    done = report(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("worldsize: this is no run folder. Found: ")
    assert done.stderr.count("\n") == 1


CONTRAST = """
(() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).map(Number), [r, g, b] = parts.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return { value: 0.2126 * r + 0.7152 * g + 0.0722 * b, solid: parts.length < 4 || parts[3] > 0.99 };
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = light(getComputedStyle(node).backgroundColor);
      if (found.solid) return found.value;
    }
    return 1;
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("script, style, .skip") || !node.getClientRects().length) continue;
    const one = light(getComputedStyle(node).color).value, other = behind(node);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) faint.push(`${node.tagName} ${node.className} ${ratio.toFixed(2)} ${node.textContent.slice(0, 30)}`);
  }
  return faint;
})()
"""


@pytest.mark.browser
@pytest.mark.parametrize("screen", SCREENS, ids=[screen[0] for screen in SCREENS])
def test_it_is_seen_well(browser: Browser, run: Path, tmp_path: Path, screen: tuple[str, int, int, bool]) -> None:
    """No error, no request, nothing wider than the screen, and every word stands out from what is behind it."""
    name, width, height, dark = screen
    browser.open(run / "report.html", width, height, dark=dark)
    methods = {event["method"] for event in browser.events}
    assert methods & {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"} == set(), (
        browser.events
    )
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [(run / "report.html").as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(CONTRAST) == []
    picture = browser.screenshot(Path(KEPT or tmp_path) / f"{name}.png")
    assert len(picture) > 50_000


@pytest.mark.browser
def test_curves_are_read_with_the_keyboard(browser: Browser, run: Path, facts: dict[str, Any]) -> None:
    """Each plot has a name for those who do not see it; the arrows walk over its points."""
    browser.open(run / "report.html", 1280, 900)
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.ariaLabel.length > 20)")
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("ArrowLeft")
    told = browser.evaluate("document.querySelector('.plot .tip').innerText")
    assert told.split() == ["step", str(runs.TOTAL - 2), "loss", words.number(facts["series"]["loss"]["y"][-2])]


@pytest.mark.browser
def test_runs_stand_side_by_side(browser: Browser, run: Path, tmp_path: Path) -> None:
    """Curves of both in one picture, and a column for each."""
    done = report(run, run, "-o", tmp_path / "two.html")
    assert done.returncode == 0, done.stderr
    browser.open(tmp_path / "two.html", 1280, 900)
    assert browser.evaluate("document.querySelectorAll('.run').length") == 2
    assert browser.evaluate("document.querySelector('.plot svg').querySelectorAll('path').length") == 2
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
    browser.screenshot(Path(KEPT or tmp_path) / "two.png")
