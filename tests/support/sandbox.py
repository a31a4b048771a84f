"""Tests that run programs in the sandbox."""

import os

import pytest

from qerl.rewards import sandbox

REQUIRED = "QERL_TESTS_REQUIRE"
"""Environment variable: what tests may not be skipped for the lack of; continuous integration sets it."""


def skips() -> bool:
    """Whether tests that need the sandbox are skipped here."""
    return sandbox.obstacle() is not None and "bubblewrap" not in os.environ.get(REQUIRED, "").split()


needs_sandbox = pytest.mark.skipif(skips(), reason=str(sandbox.obstacle()))
"""Skips a test where there is no sandbox, unless bubblewrap is required; then it fails there."""
