"""The report page, with and without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_sao.cli import main as cli
from megatron_sao.report import page
from megatron_sao.report.run_files import RunFiles
from tests.recorded_run import HOSTILE, write_run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("report") / "run"
    write_run(run_dir)
    assert cli(["report", str(run_dir)]) == 0
    return run_dir / "report.html"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in self.raw else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside].append(data)


def payload(report: Path) -> dict[str, Any]:
    return json.loads(Page(report.read_text()).raw["script"][0])


def charts(report: Path) -> dict[str, dict[str, Any]]:
    """By title; of several with one title that of the RL stage, which comes first."""
    return {chart["title"]: chart for section in payload(report)["sections"][::-1] for chart in section["charts"]}


def test_the_page_refers_to_nothing_outside_itself(report: Path) -> None:
    parsed = Page(report.read_text())
    addresses = [value for _, attributes in parsed.tags for key, value in attributes.items() if key in ("src", "href")]
    assert addresses == []
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"link", "iframe", "img", "object"})
    assert not re.search(r"@import|url\(", "".join(parsed.raw["style"]))
    links = re.findall(r"https?://[^\"' ]+", report.read_text())
    assert set(links) == {"http://www.w3.org/2000/svg"}  # a name space, not a place


def test_text_of_a_trajectory_cannot_end_the_script_it_is_in(report: Path) -> None:
    parsed = Page(report.read_text())
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert HOSTILE not in report.read_text()
    assert payload(report)["samples"][0]["pieces"][-1] == HOSTILE


def test_curves_are_the_runs_metrics_and_the_later_line_of_a_step_wins(report: Path) -> None:
    curves = {series["name"]: series for series in charts(report)["Success rate, trained and held-out"]["series"]}
    assert (curves["train/success_rate"]["x"], curves["train/success_rate"]["y"]) == (
        [0, 1, 2, 3], [0.25, 0.5, 0.625, 0.75],
    )  # fmt: skip
    assert (curves["eval/success_rate"]["x"], curves["eval/success_rate"]["y"]) == ([0, 4], [0.25, 0.875])
    (loss,) = charts(report)["Supervised loss"]["series"]
    assert loss["y"] == [2.0, 1.0, 0.66667]


def test_the_ratio_histogram_goes_over_time_from_the_lowest_interval_up(report: Path) -> None:
    heat = charts(report)["Histogram of the importance ratio over time"]
    assert heat["kind"] == "heat"
    assert [(s["name"], s["y"]) for s in heat["series"]] == [
        ("dis/rho_bin_0.7", [0.25] * 4), ("dis/rho_bin_1.01", [0.75] * 4),
    ]  # fmt: skip
    assert payload(report)["band"] == [0.7, 6.0]


def test_every_metric_of_the_run_is_in_some_chart_and_no_evaluation_counts_as_a_step(report: Path) -> None:
    every = [chart for section in payload(report)["sections"][::-1] for chart in section["charts"]]
    drawn = {series["name"]: series for chart in every for series in chart["series"]}
    events = RunFiles(report.parent).events()
    logged = {name for event in events for name in event} - {"time", "stage", "step", "time/step"}
    assert set(drawn) == logged
    assert drawn["idle_fraction"]["y"] == [0.75] * 4
    assert drawn["dis/rho_max"]["y"] == [None] * 4  # NaN, which JSON cannot say


def test_every_name_that_a_chart_wants_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    wanted = {name for charts in page.SECTIONS.values() for chart in charts for name in chart.names}
    assert {name for name in wanted if f"`{name.rstrip('*')}" not in documented} == set()


def test_a_long_curve_is_averaged_and_keeps_its_range() -> None:
    steps, values = page._thinned([(n, float(n % 2)) for n in range(3000)], 600)
    assert len(steps) == len(values) == 600
    assert steps[0] < 5 and steps[-1] >= 2995
    assert set(values) == {0.4, 0.6}
    assert page._thinned([(0, None), (1, 2.0)], 1) == ([1], [2.0])


def test_samples_carry_their_text_and_the_numbers_of_each_action_token(report: Path) -> None:
    newest, oldest = payload(report)["samples"]
    assert (newest["step"], oldest["step"]) == (2, 0)
    assert newest["pieces"][:6] == ["two", "plus", "three", " is", "\n", " five"]
    assert newest["mask"] == [0, 0, 0, 1, 0, 1, 1]
    assert newest["advantages"] == [0.5, -1.0, 0.25]


def test_without_config_and_tokenizer_there_is_still_a_report(report: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        shutil.copy(report.parent / name, tmp_path)
    assert cli(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert payload(tmp_path / "page.html")["samples"][0]["pieces"][0] == "[1]"


def test_a_directory_that_is_no_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["report", str(tmp_path)]) == 2
    assert "holds neither config.yaml nor metrics.jsonl" in capsys.readouterr().err


def dom(report: Path, fragment: str = "") -> str:
    """The page after its script has run in a real browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium or google-chrome is installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", report.as_uri() + fragment]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_in_a_browser_all_charts_are_drawn_and_tokens_are_coloured_by_advantage(report: Path) -> None:
    text = dom(report)
    sections = payload(report)["sections"]
    others = [chart for section in sections if "Everything else" in section["title"] for chart in section["charts"]]
    still = [chart["title"] for chart in others if len(set(chart["series"][0]["y"])) == 1]
    assert still and all(f"<span>{title} " in text for title in still), "what never changes is listed"
    expected = sum(len(section["charts"]) for section in sections) - len(still)
    assert len(re.findall(r"<figure>", text)) == expected
    assert len(re.findall(r'class="curve"', text)) + len(re.findall("no number", text)) >= expected - 1  # heat: rects
    assert re.search(r'<rect [^>]*fill="var\(--c0\)"', text)
    assert "<title>test</title>" in text, "the text of a trajectory must not run"
    opened = re.search(r"<details open.*?</details>", text, re.DOTALL)[0]
    spans = dict(re.findall(r'data-n="(\d)" style="background: ([^"]*);"', opened))
    assert "--pos" in spans["0"] and "--neg" in spans["1"], spans
    assert spans["1"].endswith("0.80)") and spans["0"].endswith("0.44)")  # 0.08 + 0.72 · |A| / max |A|
    assert len(re.findall(r'class="tok masked"', opened)) == 4
    # token 1 has the ratio exp(-2.25) < 0.7, token 2 was reported with log-probability -inf
    assert re.findall(r'class="tok action( rejected)?" data-n="(\d)"', opened) == [
        ("", "0"), (" rejected", "1"), (" rejected", "2"),
    ]  # fmt: skip


def test_in_a_browser_a_search_leaves_the_trajectories_that_match(report: Path) -> None:
    text = dom(report, "#search=step:0%20FIRST")
    assert "1 of 2 trajectories" in text
    assert re.search(r'<details hidden="">.*?task second', text, re.DOTALL)
    assert re.search(r'<details open="">.*?task first', text, re.DOTALL)
    assert "0 of 2 trajectories" in dom(report, "#search=nowhere")
