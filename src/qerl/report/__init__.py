"""What a run folder says about its run: as a page, as a picture, in the terminal."""

from qerl.report.curve import reward_curve_png, terminal_curve
from qerl.report.page import write_report
from qerl.report.runs import read_metrics

__all__ = ["read_metrics", "reward_curve_png", "terminal_curve", "write_report"]
