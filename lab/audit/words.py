"""Formats of numbers on the pages, and names of the result files that the pages use."""

from collections.abc import Sequence

import numpy as np

from lab.audit import statistics as st
from lab.audit.raw import Judged, Study, study

MINUS = " \N{MINUS SIGN} "
NOT_RUN, NOT_READ = "not run", "not read"
TASKS = {"wp12": "noise-wp12", "wp1": "noise-wp1", "needle": "noise-needle"}
EARLIER, TRUST, TRAINED = "noise-wp12-6b0a637", "trust-regions-wp12", ("probe-trained", "probe-seeds")


def signed(mean: float, low: float, high: float, digits: int = 3) -> str:
    """Format a difference with its interval."""
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def estimate(d: st.Array, digits: int = 3) -> str:
    """Format the mean of paired differences with its BCa interval."""
    return signed(d.mean(), *st.bca(d), digits) if len(d) > 1 else NOT_RUN


def centre(d: st.Array) -> str:
    """Format the Hodges-Lehmann centre of paired differences with its interval."""
    return signed(st.hodges_lehmann(d), *st.centre_interval(d)) if len(d) > 1 else NOT_RUN


def over_seeds(d: st.Array) -> str:
    """Format the mean of paired differences with its BCa interval and the number of seeds."""
    return f"{estimate(d)}, {len(d)} seeds" if len(d) > 1 else NOT_RUN


def plain(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean of one value per seed with its percentile interval."""
    known = np.array([value for value in values if np.isfinite(value)])
    low, high = st.percentile(known)
    return f"{known.mean():.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def deviation(values: Sequence[float]) -> str:
    """Format the mean of one value per seed with its standard deviation."""
    return f"{np.mean(values):.3f} ({np.std(values, ddof=1):.3f})"


def p_value(p: float) -> str:
    """Format a p-value to three digits."""
    return f"{p:.3g}"


def rates_of(false: float, found: float) -> str:
    """Format the rate of false claims, and the smallest difference that is found."""
    return f"{false:.3f}; {'none' if np.isnan(found) else f'{found:.3f}'}"


def later(one: Study, first: str, second: str) -> str:
    """Format the comparison of a pair that its study did not plan."""
    d = one.paired(first, second)
    return f"{estimate(d)}, p {p_value(st.signed_ranks(d))} uncorrected" if len(d) > 1 else NOT_RUN


def interval_of(judged: Judged) -> str:
    """Format the mean of a comparison with its interval."""
    return signed(judged.differences.mean(), *judged.interval)


def sentence(name: str, first: str, second: str) -> str:
    """Format a comparison for a sentence."""
    judged = study(name).judged.get((first, second))
    return later(study(name), first, second) if judged is None else f"{interval_of(judged)}, {judged.verdict}"
