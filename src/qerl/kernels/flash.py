"""FlashAttention over segments, for the update: torch's own (2), or flash-attn-4 for long rows on Hopper.

The functions underneath autograd are called directly, because the update gathers keys and values again for
backward instead of keeping them. Both versions add gradients in a fixed order: a resumed run must compute the
same bits. torch's does so in several FP32 copies; copies that no block of keys would write are left out
(`segments_in_backward`).

FlashAttention-4 was faster on an H200 from rows of 8192 tokens on, with 400 or more per segment and heads of
128 columns: one sample of 16384 tokens takes 12 ms per layer of 7B instead of 32, two groups of 8 x 1024 take
2.1 instead of 3.2 (attention-fa4-h200.json). For more than 256 segments it has other kernels, which were not
run, and neither were its windows and sinks. The functions called here are private, so no other version of it
is used.

Neither version takes heads of more than 256 columns (512 in the full layers of Gemma 4). Those get torch's
memory-efficient attention, with keys and values repeated for each query head. It is slower, and adds in a
fixed order as long as keys are not split.

Shapes: L queries of all segments, M keys of all segments, N segments plus one, H query heads, G key heads, E
head size.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch.nn.attention import current_flash_attention_impl

from qerl.errors import QeRLError
from qerl.kernels.cards import card_of
from qerl.kernels.device import multiprocessors
from qerl.kernels.limits import MAX_HEAD

_FLASH4 = "4.0.0b36"
_CAUSAL_AT_THE_ENDS = 2  # CustomMaskType::CausalFromBottomRight of torch's memory-efficient attention
_ONE_THREAD = threading.Lock()


class Extents(NamedTuple):
    """Segments of queries, each with the segment of keys it attends to: causal, aligned at their ends.

    Attributes:
        query_offsets_N: int32, first query of each segment, then L.
        key_offsets_N: int32, first key of each segment, then M.
        longest_query, longest_key: Tokens of the longest segment.
    """

    query_offsets_N: torch.Tensor
    key_offsets_N: torch.Tensor
    longest_query: int
    longest_key: int


class Scoring(NamedTuple):
    """How a layer computes attention weights from queries and keys.

    Attributes:
        scale: Factor of their products.
        window: Keys that a query attends to, its own included; None for all up to its own.
        has_sinks: Whether the caller adds a sink to the softmax of each head.
    """

    scale: float
    window: int | None = None
    has_sinks: bool = False


@cache
def why_not_flash4(device: torch.device) -> str:
    """Return why no row on a device gets FlashAttention-4, or an empty string if long rows do."""
    if device.type != "cuda" or card_of(device).math != "wgmma":
        return "FlashAttention-4 was run on Hopper alone"
    try:
        found = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        found = "not"
    advice = f"flash-attn-4 is {found} installed: pip install flash-attn-4=={_FLASH4}"
    return "" if found == _FLASH4 else advice


def takes_flash4(q_LHE: torch.Tensor, extents: Extents, scoring: Scoring) -> bool:
    """Return True if a row gets FlashAttention-4 in a layer; this does not depend on other rows."""
    if scoring.window is not None or scoring.has_sinks:
        return False
    tokens, _, size = q_LHE.shape
    segments = len(extents.query_offsets_N) - 1
    if tokens < max(8192, 400 * segments) or segments > 256 or size != 128 or q_LHE.dtype != torch.bfloat16:
        return False
    return not why_not_flash4(q_LHE.device)


def _named(extents: Extents) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {**dict(zip(names, extents, strict=True)), "causal": True}


def _settings(scoring: Scoring) -> dict[str, Any]:
    if scoring.window is None:
        return {"scale": scoring.scale}
    return {"scale": scoring.scale, "window_size_left": scoring.window - 1, "window_size_right": 0}


def forward(
    q_LHE: torch.Tensor, k_MGE: torch.Tensor, v_MGE: torch.Tensor, extents: Extents, scoring: Scoring
) -> tuple[torch.Tensor, ...]:
    """Return the output [L, H, E] in 16 bits, the log-sum-exp of each softmax, and other inputs of backward.

    The log-sum-exps are FP32 [H, L], except where heads have more than `MAX_HEAD` columns.
    """
    if q_LHE.shape[-1] > MAX_HEAD:
        k_MHE, v_MHE = (_for_each_query_head(x, q_LHE) for x in (k_MGE, v_MGE))
        wide = torch.ops.aten._efficient_attention_forward(
            q_LHE[None], k_MHE[None], v_MHE[None], None, *extents, 0.0, _CAUSAL_AT_THE_ENDS, True,
            **_settings(scoring),
        )  # fmt: skip
        return wide[0][0], *wide[1:4]
    if takes_flash4(q_LHE, extents, scoring):
        from flash_attn.cute import interface  # compiles at its first call, in 5 to 6 s

        of_4 = interface._flash_attn_fwd(
            q_LHE, k_MGE, v_MGE, softmax_scale=scoring.scale, return_lse=True, **_named(extents)
        )
        return tuple(of_4[:2])
    found = torch.ops.aten._flash_attention_forward(
        q_LHE, k_MGE, v_MGE, *extents, 0.0, True, False, **_settings(scoring)
    )
    return tuple(found[:4])


def _for_each_query_head(x_MGE: torch.Tensor, q_LHE: torch.Tensor) -> torch.Tensor:
    return x_MGE.repeat_interleave(q_LHE.shape[1] // x_MGE.shape[1], dim=1)


def backward(
    dout_LHE: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, ...],
    extents: Extents,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of forward's q, k and v, given all its outputs; the same bits each time."""
    if takes_flash4(inputs[0], extents, scoring):
        from flash_attn.cute import interface

        out_LHE, lse = outputs
        settings = {"softmax_scale": scoring.scale, "deterministic": True, **_named(extents)}
        return tuple(interface._flash_attn_bwd(*inputs, out_LHE, dout_LHE, lse, **settings)[:3])
    out_LHE, lse, state, unused = outputs
    q_LHE, k_MGE, v_MGE = inputs
    if q_LHE.shape[-1] > MAX_HEAD:
        k_MHE, v_MHE = (_for_each_query_head(x, q_LHE) for x in (k_MGE, v_MGE))
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            dout_LHE[None], q_LHE[None], k_MHE[None], v_MHE[None], None, out_LHE[None], *extents, lse, 0.0,
            state, unused, _CAUSAL_AT_THE_ENDS, False, num_splits_key=1, **_settings(scoring),
        )  # fmt: skip
        dk, dv = (x[0].unflatten(1, (k_MGE.shape[1], -1)).sum(2) for x in (dk, dv))
        return dq[0], dk, dv
    with deterministic():
        dq_LHE, dk_MGE, dv_MGE = torch.ops.aten._flash_attention_backward(
            dout_LHE, *inputs, out_LHE, lse, *_with_empty(extents, q_LHE), 0.0, True, state, unused,
            **_settings(scoring),
        )  # fmt: skip
    return dq_LHE, dk_MGE, dv_MGE


