"""Which FlashAttention computes a row: by the card, the heads and the row alone, so that a resumed run, which
computes the same rows, computes the same bits.

In one layer FlashAttention-4 (the package flash-attn-4) is faster on Hopper where a row is long enough to
keep the GPU busy: its calls take the host 0.9 ms a layer, forward and backward. Milliseconds of both passes
on an H200, with FlashAttention-2 and with FlashAttention-4: of 7B's 28 heads of 128 columns, one sample of
16384 tokens 32 and 12; two groups of 8 samples of 1024 tokens, 18 stretches, 3.2 and 2.1; 14832 tokens in 36
stretches of drawn lengths 2.8 and 2.0; 8447 tokens in 9 stretches 1.7 and 1.1. But of SmolLM2's 9 heads of 64
columns, 4100 tokens 0.3 and 0.9. The limits below are those of the smallest rows that gained. Whole updates
of 128 x 1024 were not faster with it, because they draw all the power that the GPU may take, and of longer
samples no whole update was compared.
"""

from functools import cache
from importlib import metadata
from typing import NamedTuple, Protocol

import torch

from qerl.errors import QeRLError, first_line
from qerl.kernels.cards import Card, card_of

PACKAGE, TESTED = "flash-attn-4", "4.0.0b36"
"""The package and the only version that is used, because what is called of it is private."""

HEAD_SIZE = 128
"""Size of the heads with which it was seen to gain."""

LEAST_TOKENS, LEAST_MEAN = 8192, 400
"""Tokens of a row, and tokens a stretch on average, from which it is used."""

MOST_STRETCHES = 256
"""Stretches of a row up to which it is used; for more it has other kernels, which were not run."""


class Extents(NamedTuple):
    """Stretches of queries, each with the stretch of keys it sees: causal, aligned at their ends.

    Attributes:
        query_offsets_N: int32, where the queries of each stretch begin, and L.
        key_offsets_N: int32, where its keys begin, and M.
        longest_query, longest_key: Tokens of the longest stretch.
    """

    query_offsets_N: torch.Tensor
    key_offsets_N: torch.Tensor
    longest_query: int
    longest_key: int


class Heads(NamedTuple):
    """The attention heads of a model.

    Attributes:
        queries, keys: Heads of queries, and of keys and values.
        size: Columns of each.
        dtype: Of what is multiplied.
        device: Where.
    """

    queries: int
    keys: int
    size: int
    dtype: torch.dtype
    device: torch.device


class Flash(Protocol):
    """FlashAttention, forward and backward, in 16 bits."""

    def forward(
        self, q_LHE: torch.Tensor, k_MGE: torch.Tensor, v_MGE: torch.Tensor, extents: Extents, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """The output [L, H, E], and what else backward needs."""
        ...

    def backward(
        self,
        dout_LHE: torch.Tensor,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        extents: Extents,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the inputs q, k and v of forward, given all it returned; the same bits each time."""
        ...


def flash_for(q_LHE: torch.Tensor, extents: Extents) -> Flash:
    """The FlashAttention for a row, forward and backward.

    Raises:
        QeRLError: flash-attn-4 is installed and cannot be imported.
    """
    from qerl.kernels.flash.flash2 import Flash2

    tokens, _, size = q_LHE.shape
    if not _is_long(tokens, len(extents.query_offsets_N) - 1):
        return Flash2()
    return Flash2() if why_not_flash4(size, q_LHE.dtype, q_LHE.device) else _flash4()


def flash_words(why_not: str) -> str:
    """Which FlashAttention rows get, in words.

    Args:
        why_not: Why none gets FlashAttention-4 (:func:`why_not_flash4`), empty where long ones do.
    """
    if why_not:
        return f"FlashAttention-2 ({why_not})"
    return (
        f"FlashAttention-4 (heads of {HEAD_SIZE}, rows of {LEAST_TOKENS} tokens or more, {LEAST_MEAN} or "
        "more a stretch; else FlashAttention-2)"
    )


def compile_flash4(heads: Heads, longest: int | None = None) -> None:
    """Compile FlashAttention-4 for a model that may get it: 5 to 6 s once in a process, which would else be a
    part of the first step. All rows that are long enough for it use the same kernels.

    Args:
        heads: Of the model.
        longest: Tokens of the longest row, where nothing is compiled if it is too short; None: not known.

    Raises:
        QeRLError: flash-attn-4 is installed and cannot be imported or compiled.
    """
    if longest is not None and longest < LEAST_TOKENS:
        return
    if why_not_flash4(heads.size, heads.dtype, heads.device):
        return
    flash, tokens = _flash4(), 2 * LEAST_MEAN
    q_LHE = torch.zeros(tokens, heads.queries, heads.size, dtype=heads.dtype, device=heads.device)
    k_MGE = q_LHE.new_zeros(tokens, heads.keys, heads.size)
    offsets_N = torch.tensor([0, LEAST_MEAN, tokens], dtype=torch.int32, device=heads.device)
    extents = Extents(offsets_N, offsets_N, LEAST_MEAN, LEAST_MEAN)
    try:
        outputs = flash.forward(q_LHE, k_MGE, k_MGE, extents, 1.0)
        flash.backward(q_LHE, (q_LHE, k_MGE, k_MGE), outputs, extents, 1.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # its compiler raises many kinds
        raise _unusable(f"compiled for heads of {heads.size}", error) from error


@cache
def why_not_flash4(head_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why no row gets FlashAttention-4, however long it is; empty where long ones do."""
    if device.type != "cuda":
        return "FlashAttention-4 needs a CUDA GPU"
    card = card_of(device)
    if card.flash4 and head_size != HEAD_SIZE:
        return f"FlashAttention-4 was seen to gain with heads of {HEAD_SIZE}, and these have {head_size}"
    if card.flash4 and dtype != torch.bfloat16:
        return f"FlashAttention-4 was not run in {str(dtype).removeprefix('torch.')}"
    return why_not_on(card)


def why_not_on(card: Card) -> str:
    """Why no model gets FlashAttention-4 on a card; empty where some do."""
    return why_not_installed() if card.flash4 else "FlashAttention-4 was not run on such GPUs"


def why_not_installed() -> str:
    """Why the package cannot be used, with the command that gets it; empty where it can."""
    found = _installed()
    if found is None:
        return f"{PACKAGE} is not installed: pip install '{PACKAGE}=={TESTED}'"
    if found != TESTED:
        return f"{PACKAGE} {found} is installed and {TESTED} was tested: pip install '{PACKAGE}=={TESTED}'"
    return ""


def _installed() -> str | None:
    """The version of the package that is installed; None without one."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _is_long(tokens: int, stretches: int) -> bool:
    return tokens >= max(LEAST_TOKENS, LEAST_MEAN * stretches) and stretches <= MOST_STRETCHES


@cache
def _flash4() -> Flash:
    try:
        from qerl.kernels.flash.flash4 import Flash4
    except ImportError as error:
        raise _unusable("imported", error) from error
    return Flash4()


def _unusable(what: str, error: Exception) -> QeRLError:
    return QeRLError(
        f"{PACKAGE} {TESTED} is installed and cannot be {what} ({first_line(error)}); install it again with "
        f"pip install '{PACKAGE}=={TESTED}', or remove it with pip uninstall {PACKAGE}."
    )
