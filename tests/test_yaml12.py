"""YAML 1.2's core schema, both ways, and what is refused."""

import math

import pytest
import yaml

from qerl.yaml12 import dump, load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("1e-5", 1e-5),
        ("-.5E3", -500.0),
        (".inf", math.inf),
        ("~", None),
        ("", None),
        ("'no'", "no"),
        ("[a, 1e3]", ["a", 1000.0]),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
    ],
)
def test_plain_values(text, value):
    loaded = load(text)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"the key 'a' is there twice \(line 3, column 1\)"),
        ("x: {a: 1, a: 2}", "twice"),
        ("a: &x 1\nb: *x", "aliases are not supported"),
        ("&a [*a]", "aliases are not supported"),
        ("!!python/object:os.system x", "tag .* is not supported"),
        ("!!bool foo", "tag .* is not supported"),
        ("? [a]\n: b", "cannot be a key"),
        ("[" * 2000, "nested too deep"),
        ("9" * 5000, "4300 digits"),
        ("{a: [", "line 1"),
        ("a\0b", "special characters"),
        ("a: 1\n--- \nb: 2", "another document"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        load(text)


VALUES = [
    "no",
    "0o17",
    "017",
    "12:30",
    "1e5",
    "~",
    "",
    "true",
    "1_000",
    " #a",
    "a: b",
    "=",
    "<<",
    "2026-01-01",
]
VALUES += [
    "ü\u2028\x85 \t",
    "a\nb\n",
    "\U0001f600",
    "x" * 200 + " y",
    1e-6,
    -0.0,
    math.inf,
    10**30,
    None,
    True,
]


def test_what_is_written_is_read_again_by_either_version():
    document = {"plain": VALUES, "nested": {value: [value] for value in VALUES if isinstance(value, str)}}
    written = dump(document)
    assert load(written) == document
    assert yaml.safe_load(written) == document
