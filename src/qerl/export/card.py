"""The model card of an exported model, which states the base weights it builds on.

The Hub reads its front matter: the base model, the relation to it, the library, and the licence of the base
if known.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from qerl.errors import QeRLError
from qerl.models.hub import Unreachable, download
from qerl.trainer.card import CARD_FILE, PIPELINE, is_hub_id, library_versions, linked

_TEXT = """---
{data}
---

# {name}

{what}

{how}

```{language}
{example}
```

## Framework versions

{versions}
"""

_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base}")
model = AutoModelForCausalLM.from_pretrained("{base}", device_map="auto")
model = PeftModel.from_pretrained(model, "{saved_as}")
messages = [{{"role": "user", "content": "What is 6 times 7?"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(model.device)
output = model.generate(**inputs, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

_GGUF = """\
llama-cli -hf {saved_as} -p "What is 6 times 7?"
ollama run hf.co/{saved_as}"""

_GGUF_HERE = """\
llama-cli -m {saved_as} -p "What is 6 times 7?"
echo "FROM ./{saved_as}" > Modelfile && ollama create {name} -f Modelfile && ollama run {name}"""

_EXAMPLES = {"adapter": _ADAPTER, "merged": PIPELINE, "gguf": _GGUF}
_KINDS = {
    "adapter": "LoRA adapter for",
    "merged": "fine-tuned version of",
    "gguf": "GGUF file of a fine-tuned version of",
}
_RELATIONS = {"adapter": "adapter", "merged": "finetune", "gguf": "quantized"}
_LIBRARIES = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_TAGS = ("grpo", "sft", "trl")
"""Tags of a run's card that apply to the export, too; PEFT adds others, with a local path among them."""
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Facts:
    """Facts stated by a card.

    Attributes:
        format: ``adapter``, ``merged`` or ``gguf``.
        name: Title of the card.
        repository: Repository on the Hub, which the example loads; None if it is not pushed.
        file: Name of the .gguf file, which the example loads if there is no repository.
        base: The base model: a name on the Hub or a local path.
        run: Folder of the exported run, whose own card has tags and data sets.
        by_qerl: True if a run of QeRL trained it.
        how: How these weights were made, in sentences.
    """

    format: str
    name: str
    repository: str | None
    file: str
    base: str
    run: Path
    by_qerl: bool
    how: str


def exported_card(facts: Facts) -> ModelCard:
    """Build the card from the facts."""
    of_run = _data(facts.run / CARD_FILE)
    tags = [*dict.fromkeys(("qerl", *(tag for tag in of_run.get("tags") or () if tag in _TAGS)))]
    if facts.format == "adapter" and is_hub_id(facts.base):
        tags.append(f"base_model:adapter:{facts.base}")
    data = ModelCardData(
        base_model=facts.base if is_hub_id(facts.base) else None,
        base_model_relation=_RELATIONS[facts.format] if is_hub_id(facts.base) else None,
        datasets=of_run.get("datasets"),
        library_name=_LIBRARIES[facts.format],
        pipeline_tag="text-generation",
        tags=tags,
        **_license(facts.base),
    )
    base = facts.base if is_hub_id(facts.base) else f"path/to/{Path(facts.base).name}"
    here = facts.file if facts.format == "gguf" else f"path/to/{facts.name}"
    example = _GGUF_HERE if facts.format == "gguf" and not facts.repository else _EXAMPLES[facts.format]
    text = _TEXT.format(
        data=data.to_yaml(),
        name=facts.name,
        what=f"This is a {_KINDS[facts.format]} {linked(facts.base)}, "
        f"{'trained' if facts.by_qerl else 'exported'} with QeRL.",
        how=facts.how,
        language="sh" if facts.format == "gguf" else "python",
        example=example.format(base=base, saved_as=facts.repository or here, name=facts.name),
        versions=library_versions(),
    )
    return ModelCard(text)


def _license(base: str) -> dict[str, Any]:
    """Return the licence fields of the base's own card; empty without a card or a network to fetch it."""
    folder = Path(base).expanduser()
    if is_hub_id(base):
        try:
            folder = download(base, [CARD_FILE])
        except (QeRLError, Unreachable):
            return {}
    data = _data(folder / CARD_FILE)
    return {key: data[key] for key in _LICENSE if data.get(key)}


def _data(card: Path) -> dict[str, Any]:
    """Return the front matter of a card; empty if the card is missing or cannot be read."""
    try:
        data: dict[str, Any] = ModelCard.load(card).data.to_dict()
        return data
    except (OSError, ValueError):
        return {}
