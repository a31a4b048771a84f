"""Sizes that the decode kernels are compiled for: tokens per block of keys and values, tokens between two
writes of a state, stop tokens per row, ranks of an adapter, tokens per item of an expert; and how many bytes
of experts the update dequantises at a time.

Plain numbers without Triton or torch, so that a memory plan made on a machine without a GPU uses the same
sizes as the kernels.
"""

PAGE = 64
"""Tokens in a block of keys and values."""

STATE_TOKENS = 8
"""Tokens between two writes of a delta net's state; the tokens since the last write are kept beside it
(`qerl.kernels.decode.delta_net`)."""

STOP_TOKENS = 16
"""Stop tokens per row that the drawing kernel compares; the host checks any further ones."""

MAX_RANK = 256
"""Largest LoRA rank that the kernels take."""

PART = 128
"""Ranks of one adapter's A or B that a kernel holds at once; multiples of it take several iterations."""

STACKED_PART = 512
"""Rows of several stacked A that a kernel holds at once: those of q, k and v at rank `PART`."""

MAX_HEAD = 256
"""Widest heads that FlashAttention takes."""

MAX_KEY = 128
"""Widest keys of a delta net: each thread of delta_step.cu holds one number of a key."""

LORA_PART = 512
"""Inputs of an expert that one program multiplies with A, if there are few places (`parts_of`)."""

_FEW_PLACES = 4096

EXPERTS_BYTES = 1 << 27
"""Bytes of experts that the update dequantises at a time, unless a single expert has more."""

WHOLE_PARTS = 160 * 1024
"""Shared memory of a block, in bytes, from which kernels hold the sizes above at once; with less, half of
them."""


ITEM_SIZES = (8, 16, 32, 64)
"""Tokens that a four-bit expert may multiply at once (`qerl.kernels.decode.route`)."""


def item_size(tokens: int, experts: int, chosen: int, sizes: tuple[int, ...] = ITEM_SIZES) -> int:
    """Return the places of an item: the smallest size with room for twice an expert's mean share of the
    tokens.

    Few experts then need a second item, and few places stay empty.

    Args:
        tokens: Tokens of the batch.
        experts: Experts of a layer.
        chosen: Experts per token.
        sizes: Available sizes, ascending.
    """
    wanted = 2 * tokens * chosen / experts
    return next((size for size in sizes if size >= wanted), sizes[-1])


def most_items(tokens: int, experts: int, chosen: int, size: int) -> int:
    """Return the maximum number of items: the last item of each expert may have a single token."""
    pairs = tokens * chosen
    return (pairs + min(experts, pairs) * (size - 1)) // size


def parts_of(places: int, width: int) -> int:
    """Return into how many parts x A^T of experts' adapters is split along its inputs.

    With few places, most of a GPU would be idle without a split.
    """
    return -(-width // LORA_PART) if places <= _FEW_PLACES else 1


def pad_rank(rank: int) -> int:
    """Return the ranks that buffers hold for an adapter of this rank: a power of two, as Triton needs, from
    16 on."""
    return max(16, 1 << (rank - 1).bit_length())


def rank_part(ranks: int, shared_bytes: int) -> int:
    """Return how many ranks of one adapter a kernel takes at a time, given a block's bytes of shared
    memory."""
    return min(ranks, _most(PART, shared_bytes))


def stacked_part(ranks: int, shared_bytes: int) -> int:
    """Return how many rows of several stacked A a kernel takes at a time, a power of two.

    If they do not fit at once, a loop takes half of the maximum, so that they and a part of B fit into the
    shared memory of a block.
    """
    whole, most = 1 << max(0, ranks - 1).bit_length(), _most(STACKED_PART, shared_bytes)
    return whole if whole <= most else most // 2


def _most(part: int, shared_bytes: int) -> int:
    return part if shared_bytes >= WHOLE_PARTS else part // 2
