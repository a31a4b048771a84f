"""Draw the figures of the docs again, from the results of studies and probes in bench/results.

    python -m lab draw        # writes docs/images

Each study and probe has a folder of figures; files of an earlier call are removed. `python -m lab tables`
then puts the figures into the pages.
"""

import argparse
import shutil
from pathlib import Path

from lab.study import page
from lab.writers import probe_figures
from lab.writers.probe_rows import TRAINED
from lab.writers.study_tables import study

IMAGES = Path(__file__).parents[2] / "docs" / "images"
"""Parent of the figures' folders."""
STUDIES = {"wp12": "noise-wp12", "wp1": "noise-wp1", "needle": "noise-needle"}
"""Files of the studies by the name of their task, which is also the name of their folder."""
PROBES = ("probe", *TRAINED)
WITHOUT = ("rewards/accuracy/mean", "accuracy/steps_1", "entropy")
"""Keys not drawn for the docs, which show the sampler's; a study's own page has them."""


def draw() -> list[str]:
    """Draw all figures and return a sentence per result file."""
    said = []
    for folder in (*STUDIES, *PROBES):
        shutil.rmtree(IMAGES / folder, ignore_errors=True)
    for task, name in STUDIES.items():
        said.append(_said(name, page.write_figures(study(name), IMAGES / task, WITHOUT)))
    for name in PROBES:
        said.append(_said(name, probe_figures.write_figures(name, IMAGES / name)))
    return said


def _said(name: str, paths: list[Path]) -> str:
    return f"{len(paths)} figures of {name}.json.gz in {paths[0].parent}."


def shown(folder: str, *stems: str) -> str:
    """Return a folder's figures whose names begin with ``stems`` as Markdown; a sentence if it has none."""
    found = [path for stem in stems for path in sorted((IMAGES / folder).glob(f"{stem}*.svg"))]
    if not found:
        return f"The figures of {folder} are not drawn yet; `python -m lab draw` does.\n"
    return "".join(
        f"![{path.stem.replace('-', ' ')}, {folder}](images/{folder}/{path.name})\n"
        for path in dict.fromkeys(found)
    )


def main(arguments: list[str]) -> None:
    """Run `python -m lab draw` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab draw", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    print("\n".join(draw()))
