"""A hook of mkdocs: README and other files outside of docs are part of the site where a page links to them.

Pages link as a clone needs it: ``../lab/studies/README.md`` from docs, ``docs/training.md`` from README.
Mkdocs knows the folder docs alone, and there is no public repository that a link could lead to instead. So
whatever README, the pages of docs, and pages reached from these link to inside of the repository becomes part
of the site: Markdown as a page, a folder as a page that lists its files, any other file as it is. A link is
then written anew between the two places that they have in the site::

    README.md              index.md
    docs/training.md       training.md
    CONTRIBUTING.md        CONTRIBUTING.md
    bench/results          bench/results/index.md

Anchors are those that GitHub makes, so a link to a heading means the same there. A link to what is not there
stays as it is, and mkdocs, which is strict, refuses it.

Given up: links in HTML, of which the pages have none.
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
    """The anchor of a heading as GitHub makes it.

    Args:
        heading: Its text.
        separator: What stands for a space.
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def place(path: str, root: Path = ROOT) -> str:
    """Where a file or folder of the repository is in the site; both paths have slashes and no dots in front.

    Args:
        path: From the root of the repository.
        root: Of the repository.
    """
    if path == "README.md":
        return "index.md"
    if (root / path).is_dir():
        path += "/index.md"
    return path.removeprefix("docs/")


def targets(path: str, text: str, root: Path = ROOT) -> Iterator[str]:
    """What the Markdown ``text`` of the file ``path`` links to inside of the repository, from its root."""
    for part in _CODE.split(text)[::2]:
        for link in _LINK.findall(part):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
            if not target.startswith("..") and (root / target).exists():
                yield target


def moved(path: str, text: str, root: Path = ROOT) -> str:
    """The Markdown ``text`` of the file ``path`` with its links as they are between places of the site."""
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
    """Files and folders outside of docs that the site needs, from the repository's root; README first."""
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
    """A page that lists the files of a folder, and these files from the root of the repository."""
    names = sorted(path.name for path in (root / folder).iterdir() if path.is_file())
    lines = [f"- [{name}]({name})" for name in names]
    return "\n".join([f"# {folder}", "", *lines, ""]), [f"{folder}/{name}" for name in names]


def on_config(config: Any) -> Any:
    """Gives headings the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds what lies outside of docs."""
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
    """Moves the links of a page; those of a listing are of the site already.

    Python-Markdown begins a list behind an empty line alone, GitHub behind a paragraph as well.
    """
    source = page.file.abs_src_path
    if source is None:
        return markdown
    return _LIST.sub(r"\1\n", moved(Path(source).relative_to(ROOT).as_posix(), markdown))