def _with_empty(extents: Extents, q_LHE: torch.Tensor) -> Extents:
    """Append empty segments if they save memory."""
    count, (_, heads, size) = len(extents.query_offsets_N) - 1, q_LHE.shape
    blocks = -(-extents.longest_key // (128 if size <= 128 else 64))  # as the kernel cuts keys
    empty = segments_in_backward(count, heads, blocks, multiprocessors(q_LHE.device)) - count
    if not empty:
        return extents
    queries, keys = (torch.cat((each, each[-1:].expand(empty))) for each in extents[:2])
    return Extents(queries, keys, extents.longest_query, extents.longest_key)


def segments_in_backward(count: int, heads: int, blocks: int, cores: int) -> int:
    """Return how many segments FlashAttention's deterministic backward is told that there are.

    Backward sums gradients of queries in ``cores / (segments * heads)`` FP32 copies, rounded up, with blocks
    of keys assigned to the copies in turn, so that each multiprocessor has a block. If there are fewer blocks
    of keys than copies, the other copies are filled with zeros and never written: with few short segments and
    few heads they take more memory than all else in a layer. Told of more segments, backward makes fewer
    copies.

    Args:
        count: Segments.
        heads: Query heads.
        blocks: Blocks of keys of the longest segment.
        cores: Multiprocessors of the GPU.

    Returns:
        At least ``count``; the smallest number with the fewest copies that leave each block of keys its own
        where it had one.
    """
    most = (cores - 1) // (heads * (blocks - 1)) if blocks > 1 else -(-cores // heads)
    copies = -(-cores // (max(count, most) * heads))
    return max(count, -(-cores // (copies * heads)))


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch's fused attention of either kind add gradients in a fixed order inside the block.

    torch has only a setting of the whole process, so threads take turns here. Any other operation that
    another thread runs on a GPU meanwhile must have a deterministic form, or torch refuses it.

    Raises:
        QeRLError: torch's FlashAttention was replaced by an implementation that does not read this setting.
    """
    if other := current_flash_attention_impl():
        raise QeRLError(
            f"torch's FlashAttention was replaced by {other}, whose gradients are not the same twice; call "
            "torch.nn.attention.restore_flash_attention_impl() before training."
        )
    with _ONE_THREAD:
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        settings: Any = torch.utils.deterministic
        fill = settings.fill_uninitialized_memory
        settings.fill_uninitialized_memory = False  # costs a pass over every new tensor
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
            settings.fill_uninitialized_memory = fill
