"""Text that any tokenizer accepts.

JSON can encode a lone surrogate (``"\\ud800"``), and a Python string can hold it, but UTF-8 cannot represent
it, so tokenizers and files refuse it. A policy that samples JSON occasionally writes one.
"""

from typing import Any


def whole(value: Any) -> Any:
    """Return the value with U+FFFD for each lone surrogate, also in the texts of lists and mappings."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value
