"""Text that any tokenizer takes.

JSON can name half of a character (``"\\ud800"``), and Python's text can hold it, but it cannot be written in
UTF-8: tokenizers and files refuse it. A policy that samples JSON writes such a half now and then.
"""

from typing import Any


def whole(value: Any) -> Any:
    """The same value with U+FFFD for each half character, in the texts of lists and mappings too."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value
