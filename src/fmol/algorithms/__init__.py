"""Algorithms: the text of one round each, one file each."""

from fmol.algorithms.alone import Alone
from fmol.algorithms.centralized import MGD, SMGD
from fmol.algorithms.curvature import OutputMoments
from fmol.algorithms.fedals import FedALS
from fmol.algorithms.fedavg import FedAvg
from fmol.algorithms.fedls import FedLS
from fmol.algorithms.fmgda import FMGDA, FSMGDA
from fmol.algorithms.merging import InputMoments
from fmol.algorithms.steps import Adam, Momentum, Plain

__all__ = [
    "FMGDA",
    "FSMGDA",
    "MGD",
    "SMGD",
    "Adam",
    "Alone",
    "FedALS",
    "FedAvg",
    "FedLS",
    "InputMoments",
    "Momentum",
    "OutputMoments",
    "Plain",
]
