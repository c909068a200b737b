"""Reports as a reader sees them: in a real browser, from a file, with nothing else to be had."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from fmol import FSMGDA, Alone, Client, FedAvg, Federation, Objective, RoundReport, fit
from fmol.problems.quadratic import Quadratic
from fmol.record import RunRecord
from fmol.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}
CHARTS = (
    "losses",
    "weights",
    "stationarity",
    "certificate",
    "radar",
    "trade-off",
    "holdings",
    "clients",
    "spread",
    "cosines",
    "pairs",
    "traffic",
    "seconds",
)
"""All but `labels`, which needs targets that are labels."""
SVG = "{http://www.w3.org/2000/svg}"


# ---- runs to look at -------------------------------------------------------------------------


def digits() -> Federation:
    """Two objectives on labels, four clients, one of which holds one objective only."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 24, 6, generator=generator)
    labels = torch.randint(0, 3, (4, 24, 2), generator=generator)

    def loss(column: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            three = outputs[:, 3 * column : 3 * column + 3]
            return torch.nn.functional.cross_entropy(three, targets[:, column], reduction="none")

        return cross_entropy

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 6)
    return Federation(
        model,
        [Objective("left", loss(0)), Objective("right", loss(1))],
        [
            Client(
                f"client-{i}",
                (inputs[i], labels[i]),
                ("left", "right") if i else ("left",),
                held_out=(inputs[i][:8], labels[i][:8]),
            )
            for i in range(4)
        ],
    )


def forty() -> RunRecord:
    """A run with forty objectives of long names, made up: what matters is how it looks."""
    names = tuple(f"attribute {s:02d}: wearing something" for s in range(40))
    base = fit(Quadratic().build(), FSMGDA(local_steps=1, local_lr=0.01, batch_size=4), rounds=1)
    record = base.record("forty")
    generator = torch.Generator().manual_seed(0)
    cosines = torch.rand(40, 40, generator=generator) * 2 - 1
    reports = tuple(
        RoundReport(
            round=t,
            cohort=(),
            losses={
                name: (1 + s / 40) * math.exp(-t * (s + 5) / 300) for s, name in enumerate(names)
            },
            evaluated="all 10 clients",
            delta_norms=dict.fromkeys(names, 1.0),
            weights=dict.fromkeys(names, 1 / 40),
            direction_norm_squared=1.0 / (t + 1),
            gap=0.0,
            min_cosine=0.1,
            cosines=(cosines + cosines.T) / 2,
            bytes_up=10**6,
            seconds={"clients": 1.0},
        )
        for t in range(12)
    )
    clients = tuple(replace(c, objectives=names) for c in record.portrait.clients)
    line = base.final.clients[0]
    lines = tuple(
        replace(line, client=c.id, objective=name, loss=0.1 + s / 40)
        for c in clients
        for s, name in enumerate(names)
    )
    final = replace(base.final, round=12, losses=reports[-1].losses, held_out={}, clients=lines)
    portrait = replace(record.portrait, objectives=names, clients=clients)
    return replace(record, portrait=portrait, reports=reports, final=final)


