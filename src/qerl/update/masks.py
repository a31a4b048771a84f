"""The attention masks of a joined row, made by the model's own code.

Which tokens of a sample attend to which is the model's affair: a layer attends to all that came before, to a
window, to a block, and different layers of a model may differ. transformers writes it as a function of two
positions, from which the model's attention implementation makes a tensor: boolean for SDPA, added to the
scores for eager attention. A joined row changes only what an index means. So the model is asked for masks as
always, and each function that it hands to its implementation is read by positions in the sample and
restricted to the branch (`JoinedRow.mask_function`).

A mask made here would have to be made for every family again, and would be wrong without a word for each
that was forgotten. Given up: models that make masks in some other way. `qerl.update.row_check` finds
them.

transformers looks an implementation's mask maker up by name; the entry is replaced for the length of one
forward pass. Masks are made in front of the decoder's layers, so layers that are computed again for the
backward pass read the ones that were made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from qerl.errors import QeRLError
from qerl.update.joined_row import JoinedRow, MaskFunction


@contextmanager
def masked_by_branch(config: PreTrainedConfig, row: JoinedRow) -> Iterator[dict[str, Any]]:
    """Yields arguments of a forward pass; inside the block the model's masks are those of the joined row.

    Args:
        config: Config of the model, or of the decoder in it.
        row: The row.

    Raises:
        QeRLError: The model's attention implementation makes no such masks.
    """
    name = config.get_text_config(decoder=True)._attn_implementation
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)

    def make_for_row(*, mask_function: MaskFunction = causal_mask_function, **settings: Any) -> Any:
        settings |= {"attention_mask": None, "allow_is_causal_skip": False}
        mask = make(mask_function=row.mask_function(mask_function), **settings)
        if mask is None or mask.ndim != 4:
            raise _no_masks(name)
        return mask

    if make is None:
        raise _no_masks(name)
    ALL_MASK_ATTENTION_FUNCTIONS[name] = make_for_row
    try:
        # Without a mask, transformers would guess from the positions where a sample ends.
        yield {"attention_mask": torch.ones_like(row.input_ids_1L)}
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]


def _no_masks(name: str) -> QeRLError:
    return QeRLError(
        f"The model asks {name} attention for a mask that cannot be restricted to the samples of a joined "
        "row; load it with attn_implementation='sdpa' or 'eager', or use a model family of docs/families.md."
    )
