"""JSON that goes out."""

import json
from typing import Any

from qerl.serve.futures import Answer


def json_answer(**fields: Any) -> Answer:
    """A result in JSON."""
    return Answer(json.dumps(fields).encode())
