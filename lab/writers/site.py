"""A hook of mkdocs that adds README and other files outside of docs to the site if a page links to them.

Pages link by paths in a clone: ``../lab/studies/README.md`` from docs, ``docs/training.md`` from README.
Mkdocs reads the folder docs only, and there is no public repository that a link could lead to instead. So
every file of the repository that README, the pages of docs, or pages reached from these link to becomes part
of the site: Markdown as a page, a folder as a page that lists its files, any other file unchanged. Links are
rewritten to the places in the site::

    README.md              index.md
    docs/training.md       training.md
    CONTRIBUTING.md        CONTRIBUTING.md
    bench/results          bench/results/index.md

Anchors are GitHub's, so a link to a heading works on both. A link to a missing file is not changed, and
mkdocs in strict mode refuses it.

Given up: links in HTML; the pages have none.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=(?:#[^)\s]*)?\))")
_LIST = re.compile(r"^((?![-*|#<> \t]).+\n)(?=- )", re.MULTILINE)
_CODE = re.compile(r"(```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def slug(heading: str, separator: str = "-") -> str:
    """Return GitHub's anchor of a heading.

    Args:
        heading: Text of the heading.
        separator: Replacement of a space.
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def place(path: str, root: Path = ROOT) -> str:
    """Return the path in the site of a file or folder of the repository.

    Args:
        path: Path from the root of the repository, with slashes and without a leading dot.
        root: Root of the repository.
    """
    if path == "README.md":
        return "index.md"
    if (root / path).is_dir():
        path += "/index.md"
    return path.removeprefix("docs/")


def targets(path: str, text: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the files and folders that the Markdown ``text`` of ``path`` links to, as paths from root."""
    for part in _CODE.split(text)[::2]:
        for link in _LINK.findall(part):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
            if not target.startswith("..") and (root / target).exists():
                yield target


def moved(path: str, text: str, root: Path = ROOT) -> str:
    """Return the Markdown ``text`` of the file ``path`` with its links rewritten for the site."""
    here = posixpath.dirname(place(path, root))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[0]))
        if target.startswith("..") or not (root / target).exists():
            return match[0]
        return posixpath.relpath(place(target, root), here or ".")

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def outside(root: Path = ROOT) -> list[str]:
    """Return the files and folders outside of docs that the site needs, as paths from root; README first."""
    found = ["README.md"]
    todo = [*found, *(page.relative_to(root).as_posix() for page in sorted((root / "docs").rglob("*.md")))]
    while todo:
        path = todo.pop(0)
        for target in targets(path, (root / path).read_text(encoding="utf-8"), root):
            if target not in found and not f"{target}/".startswith("docs/"):
                found.append(target)
                todo += [target] if target.endswith(".md") else []
    return found


def listing(folder: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """Return a page that lists the files of a folder, and the paths of these files from the root."""
    names = sorted(path.name for path in (root / folder).iterdir() if path.is_file())
    lines = [f"- [{name}]({name})" for name in names]
    return "\n".join([f"# {folder}", "", *lines, ""]), [f"{folder}/{name}" for name in names]


def on_config(config: Any) -> Any:
    """Give headings GitHub's anchors (mkdocs event)."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files outside of docs to the site (mkdocs event)."""
    from mkdocs.structure.files import File  # the tests' environment has no mkdocs

    found = outside()
    for folder in (path for path in found if (ROOT / path).is_dir()):
        page, listed = listing(folder)
        files.append(File.generated(config, place(folder), content=page))
        found = [path for path in found if path not in (folder, *listed)] + listed
    for path in found:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site (mkdocs event); a listing's links already fit.

    Also inserts an empty line before a list that follows a paragraph: Python-Markdown needs it, GitHub does
    not.
    """
    source = page.file.abs_src_path
    if source is None:
        return markdown
    return _LIST.sub(r"\1\n", moved(Path(source).relative_to(ROOT).as_posix(), markdown))
