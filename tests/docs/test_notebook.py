"""The notebook of the docs runs from its first cell to its last, on a tiny model in place of a real one."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.models import make_tiny_model, make_tiny_tokenizer

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "docs" / "demo.ipynb"


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, folder = tmp_path / "model", tmp_path / "run"
    make_tiny_model("llama").save_pretrained(model)
    make_tiny_tokenizer().save_pretrained(model)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    parameters.source = (
        f"MODEL, FOLDER = {str(model)!r}, {str(folder)!r}\nSTEPS, PROMPTS, SAMPLES, HELD_OUT = 2, 2, 2, 4"
    )
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "accuracy [1.0, 0.0]" in printed, "the rewards of the two answers"
    assert "right answers: " in printed and "2 reward" in printed
    assert (folder / "adapter_model.safetensors").is_file()


def test_the_notebook_is_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
