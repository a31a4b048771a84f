"""Audit: the docs' published figures of runs, recomputed from the raw results by independent code.

    python -m lab audit

`lab.writers` makes the tables with `lab.study`'s statistics, which use scipy. This package imports neither of
them, nor scipy, so that a mistake in them shows as a difference: `statistics` has the formulas in numpy,
`raw` reads the files of bench/results, `tables` and `sentences` compute the expected text of each cell and
number of a page, `command` compares, and `others` lists what is not of runs. Bootstraps and simulations use
the generator and the seed that the laboratory documents, so that the ends of intervals, like all other
figures, agree to the last printed digit. Differences below a printed digit are not found.
"""
