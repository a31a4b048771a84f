"""What docs/training.md shows, so that tests run it as it stands."""

import re
from fnmatch import fnmatch
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def shown(heading: str, language: str = "yaml", under: int = 15) -> str:
    """The first block of a language under a heading of the page, which has fewer than ``under`` lines."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.search(rf"^```{language}\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    assert block is not None, f"{PAGE} has no {language} under {heading!r}"
    lines = block[1].count("\n")
    assert lines < under, f"the {language} under {heading!r} has {lines} lines"
    return block[1]


def is_explained(metric: str) -> bool:
    """Whether the page's table of metrics has a metric, whose names may have a star or NAME in them."""
    logged = PAGE.read_text(encoding="utf-8").partition("\n## What a run logs\n")[2]
    names = (line.split(" | ")[0] for line in logged.splitlines() if line.startswith("| `"))
    patterns = [name.replace("NAME", "*") for cell in names for name in re.findall(r"`([^`]+)`", cell)]
    return any(fnmatch(metric, pattern) for pattern in patterns)
