r"""Finding the final answer in a text and deciding whether two answers are equal.

Extraction takes only an answer that the text marks as final: an ``<answer>`` tag, ``\boxed{}``, a line after
``####``. A number that merely comes last is taken on explicit request alone (:func:`last_number`), because a
truncated derivation ends with a number too and would be paid for being cut off.

Equality is decided in three steps, the first that applies:

1. both are plain numbers ("1,000", "$12.00", "-3"): exact, as fractions, however many digits;
2. either is a word ("Tuesday"): the same letters, ignoring case, for math-verify would read a product of
   symbols and call every anagram equal;
3. anything else is parsed and compared by math-verify, as LaTeX.

What was given up: units are not judged (math-verify drops them: "12 km" equals "12").
"""

import logging
import re
from fractions import Fraction

from math_verify import parse, verify

# It warns once a process that its timeouts are off, which is deliberate: see _verified_equal.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 1000
"""A longer "answer" is a derivation; comparing it symbolically costs seconds and is never right."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_NUMBER_IN_TEXT = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_PLAIN_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?")
_WORD = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*")


def answer_tag(text: str) -> str | None:
    """Content of the last ``<answer>...</answer>``; None if there is none."""
    found = _ANSWER_TAG.findall(text)
    return found[-1].strip() if found else None


def after_hashes(text: str) -> str | None:
    """What follows the last ``####`` on its line; None if there is none."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` whose braces close, nested and escaped braces included."""
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
    """The last number of a text, marked as an answer or not."""
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


def as_number(answer: str) -> Fraction | None:
    """Exact value of a plain decimal number, or None if the text is anything else.

    A currency sign in front, thousands separators where they belong and a full stop at the end are accepted;
    exponents, fractions and units are not.
    """
    text = answer.strip().strip("$").strip().removeprefix(r"\$").replace(r"{,}", ",").removesuffix(".")
    if text.startswith(("-$", r"-\$")):
        text = "-" + text.partition("$")[2]
    match = _PLAIN_NUMBER.fullmatch(text.strip())
    if match is None or not any(c.isdigit() for c in text) or not text.isascii():
        return None
    sign, whole, decimals = match.groups()
    return Fraction(f"{sign}{(whole or '0').replace(',', '')}{decimals or ''}")


def equal(answer: str, reference: str) -> bool:
    """Whether two answers are the same.

    Args:
        answer: As extracted from a completion.
        reference: The right answer.

    Returns:
        Exact equality for plain numbers, letters for words, math-verify's verdict otherwise.
    """
    if max(len(answer), len(reference)) > MAX_ANSWER_CHARS or not answer.strip():
        return False
    value, expected = as_number(answer), as_number(reference)
    if value is not None and expected is not None:
        return value == expected
    words, expected_words = _as_words(answer), _as_words(reference)
    if _WORD.fullmatch(words) or _WORD.fullmatch(expected_words):
        return words == expected_words
    return _verified_equal(answer, reference)


def _as_words(answer: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}", r"\1", answer.strip().strip("$"))
    return " ".join(text.removesuffix(".").split()).casefold()


def _verified_equal(answer: str, reference: str) -> bool:
    # math-verify's timeouts use the process's one SIGALRM timer: they fail outside the main thread, and
    # inside it they would cancel the limit that qerl.tasks.guard has set. That limit is the only one, so
    # theirs are off.
    gold = parse(f"${reference.strip().strip('$')}$", parsing_timeout=None)
    candidate = parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)
    return verify(gold, candidate, timeout_seconds=None)
