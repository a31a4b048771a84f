"""Text that a model wrote, made safe to look at: nothing in it acts, and nothing in it is hidden.

Control characters move a terminal's cursor, marks of direction turn lines around, and half of a surrogate
pair cannot be written to a file. Each of them is replaced by a sign that shows it.
"""

_NEWLINE, _TAB = 10, 9
_DIRECTION = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))

_SIGNS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(32) if code not in (_NEWLINE, _TAB)},
    127: "\N{SYMBOL FOR DELETE}",
    **{code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), *_DIRECTION)},
    **dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}"),
}


def visible(text: str) -> str:
    """Return the text with a visible sign in place of each character that would act instead."""
    return text.replace("\r\n", "\n").translate(_SIGNS)


def seen(text: str, characters: int) -> str:
    """Return a model's text as it is shown, cut to a number of characters."""
    few = shortened(text, characters)  # first, so that only shown text is searched
    return shortened(visible(few), characters)


def shortened(text: str, characters: int) -> str:
    """Return the first and the last part of a longer text, with a note of the number of characters left
    out."""
    if len(text) <= characters:
        return text
    head, tail = characters - characters // 2, characters // 2
    note = f"[... {len(text) - head - tail} characters left out ...]"
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"
