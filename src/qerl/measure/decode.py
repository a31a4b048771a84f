"""Decode speed of random models, from the first token after a prompt that is in the KV cache already."""

import statistics
import time
from typing import Any

import torch

from qerl.kernels.limits import PAGE
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.blocks import memory_of
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import PREFILL_TOKENS, BlockDemand, KVGeometry, Units
from qerl.rollout.paged.machine import CudaGraphs
from qerl.rollout.paged.scheduler import Pace, Scheduler
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.session import new_sequences


def random_cache(decoder: Decoder, blocks: Units, dtype: torch.dtype) -> KVCache:
    """Make a KV cache of normally distributed keys, values and states, layer by layer."""
    cache = KVCache.of_blocks(decoder, blocks, dtype)
    for pair in cache.layers:
        for held in pair:
            held.copy_(torch.randn(held.shape, dtype=torch.bfloat16, device=held.device))
    return cache


def fill_rows(step: DecodeStep, cache: KVCache, prompt_tokens: int, group: int, decode_tokens: int) -> None:
    """Put every row at the end of a cached prompt of ``prompt_tokens``, ``group`` rows per prompt, with
    blocks for ``decode_tokens`` tokens."""
    rows = step.rows.count
    pace = Pace(round_steps=decode_tokens, spare_rounds=0)
    memory = memory_of(cache.blocks, cache.geometry.pools, PAGE, PREFILL_TOKENS[-1])
    scheduler = Scheduler(memory, rows, pace)
    prompts = torch.randint(0, 1000, (-(-rows // group), prompt_tokens)).tolist()
    scheduler.add(new_sequences(prompts, [SamplingParams(decode_tokens)] * (len(prompts) * group)))
    admitted = scheduler.next_round().admitted
    assert len(admitted) == rows, "the cache is too small"
    step.rows.clear()
    for row, sequence in enumerate(admitted):
        sequence.key = 0, row, 0
    step.rows.place(admitted)
    step.attend(scheduler.running)


def decode_speed(
    decoder: Decoder,
    rows: int,
    prompt_tokens: int,
    decode_tokens: int,
    group: int,
    repeats: int = 3,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Time ``decode_tokens`` decode steps of ``rows`` sequences.

    Returns:
        decode_tok_s, step_ms (medians over the repeats) and spread, (largest - smallest) / median.
    """
    pools = KVGeometry.of(decoder.sizes, kv_dtype.itemsize).pools
    demand = BlockDemand(prompt_tokens, decode_tokens, group, pools, ahead_tokens=decode_tokens)
    cache = random_cache(decoder, demand.blocks(rows), kv_dtype)
    step = DecodeStep(decoder, cache, rows, decode_tokens, demand.table_width, CudaGraphs())
    fill_rows(step, cache, prompt_tokens, group, decode_tokens)
    step.capture()
    times = []
    for _ in range(repeats):
        fill_rows(step, cache, prompt_tokens, group, decode_tokens)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step.decode(decode_tokens)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert int(step.rows.state.generated_T.min()) == decode_tokens
    assert torch.isfinite(step.rows.state.out_stats_2TM).all()
    middle = statistics.median(times)
    return {
        "decode_tok_s": rows * decode_tokens / middle,
        "step_ms": middle / decode_tokens * 1e3,
        "spread": (max(times) - min(times)) / middle,
    }
