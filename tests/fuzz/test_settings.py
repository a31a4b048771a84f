"""A small seed of `python -m tests.fuzz settings`."""

from tests.fuzz.settings import run


def test_random_settings_are_valid_or_refused_in_a_sentence(tmp_path):
    counts = run(150, 0, tmp_path)
    assert counts["valid"] > 5 and counts["refused"] > 50
