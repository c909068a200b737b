"""Reports as a reader sees them: in a real browser, from a file, with nothing else to be had."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from fmol import FSMGDA, Alone, Client, FedAvg, Federation, Objective, RoundReport, fit
from fmol.alarms import Alarm
from fmol.participation import Number
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


def two_columns(*, labelled: bool = True, split: bool = False) -> Federation:
    """Two objectives at four clients: the second perhaps without labels, or each client with one."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 16, 3, generator=generator)
    targets = torch.randn(4, 16, 2, generator=generator)
    if not labelled:
        targets[..., 1] = math.nan

    def loss(column: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda outputs, targets: (outputs[:, column] - targets[:, column]) ** 2

    held = [("left",), ("right",)] * 2 if split else [("left", "right")] * 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
    return Federation(
        model,
        [Objective("left", loss(0)), Objective("right", loss(1))],
        [Client(f"client-{i}", (inputs[i], targets[i]), held[i]) for i in range(4)],
    )


def many_settings() -> list[RunRecord]:
    """Seven settings of long names on two federations, with the same notes and alarms."""
    problem = two_columns()
    targets = torch.full((16, 2), math.nan)
    targets[:, 0] = 0.0
    unlabelled = Client("client-0", (torch.randn(16, 3), targets), ("left", "right"))
    targets = torch.randn(16, 2)
    targets[:6, 1] = math.nan
    partly = Client("client-1", (torch.randn(16, 3), targets), ("left", "right"))

    def masked(column: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
            known = ~targets[:, column].isnan()
            return (outputs[:, column] - targets[:, column].nan_to_num()) ** 2, known

        return loss

    objectives = [Objective("left", masked(0)), Objective("right", masked(1))]
    some = Federation(problem.model, objectives, [unlabelled, partly])
    start = "a-name-that-goes-on-for-so-long-that-there-is-no-room-for-all-of-it"
    runs = []
    for i in range(7):
        federation = some if i < 5 else problem
        run = fit(federation, FSMGDA(local_steps=1 + i, batch_size=8), 3).record(f"{start}-{i}")
        alarms = tuple(
            Alarm("stall", name, 1, "solved", f"`{name}` stalls at {i}")
            for name in ("left", "right")
        )
        last = replace(run.reports[-1], alarms=alarms, notes=(*run.reports[-1].notes, "a note"))
        notes = tuple(f"note {k}" for k in range(9))
        runs.append(replace(run, reports=(*run.reports[:-1], last), notes=notes))
    return runs


def renamed(record: RunRecord, problem: str, names: dict[str, str]) -> RunRecord:
    """The record as if its objectives had other names."""

    def keys(values: Any) -> dict[str, Any]:
        return {names[name]: value for name, value in values.items()}

    def lines(clients: Any) -> Any:
        return tuple(each._replace(objective=names[each.objective]) for each in clients)

    reports = tuple(
        replace(
            report,
            losses=keys(report.losses),
            held_out=keys(report.held_out),
            delta_norms=keys(report.delta_norms),
            weights=keys(report.weights),
            spread=keys(report.spread),
            clients=lines(report.clients),
        )
        for report in record.reports
    )
    assert record.final is not None
    final = replace(
        record.final,
        losses=keys(record.final.losses),
        held_out=keys(record.final.held_out),
        clients=lines(record.final.clients),
    )
    objectives = tuple(names.values())
    clients = tuple(
        replace(each, objectives=tuple(names[name] for name in each.objectives))
        for each in record.portrait.clients
    )
    portrait = replace(record.portrait, objectives=objectives, clients=clients)
    config = {"problem": {"name": problem}}
    return replace(
        record, name=problem, portrait=portrait, reports=reports, final=final, config=config
    )


def risen() -> RunRecord:
    """A run in which one loss of three fell, and two rose from nearly nothing, one over its target."""
    names = ("accuracy", "parity", "odds")
    ends = {"accuracy": 0.4, "parity": 0.0065, "odds": 0.02}
    base = fit(two_columns(), FSMGDA(local_steps=1, batch_size=4), rounds=1).record("risen")
    assert base.final is not None
    reports = tuple(
        RoundReport(
            round=t,
            cohort=(),
            losses={"accuracy": 0.7, "parity": 1.3e-7, "odds": 2e-7},
            delta_norms=dict.fromkeys(names, 1.0),
            weights=dict.fromkeys(names, 1 / 3),
            protected=("parity",),
            gap=0.0,
            cosines=torch.eye(3),
        )
        for t in range(3)
    )
    portrait = replace(
        base.portrait,
        objectives=names,
        targets={"parity": 0.01, "odds": 0.01},
        clients=tuple(replace(each, objectives=names) for each in base.portrait.clients),
    )
    final = replace(base.final, round=3, losses=ends, held_out={}, clients=())
    return replace(
        base, portrait=portrait, reports=reports, final=final, stopped="all 3 rounds done"
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
        line._replace(client=c.id, objective=name, loss=0.1 + s / 40)
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
    few: dict[str, Any] = {"local_steps": 2, "batch_size": 8}
    refused = fit(two_columns(labelled=False), FSMGDA(**few), 6).record("refused")
    one_each = fit(two_columns(split=True), FSMGDA(**few), 6, participation=Number(1))
    both = fit(two_columns(), FSMGDA(**few), 6).record("both")
    ours = renamed(both, "ours", {"left": "left", "right": "right"})
    apart = renamed(both, "theirs", {"left": "up", "right": "down"})
    partly = renamed(both, "theirs", {"left": "left", "right": "down"})
    plain = write_report(folder / "whole.html", [both])
    whole = plain.read_text(encoding="utf-8")
    # A section that fails as it is built, and a chart that fails as it is drawn.
    holed = re.sub(
        '"holds":.*?]', '"holds":null', whole.replace('"cosines":', '"cosines":null,"old":')
    )
    broken = folder / "broken.html"
    broken.write_text(holed, encoding="utf-8")
    return {
        "refused": write_report(folder / "refused.html", [refused]),
        "one-each": write_report(folder / "one-each.html", [one_each.record("one each")]),
        "apart": write_report(folder / "apart.html", [ours, apart]),
        "partly": write_report(folder / "partly.html", [ours, partly]),
        "risen": write_report(folder / "risen.html", [risen()]),
        "broken": broken,
        "whole": plain,
        "single": write_report(folder / "single.html", [single], alone=alone),
        "compare": write_report(folder / "compare.html", [*runs.values(), alone]),
        "forty": write_report(folder / "forty.html", [forty()]),
        "untrained": write_report(folder / "untrained.html", [untrained]),
        "odd": write_report(folder / "odd.html", [odd]),
        "many": write_report(folder / "many.html", many_settings()),
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


@pytest.mark.parametrize(
    "name",
    [
        "single",
        "compare",
        "forty",
        "untrained",
        "odd",
        "unfinished",
        "refused",
        "one-each",
        "apart",
        "partly",
        "risen",
    ],
)
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


def test_what_fails_says_so_and_leaves_the_rest_of_the_page(look: Open) -> None:
    sight = look("broken")
    assert sight.count("section") == 9
    assert "This part could not be drawn: " in sight.texts("#conflict .nothing")[0]
    assert "This chart could not be drawn: " in sight.texts("#chart-holdings .nothing")[0]
    assert sight.count("#chart-losses .mark") == 2
    assert sight.count("#chart-seconds .mark") > 0
    # Whoever looks for what went wrong still finds it, and nothing got past the guards.
    assert len(sight.wrong) >= 2
    assert all(words.startswith("console: TypeError") for words in sight.wrong)
    sight.wrong.clear()


@pytest.mark.parametrize("name", ["single", "compare", "forty", "odd", "apart"])
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
    # The page hears of the scrolling a frame later, and then takes away what is shown.
    frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    sight.page.evaluate(frames)
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


# ---- what a reader is told -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["refused", "one-each"])
def test_without_two_updates_in_a_round_conflict_is_a_sentence(look: Open, name: str) -> None:
    sight = look(name)
    assert "In no round did two objectives have an update" in sight.texts("#conflict .lead")[0]
    assert sight.count("#conflict figure") == 0


def test_an_objective_that_was_never_heard_is_told_in_sight(look: Open) -> None:
    sight = look("refused")
    first = sight.page.locator(".words > li").first
    assert first.is_visible()
    assert "Nothing was learned for right" in first.inner_text()
    assert "non-finite" in first.inner_text()
    assert "No alarm" not in " ".join(sight.texts(".words li"))
    assert "1 of 2 objectives" in sight.texts("#overview .lead")[0]


@pytest.mark.parametrize(
    ("name", "words"), [("apart", "share no objectives"), ("partly", "share only some objectives")]
)
def test_runs_with_other_objectives_are_not_ranked(look: Open, name: str, words: str) -> None:
    sight = look(name)
    assert "ours and theirs" in sight.texts("h1")[0]
    lead = sight.texts("#overview .lead")[0]
    assert words in lead
    assert "lowest" not in lead
    assert sight.count("td.best") == 0
    assert "mean of all" not in sight.texts("#overview th")
    assert sight.count('[data-value="all"]') == 0
    assert look("compare").count("td.best") > 0


def test_losses_that_rose_are_named_and_nothing_is_measured_by_a_start_near_zero(
    look: Open,
) -> None:
    sight = look("risen")
    fell, rose, *aims = sight.texts("#overview .lead")[0].split(". ")
    assert fell == "The training loss fell for 1 of 3 objectives: accuracy (0.7 → 0.4, down 42.9 %)"
    assert rose == "It rose for odds (2e−7 → 0.02) and parity (1.3e−7 → 0.0065)"
    assert aims == [
        "Within target: parity (0.0065, target 0.01)",
        "Not within target: odds (0.02, target 0.01).",
    ]
    assert "from near 0" in sight.texts("#overview td")
    assert "parity is partly that of a constraint" in sight.texts("#overview .say")[0]
    assert "Left out: parity and odds" in sight.texts("#chart-radar .say")[0]


def test_an_end_as_planned_is_told_once_and_rounds_say_how_they_are_numbered(look: Open) -> None:
    sight = look("one-each")
    assert "Ended as planned, after 6 rounds." in sight.texts(".words > li")
    assert "6numbered 0 to 5" in sight.texts(".tile")[0]


def test_what_several_runs_have_is_told_once_and_much_of_it_is_folded(look: Open) -> None:
    sight = look("many")
    boxes = sight.texts("#overview section > .words > li, #overview > .words > li")
    (left,) = (text for text in boxes if "Alarm, stall of left" in text)
    assert left.startswith("all 7 runs: Alarm, stall of left")
    assert "6 more, of other runs" in left
    assert sum("a note" in text for text in boxes) == 1
    assert sum("more notes" in text for text in boxes) == 1
    assert all(f"note {k}" in " ".join(boxes) for k in range(9))
    assert not sight.page.locator("#overview .words .words").first.is_visible()
    assert len(boxes) < 12


def test_settings_that_begin_alike_can_be_told_apart(look: Open) -> None:
    sight = look("many")
    chips = sight.texts('[data-chip^="run"]')
    assert chips == [f"…{i}" for i in range(7)]
    for cell in sight.texts("#overview tbody th"):
        assert cell[-1] in "0123456"


def test_all_runs_of_a_federation_are_counted(look: Open) -> None:
    (choice, _) = look("many").page.locator("#chart-holdings select option").all_text_contents()
    assert choice.startswith("1: ")
    assert choice.endswith("and 2 more")


def test_a_client_without_a_label_does_not_look_as_if_it_took_part(look: Open) -> None:
    sight = look("many")
    assert "Grey: it holds the objective but has no label" in sight.texts("#chart-holdings .say")[0]
    assert sight.texts("#chart-holdings .cells text") == ["16", "0", "16", "10"]
    fills = [
        cell.get_attribute("fill") for cell in sight.page.locator("#chart-holdings .mark").all()
    ]
    assert fills[0] == fills[2]
    assert len({fills[0], fills[1], fills[3]}) == 3
    assert "Grey" not in look("whole").texts("#chart-holdings .say")[0]


def test_an_untrained_report_speaks_of_its_algorithm(look: Open) -> None:
    assert "given" not in look("untrained").texts("#direction .lead")[0]
    assert "given" in look("odd").texts("#direction .lead")[0]


def test_a_table_that_is_cut_off_says_that_it_scrolls(look: Open) -> None:
    sight = look("risen", PHONE)
    assert sight.texts("#overview .hint:visible") == ["scroll for more columns →"]
    assert sight.count("#overview .scroller.more-right") == 1
    sight.page.locator("#overview .scroll").evaluate("node => { node.scrollLeft = 9999; }")
    sight.page.wait_for_selector("#overview .scroller:not(.more-right)")
    # The names stay in sight while the numbers move.
    assert sight.boxes("#overview tbody th")[0][0] >= 0
    assert look("risen").count("#overview .hint:visible") == 0


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
