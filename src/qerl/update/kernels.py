"""A model put on the kernels of the update, as far as they compute what it computes."""

from transformers import PreTrainedModel

from qerl.update.attention import use_branch_attention
from qerl.update.delta_net import read_sequences
from qerl.update.path import UpdatePath, find_path, why_unfit


def use_kernels(model: PreTrainedModel) -> UpdatePath:
    """Give a model its kernels for packed rows, and say which parts of it run on them.

    Layers that carry a state learn to read the sequences of a row wherever the model is.

    Args:
        model: The transformers model where it trains, adapters included; a layer that is given its adapter
            later keeps the code that it came with.
    """
    read_sequences(model)
    unfit = why_unfit(model)
    why_dense_masks = unfit or use_branch_attention(model)
    if not unfit:
        from qerl.update.fused import fuse  # needs Triton

        fuse(model)
    return find_path(model, why_dense_masks)
