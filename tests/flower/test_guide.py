"""`docs/deployment.md` is followed to the letter, on one machine in place of many."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')
if not sys.platform.startswith("linux"):  # pragma: no cover
    pytest.skip("processes are followed by Linux's /proc", allow_module_level=True)
if not (shutil.which("openssl") and shutil.which("ssh-keygen")):  # pragma: no cover
    pytest.skip("the guide uses openssl and ssh-keygen", allow_module_level=True)

from flower_deployment import Deployment, free_port, wait_until
from fmol.flower import SWITCHED_OFF
from fmol.runs.folder import RunFolder

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SITES = ("north", "south", "west")


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(GUIDE.read_text()) if kind == language]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Deployment]:
    """One machine, on which nothing is set that the guide does not set."""
    made = Deployment(tmp_path / "fmol", secure=False)
    made.port = free_port()
    made.env = {n: v for n, v in made.env.items() if n not in (*SWITCHED_OFF, "FLWR_HOME")}
    try:
        yield made
    finally:
        made.stop()
    assert not made.running(), "a process was left behind"


def follow(host: Deployment, block: str, site: str = "north") -> None:
    """Does what a block says; what is to be left running is left running."""
    title, text = block.split("\n", 1)
    changes = {
        "/srv/fmol": str(host.folder),
        "link.example.org": "localhost",
        "0.0.0.0": "127.0.0.1",
        ":8000": f":{host.port}",
        "--port 8000": f"--port {host.port}",
        "flower-supernode ": f"flower-supernode --port {free_port()} ",
        "number=0": f"number={SITES.index(site)}",
        "north": site,
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    stays = "leave it running" in title
    if stays:
        text = text.replace("flower-super", "exec flower-super", 1)
    settings = "[ ! -e flower.env ] || { set -a; . ./flower.env; set +a; }"
    script = f"set -euo pipefail\n{settings}\n{text}"
    program = host._start(f"{title.strip('# ')}-{site}", ["bash", "-c", script])
    if not stays:
        host._finished(program, 300.0)
    elif "superlink" in text:
        host.superlink = program
        host._wait_for_port(program, host.port, 60.0)
    else:
        assert wait_until(lambda: "SuperNode ID" in program.text(), seconds=60.0), program.tail()


def test_the_guide_leads_to_a_trained_model(host: Deployment) -> None:
    for block in blocks("bash"):
        for site in SITES if "site" in block.split("\n", 1)[0] else SITES[:1]:
            follow(host, block, site)
    said = "".join(program.text() for program in host._programs)
    assert all(site in said for site in SITES)
    assert "finished:completed" in said
    record = RunFolder.open(host.folder / "runs" / "first").record()
    assert [len(report.cohort) for report in record.reports] == [3, 3]
    assert not any(report.refused or report.silent for report in record.reports)
    assert sorted(record.reports[0].cohort) == sorted(SITES)
    assert host.peers() == {"127.0.0.1"}


def test_the_services_start_what_the_steps_start() -> None:
    def words(text: str, program: str) -> list[str]:
        found = re.search(rf"{program} (.*?)(?:\n(?!  )|\Z)", text.replace("\\\n", ""), re.DOTALL)
        assert found
        return found[1].split()

    for program in ("flower-superlink", "flower-supernode"):
        step, service = (
            next(text for text in blocks(language) if program in text)
            for language in ("bash", "ini")
        )
        assert words(step, program) == words(service, program)


def test_the_guide_switches_off_all_that_the_package_does() -> None:
    settings = next(text for text in blocks("bash") if "flower.env" in text)
    for name, value in SWITCHED_OFF.items():
        if name != "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO":  # It only keeps Ray from talking.
            assert f"{name}={value}" in settings
