"""`import qerl`: what it offers, and that it loads nothing heavy before something is asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import qerl

HEAVY = ("torch", "transformers", "trl", "peft", "numpy", "pydantic")


def test_importing_the_package_alone_is_quick_and_loads_no_torch():
    script = f"""
import sys, time
start = time.perf_counter()
import qerl
seconds = time.perf_counter() - start
names = dir(qerl)
print(seconds, [name for name in {HEAVY} if name in sys.modules], "QeRLTrainer" in names)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, rest = run.stdout.split(maxsplit=1)
    assert rest.strip() == "[] True"
    assert float(seconds) < 0.5


def test_every_public_name_is_that_of_its_module():
    assert set(qerl.__all__) == qerl._MODULES.keys()
    assert set(qerl.__all__) <= set(dir(qerl))
    for name, module in qerl._MODULES.items():
        assert getattr(qerl, name) is getattr(import_module(module), name)


def test_type_checkers_see_the_same_names():
    """The imports under TYPE_CHECKING and the table that is read at run time name the same things."""
    tree = ast.parse(Path(qerl.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == qerl._MODULES


def test_star_import_and_unknown_names():
    namespace: dict = {}
    exec("from qerl import *", namespace)
    assert namespace["QeRLConfig"] is qerl.QeRLConfig
    with pytest.raises(AttributeError, match="module 'qerl' has no attribute 'QeRLTrainr'"):
        qerl.QeRLTrainr  # noqa: B018
