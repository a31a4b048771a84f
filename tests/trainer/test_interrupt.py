"""The first signal asks for the end of a run, wherever in the code it comes."""

import io
import os
import signal
import sys
from types import ModuleType

import pytest
from rich.console import Console

from qerl.trainer.callbacks import InterruptGuard


def test_a_signal_while_rich_imports_what_it_prints_with_is_no_error(monkeypatch):
    half_imported = ModuleType("rich._emoji_codes")
    monkeypatch.setitem(sys.modules, "rich._emoji_codes", half_imported)
    console = Console(file=io.StringIO())
    with pytest.raises(ImportError):  # rich needs it for any text with markup
        console.print("step")
    with InterruptGuard(console) as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.interrupted
    assert "again stops at once" in console.file.getvalue()
