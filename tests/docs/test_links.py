"""What docs and docstrings point to is there: files behind links, and files and modules that prose names."""

import re
from pathlib import Path

import pytest

from lab.writers.site import slug

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
DATED = ("CHANGELOG.md", "log")  # changelog and lab book, which speak of files of their time
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:qerl|src|tests|docs|bench|lab)/[\w./-]+|(?!my/)[\w-]+/[\w./-]*(?:\.\w+|/))`")
_PLACES = (ROOT, ROOT / "src", ROOT / "src" / "qerl", ROOT / "packages" / "serve" / "src")
_MODULE = re.compile(r"`((?:qerl|qerl_serve|lab)(?:\.[a-z_]\w*)+)`")
PACKAGE = ROOT / "src" / "qerl"
_DOTTED = re.compile(r"`(?:qerl\.)?([a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
_OF_OBJECTS = {"trainer.train", "trainer.engine"}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {slug(heading) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    "page", [p for p in PAGES if not {p.name, p.stem, p.parent.name} & set(DATED)], ids=lambda page: page.name
)
def test_files_and_modules_that_are_named_exist(page):
    text = page.read_text()
    named = _FILE.findall(text) + [name.replace(".", "/") for name in _MODULE.findall(text)]
    for name in named:
        paths = [place / end for place in _PLACES for end in (name, f"{name}.py")]
        assert any(path.exists() for path in paths), name


def defines(name: str, place: Path) -> bool:
    """Whether a dotted name is that of a module below a folder, or of something in one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        folder = place.joinpath(*parts[:depth])
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if depth == len(parts) and (folder.is_dir() or file.is_file()):
            return True
        if file.is_file():
            return re.search(rf"\b{parts[depth]}\b", file.read_text()) is not None
    return False


def test_modules_that_docstrings_name_exist():
    rooms = {path.stem for path in PACKAGE.iterdir()}
    beside = (ROOT / "lab", ROOT / "packages" / "serve" / "src")
    for path in [*PACKAGE.rglob("*.py"), *(path for place in beside for path in place.rglob("*.py"))]:
        for name in _DOTTED.findall(path.read_text()):
            first = name.partition(".")[0]
            if first == "lab" or (first in rooms and name not in _OF_OBJECTS):
                place = ROOT if first == "lab" else PACKAGE
                assert defines(name, place), f"{path.relative_to(ROOT)}: {name}"
