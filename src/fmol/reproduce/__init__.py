"""The paper's experiments by name, and two beside them."""

from __future__ import annotations

from fmol.reproduce.batch import BATCH
from fmol.reproduce.celeba import CELEBA
from fmol.reproduce.centralised import CENTRALISED
from fmol.reproduce.clients import CLIENTS
from fmol.reproduce.conflict import CONFLICT
from fmol.reproduce.experiment import Experiment, Reproduction
from fmol.reproduce.heterogeneity import HETEROGENEITY
from fmol.reproduce.local_steps import LOCAL_STEPS
from fmol.reproduce.local_updates import LOCAL_UPDATES
from fmol.reproduce.planning import plan_runs
from fmol.reproduce.rates import RATES
from fmol.reproduce.river_flow import RIVER_FLOW
from fmol.reproduce.running import (
    RESULTS,
    UnfinishedError,
    UnmatchedError,
    experiment_size,
    missing_data,
    reproduce,
)
from fmol.reproduce.step_size import STEP_SIZE

__all__ = [
    "EXPERIMENTS",
    "RESULTS",
    "Experiment",
    "Reproduction",
    "UnfinishedError",
    "UnmatchedError",
    "experiment_size",
    "missing_data",
    "plan_runs",
    "reproduce",
]

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        BATCH,
        LOCAL_STEPS,
        LOCAL_UPDATES,
        CENTRALISED,
        CLIENTS,
        STEP_SIZE,
        RIVER_FLOW,
        CELEBA,
        RATES,
        HETEROGENEITY,
        CONFLICT,
    )
}
