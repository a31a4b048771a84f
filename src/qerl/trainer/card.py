"""The model card that is written beside a trained model."""

import re
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from qerl import __version__
from qerl.families.parts import base_model

CARD_FILE = "README.md"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_LIBRARIES = ("trl", "transformers", "peft", "torch")


def is_hub_id(name: str) -> bool:
    """Return True if a model's name has the form ``owner/name`` and is not a local folder or file."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def linked(name: str) -> str:
    """Return a model's name for a card: with a link to the Hub, or the last part of a local path."""
    return f"[{name}](https://huggingface.co/{name})" if is_hub_id(name) else Path(name).name


def library_versions() -> str:
    """Return the versions of this package and its main dependencies, as a Markdown list."""
    versions = {"qerl": __version__} | {library: version(library) for library in _LIBRARIES}
    return "\n".join(f"- {library} {number}" for library, number in versions.items())


PIPELINE = """\
from transformers import pipeline

generator = pipeline("text-generation", model="{saved_as}", device_map="auto")
messages = [{{"role": "user", "content": "What is 6 times 7?"}}]
output = generator(messages, max_new_tokens=128, return_full_text=False)
print(output[0]["generated_text"])"""
"""Example code of a card: load the saved model and generate."""

_TEXT = """---
{data}
---

# {name}

This model is a fine-tuned version of {base}.
{how}

## Quick start

```python
{example}
```

## Framework versions

{versions}
"""


_BY_REWARDS = """\
It was trained by reinforcement learning with QeRL, with the arguments of TRL's GRPO trainer, a method
introduced in [DeepSeekMath](https://huggingface.co/papers/2402.03300)."""
_BY_DEMONSTRATIONS = "It was trained by supervised fine-tuning with QeRL."


def model_card(
    model: nn.Module, name: str, saved_as: str, tags: list[str], dataset: str | None, supervised: bool
) -> ModelCard:
    """Return the model card of a policy.

    Args:
        model: The policy, PEFT-wrapped or not.
        name: Title of the card.
        saved_as: The model that the example loads: its name on the Hub, or the run folder.
        tags: Tags on the Hub.
        dataset: Name of the data set on the Hub, if any.
        supervised: Whether it was trained on demonstrations, else by rewards.
    """
    base = base_model(model)
    given = base.name_or_path
    data = ModelCardData(
        base_model=given if is_hub_id(given) else None,
        datasets=dataset,
        library_name="transformers",
        model_name=name,
        tags=["generated_from_trainer", *tags],
    )
    text = _TEXT.format(
        data=data.to_yaml(),
        name=name,
        how=_BY_DEMONSTRATIONS if supervised else _BY_REWARDS,
        base=linked(given) or f"a {type(base).__name__} without a name",
        example=PIPELINE.format(saved_as=saved_as),
        versions=library_versions(),
    )
    return ModelCard(text)
