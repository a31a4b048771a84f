"""What the decode kernels are compiled for: tokens per block of keys and values, tokens between two writes of
a state, stop tokens of a row, ranks of an adapter, tokens that an expert multiplies at once; and how many
logits the output head of the update has at a time.

Plain numbers without Triton or torch, so that a plan made on a machine without a GPU counts with those of the
kernels.
"""

PAGE = 64
"""Tokens in a block of keys and values."""

STATE_TOKENS = 8
"""Tokens after which the state of a delta net is written: those since then lie beside it
(`qerl.kernels.decode.delta_net`)."""

STOP_TOKENS = 16
"""Tokens that end a row, as many as the kernel that draws compares; others the host looks for."""

MAX_RANK = 256
"""Largest LoRA rank that the kernels take."""

PART = 128
"""Ranks that a kernel holds at once of one adapter's A or B; a multiple of it takes several turns."""

STACKED_PART = 512
"""Rows of several A on top of each other that a kernel holds at once: those of q, k and v at rank `PART`."""

MAX_HEAD = 256
"""Widest heads that FlashAttention takes."""

MAX_KEY = 128
"""Widest keys of a delta net: a thread of delta_step.cu has one number of a key."""

LORA_PART = 512
"""Inputs of an expert that a program multiplies with A, where there are few places (`parts_of`)."""

_FEW_PLACES = 4096

EXPERTS_BYTES = 1 << 27
"""Bytes of the experts that the update dequantises at a time, unless one has more."""

WHOLE_PARTS = 160 * 1024
"""Shared memory of a block, bytes, from which on kernels hold these many at once; with less, half of them."""


ITEM_SIZES = (8, 16, 32, 64)
"""Tokens that an expert in four bits multiplies at once (`qerl.kernels.decode.route`)."""


def item_size(tokens: int, experts: int, chosen: int, sizes: tuple[int, ...] = ITEM_SIZES) -> int:
    """Places of an item: room for twice an expert's mean share of the tokens, of the sizes that there are, so
    that few experts take a second item and few places are empty.

    Args:
        tokens: Of the batch.
        experts: Of a layer.
        chosen: Experts per token.
        sizes: Ascending.
    """
    wanted = 2 * tokens * chosen / experts
    return next((size for size in sizes if size >= wanted), sizes[-1])


def most_items(tokens: int, experts: int, chosen: int, size: int) -> int:
    """Items that there can be at most: each expert's last may have a single token."""
    pairs = tokens * chosen
    return (pairs + min(experts, pairs) * (size - 1)) // size


def parts_of(places: int, width: int) -> int:
    """Parts of x A^T of experts' adapters, for a product of so many places and inputs: with few places most
    of a GPU would be idle else."""
    return -(-width // LORA_PART) if places <= _FEW_PLACES else 1


def pad_rank(rank: int) -> int:
    """Ranks that buffers have for an adapter of this rank: a power of two, as Triton wants, from 16 on."""
    return max(16, 1 << (rank - 1).bit_length())


def rank_part(ranks: int, shared_bytes: int) -> int:
    """Ranks of one adapter that a kernel takes at a time, with that much shared memory of a block."""
    return min(ranks, _most(PART, shared_bytes))


def stacked_part(ranks: int, shared_bytes: int) -> int:
    """Rows of several A that a kernel takes at a time, a power of two; half of the most in a loop, so that
    they and a part of B fit into the shared memory of a block."""
    whole, most = 1 << max(0, ranks - 1).bit_length(), _most(STACKED_PART, shared_bytes)
    return whole if whole <= most else most // 2


def _most(part: int, shared_bytes: int) -> int:
    return part if shared_bytes >= WHOLE_PARTS else part // 2
