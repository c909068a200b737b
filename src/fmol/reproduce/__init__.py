"""The paper's experiments by name, and one beside them."""

from __future__ import annotations

from fmol.reproduce.batch import BATCH
from fmol.reproduce.centralised import CENTRALISED
from fmol.reproduce.clients import CLIENTS
from fmol.reproduce.experiment import Experiment
from fmol.reproduce.heterogeneity import HETEROGENEITY
from fmol.reproduce.local_steps import LOCAL_STEPS
from fmol.reproduce.local_updates import LOCAL_UPDATES
from fmol.reproduce.rates import RATES
from fmol.reproduce.river_flow import RIVER_FLOW
from fmol.reproduce.running import RESULTS, Reproduction, missing_data, reproduce
from fmol.reproduce.step_size import STEP_SIZE

__all__ = ["EXPERIMENTS", "RESULTS", "Experiment", "Reproduction", "missing_data", "reproduce"]

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
        RATES,
        HETEROGENEITY,
    )
}