@dataclass
class Sight:
    """A page that is open, and everything that went wrong on it."""

    page: Any
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Every address the page requested."""

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def overflow(self) -> int:
        script = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(script))

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.page.locator(selector).all_text_contents()]

    def boxes(self, selector: str) -> list[tuple[float, float, float, float]]:
        script = """selector => [...document.querySelectorAll(selector)].map(node => {
            const box = node.getBoundingClientRect();
            return [box.left, box.top, box.right, box.bottom];
        })"""
        return [tuple(box) for box in self.page.evaluate(script, selector)]


Open = Callable[..., Sight]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    problem = digits()
    options: dict[str, Any] = {"local_steps": 3, "local_lr": 0.2, "batch_size": 8}
    alone = fit(problem, Alone(**options), rounds=6).record("alone")
    runs = {
        (kind, seed): fit(
            problem, algorithm(**options), rounds=6, seed=seed, true_gradients_every=2
        ).record(kind)
        for kind, algorithm in (("plain", FSMGDA), ("fedavg", FedAvg))
        for seed in (0, 1)
    }
    single = replace(
        runs["plain", 0],
        config={"problem": {"name": "digits"}, "seed": 0},
        command="fmol run digits",
        environment={"torch": "2"},
    )
    untrained = fit(problem, FSMGDA(**options), rounds=0).record("untrained")
    strange = "</script><img src=x onerror=alert(1)> \u0001 λ"
    odd = fit(
        Federation(
            torch.nn.Linear(2, 1),
            [Objective(strange, lambda out, y: (out[:, 0] - y) ** 2)],
            [Client("<i>é", (torch.ones(4, 2), torch.zeros(4)), (strange,))],
        ),
        FedAvg(local_steps=1, local_lr=0.01),
        rounds=2,
        evaluate_every=5,
    ).record(strange)
    return {
        "single": write_report(folder / "single.html", [single], alone=alone),
        "compare": write_report(folder / "compare.html", [*runs.values(), alone]),
        "forty": write_report(folder / "forty.html", [forty()]),
        "untrained": write_report(folder / "untrained.html", [untrained]),
        "odd": write_report(folder / "odd.html", [odd]),
        "unfinished": write_report(
            folder / "unfinished.html", [replace(single, final=None, stopped="")]
        ),
    }


@pytest.fixture(scope="module")
def windows() -> Iterator[Callable[[dict[str, int], str], Sight]]:
    """One browser for all, and one window per size and colour scheme, since windows open slowly."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        known: dict[tuple[int, str], Sight] = {}

        def window(viewport: dict[str, int], scheme: str) -> Sight:
            key = viewport["width"], scheme
            if key not in known:
                page = browser.new_context(
                    viewport=viewport, color_scheme=scheme, reduced_motion="reduce"
                ).new_page()
                sight = known[key] = Sight(page)
                page.on("console", lambda message: sight.wrong.append(f"console: {message.text}"))
                page.on("pageerror", lambda error: sight.wrong.append(f"error: {error}"))
                page.on("request", lambda request: sight.asked.append(request.url))
            return known[key]

        yield window
        browser.close()


@pytest.fixture
def look(windows: Callable[[dict[str, int], str], Sight], files: dict[str, Path]) -> Iterator[Open]:
    """Opens a report; afterwards nothing may have gone wrong on any that was opened."""
    opened: list[Sight] = []
    addresses = {path.as_uri() for path in files.values()}

    def look(name: str, viewport: dict[str, int] = LAPTOP, scheme: str = "light") -> Sight:
        sight = windows(viewport, scheme)
        sight.page.goto(files[name].as_uri())
        sight.page.mouse.move(0, 0)
        opened.append(sight)
        return sight

    yield look
    for sight in opened:
        assert sight.wrong == []
        # A figure on its way to a picture is a `blob:` of the page's own.
        assert {url for url in sight.asked if not url.startswith("blob:")} <= addresses


# ---- what every report must do ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["single", "compare", "forty", "untrained", "odd", "unfinished"])
def test_a_report_opens_from_a_file_without_errors_and_without_asking_for_more(
    look: Open, name: str
) -> None:
    sight = look(name)
    assert sight.count("section") == 9
    figures, sentences = sight.count("figure .stage > svg"), sight.count("figure .stage > .nothing")
    assert figures > 0
    assert figures + sentences == sight.count("figure")
    # Nothing to draw is a sentence, never an empty chart.
    assert sight.count(".stage > svg:not(:has(.mark))") == 0
    if name in ("single", "compare", "forty"):
        for chart in CHARTS:
            assert sight.count(f"#chart-{chart} .mark") > 0, chart
        assert (sight.count("#chart-labels .mark") > 0) == (name != "forty")


@pytest.mark.parametrize("name", ["single", "compare", "forty", "odd"])
def test_a_phone_needs_no_sideways_scrolling(look: Open, name: str) -> None:
    sight = look(name, PHONE)
    assert sight.overflow() <= 0
    for left, _, right, _ in sight.boxes(".stage > svg"):
        assert left >= 0
        assert right <= PHONE["width"]


