"""The model card that TRL writes beside a model, for a base that is not on the Hub.

TRL links to the base on the Hub by its name. A folder has none there, so the card says ``[None]``; a
``.gguf`` file is taken for a name, and gets a link to nowhere.
"""

from pathlib import Path

from torch import nn

from qerl.families.parts import base_model

CARD_FILE = "README.md"
_LINK = "[{0}](https://huggingface.co/{0})"


def name_base(card: Path, model: nn.Module, saved_as: str) -> None:
    """Put the base's own name, without a link, into a card of TRL's; a base of the Hub keeps its link.

    Args:
        card: The file, as TRL's `create_model_card` has written it.
        model: The policy, PEFT-wrapped or not.
        saved_as: The run folder, which the card's example loads where the model has no name on the Hub.
    """
    base = base_model(model)
    name = base.name_or_path
    text = card.read_text(encoding="utf-8").replace('model="None"', f'model="{saved_as}"')
    if not name or Path(name).expanduser().exists():
        own = Path(name).name or f"a {type(base).__name__} without a name"
        for linked in ("None", name):
            text = text.replace(_LINK.format(linked), own)
    card.write_text(text, encoding="utf-8")
