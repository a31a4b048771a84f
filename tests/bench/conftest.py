"""What tests of the benchmarks share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """`python -m bench` takes SIGTERM for the rest of its process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