def overlaps(boxes: list[tuple[float, float, float, float]]) -> int:
    def meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
        across = min(a[2], b[2]) - max(a[0], b[0])
        down = min(a[3], b[3]) - max(a[1], b[1])
        # A line's box has room above its letters, so boxes may touch where letters do not.
        return across > 1 and down > 3.5

    return sum(meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize("name", ["forty", "compare"])
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_no_tick_label_lies_on_another(look: Open, name: str, viewport: dict[str, int]) -> None:
    sight = look(name, viewport)
    for chart in CHARTS:
        assert overlaps(sight.boxes(f"#chart-{chart} .tick")) == 0, chart
        for left, _, right, _ in sight.boxes(f"#chart-{chart} .tick"):
            assert left >= 0, chart
            assert right <= viewport["width"], chart


# ---- what a reader can do --------------------------------------------------------------------


def test_switching_an_objective_off_removes_its_marks_and_on_again_brings_them_back(
    look: Open,
) -> None:
    sight = look("single")
    chip = sight.page.locator('[data-chip="objective:0"]')
    drawn = sight.count('.mark[data-objective="0"]')
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert sight.count('.mark[data-objective="0"]') == 0
    assert sight.count('#chart-losses .mark[data-objective="1"]') == 1
    chip.click()
    assert sight.count('.mark[data-objective="0"]') == drawn > 0


def test_forty_objectives_can_be_searched_and_switched_off_at_once(look: Open) -> None:
    sight = look("forty")
    sight.page.locator("#bar summary").click()
    sight.page.get_by_label("Find an objective").fill("attribute 07")
    assert sight.count('[data-chip^="objective"]:visible') == 1
    sight.page.get_by_label("Show no objective").click()
    assert sight.count(".mark[data-objective]") == 0
    sight.page.locator('[data-chip="objective:7"]').click()
    assert sight.count("#chart-losses .mark") == 1
    assert sight.texts("#how-many") == ["1 of 40 shown"]


def test_switching_a_run_off_removes_its_marks(look: Open) -> None:
    sight = look("compare")
    assert sight.count('.mark[data-run="1"]') > 0
    sight.page.locator('[data-chip="run:1"]').click()
    assert sight.count('.mark[data-run="1"]') == 0
    assert sight.count('.mark[data-run="0"]') > 0


def test_seeds_of_one_setting_are_a_line_with_a_band(look: Open) -> None:
    sight = look("compare")
    mark = '#chart-losses .mark[data-run="0"][data-objective="0"]'
    assert sight.count(f"{mark} path") == 2
    assert "lowest to the highest seed" in sight.texts("#chart-losses .say")[0]


def test_a_log_axis_and_a_linear_one_differ(look: Open) -> None:
    sight = look("single")
    ticks, line = "#chart-losses .tick.y", "#chart-losses .line"
    before = sight.texts(ticks), sight.page.locator(line).first.get_attribute("d")
    sight.page.locator('#chart-losses [data-value="linear"]').click()
    after = sight.texts(ticks), sight.page.locator(line).first.get_attribute("d")
    assert before != after
    assert before[1] != after[1]


def test_held_out_metrics_can_be_chosen(look: Open) -> None:
    sight = look("single")
    sight.page.locator("#chart-losses select").select_option("held_out:loss")
    assert sight.texts("#chart-losses .axis-label") == ["round", "held-out loss"]
    assert sight.count("#chart-losses .mark") == 2


def test_dark_and_light_follow_the_system_until_the_button_is_pressed(look: Open) -> None:
    sight = look("single", scheme="dark")

    def ground() -> str:
        return str(sight.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))

    def stroke() -> str | None:
        value = sight.page.locator("#chart-losses .line").first.get_attribute("stroke")
        return None if value is None else str(value)

    dark = ground(), stroke()
    sight.page.locator("#theme").click()
    assert sight.page.locator("html").get_attribute("data-theme") == "light"
    light = ground(), stroke()
    assert dark[0] != light[0]
    assert dark[1] != light[1]


