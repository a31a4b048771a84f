"""Selection of the rollout engine for a model on this machine.

The paged engine is used wherever it can run: it needs a CUDA GPU, the packages of the extra `gpu`, a family
that it supports, and 16-bit, NVFP4, MXFP4 or NF4 weights. Otherwise the portable engine is used; on a GPU,
where it is slow, a warning gives the reason.
"""

import warnings

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.gpu_memory import keep_within_limit
from qerl.kernels import needs
from qerl.ranks import is_first_process
from qerl.rollout.engine import KvCacheDtype, RolloutEngine
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.rollout.portable.engine import ROWS, PortableEngine


def make_engine(
    model: nn.Module,
    pad_token_id: int,
    max_sequences: int | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> RolloutEngine:
    """Create the fastest engine that can run a model on its device.

    The paged engine reorders packed weights in place; training reads them in that order.

    Args:
        model: A transformers causal LM, PEFT-wrapped or not.
        pad_token_id: Any id of the vocabulary; it fills masked positions.
        max_sequences: Maximum number of sequences decoded at the same time; None for the engine's default.
        kv_cache_dtype: Dtype of the paged engine's KV cache.

    Raises:
        QeRLError: ``kv_cache_dtype`` is ``fp8``, but the paged engine cannot run.
    """
    on_gpu = base_model(model).device.type == "cuda"
    if on_gpu:
        keep_within_limit(base_model(model).device)
    reasons = _obstacles(model, kv_cache_dtype == "fp8") if on_gpu else needs.NO_CUDA.reason
    if reasons and kv_cache_dtype != "auto":
        raise no_paged_engine(kv_cache_dtype, reasons)
    if reasons:
        if on_gpu and is_first_process():
            message = f"Rollouts take the portable engine, which is slow on a GPU: {reasons}."
            warnings.warn(message, stacklevel=2)
        return PortableEngine(model, pad_token_id, ROWS if max_sequences is None else max_sequences)
    from qerl.rollout.paged.engine import PagedEngine

    return PagedEngine(
        model, pad_token_id, MAX_ROWS if max_sequences is None else max_sequences, kv_cache_dtype
    )


def no_paged_engine(kv_cache_dtype: KvCacheDtype, reasons: str) -> QeRLError:
    """Return the error for a KV cache dtype that needs the paged engine where that engine cannot run."""
    return QeRLError(
        f"kv_cache_dtype: {kv_cache_dtype} needs the paged engine, which cannot run ({reasons}); set "
        "kv_cache_dtype: auto."
    )


def _obstacles(model: nn.Module, fp8: bool) -> str:
    """Return why the paged engine cannot run this model on its GPU; empty if it can."""
    with torch.cuda.device(base_model(model).device):
        missing = needs.obstacles(fp8)
    if missing:
        remedies = " and ".join(sorted({obstacle.remedy for obstacle in missing if obstacle.remedy}))
        text = ", ".join(obstacle.reason for obstacle in missing)
        return f"{text} ({remedies})" if remedies else text
    from qerl.rollout.paged.binding import why_not  # needs Triton

    return why_not(model) or ""
