"""What the docs publish of studies, computed again from the raw results by other code.

    python -m lab audit

`lab.writers` makes the tables with `lab.study`'s statistics, which use scipy. Nothing of either is imported
here, nor scipy, so that a mistake in them shows as a difference: `statistics` has the formulas in numpy,
`raw` reads the files of bench/results as they are, `tables` and `sentences` say what each cell of a page
should be, `command` compares. Bootstraps draw with the generator and the seed that the laboratory documents,
so that ends of intervals are equal to the last digit that is printed, like everything else. What is too small
to move a printed digit is not seen.
"""
