"""The attention masks of a packed row, made by the model's own code.

Who sees whom inside a sample is the model's affair: a layer attends to all that came before, to a window,
to a chunk, and different layers of a model may differ. What is seen by position, transformers writes as a
function of two indices, from which the attention implementation of the model makes a tensor: boolean for
SDPA, added to the scores for eager attention. A packed row changes only what an index means. So the model
is asked for masks as always, and each function that it hands to its implementation is read by positions in
the sample and cut down to the branch (`PackedBatch.mask_function`).

A mask of our own making would have to be made for every family again, and would be wrong without a word for
each that was forgotten. Given up: models that make masks in some other way. `qerl.trainer.update.row_check`
finds them.

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
from qerl.trainer.update.packing import MaskFunction, PackedBatch


@contextmanager
def masked_by_branch(config: PreTrainedConfig, packed: PackedBatch) -> Iterator[dict[str, Any]]:
    """Arguments of a forward pass in this block, in which the model's masks are those of the packed row.

    Args:
        config: Of the model, or of the decoder in it.
        packed: The row.

    Raises:
        QeRLError: The model's attention implementation makes no such masks.
    """
    name = config.get_text_config(decoder=True)._attn_implementation
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)

    def make_for_row(*, mask_function: MaskFunction = causal_mask_function, **settings: Any) -> Any:
        settings |= {"attention_mask": None, "allow_is_causal_skip": False}
        mask = make(mask_function=packed.mask_function(mask_function), **settings)
        if mask is None or mask.ndim != 4:
            raise _no_masks(name)
        return mask

    if make is None:
        raise _no_masks(name)
    ALL_MASK_ATTENTION_FUNCTIONS[name] = make_for_row
    try:
        # Without a mask, transformers would guess from the positions where a sample ends.
        yield {"attention_mask": torch.ones_like(packed.input_ids_1L)}
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]


def _no_masks(name: str) -> QeRLError:
    return QeRLError(
        f"The model asks {name} attention for a mask that cannot be cut down to the samples of a packed row; "
        "load it with attn_implementation='sdpa' or 'eager', or use a model family of docs/families.md."
    )
