"""Find measured numbers in README and docs that come from no committed result.

    python -m lab numbers

A number with a unit of time, size, speed or share, or alone in a table cell, must be in a generated table or
a `number` comment. `lab.writers.tables` writes both from `bench/results`:

    <!-- table decode -->      ...      <!-- /table -->
    a step takes <!-- number step-7b -->7.3 s<!-- / -->

Any other such number is reported. A number that cannot come from a result (a setting, a hardware limit, a
figure published by others) is allowed if its line, or a line of its table, gives the reason:
`<!-- by hand: the card's size -->`. Code, links, comments and the pages in `UNCHECKED` are not checked.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNCHECKED = {
    "docs/configuration.md": "written from the fields",
    "docs/dev/log": "the lab book: dated, with the conditions of each figure beside it",
}
"""Prefixes of the names of pages that are not checked, and why."""

_UNITS = (
    "tokens/s|tok/s|tokens (?:a|per) second|ns|us|µs|ms|s|seconds?|min|minutes?|hours?|[kMGT]i?B(?:/s)?|"
    r"TFLOPS|W|%|percent|points|times|x(?!\s?\d)"
)
_NUMBER = re.compile(rf"(?<![\w.#/-])[-+~]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e-?\d+)?\s?(?:{_UNITS})(?![\w/%])")
_ALONE = re.compile(r"[-+~]?(?:\d{3,}|\d{1,3}(?:,\d{3})+|\d*\.\d+)(?:e-?\d+)?")
_TIED = re.compile(
    r"<!-- table \S+ -->.*?<!-- /table -->|<!-- number \S+ -->.*?<!-- / -->|```.*?```|~~~.*?~~~|`[^`\n]+`|"
    r"^(?: {4}|\t)[^\n]*$|<!--(?! by hand:).*?-->|\]\([^)\n]*\)|[AH]\d00 \d+ ?GB",
    re.DOTALL | re.MULTILINE,
)
_BY_HAND = re.compile(r"<!-- by hand: \S[^\n]*-->")


@dataclass(frozen=True)
class Untied:
    """A measured number that comes from no result."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def untied_numbers(page: str, text: str) -> list[Untied]:
    """Return the numbers of the Markdown ``text`` that no marker ties to a result or marks as by hand."""
    blank = _TIED.sub(lambda tied: re.sub(r"[^\n]", " ", tied[0]), text)
    exempt, found = _exempt_lines(blank), []
    for number, line in enumerate(blank.split("\n"), 1):
        if number not in exempt:
            cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
            alone = [cell for cell in cells if _ALONE.fullmatch(cell)]
            found += [Untied(page, number, text) for text in [*_NUMBER.findall(line), *alone]]
    return found


def _exempt_lines(text: str) -> set[int]:
    """Return the numbers of lines marked as by hand; one such line in a table exempts the whole table."""
    exempt: set[int] = set()
    table: list[int] = []
    by_hand = False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.lstrip().startswith("|"):
            table.append(number)
            by_hand = by_hand or bool(_BY_HAND.search(line))
            continue
        exempt |= {number} if _BY_HAND.search(line) else set()
        exempt |= set(table) if by_hand else set()
        table, by_hand = [], False
    return exempt


def pages() -> Iterator[Path]:
    """Yield README and each page of docs that is checked."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if not path.relative_to(ROOT).as_posix().startswith(tuple(UNCHECKED)):
            yield path


def all_untied() -> list[Untied]:
    """Return the numbers of README and docs that come from no committed result."""
    return [
        found
        for path in pages()
        for found in untied_numbers(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def main(arguments: list[str]) -> int:
    """Run `python -m lab numbers` with these arguments; return the exit status, 1 if it found any."""
    parser = argparse.ArgumentParser(prog="python -m lab numbers", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    found = all_untied()
    print("\n".join(map(str, found)))
    return int(bool(found))
