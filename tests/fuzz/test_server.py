"""A small seed of `python -m tests.fuzz server`."""

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("google.protobuf", reason="needs the extra serve")

from tests.fuzz.server import run


def test_clients_that_die_repeat_and_reorder_double_no_gradient_and_leave_nothing(tmp_path):
    did = run(200, 0, tmp_path)
    assert did["steps"] > 3 and did["broken"] > 1 and did["samples"] > 3
