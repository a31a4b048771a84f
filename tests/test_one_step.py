"""One step as ARCHITECTURE.md draws it: the order of its events, the modules that it enters, and how often
the trainer and the libraries call each other."""

import re
from pathlib import Path

import pytest

from tests.support.step_trace import trace_step

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def packed():
    return trace_step("nvfp4")


def drawn_events():
    """(function, file) of each line of the drawing."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawing = text[text.index("\nevent ") :].partition("```")[0]
    lines = [re.match(r" *\S+ +(\S+) +(\S+\.py) +\S", line) for line in drawing.strip().splitlines()[1:]]
    assert all(lines)
    return [found.groups() for found in lines]


def test_a_step_runs_as_it_is_drawn(packed):
    drawn = [f"{file.removesuffix('.py').replace('/', '.')}.{name}" for name, file in drawn_events()]
    assert len(drawn) > 20 and [call for call in packed.calls if call in drawn] == drawn


def test_a_step_enters_few_modules_and_seldom_crosses_to_the_libraries(packed):
    plainest = trace_step()
    assert len(plainest.modules) <= 21, sorted(plainest.modules)
    assert len(plainest.crossings) <= 12, plainest.crossings
    assert packed.modules.keys() - plainest.modules.keys() == {"fp4/linear.py", "lora/product.py"}
    assert packed.crossings == plainest.crossings
