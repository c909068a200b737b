"""The front in a report, as a reader sees it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fmol.front import FrontOptions, front_records, train_front
from fmol.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, folder: Path, objectives: int, **options: Any) -> tuple[Any, list[str]]:
    told = {
        "problem": {
            "name": "quadratic",
            "objectives": objectives,
            "dimension": 12,
            "clients": 3,
            "samples": 4,
        },
        "rounds": 3,
        "engine": "vectorized",
        "device": "cpu",
    }
    path, front = train_front(told, {}, FrontOptions(**options), out=folder)
    page_file = write_report(
        folder / "front.html", front_records(path, front), front=front.summary()
    )
    page = browser.new_page(viewport={"width": 1366, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.goto(page_file.as_uri())
    return page, errors


def test_two_objectives_are_points_with_a_reference_and_a_hypervolume(
    browser: Any, tmp_path: Path
) -> None:
    page, errors = opened(
        browser, tmp_path, 2, points=5, method=("weights", "near-prior"), reference=2.0
    )
    assert page.locator("#front h2").inner_text() == "What can be traded"
    assert "Hypervolume up to the reference point" in page.locator("#front .lead").inner_text()
    marks = page.locator("#front .stage .mark")
    assert marks.count() == 10
    assert page.locator("#front .stage .reference").count() == 1
    page.locator("#front .stage svg").focus()
    page.keyboard.press("ArrowRight")
    assert "f1" in page.locator("#tip, .tip").first.inner_text()
    page.locator("#front details summary").last.click()
    assert page.locator("#front tbody tr").count() == 10
    page.locator('#front [data-value="log"]').click()
    assert marks.count() == 10
    page.locator('[data-chip="run:0"]').click()
    assert marks.count() == 9
    assert errors == []


def test_many_objectives_are_lines_and_any_two_can_be_looked_at(
    browser: Any, tmp_path: Path
) -> None:
    page, errors = opened(browser, tmp_path, 5, points=7)
    assert page.locator("#front .stage .mark").count() == 7
    assert "No reference point was given" in page.locator("#front .lead").inner_text()
    page.locator('#front [data-value="two"]').click()
    assert "training loss, f1" in page.locator("#front .stage").text_content()
    page.locator("#front select").first.select_option("3")
    assert "training loss, f4" in page.locator("#front .stage").text_content()
    assert errors == []
