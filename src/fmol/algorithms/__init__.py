"""Algorithms: the text of one round each, one file each."""

from fmol.algorithms.alone import Alone
from fmol.algorithms.centralized import MGD, SMGD
from fmol.algorithms.fedavg import FedAvg
from fmol.algorithms.fmgda import FMGDA, FSMGDA

__all__ = ["FMGDA", "FSMGDA", "MGD", "SMGD", "Alone", "FedAvg"]
