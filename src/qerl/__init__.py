"""QeRL: reinforcement learning of large language models on few GPUs.

A frozen base model in NVFP4 (4-bit floats, two-level scaling), LoRA adapters in 16 or 32 bits, GRPO or DAPO,
and, if asked for, noise in the RMSNorm weights during rollouts that is annealed in stages (arXiv 2510.11696).
One packed copy of the weights serves rollout and training.

Scripts import the public names from here: ``from qerl import QeRLConfig, QeRLTrainer``. Each name is loaded
on first access (PEP 562), so that ``import qerl`` by itself loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl.errors import QeRLError
    from qerl.lora.adapter import add_lora, load_adapter
    from qerl.models.load import load_model, load_tokenizer
    from qerl.rollout.select import make_engine
    from qerl.settings.config import QeRLConfig
    from qerl.trainer.grpo import QeRLTrainer
    from qerl.trainer.sft import QeRLSFTTrainer

__version__ = "0.3.0.dev0"

__all__ = [
    "QeRLConfig",
    "QeRLError",
    "QeRLSFTTrainer",
    "QeRLTrainer",
    "add_lora",
    "load_adapter",
    "load_model",
    "load_tokenizer",
    "make_engine",
]

_MODULES = {
    "QeRLConfig": "qerl.settings.config",
    "QeRLError": "qerl.errors",
    "QeRLSFTTrainer": "qerl.trainer.sft",
    "QeRLTrainer": "qerl.trainer.grpo",
    "add_lora": "qerl.lora.adapter",
    "load_adapter": "qerl.lora.adapter",
    "load_model": "qerl.models.load",
    "load_tokenizer": "qerl.models.load",
    "make_engine": "qerl.rollout.select",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first access."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of the module, including those that are not loaded yet."""
    return sorted({*globals(), *__all__})
