r"""Reading an answer that is one number, whatever is written around it.

Models write numbers as people do: ``$18``, ``**18**``, ``18 dollars per day``, ``\text{18 km/h}``, ``1 1/2``,
``1e3``. All of these are read as the number, so that a right answer counts as right and training does not
reward leaving units out. GSM8K's published grader takes the number after ``####`` and looks at nothing else;
MATH's removes currency signs, a final ``\text{ ...}`` and degrees. Neither judges a unit.

An answer that hedges must not become readable that way. So the text has to be one number with a currency sign
or unit words, and nothing else: no second number, in digits or in words, no word that joins, negates or
calculates ("or", "not", "plus", "squared"), and no letter directly behind the number that may be a variable
("18x"). Words that scale a number are applied: "18 million" is 18000000. An exclamation mark is a factorial.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# Typographic characters and their plain forms.
_PLAIN = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        **dict.fromkeys("\u2212\u2013\u2010\u2011\ufe63", "-"),  # minus, en dash, hyphens
        **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u202f\u3000\t\n\r", " "),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **{"∞": r"\infty ", "°": r"^{\circ}", "。": ".", "²": "^{2}", "³": "^{3}"},
        **{"\u00d7": r"\times ", "÷": r"\div ", "·": r"\cdot ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    }
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"), ("**", "**"), ("__", "__"), ("`", "`"))
_ROOT = re.compile(r"√ ?(?:(\d+|[a-zA-Z])|\(([^()]*)\))")
_REPEATING = re.compile(r"(?<![\d,.])(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?", re.ASCII)
_BOLD = re.compile(r"(?<![\w)*])\*\*([^\s*](?:[^*]*[^\s*])?)\*\*(?![\w(*])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_INFINITY = re.compile(r"([+-]?) *\\?inf(?:inity|ty)?", re.IGNORECASE)

_SPACE = re.compile(r"\\[,;:! ]|~|\\quad")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,; ]|~|\\!|\{,\}|,\\!)(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{ *(\d+) *\}\s*\{ *(\d+) *\}|(\d)\s*(\d))")
_SIGN = r"\s*([+-]?)\s*"
_MONEY = r"(?:(?:US)?\\?\$|[£€¥₹]|USD|EUR|GBP)"
_CURRENCIES = {"$": "dollar", "£": "pound", "€": "euro", "¥": "yen", "₹": "rupee"}
_CURRENCIES |= {"usd": "dollar", "gbp": "pound", "eur": "euro"}
_MONEY_UNITS = {*_CURRENCIES.values(), "cent", "penny", "pennie", "pence"}
_NUMBER = re.compile(
    rf"{_SIGN}(?P<money>{_MONEY})?{_SIGN}"
    r"(?:(?P<mixed>\d+) +(?=\d+ */ *\d))?"
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?:[eE](?P<power>[+-]?\d{1,3})(?![\d.])| */ *(?P<below>\d+)(?![\d.]))?"
    r"(?P<rest>.*)",
    re.ASCII,
)

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_UNIT_WORDS = 5
_VOWEL = re.compile("[aeiou]")
# A unit of letters, with a power and a slash as in m^2 and km/h, and the stop of an abbreviation.
_UNIT = re.compile(r"[a-zA-Z]+\.?(?:\^?\{?[23]\}?)?(?: ?/ ?[a-zA-Z]+\.?(?:\^?\{?[23]\}?)?)?")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHORT = _words(
    """m g s h l b c f k n j w v cm mm km dm nm kg mg lb lbs oz ft in yd mi ml cl dl kb mb gb tb hr hrs ms am
    pm mph kmh kph kw kwh st nd rd th pts qt pt sq cu ct cts per of by at a an"""
)
_GLUED = _words("cm mm km kg mg lb lbs oz ft ml kw kwh mph kmh kph min hr hrs am pm st nd rd th usd")
_NO_UNIT = _words(
    """or and not no nor but maybe perhaps to until till through versus vs plus minus divided multiplied than
    is are was equals wrong false mod modulo base choose log exp sin cos tan sqrt root squared cubed factorial
    infinity alpha beta theta half halves thirds fourths fifths sixths eighths tenths hundredths thousandths
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety except if unless
    otherwise either instead rather answer approximately about hundred thousand million billion trillion"""
)


@dataclass(frozen=True)
class Quantity:
    """A number and its unit.

    Attributes:
        value: The number, exactly.
        unit: In small letters, without the s of a plural; empty if no unit is stated.
        exact: True if a different value is certainly a different answer. False for a fraction, which may be
            compared with a rounded decimal, and for a percentage, which may be compared with a share of 1.
    """

    value: Fraction
    unit: str
    exact: bool

    def in_other_money(self, other: "Quantity") -> bool:
        """True if both state a currency and the currencies differ: 18 cents are not 18 dollars."""
        return self.unit != other.unit and {self.unit, other.unit} <= _MONEY_UNITS


@lru_cache(maxsize=4096)
def plain(text: str) -> str:
    r"""Return the text in plain characters, without the markup around it.

    Surrounding spaces, one full stop at the end, and surrounding ``$...$``, ``\[...\]``, ``\(...\)``, bold
    and code marks are removed; every spelling of infinity becomes one.
    """
    text = _ROOT.sub(lambda m: f"\\sqrt{{{m[1] or m[2]}}}", text.translate(_PLAIN))
    before = None
    while text != before:
        before = text = text.strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        for left, right in _WRAPPERS:
            inner = text[len(left) : len(text) - len(right)]
            if (
                text.startswith(left)
                and text.endswith(right)
                and inner
                and left not in inner.replace(r"\$", "")
            ):
                text = inner
    text = _BOLD.sub(r"\1", text)
    if text.count("**") == 1:  # its pair stands outside of the extracted answer
        text = text.removeprefix("**").removesuffix("**").strip()
    # math-verify's parser stops at the bar of a repeating decimal and would read 0.333... as 0.
    text = _REPEATING.sub(_as_fraction, text)
    infinite = _INFINITY.fullmatch(text)
    return f"{infinite[1]}\\infty" if infinite else text


def _as_fraction(match: re.Match[str]) -> str:
    before, after, period = match.groups()
    whole = int(before + after + period) - int("0" + before + after)
    return f"\\frac{{{whole}}}{{{(10 ** len(period) - 1) * 10 ** len(after)}}}"


def unknown(text: str, known: re.Pattern[str]) -> set[str]:
    """Return the characters and commands of a text outside all matches of a pattern, and "bracket" if a
    bracket is unpaired."""
    left = set(re.findall(r"\\[A-Za-z]+|\S", known.sub(" ", text)))
    return left if _paired(text) else left | {"bracket"}


def _paired(text: str) -> bool:
    opened: list[str] = []
    for sign in re.findall(r"[()\[\]{}]", text):
        if sign in _PAIRS:
            opened.append(_PAIRS[sign])
        elif not opened or opened.pop() != sign:
            return False
    return not opened


def without_text(text: str) -> str:
    r"""The text with ``\text{...}`` and similar commands replaced by their content."""
    return _TEXT.sub(r" \1 ", text)


@lru_cache(maxsize=4096)  # the samples of a group state the same few answers
def quantity(text: str) -> Quantity | None:
    """Return the quantity in a text from :func:`plain`, or None if the text is anything but one number with
    its unit."""
    text = _THOUSANDS.sub(",", without_text(text))
    text = _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", _SPACE.sub(" ", text))
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (match[1] and match[3]):
        return None
    value = _value(match)
    rest = _unit(match["rest"])
    if value is None or rest is None:
        return None
    scale, unit = rest
    signed = -value if "-" in (match[1], match[3]) else value
    exact = unit != "percent" and (match["below"] is None or match["mixed"] is not None)
    return Quantity(signed * scale, unit or _currency(match["money"] or ""), exact)


def _value(match: re.Match[str]) -> Fraction | None:
    value = Fraction(match["number"].replace(",", ""))
    if match["power"]:
        value *= Fraction(10) ** int(match["power"])
    if match["below"]:
        if not int(match["below"]) or "." in match["number"]:
            return None
        value /= int(match["below"])
    return value + int(match["mixed"] or 0)


def _unit(rest: str) -> tuple[int, str] | None:
    """The scale and the unit that follow a number, or None if anything else follows it."""
    rest = re.sub(rf"{_MONEY}$", lambda m: f" {_currency(m[0])}", rest.rstrip())
    rest = re.sub(r" ?\\?%$", " percent", rest)
    rest = re.sub(r"\^ ?\{? ?\\circ ?\}?", " degree ", rest)
    words = rest.split()
    # Letters directly behind the number are an ordinal or a known unit; anything else may be a variable.
    if words and not rest[0].isspace() and re.split(r"\W|\d|_", words[0].lower())[0] not in _GLUED:
        return None
    scale = 1
    while words and words[0].lower().removesuffix("s") in _SCALES:
        scale *= _SCALES[words.pop(0).lower().removesuffix("s")]
    if len(words) > _UNIT_WORDS or not all(_may_be_unit(word) for word in words):
        return None
    unit = " ".join(word.lower().rstrip(".").removesuffix("s") for word in words)
    return scale, _CURRENCIES.get(unit, unit)


def _currency(sign: str) -> str:
    return _CURRENCIES.get(sign.replace("\\", "").replace("US$", "$").lower(), "")


def _may_be_unit(word: str) -> bool:
    if not _UNIT.fullmatch(word):
        return False
    parts = [part for part in re.split(r"[^a-z]+", word.lower()) if part]
    return all(
        part in _SHORT or (len(part) > 2 and part not in _NO_UNIT and _VOWEL.search(part)) for part in parts
    )