def test_pointing_at_a_chart_tells_the_values_highest_first_and_twelve_at_most(
    look: Open,
) -> None:
    sight = look("forty")
    stage = sight.page.locator("#chart-losses .stage")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    sight.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert sight.count("#tip:visible") == 1
    assert sight.count("#tip .row") == 12
    assert sight.texts("#tip .more") == ["… 28 more"]
    values = [float(text) for text in sight.texts("#tip .row em")]
    assert values[1:] == sorted(values[1:], reverse=True)  # The one pointed at comes first.


def test_the_arrow_keys_move_through_a_chart(look: Open) -> None:
    sight = look("single")
    sight.page.locator("#chart-losses .stage > svg").focus()
    sight.page.keyboard.press("ArrowRight")
    sight.page.keyboard.press("ArrowRight")
    assert sight.texts("#tip b") == ["round 1"]
    sight.page.keyboard.press("Escape")
    assert sight.count("#tip:visible") == 0


def test_the_radar_turns_to_another_round_and_keeps_one(look: Open) -> None:
    sight = look("forty")
    rounds = "#chart-radar .mark[data-round]"
    assert sight.count(f'{rounds}[data-round="12"]') == 1
    sight.page.locator("#chart-radar input[type=range]").fill("6")
    assert sight.count(f'{rounds}[data-round="6"]') == 1
    sight.page.get_by_role("button", name="keep this round").click()
    sight.page.locator("#chart-radar input[type=range]").fill("9")
    assert sight.count(f'{rounds}[data-round="6"]') == 1
    assert sight.count(f'{rounds}[data-round="9"]') == 1


def test_what_a_client_gains_over_training_alone_is_shown_where_it_is_known(look: Open) -> None:
    words = {
        name: look(name).texts("#chart-clients .say")[0] for name in ("single", "compare", "forty")
    }
    assert "over training alone" in words["single"]
    assert "over training alone" in words["compare"]
    assert "alone" not in words["forty"]


def test_what_was_not_measured_is_a_sentence_that_says_why(look: Open) -> None:
    odd = look("odd")
    assert "one objective" in odd.texts("#conflict .lead")[0]
    assert "FedAvg" in odd.texts("#chart-certificate .nothing")[0]
    assert "No round was run" in look("untrained").texts("#chart-weights .nothing")[0]
    assert "has not ended" in " ".join(look("unfinished").texts(".words li"))


@pytest.mark.parametrize("name", ["single", "compare", "forty", "odd"])
def test_every_exported_figure_stands_by_itself(look: Open, name: str) -> None:
    sight = look(name, scheme="dark")
    script = "() => cards.filter(card => card.drawn).map(card => [card.id, exportSvg(card)])"
    figures = sight.page.evaluate(script)
    assert len(figures) >= 5
    for chart, text in figures:
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg"
        ground = root.find(f"{SVG}rect")
        assert ground is not None
        assert ground.get("fill") == "#ffffff", chart
        assert root.get("font-family")
        assert "class=" not in text or "<style" not in text
        assert "var(" not in text
        assert len(root.findall(f".//{SVG}text")) >= 3, chart


def test_the_buttons_save_a_vector_and_a_picture(look: Open, tmp_path: Path) -> None:
    sight = look("single")
    for kind, start in (("SVG", b"<?xml"), ("PNG", b"\x89PNG")):
        with sight.page.expect_download() as waiting:
            sight.page.get_by_label(f"Save “Loss over rounds” as {kind}").click()
        target = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(target)
        assert target.name == f"losses.{kind.lower()}"
        assert target.read_bytes().startswith(start)


def test_names_are_shown_as_they_are_and_never_run(look: Open) -> None:
    sight = look("odd")
    assert "</script><img src=x onerror=alert(1)>" in sight.texts("h1")[0]
    assert sight.count("img") == 0
