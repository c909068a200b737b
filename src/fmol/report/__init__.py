"""A run, or several beside one another, as one HTML page that needs nothing else."""

from fmol.report.page import build_report, write_report

__all__ = ["build_report", "write_report"]
