"""A small seed of `python -m tests.fuzz tools`."""

import pytest

from tests.fuzz.tools import run


@pytest.mark.slow
def test_nothing_stays_behind_of_tools_that_raise_hang_or_return_nonsense(tmp_path):
    ends = run(40, 0, tmp_path)
    assert sum(ends.values()) == 40 and ends["stop"] > 5 and len(ends) > 1
