"""FlashAttention along stretches, for the update: torch's own or FlashAttention-4.

Both are called by what autograd would call, because the update gathers keys and values anew for backward
instead of keeping them, and both add gradients in a fixed order: a resumed run must compute the same bits.

Shapes: L queries of all stretches, M keys of all stretches, N stretches and one, H query heads, G key heads,
E head size.
"""

from qerl.kernels.flash.choice import (
    Extents,
    Flash,
    Heads,
    compile_flash4,
    flash_for,
    flash_words,
    why_not_flash4,
    why_not_on,
)

__all__ = [
    "Extents", "Flash", "Heads", "compile_flash4", "flash_for", "flash_words", "why_not_flash4", "why_not_on",
]  # fmt: skip
