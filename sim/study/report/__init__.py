"""One HTML page about a run or a sweep: ``vtoken report``."""

from sim.study.report.page import write_report

__all__ = ["write_report"]
