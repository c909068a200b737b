"""What goes wrong in a real deployment, done on purpose: counted, named, and nothing else is lost.

Each test deploys a SuperLink and SuperNodes on this machine, with TLS and node keys, and breaks
something. Afterwards the model must be, bit for bit, that of one machine in which the same updates
came in. Run them with `make test-faults`; the table at the end says what was tried and what was lost.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')
if not sys.platform.startswith("linux"):  # pragma: no cover
    pytest.skip("processes are followed by Linux's /proc", allow_module_level=True)

from deployed_server import ALGORITHM, SEED
from deployed_sites import make_problem
from flower_deployment import Deployment, Run, deployment, wait_until, write_test_app
from fmol import FSMGDA, fit
from fmol.federation import Population
from fmol.rounds import RoundReport
from fmol.runs.folder import RunFolder
from support import flat

pytestmark = pytest.mark.faults

SITES = ("c0", "c1", "c2")


# ---- what was tried, and what was lost -------------------------------------------------------


@dataclass
class Ledger:
    """One line per fault: how often it was tried, whether it was named, what was lost by it."""

    rows: list[tuple[str, int, int, int, int]] = field(default_factory=list)

    def add(self, what: str, *, tried: int, named: int, updates: int = 0, rounds: int = 0) -> None:
        """`updates` and `rounds` are those that were lost although nothing was wrong with them."""
        self.rows.append((what, tried, named, updates, rounds))

    def table(self) -> str:
        head = f"{'fault':48} {'tried':>6} {'named':>6} {'updates lost':>13} {'rounds lost':>12}"
        lines = [f"{w:48} {t:6} {n:6} {u:13} {r:12}" for w, t, n, u, r in self.rows]
        columns = list(zip(*[row[1:] for row in self.rows], strict=True)) or [(0,)] * 4
        last = "{:48} {:6} {:6} {:13} {:12}".format("all", *map(sum, columns))
        return "\n".join([head, *lines, last])


@pytest.fixture(scope="module")
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    made = Ledger()
    yield made
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line("\n" + made.table())


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployment]:
    with deployment(tmp_path / "deployment") as made:
        yield made
    assert not made.running(), "a process was left behind"


# ---- what should have come out ---------------------------------------------------------------


@dataclass(frozen=True)
class Scripted:
    """The cohorts of another run."""

    cohorts: Sequence[tuple[str, ...]]

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        return self.cohorts[round] if round < len(self.cohorts) else tuple(population.ids())


def counted(report: RoundReport) -> tuple[str, ...]:
    """The sites whose updates came in."""
    return tuple(sorted({c.client for c in report.clients if not math.isnan(c.delta_norm)}))


def assert_as_on_one_machine(out: Path, rounds: int) -> tuple[RoundReport, ...]:
    """The reports of a run whose model is the one that the updates which came in lead to."""
    folder = RunFolder.open(out)
    saved, _ = folder.last_state()
    reports = folder.record().reports
    assert saved is not None
    assert [report.round for report in reports] == list(range(rounds))
    expected = fit(
        make_problem(),
        FSMGDA(**ALGORITHM),
        rounds=rounds,
        seed=SEED,
        device="cpu",
        engine="sequential",
        participation=Scripted([counted(report) for report in reports]),
        evaluate="cohort",
    )
    assert torch.equal(saved.state.x, flat(expected.model))
    return reports


def start(deployed: Deployment, tmp_path: Path, **faults: str) -> None:
    """The three sites, of which some misbehave in some rounds."""
    deployed.start_nodes(
        {site: {**node_config(tmp_path, site), "faults": faults.get(site, "")} for site in SITES}
    )


def node_config(tmp_path: Path, site: str) -> dict[str, Any]:
    return {"site": site, "log": str(tmp_path)}


def run_app(deployed: Deployment, tmp_path: Path, rounds: int, **config: Any) -> Run:
    app = tmp_path / "app"
    if not app.exists():
        write_test_app(app)
    given = {"num-server-rounds": rounds, "out": str(tmp_path / "out")}
    given |= {name.replace("_", "-"): value for name, value in config.items()}
    return deployed.run(app, given)


def wait_for_site(tmp_path: Path, site: str, text: str, *, seconds: float = 120.0) -> None:
    """Returns when a site does something: it says so in a file."""
    path = tmp_path / f"{site}.txt"
    assert wait_until(lambda: path.exists() and text in path.read_text(), seconds=seconds)


# ---- what a site sends -----------------------------------------------------------------------

SENT = {
    "nan": "non-finite",
    "shape": r"shape \[1, \d+\]",
    "short": r"shape \[1\]",
    "stale": "round 3, and 4 was expected",
    "replay": "round 0, and 5 was expected",
    "layout": "layout '0+'",
    "garbage": "begins with",
    "stock": "no `head` of fmol's",
    "raise": "ValueError",
    "loss": "lowest_loss",
    "samples": "1000000000 samples",
    "objective": "nobody asked for",
}
"""Fault → what must be said of it. The n-th is done in round n + 1."""


def test_whatever_a_site_sends_is_refused_by_name_and_the_others_count(
    deployed: Deployment, tmp_path: Path, ledger: Ledger
) -> None:
    faults = ["keep@0", *(f"{fault}@{i}" for i, fault in enumerate(SENT, 1))]
    rounds = len(faults) + 1
    start(deployed, tmp_path, c1=" ".join(faults))
    run = run_app(deployed, tmp_path, rounds)
    assert deployed.wait(run, seconds=600.0) == "finished:completed", run.program.tail()
    reports = assert_as_on_one_machine(tmp_path / "out", rounds)
    for report, (fault, words) in zip(reports[1:], SENT.items(), strict=False):
        said = " ".join([*map(str, report.refused), *report.notes])
        named = bool(re.search(words, said)) and "`c1`" in said
        ledger.add(
            f"a site sends: {fault}",
            tried=1,
            named=int(named),
            updates=len({"c0", "c2"} - set(counted(report))),
        )
        assert counted(report) == ("c0", "c2"), f"{fault}: {said}"
        assert named, f"{fault}: {said}"
        assert "4711" not in said, "a value of the site's data was told"
    assert counted(reports[0]) == counted(reports[-1]) == SITES
    assert "4711" not in run.text()


# ---- who comes and goes ----------------------------------------------------------------------


def test_a_site_killed_in_a_round_and_the_only_holder_of_an_objective_come_back(
    deployed: Deployment, tmp_path: Path, ledger: Ledger
) -> None:
    """Flower takes a minute to notice that a node is gone; until then it is asked, and not heard."""
    first, second, rounds = 1, 7, 14
    start(deployed, tmp_path, c1=f"sleep@{first}", c2=f"sleep@{second}")
    run = run_app(deployed, tmp_path, rounds, timeout=30.0, min_sites=1)
    for site in ("c1", "c2"):
        wait_for_site(tmp_path, site, "train sleep", seconds=300.0)
        deployed.nodes[site].kill()
        deployed.bring_back(site, node_config(tmp_path, site))
    assert deployed.wait(run, seconds=400.0) == "finished:completed", run.program.tail()
    reports = assert_as_on_one_machine(tmp_path / "out", rounds)

    killed, orphaned, last = reports[first], reports[second], reports[-1]
    notes = [note for report in reports for note in report.notes]
    assert killed.silent == ("c1",)
    assert counted(killed) == ("c0", "c2")
    assert not killed.missing
    assert orphaned.silent == ("c2",)
    assert orphaned.missing == ("c",)
    assert orphaned.weights.get("c", 0.0) == 0.0
    gone = any("site `c2` is gone, and nobody else holds `c`" in note for note in notes)
    # Who was there all the time was counted all the time.
    lost = sum("c0" not in counted(report) for report in reports)
    ledger.add(
        "a site is killed in a round", tried=1, named=int("c1" in killed.silent), updates=lost
    )
    ledger.add("the only holder of an objective is killed", tried=1, named=int(gone))
    back = set(SITES) - set(counted(last))
    ledger.add("a site that was killed comes back", tried=2, named=2, updates=len(back))
    assert gone
    assert not back, "somebody did not come back"
    assert not lost


# ---- the server ------------------------------------------------------------------------------


def test_a_server_killed_at_any_moment_goes_on_to_the_same_model(
    deployed: Deployment, tmp_path: Path, ledger: Ledger
) -> None:
    rounds = 6
    start(deployed, tmp_path, c1="sleep@1")
    run = run_app(deployed, tmp_path, rounds)

    # The server's process, while a site is at work.
    wait_for_site(tmp_path, "c1", "train sleep")
    servers = deployed.running("flwr-serverapp")
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not deployed.running("flwr-serverapp"), seconds=10.0)
    deployed.nodes["c1"].stop()  # What it sleeps over is of a run that is no more.
    deployed.bring_back("c1", node_config(tmp_path, "c1"))

    # All of the server's machine, between two rounds.
    run = run_app(deployed, tmp_path, rounds)
    run.wait_for("ROUND 2 DONE", seconds=120.0)
    assert deployed.superlink is not None
    deployed.superlink.kill()
    deployed.start_superlink()
    for site in SITES:
        if not deployed.nodes[site].alive:
            deployed.bring_back(site, node_config(tmp_path, site))

    run = run_app(deployed, tmp_path, rounds)
    assert deployed.wait(run, seconds=400.0) == "finished:completed", run.program.tail()
    reports = assert_as_on_one_machine(tmp_path / "out", rounds)
    lost = sum(len(set(SITES) - set(counted(report))) for report in reports)
    ledger.add("the server's process is killed in a round", tried=1, named=1, updates=lost)
    ledger.add(
        "the SuperLink is killed", tried=1, named=1, rounds=rounds - len(reports), updates=lost
    )
    assert lost == 0


# ---- who may not take part -------------------------------------------------------------------


def test_who_may_not_take_part_is_turned_away_and_the_others_train(
    deployed: Deployment, tmp_path: Path, ledger: Ledger
) -> None:
    rounds = 5
    start(deployed, tmp_path)
    deployed.register("foreign", "twin")
    deployed.start_node("foreign", {**node_config(tmp_path, "c1"), "foreign": True})
    stranger = deployed.start_node("stranger", node_config(tmp_path, "c1"))
    assert wait_until(lambda: not stranger.alive, seconds=60.0), (
        "a key that nobody knows was let in"
    )
    run = run_app(deployed, tmp_path, rounds)
    run.wait_for("ROUND 0 DONE", seconds=120.0)
    deployed.start_node("twin", node_config(tmp_path, "c0"))
    assert deployed.wait(run, seconds=400.0) == "finished:completed", run.program.tail()
    reports = assert_as_on_one_machine(tmp_path / "out", rounds)
    notes = " ".join(note for report in reports for note in report.notes)
    assert all(counted(report) == SITES for report in reports)
    refused = "regist" in stranger.text().lower() or "305" in stranger.text()
    ledger.add("a node whose key is not registered", tried=1, named=int(refused))
    ledger.add("a node with another model", tried=1, named=int("was turned away" in notes))
    twin = "says that it is `c0`" in notes
    ledger.add("a second node with a site's name", tried=1, named=int(twin))
    assert twin, notes
    assert refused, stranger.tail()
    assert "was turned away" in notes
    assert "Build the same model on both sides" in notes


def test_too_few_sites_end_the_run_with_a_sentence(
    deployed: Deployment, tmp_path: Path, ledger: Ledger
) -> None:
    deployed.start_nodes({"c0": node_config(tmp_path, "c0")})
    run = run_app(deployed, tmp_path, 2, patience=15.0, min_sites=2)
    assert deployed.wait(run, seconds=120.0) == "finished:failed"
    said = " ".join(run.text().split())
    named = "1 of at least 2 sites were there (`c0`)" in said and "no site holds `c`" in said
    ledger.add("too few sites", tried=1, named=int(named))
    assert named, run.program.tail()
