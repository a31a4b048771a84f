"""The studies of this project, by name; a word that ends in .yaml or has a slash is a path instead."""

from pathlib import Path

from qerl.settings.library import named_file

FOLDER = Path(__file__).parents[1] / "studies"


def known() -> dict[str, Path]:
    """Files of studies, and of parts of them, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def study_file(word: str) -> Path:
    """The file that a command-line word names.

    Raises:
        QeRLError: There is no study of this name.
    """
    return named_file(word, known(), "study")
