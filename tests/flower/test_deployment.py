"""A real deployment on this machine trains: a SuperLink, three SuperNodes, TLS and node keys."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')
if not sys.platform.startswith("linux"):  # pragma: no cover
    pytest.skip("processes are followed by Linux's /proc", allow_module_level=True)

from deployed_server import ALGORITHM, SEED
from deployed_sites import HOLDINGS, make_problem
from flower_deployment import Deployment, deployment, wait_until, write_test_app
from fmol import FSMGDA, Result, fit
from fmol.runs.folder import RunFolder
from support import flat

ROUNDS = 2


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployment]:
    with deployment(tmp_path / "deployment") as made:
        yield made
    assert not made.running(), "a process was left behind"


def reference(rounds: int) -> Result:
    """What comes out without Flower."""
    return fit(
        make_problem(),
        FSMGDA(**ALGORITHM),
        rounds=rounds,
        seed=SEED,
        device="cpu",
        engine="sequential",
        evaluate="cohort",
    )


def test_three_sites_with_tls_and_node_keys_train_the_model_of_one_machine(
    deployed: Deployment, tmp_path: Path
) -> None:
    names = [f"c{i}" for i in range(len(HOLDINGS))]
    deployed.start_nodes({f"n{i}": {"site": n, "log": str(tmp_path)} for i, n in enumerate(names)})
    out = tmp_path / "out"
    run = deployed.run(
        write_test_app(tmp_path / "app"), {"out": str(out), "num-server-rounds": ROUNDS}
    )
    peers: set[str] = set()

    def ended() -> bool:
        nonlocal peers
        peers |= deployed.peers()
        return not run.program.alive

    assert wait_until(ended, seconds=300.0, every=0.5), run.program.tail()
    assert deployed.status(run) == "finished:completed", run.program.tail()

    # The numbers are those of a run without any network.
    expected, folder = reference(ROUNDS), RunFolder.open(out)
    saved, _ = folder.last_state()
    record = folder.record()
    assert saved is not None
    assert torch.equal(saved.state.x, flat(expected.model))
    assert record.stopped == expected.stopped
    assert record.final is not None
    assert record.final.held_out == expected.final.held_out

    # Every site's losses are there, on its own held-out data too, and bytes as they were sent.
    d = flat(expected.model).numel()
    for report, other in zip(record.reports, expected.reports, strict=True):
        assert not report.refused
        assert not report.silent
        assert report.losses == other.losses
        assert report.weights == other.weights
        mine, theirs = (
            [(c.client, c.objective, c.loss, c.samples, c.held_out) for c in r.clients]
            for r in (report, other)
        )
        assert mine == theirs
        assert report.bytes_up > 8 * d * sum(map(len, HOLDINGS))
        assert report.bytes_down > 8 * d * len(HOLDINGS)

    # Torch was loaded once at each site, and not once for every message.
    for name in names:
        text = (tmp_path / f"{name}.txt").read_text().split("\n")
        assert len({line.split()[1] for line in text if line}) == 1

    # Nobody spoke with another machine or can be spoken to from one; the keys are their owners' alone.
    assert peers == {"127.0.0.1"}
    for key in ("server.key", "n0", "n1", "n2"):
        assert stat.S_IMODE((deployed.folder / key).stat().st_mode) == 0o600
