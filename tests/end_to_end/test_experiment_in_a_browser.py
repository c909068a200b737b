"""An experiment's section in a report, as a reader sees it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fmol.reproduce import reproduce
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Experiment,
    Line,
    Outcome,
    Panel,
    Table,
    Trial,
)
from fmol.reproduce.section import REPORT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

RUN = {
    "rounds": 3,
    "problem": {"name": "quadratic", "clients": 3, "samples": 4},
    "algorithm": {"name": "fmgda", "local_steps": 1},
}
OUTCOME = Outcome(
    [Table("rounds until a loss of 0.01", ("L", "R"), {"plain": [Cell((3.0, 5.0), 82), Cell((1.0,))]})],
    [
        Claim("more local steps need fewer rounds", True, "K = 1 89, K = 5 42"),
        Claim("larger batches converge faster", False, "0.3 and 0.2", "ours"),
    ],
    [Panel("loss", "rounds", "loss", [Line("a", [0, 1], [[1.0, 0.5]])])],
)  # fmt: skip


def _read(path: Path) -> tuple[list[str], str, int]:
    """The sections of a page, what its experiment says, and how wide its figure is."""
    errors: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(path.as_uri())
        sections = page.locator("main section").evaluate_all("all => all.map((each) => each.id)")
        text = page.locator("#experiment").inner_text()
        width = page.locator("#experiment img").evaluate("image => image.naturalWidth")
        browser.close()
    assert errors == []
    return sections, text, width


def test_tables_claims_and_figures_stand_before_the_runs(tmp_path: Path) -> None:
    experiment = Experiment(
        "shown", "Shown", "As it was read.", (lambda *_: [Trial("one", RUN)],), lambda *_: OUTCOME
    )
    reproduce(experiment, tmp_path, device="cpu")
    sections, text, width = _read(tmp_path / REPORT)
    assert sections[:2] == ["experiment", "overview"]
    assert "4 ± 13 [82]" in text
    assert "± is half of their 95 % interval. The paper’s numbers in brackets." in text
    assert "does not hold: larger batches converge faster" in text
    assert "holds: more local steps need fewer rounds (the paper’s)" in text
    assert "As it was read." in text
    assert width > 100


def test_what_has_no_runs_stands_by_itself(tmp_path: Path) -> None:
    reproduce(Experiment("shown", "Shown", "As it was read.", (), lambda *_: OUTCOME), tmp_path)
    sections, text, width = _read(tmp_path / REPORT)
    assert sections == ["experiment"]
    assert "4 ± 13 [82]" in text
    assert width > 100
