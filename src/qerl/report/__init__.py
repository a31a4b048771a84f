"""What a run folder says about its run: as a page, as a picture, in the terminal."""

from qerl.report.curve import terminal_curve
from qerl.report.page import write_report
from qerl.report.runs import read_metrics

__all__ = ["read_metrics", "terminal_curve", "write_report"]
