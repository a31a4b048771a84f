"""Decode speed of vLLM, for `python -m bench rollout --peers`.

Three peers: BF16 weights, NVFP4 weights with vLLM's own choice of kernel (Marlin on Hopper), and NVFP4 with
`quantization="humming"`. Prefix caching is on. If completions are equally long, CUDA graphs are captured for
exactly the measured batch sizes, so that no step is padded. Weights are vLLM's dummies, the adapter is
random.

A batch is timed twice, to its first token and to `decode_tokens` more, with its prompts in the prefix cache;
the difference is decoding alone. It includes the time of vLLM's scheduler for which the GPU waits. With
`lengths`, whole calls are timed instead: prompts are new in each call, so that they are prefilled, and each
request has its own limit, that of our engine's sample.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lengths import call_row, draw_lengths, random_ids
from bench.peers.checkpoint import write_adapter
from bench.peers.process import serve
from qerl.families.sizes import Sizes
from qerl.measure.model_config import model_config

if TYPE_CHECKING:
    from vllm import LLM

PEERS = {"vllm-bf16": ("bf16", None), "vllm-nvfp4": ("nvfp4", None), "vllm-humming": ("nvfp4", "humming")}
"""Format of the weights, and vLLM's `quantization`, of each peer."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts as max_lora_rank
# Share of the GPU's memory; the rest is for CUDA graphs and the contexts of both processes.
_SHARE = 0.94


def run(spec: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per batch size, in the peer's process.

    Args:
        spec: ``config`` (content of a config.json), ``weights`` and ``quantization`` (from `PEERS`),
            ``rank`` (0 for no adapter), ``batches``, ``prompt_tokens``, ``decode_tokens``, ``group`` (samples
            per prompt), ``repeats`` and ``lengths`` (a spec of `bench.lengths.draw_lengths`, or None).
        folder: Folder for config and adapter.

    Returns:
        Rows with version, batch, and the fields of `qerl.measure.decode.decode_speed`, or of
        `bench.rollout.measure_calls`.
    """
    import vllm

    sizes = Sizes.from_config(spec["config"])
    positions = spec["prompt_tokens"] + spec["decode_tokens"] + 16
    model_config(sizes, spec["weights"], positions).save_pretrained(folder / "model")
    adapter, lora = None, {}
    if spec["rank"]:
        from vllm.lora.request import LoRARequest

        lora = {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= spec["rank"]),
            # Without this vLLM reserves LoRA on the head of some models and pays for it in each step.
            "lora_target_modules": write_adapter(folder / "adapter", sizes, spec["rank"]),
        }
        adapter = LoRARequest("random", 1, str(folder / "adapter"))
    # With equal lengths the batch size never changes; with others it does, and vLLM's default sizes are used.
    sizes_captured = {} if spec["lengths"] else {"cudagraph_capture_sizes": sorted(spec["batches"])}
    llm = vllm.LLM(
        model=str(folder / "model"), load_format="dummy", skip_tokenizer_init=True, max_model_len=positions,
        quantization=spec["quantization"], gpu_memory_utilization=_SHARE, enable_prefix_caching=True,
        max_num_seqs=max(spec["batches"]), max_num_batched_tokens=8192,
        compilation_config=sizes_captured, **lora,
    )  # fmt: skip
    measure = _measure if spec["lengths"] is None else _measure_calls
    for batch in spec["batches"]:
        yield {"version": f"vllm {vllm.__version__}", "batch": batch, **measure(llm, adapter, batch, spec)}


def _measure(llm: "LLM", adapter: Any, batch: int, spec: dict[str, Any]) -> dict[str, float]:
    """Return the medians over the repeats of one batch, and spread, (largest - smallest) / median."""
    decoded = spec["decode_tokens"]
    group = min(spec["group"], batch)
    first = range(1, 1 + spec["prompt_tokens"])
    vocabulary = spec["config"]["vocab_size"]
    prompts = [
        {"prompt_token_ids": [(token + 1000 * (i // group)) % vocabulary for token in first]}
        for i in range(batch)
    ]
    for tokens in (1, 8):  # fills the prefix cache; compiles what is not captured
        _seconds(llm, adapter, prompts, tokens)
    times = [
        _seconds(llm, adapter, prompts, decoded + 1) - _seconds(llm, adapter, prompts, 1)
        for _ in range(spec["repeats"])
    ]
    middle = statistics.median(times)
    return {
        "decode_tok_s": batch * decoded / middle,
        "step_ms": middle / decoded * 1e3,
        "spread": (max(times) - min(times)) / middle,
    }


def _measure_calls(llm: "LLM", adapter: Any, batch: int, spec: dict[str, Any]) -> dict[str, float]:
    """Return the medians over the repeats of whole calls, after one that compiles."""
    lengths = draw_lengths(spec["lengths"], batch, spec["decode_tokens"])
    group = min(spec["group"], batch)
    times = []
    for call in range(spec["repeats"] + 1):
        ids = random_ids(call, -(-batch // group), spec["prompt_tokens"])
        prompts = [{"prompt_token_ids": ids[i // group]} for i in range(batch)]
        times.append(_seconds(llm, adapter, prompts, lengths))
    return call_row(times[1:], lengths)


def _seconds(llm: "LLM", adapter: Any, prompts: list[dict[str, list[int]]], tokens: int | list[int]) -> float:
    """Return the seconds until each prompt has exactly ``tokens`` tokens, one number or one per prompt."""
    from vllm import SamplingParams

    lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [
        SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True, detokenize=False)
        for length in lengths
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return seconds


if __name__ == "__main__":
    serve(run)
