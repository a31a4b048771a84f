r"""Finding the final answer in a text and deciding whether two answers are equal.

Extraction takes only an answer that the text marks as final: an ``<answer>`` tag, ``\boxed{}``, a line after
``####``. A number that merely comes last is taken on explicit request only (:func:`last_number`), because a
truncated derivation ends with a number too and would be rewarded for being cut off.

Equality is decided by the first of three rules that applies:

1. Both are one number, however it is written (:mod:`qerl.tasks.quantity`): the numbers must be exactly equal.
2. One of them is a word ("Tuesday"): the letters must be the same, ignoring case. math-verify would read a
   word as a product of symbols and call every anagram equal.
3. Anything else is parsed and compared by math-verify, as LaTeX, unless it contains what math-verify's parser
   skips (arrows, dashes, foreign characters), behind which a second answer could hide, or takes longer than
   :mod:`qerl.calls.symbolic` allows.

An equation counts as its right-hand side, as in math-verify: "x = 12" and "x + y = 12" are 12, and "5x - 7y +
11z + 4 = 0" is 0. An equation that states two different numbers, "11 = 12", equals nothing.

Given up: units are not judged (18 km is 18), except that cents are not dollars.
"""

import re
from functools import lru_cache

from qerl.calls.symbolic import equal_expressions
from qerl.tasks.quantity import plain, quantity, unknown, without_text

MAX_ANSWER_CHARS = 1000
"""A longer "answer" is a derivation: comparing it symbolically takes seconds, and it is never right."""

_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\w)}\]])-)?"
    r"(?:\\[dtc]?frac\{[^{}]{1,40}\}\{[^{}]{1,40}\}"
    r"|(?:\d+ )?\d+ ?/ ?\d+"
    r"|(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w)|\^\{?-?\d+\}?)?)",
    re.ASCII,
)
# "x =" before an answer.
_SOLVED = re.compile(r"\A[A-Za-z\\][A-Za-z\\{}()_' ]*= *(?=[^=]*$)")
# The parts of an expression whose value is a number. math-verify's parser stops at what it does not know, so
# "18 -> 20", with an arrow, would be read as 18.
_IN_NUMBERS = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+|(?!(?:or|and|not|to)\b)[A-Za-z]+(?:_(?:\{\w+\}|\w))?'*"
    r"|[!%()\[\]{}]|[-+*/^=](?=\s*\S)"
    r"|\\[,;:! %${}]|\\text\{(?! *(?:or|and|not|to)\b)[^{}\d]*\}$"
    r"|\\(?:[dtc]?frac|sqrt|cdot|times|div|left|right|pi|log|ln|exp|sin|cos|tan|[dt]?binom|circ|infty"
    r"|[lr]floor|[lr]ceil|max|min|gcd|displaystyle|alpha|beta|gamma|theta|lambda|mu|angle)(?![A-Za-z])",
    re.ASCII,
)
# Signs that set two answers side by side, of which the parser would read one.
_ASIDE = re.compile(
    r"""[#@?~"`]|[^\x00-\x7f]"""
    r"|\\(?:to|(?:[lL]ong)?[rR]ightarrow|mapsto|implies|iff|sim|approx|therefore)(?![A-Za-z])"
)
# Numbers next to each other: the parser adds them, multiplies them, or reads only one. A fraction without
# braces may have them.
_SIDE_BY_SIDE = re.compile(r"\d(?:\.*(?:\s|\\ )+|\.{2,}|! *)\.?\d")
_WITHOUT_BRACES = re.compile(r"\\[dtc]?frac *\d *\d")
_LONGEST_EXPRESSION = 200
_WORD = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*")


def answer_tag(text: str) -> str | None:
    """The content of the last ``<answer>...</answer>``, the innermost if nested; None without one."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    return text[start + len("<answer>") : text.find("</answer>", start)].strip()


def after_hashes(text: str) -> str | None:
    """The text behind the last ``####`` on its line; None if there is none."""
    found = _HASHES.findall(text)
    last = found[-1].rstrip("# \t").rpartition("####")[2] if found else ""
    return last.lstrip("#").strip() or None


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces, nested and escaped, close; else None."""
    for start in reversed([m.end() for m in re.finditer(r"\\f?boxed\s*\{", text)]):
        depth, at = 1, start
        while at < len(text) and depth:
            if text[at] == "\\":
                at += 1  # the next character is escaped and opens or closes nothing
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
            at += 1
        if depth == 0:
            return text[start : at - 1].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text, marked as an answer or not; a fraction or power is taken whole."""
    found = _NUMBER_IN_TEXT.findall(text)
    return found[-1] if found else None


def final_answer(text: str) -> str | None:
    r"""The answer that a text marks as final, looked for in this order: tag, ``\boxed{}``, ``####``.

    Thinking is not answering: of a text with ``<think>`` only what follows ``</think>`` counts, so that a
    completion cut off while it thinks has no answer. A marker inside another one is opened:
    ``<answer>\boxed{7}</answer>`` gives "7".
    """
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    elif "<think>" in text:
        return None
    tagged = answer_tag(text)
    text = text if tagged is None else tagged
    for find in (boxed, after_hashes):
        found = find(text)
        if found is not None:
            return found
    return tagged


@lru_cache(maxsize=65536)  # a few answers are most of what is asked, and math-verify takes milliseconds
def equal(answer: str, reference: str) -> bool:
    """True if the extracted answer equals the right one (``reference``), by the rules above."""
    if max(len(answer), len(reference)) > MAX_ANSWER_CHARS or not answer.strip():
        return False
    answer, reference = plain(answer), plain(reference)
    if answer == reference:
        return True
    expected = quantity(reference)
    found = quantity(_SOLVED.sub("", answer))
    if found is not None and expected is not None:
        if found.value == expected.value:
            return not found.in_other_money(expected)
        if found.exact and expected.exact:
            return False
    words, expected_words = _as_words(answer), _as_words(reference)
    if without_text(answer).split() == without_text(reference).split():
        return True
    if _WORD.fullmatch(words) or _WORD.fullmatch(expected_words):
        return words == expected_words
    if expected is not None and _hides(answer):
        return False
    if re.findall(_ASIDE, answer) != re.findall(_ASIDE, reference):
        return False
    return equal_expressions(answer.strip("$"), reference.strip("$"))


def _as_words(answer: str) -> str:
    return " ".join(plain(without_text(answer)).split()).casefold()


def _hides(answer: str) -> bool:
    """True if another number may stand behind the one that math-verify's parser would read.

    Of a text that it cannot parse, such as an expression nested deeper than Python's stack, it reads the
    first number.
    """
    return (
        len(answer) > _LONGEST_EXPRESSION
        or _SIDE_BY_SIDE.search(_WITHOUT_BRACES.sub("", answer)) is not None
        or _contradicts(answer)
        or bool(unknown(answer, _IN_NUMBERS))
    )


def _contradicts(answer: str) -> bool:
    """True for an equation that states two different numbers, such as "11 = 12"."""
    stated = [quantity(plain(side)) for side in answer.split("=")] if "=" in answer else []
    return len({side.value for side in stated if side is not None}) > 1
