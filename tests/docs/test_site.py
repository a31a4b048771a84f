"""The hook that brings README and other files outside of docs into the site; `make site` checks its links."""

import re
from pathlib import Path

import pytest
import yaml

from lab.writers.site import ROOT, listing, moved, on_page_markdown, outside, place, slug, targets


@pytest.fixture
def clone(tmp_path):
    """A small repository."""
    files = {
        "README.md": "[a](docs/a.md#x) [more](MORE.md) [web](https://example.org) [gone](gone.md)",
        "MORE.md": "[plan](lab/plan.yaml)",
        "docs/a.md": "[b](sub/b.md) [all](../results) `[c](../c.md)` [top](#x)",
        "docs/sub/b.md": "[home](../../README.md) ![picture](../one.svg)",
        "docs/one.svg": "", "lab/plan.yaml": "", "results/1.json": "", "results/2.json": "", "c.md": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_linked_to_outside_of_docs_is_found(clone):
    assert outside(clone) == ["README.md", "MORE.md", "results", "lab/plan.yaml"]


def test_links_lead_to_the_same_places(clone):
    def links(path):
        return re.findall(r"\]\(([^)]+)\)", moved(path, (clone / path).read_text(), clone))

    assert links("README.md") == ["a.md#x", "MORE.md", "https://example.org", "gone.md"]
    assert links("MORE.md") == ["lab/plan.yaml"]
    assert links("docs/a.md") == ["sub/b.md", "results/index.md", "../c.md", "#x"]
    assert links("docs/sub/b.md") == ["../index.md", "../one.svg"]


def test_a_folder_is_a_page(clone):
    page, files = listing("results", clone)
    assert page == "# results\n\n- [1.json](1.json)\n- [2.json](2.json)\n"
    assert files == ["results/1.json", "results/2.json"]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("What a run logs", "what-a-run-logs"),
        ("Importance correction (`qerl/update/x.py`)", "importance-correction-qerlupdatexpy"),
        ("wp12: arms, 8 - 9", "wp12-arms-8---9"),
    ],
)
def test_anchors_are_those_of_github(heading, anchor):
    assert slug(heading) == anchor


def test_a_list_begins_behind_a_paragraph():
    class page:
        class file:
            abs_src_path = str(ROOT / "README.md")

    text = "It says:\n- one\n  more\n- two\n"
    assert on_page_markdown(text, page) == "It says:\n\n- one\n  more\n- two\n"


def test_every_page_is_in_the_navigation():
    """As `make site` finds, which takes longer; a page that is new fails here first."""

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [leaf for one in entries for leaf in leaves(one)]

    shown = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    found += [path for path in outside() if path.endswith(".md") or (ROOT / path).is_dir()]
    assert sorted(shown) == sorted(map(place, found))


def test_no_link_of_a_page_is_in_html():
    for page in [ROOT / "README.md", *Path(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"<(?:a|img) ", page.read_text()), page
    assert "docs/training.md" in set(targets("README.md", (ROOT / "README.md").read_text()))
