"""A GRPO step of plain TRL with vLLM in the same process, for `python -m bench step --peers`.

TRL's `GRPOTrainer` with defaults, `use_vllm=True` and `vllm_mode="colocate"`: BF16 weights are held twice,
in the trainer and in vLLM, to which TRL sends them with LoRA merged at the start of every step. Prompts,
rewards, lengths, microbatch and optimizer are those of our own rows. Gradient checkpointing is TRL's default
and recomputes every layer, as `every_n_layers` of its row says; ours recomputes the layers that the memory
plan chose, none if memory allows. TRL's importance-sampling correction stays on, as by default and in our
rows; TRL spends a forward pass on it.

vLLM gets memory for the KV cache of all samples of a step at once, so that none waits. It does not sleep
during the update: if both fit, discarding the weights and sending them again only costs time. It loads zeros,
because TRL first sends it the trainer's random weights.

With `lengths`, each request that TRL passes to vLLM gets its own limit, that of our engine's sample.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from bench.clock import Clock, medians
from bench.lengths import draw_lengths
from bench.peers.checkpoint import write_zeros
from bench.peers.process import serve
from qerl.families.sizes import Sizes
from qerl.measure.model_config import model_config
from qerl.measure.random_task import random_prompts, random_rewards, word_tokenizer
from qerl.trainer.step_log import used_bytes

# vLLM's memory besides weights and KV cache: a prefill of 4096 tokens, graphs, workspaces.
_VLLM_BYTES = 8e9


class Colocated:
    """Timer around TRL's vLLM; the `Rollout` that `Clock` reads, with the time of sending weights included.

    Args:
        generation: The trainer's `vllm_generation`, whose two methods are wrapped.
    """

    release_seconds = 0.0  # nothing is freed between rollout and update
    trace: torch.profiler.profile | None = None

    def __init__(self, generation: Any) -> None:
        self.seconds = self.sync_seconds = self.rollout_gb = 0.0
        self.tokens = 0
        self._device = generation.accelerator.device
        self._sync, self._generate = generation.sync_weights, generation.generate
        generation.sync_weights, generation.generate = self.sync_weights, self.generate

    def sync_weights(self) -> None:
        start = time.perf_counter()
        self._sync()
        torch.cuda.synchronize()
        self.sync_seconds = time.perf_counter() - start

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._generate(*args, **kwargs)
        torch.cuda.synchronize()
        self.seconds = self.sync_seconds + time.perf_counter() - start
        self.tokens = sum(map(len, result[1]))
        self.rollout_gb = used_bytes(self._device) / 1e9
        torch.cuda.reset_peak_memory_stats()
        return result


class SyncClock(Clock):
    """`Clock` that also records the seconds of sending the weights."""

    def __init__(self, rollout: Colocated) -> None:
        super().__init__(rollout)
        self._colocated = rollout

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self.rows[-1]["sync_s"] = self._colocated.sync_seconds


def run(spec: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row, in the peer's process.

    Args:
        spec: ``config`` (content of a config.json), ``rank``, ``prompts``, ``samples``, ``microbatch``,
            ``prompt_tokens``, ``tokens``, ``lengths`` (a spec of `draw_lengths`) and ``steps``; otherwise as
            in `bench.step.measure`.
        folder: Folder for the model and TRL's output.

    Returns:
        Medians of the `SyncClock` rows after the first, version, and ``steps``, all the rows.
    """
    import vllm

    sizes = Sizes.from_config(spec["config"])
    model = _model(sizes, spec["prompt_tokens"] + spec["tokens"], folder / "model")
    count = spec["prompts"] * (spec["steps"] + 1)
    trainer = GRPOTrainer(
        model, [random_rewards()], _settings(sizes, spec, folder),
        Dataset.from_dict({"prompt": random_prompts(count, spec["prompt_tokens"])}),
        processing_class=word_tokenizer(sizes.vocabulary),
        peft_config=LoraConfig(
            r=spec["rank"], lora_alpha=2 * spec["rank"], lora_dropout=0.0, target_modules=list(sizes.targets),
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    lengths = draw_lengths(spec["lengths"], spec["prompts"] * spec["samples"], spec["tokens"])
    limit_requests(trainer.vllm_generation.llm, lengths)
    clock = SyncClock(Colocated(trainer.vllm_generation))
    trainer.add_callback(clock)
    trainer.train()
    assert clock.rows[-1]["tokens"] == sum(lengths)
    version = f"trl {trl.__version__}, vllm {vllm.__version__}"
    yield {
        "engine": "trl+vllm", "version": version, "every_n_layers": 1, **medians(clock.rows),
        "steps": clock.rows,
    }  # fmt: skip


def limit_requests(llm: Any, lengths: list[int]) -> None:
    """Give each request of a vLLM call its own `max_tokens`, in place of TRL's common one.

    Args:
        llm: TRL's vLLM, whose method `generate` is wrapped.
        lengths: Tokens of each completion, in the order of the prompts.
    """
    generate = llm.generate

    def limited(prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        params = [copy.deepcopy(sampling_params) for _ in lengths]
        for each, length in zip(params, lengths, strict=True):
            each.max_tokens = length
        return generate(prompts, sampling_params=params, **kwargs)

    llm.generate = limited


def _model(sizes: Sizes, positions: int, folder: Path) -> PreTrainedModel:
    """Return a random BF16 model on the GPU whose `name_or_path` is a folder from which vLLM loads zeros."""
    config = model_config(sizes, "bf16", positions)
    config.name_or_path = str(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    word_tokenizer(sizes.vocabulary).save_pretrained(folder)
    write_zeros(folder, model.state_dict())
    return model


def _settings(sizes: Sizes, spec: dict[str, Any], folder: Path) -> GRPOConfig:
    """Return TRL's defaults, changed only to match the work of our own rows."""
    samples = spec["prompts"] * spec["samples"]
    return GRPOConfig(
        output_dir=str(folder / "run"), num_generations=spec["samples"],
        per_device_train_batch_size=spec["microbatch"],
        gradient_accumulation_steps=samples // spec["microbatch"], max_completion_length=spec["tokens"],
        max_steps=spec["steps"] + 1, learning_rate=1e-5, gradient_checkpointing=True, logging_steps=1,
        report_to="none", save_strategy="no", optim="adamw_torch_fused", use_vllm=True,
        vllm_mode="colocate", vllm_max_model_length=spec["prompt_tokens"] + spec["tokens"],
        vllm_gpu_memory_utilization=_vllm_share(sizes, samples, spec["prompt_tokens"] + spec["tokens"]),
        generation_kwargs={"ignore_eos": True, "detokenize": False}, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip


def _vllm_share(sizes: Sizes, samples: int, positions: int) -> float:
    """Return the share of GPU memory for vLLM's weights and the KV cache of all samples of a step."""
    weights = 2 * replace(sizes, tied=False).parameters
    cache = samples * positions * 2 * 2 * sizes.keys  # keys and values in bf16
    return (weights + cache + _VLLM_BYTES) / torch.cuda.mem_get_info()[1]


if __name__ == "__main__":
    serve(run)
