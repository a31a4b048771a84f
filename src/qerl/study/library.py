"""The studies that are part of the package, by name; a word in .yaml or with a slash is a path instead."""

from pathlib import Path

from qerl.named_files import named_file

FOLDER = Path(__file__).parent / "examples"


def packaged() -> dict[str, Path]:
    """Files of the package's studies by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def study_file(word: str) -> Path:
    """The file that a word on the command line means.

    Raises:
        QeRLError: The package has no study of this name.
    """
    return named_file(word, packaged(), "study")
