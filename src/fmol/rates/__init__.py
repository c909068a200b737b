"""Table 1 of the paper, measured: how fast FMGDA and FSMGDA approach the Pareto set."""

from fmol.rates.cases import CASES, Case, Point
from fmol.rates.figure import write_figure
from fmol.rates.measuring import RatesResult, measure_rates
from fmol.rates.table import rates_table

__all__ = [
    "CASES",
    "Case",
    "Point",
    "RatesResult",
    "measure_rates",
    "rates_table",
    "write_figure",
]
