"""Log-probability of each row's target and entropy from rows of logits, with a gradient of both.

One program reads one row from start to end: once for the maximum, the sum of exponentials and their mean
logit, and if a gradient is requested a second time, to write it. A row of 152,000 FP32 logits is larger than
a multiprocessor can hold, so the second pass reads from memory again.

The gradient may overwrite its logits, from the start of the same row. In 16 bits it is written behind the
position read by then, except for the first blocks, which some warps may still read; so all warps synchronise
between reading a block and writing its gradient.

Shapes: n rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def transformed(z, scale, cap, over_temperature, CAPPED: tl.constexpr):
    """A tile of logits as the model scales and caps them, over the temperature."""
    z = z * scale
    if CAPPED:
        z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)  # tanh(x) = 2 sigmoid(2 x) - 1
    return z * over_temperature


@triton.jit
def _token_logps(
    logits_nV, target_n, logp_n, entropy_n, gradient_nV, dlogp_n, dentropy_n,
    V, gradient_stride, scale, cap, over_temperature,
    CAPPED: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = logits_nV + n * V
    columns = tl.arange(0, BLOCK)
    highest, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        z = tl.load(row + start + columns, mask=inside, other=0.0)
        z = transformed(z, scale, cap, over_temperature, CAPPED)
        new = tl.maximum(highest, tl.max(tl.where(inside, z, -float("inf")), axis=0))
        e = tl.where(inside, tl.exp(z - new), 0.0)
        before = tl.exp(highest - new)
        total = total * before + tl.sum(e, axis=0)
        weighted = weighted * before + tl.sum(tl.where(e > 0, e * z, 0.0), axis=0)
        highest = new
    log_z = highest + tl.log(total)
    entropy = log_z - weighted / total
    target = tl.load(target_n + n)
    chosen = tl.load(row + target)
    tl.store(logp_n + n, transformed(chosen, scale, cap, over_temperature, CAPPED) - log_z)
    tl.store(entropy_n + n, entropy)
    if GRADIENT:
        dlogp, dentropy = 1.0, 0.0
        if WEIGHTED:
            dlogp, dentropy = tl.load(dlogp_n + n), tl.load(dentropy_n + n)
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            y = tl.load(row + start + columns, mask=inside, other=0.0)
            z = transformed(y, scale, cap, over_temperature, CAPPED)
            log_p = z - log_z
            p = tl.exp(log_p)
            gradient = dlogp * (tl.where(start + columns == target, 1.0, 0.0) - p)
            if WEIGHTED:
                gradient -= dentropy * tl.where(p > 0, p * (log_p + entropy), 0.0)
            if CAPPED:
                t = z / (cap * over_temperature)
                gradient *= 1 - t * t
            tl.debug_barrier()
            to = gradient_nV + n * gradient_stride + start + columns
            tl.store(to, gradient * scale * over_temperature, mask=inside)


def token_logps(
    logits_nV: torch.Tensor,
    target_n: torch.Tensor,
    scale: float,
    cap: float | None,
    temperature: float,
    gradient_nV: torch.Tensor | None = None,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability [n] of each row's target and the entropy [n] in nats, FP32.

    Args:
        logits_nV: FP32, contiguous, as the head's product gives them.
        target_n: int64.
        scale: Factor of the logits, applied first.
        cap: Bound of the logits by tanh, applied next; None for none.
        temperature: Divides the logits last.
        gradient_nV: Written with the gradient with respect to ``logits_nV``; of any floating dtype. Its rows
            may begin where those of the logits do.
        weights: Gradients [n] of log-probabilities and entropies, FP32, contiguous; None for 1 and 0.
    """
    for x_n in (target_n, *(weights or ())):
        assert x_n.is_contiguous(), "the kernel reads the numbers of rows one behind the other"
    (n, vocabulary), device = logits_nV.shape, logits_nV.device
    logp_n, entropy_n = (torch.empty(n, device=device) for _ in range(2))
    dlogp_n, dentropy_n = (logp_n, entropy_n) if weights is None else weights
    to = logits_nV if gradient_nV is None else gradient_nV
    _token_logps[(n,)](
        *(logits_nV, target_n, logp_n, entropy_n, to, dlogp_n, dentropy_n),
        *(vocabulary, to.stride(0), float(scale), float(cap or 1.0), 1.0 / temperature),
        CAPPED=cap is not None, GRADIENT=gradient_nV is not None, WEIGHTED=weights is not None,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return logp_n, entropy_n
