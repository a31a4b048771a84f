"""Draw the figures of the docs again, from the results of studies and probes in bench/results.

    python -m lab draw        # writes docs/images

A folder of figures for each study and probe; what an earlier call left there is removed. A study that is not
there yet gets a sentence. The pages show what is there once `python -m lab tables` has run.
"""

import argparse
import shutil
from pathlib import Path

from lab.study import page
from lab.writers import probe_figures
from lab.writers.probe_rows import TRAINED
from lab.writers.study_tables import absent, study

IMAGES = Path(__file__).parents[2] / "docs" / "images"
"""Where the figures go."""
STUDIES = {"wp12": "noise-wp12", "wp1": "noise-wp1", "needle": "noise-needle"}
"""Files of the studies by the name of their task, which is that of their folder."""
PROBES = ("probe", *TRAINED)
WITHOUT = ("rewards/accuracy/mean", "accuracy/steps_1", "entropy")
"""Not drawn for the docs, which show what the sampler has; a study's own page has them."""


def draw() -> list[str]:
    """Draw all figures, and say for each file of results what was done."""
    said = []
    for folder in (*STUDIES, *PROBES):
        shutil.rmtree(IMAGES / folder, ignore_errors=True)
    for task, name in STUDIES.items():
        results = study(name)
        paths = [] if results is None else page.write_figures(results, IMAGES / task, WITHOUT)
        said.append(_said(name, paths))
    for name in PROBES:
        said.append(_said(name, probe_figures.write_figures(name, IMAGES / name)))
    return said


def _said(name: str, paths: list[Path]) -> str:
    return f"{len(paths)} figures of {name}.json.gz in {paths[0].parent}." if paths else absent(name).strip()


def shown(folder: str, *stems: str) -> str:
    """Figures of a folder as Markdown, those that begin with each of some words; a sentence where none is."""
    found = [path for stem in stems for path in sorted((IMAGES / folder).glob(f"{stem}*.svg"))]
    if not found:
        return f"The figures of {folder} are not drawn yet; `python -m lab draw` does.\n"
    return "".join(
        f"![{path.stem.replace('-', ' ')}, {folder}](images/{folder}/{path.name})\n"
        for path in dict.fromkeys(found)
    )


def main(arguments: list[str]) -> None:
    """Runs `python -m lab draw` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab draw", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    print("\n".join(draw()))
