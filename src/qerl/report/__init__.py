"""What a run folder says about its run: as a page, as a picture, in the terminal."""

from qerl.report.curve import terminal_curve
from qerl.report.page import COMPLETIONS, write_report

__all__ = ["COMPLETIONS", "terminal_curve", "write_report"]
