"""What the package takes of TRL and of transformers' trainer: to be read first when their versions move."""

import ast
import importlib
from pathlib import Path

from transformers import Trainer

import qerl
from qerl.trainer.grpo import QeRLTrainer

SOURCE = Path(qerl.__file__).parent

# Private methods of transformers' trainer that ours wraps.
WRAPPED = {
    "_run_epoch", "_get_grad_norm", "_save_checkpoint", "_get_output_dir", "_save", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
}  # fmt: skip


def names_from(library: str) -> set[tuple[str, str]]:
    """(module, name) of each import from a library."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                found |= {(node.module, each.name) for each in node.names}
    return found


def test_only_public_names_of_trl_are_used_and_none_of_its_trainer():
    found = names_from("trl")
    assert {module for module, _ in found} <= {
        "trl",
        "trl.rewards",
        "trl.chat_template_utils",
        "trl.data_utils",
    }
    for module, name in found:
        assert not name.startswith("_") and hasattr(importlib.import_module(module), name), name
    assert "GRPOTrainer" not in {name for _, name in found}


def test_the_private_methods_of_transformers_that_are_wrapped_are_these():
    own = {name for name in vars(QeRLTrainer) if hasattr(Trainer, name) and name.startswith("_")}
    assert {name for name in own if not name.startswith("__")} == WRAPPED
