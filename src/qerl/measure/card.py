"""`qerl bench card`: the standard table of one GPU in about five minutes, as a file that can be sent.

First a small model samples with the paged engine, and its log-probabilities are compared with the trainer's
and with FP32: a card whose kernels compute something else gets no table. Then the largest of the standard
shapes that fits, with random NVFP4 weights and LoRA of rank 32, decodes 1, 8, 64 and 128 sequences and takes
whole GRPO steps. The memory plan chooses the shape, so cards of one size measure the same. Where an H200
was measured with the same settings, decoding is shown with the ratio to its speed.

`check` validates such a file; tests apply it to every file in bench/results/cards.
"""

import copy
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from torch import nn

from qerl import __version__
from qerl.errors import QeRLError
from qerl.families.sizes import SIZES, Sizes
from qerl.gpu_memory import total_bytes
from qerl.kernels import needs
from qerl.kernels.cards import card_of, words
from qerl.measure.gauge import gauge
from qerl.measure.provenance import provenance
from qerl.measure.random_model import as_if_trained, random_decoder, random_policy
from qerl.measure.random_task import random_prompts, random_rewards, word_tokenizer
from qerl.plan.parts import Adapter, Cache, Weights
from qerl.plan.propose import MARGIN, fastest
from qerl.plan.work import Work
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.paged.limits import CONTEXT_BYTES
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer

SHAPES = ("1.5b", "3b", "7b", "14b", "32b")
"""The standard shapes; a card measures the largest that fits."""

ROWS = (1, 8, 64, 128)
PROMPT, DECODED, COMPLETION, GROUP, RANK, STEPS = 256, 256, 1024, 8, 32, 2

H200 = {
    "7b": ("rollout-7b-all-h200", {1: 511, 8: 3730, 64: 17023, 128: 24358}),
    "32b": ("rollout-32b-all-h200", {1: 142, 8: 1094, 64: 4473, 128: 6152}),
}
"""By shape a file of bench/results, and the tokens/s of an H200 in it by sequences, measured by the same
function with the settings above. No file has a step with these settings."""

PARITY = 1.2
"""Largest ratio of engine to trainer in mean difference of log-probabilities from FP32."""

SMALL = Sizes.uniform(384, 448, 3, 6, 2, 64, 1000, qkv_bias=True)
"""The model of the parity check."""

REQUIRED: dict[str, type | tuple[type, ...]] = {
    "gpu": str, "driver": (str, type(None)), "capability": str, "total_gb": float, "torch": str, "cuda": str,
    "version": str, "commit": str, "date": str, "command": str, "shape": str, "parity": dict, "rows": list,
}  # fmt: skip
"""Fields of a card's file and their types."""


def measure_card(out: Path, console: Console, shape: str | None = None) -> None:
    """Measure this GPU and write the file; rows are printed as they come.

    Args:
        out: File to write.
        console: Shows rows.
        shape: One of `SHAPES`; None takes the largest that fits.

    Raises:
        QeRLError: There is no GPU that the kernels support, no shape fits, or the parity check fails.
    """
    if not torch.cuda.is_available():
        raise QeRLError("`qerl bench card` measures a CUDA GPU and this machine has none; see `qerl doctor`.")
    if missing := needs.obstacles():
        raise QeRLError(f"The kernels do not run here: {missing[0].reason}. {missing[0].remedy}".strip())
    from qerl.measure.decode import decode_speed  # needs Triton
    from qerl.rollout.paged.engine import PagedEngine

    device = torch.device("cuda")
    card, total = card_of(device), total_bytes(device)
    shape = shape or largest_shape(total)
    if shape not in SHAPES:
        raise QeRLError(f"--shape is {shape}; it must be one of {', '.join(SHAPES)}.")
    console.print(f"{torch.cuda.get_device_name()}, {total / 1e9:.1f} GB: {needs.card_sentence(card)}")
    found = parity(lambda model: PagedEngine(model, 0), "cuda")
    console.print(f"parity: {found}", highlight=False)
    if found["engine"] > PARITY * found["trainer"]:
        raise QeRLError(f"The engine's probabilities differ from the trainer's on this GPU: {found}.")
    if shape not in H200:
        console.print(f"An H200's speed is known for {' and '.join(H200)} only; rows of {shape} stand alone.")
    sizes = SIZES[shape]
    rows: list[dict[str, Any]] = []
    with gauge() as read:
        decoder = random_decoder(sizes, "nvfp4", RANK, PROMPT + DECODED + 64)
        for batch in ROWS:
            seen = decode_speed(decoder, batch, PROMPT, DECODED, GROUP)
            rows.append({"benchmark": "decode", "batch": batch, **seen, "clocks": read.take()})
            speed = f"{seen['decode_tok_s']:.0f} tokens/s{_beside(shape, batch, seen['decode_tok_s'])}"
            console.print(f"{shape}, {batch} sequences: {speed}", highlight=False)
        del decoder
        gc.collect()
        torch.cuda.empty_cache()
        policy = random_policy(sizes, "nvfp4", RANK, PROMPT + COMPLETION + 64)
        seen = whole_step(policy, PagedEngine(policy, 0, GROUP), sizes, _update(sizes, total))
        rows.append({"benchmark": "step", **seen, "clocks": read.take()})
    console.print(
        f"{shape}, step of {GROUP} x {COMPLETION} tokens: {seen['step_s']:.2f} s, {seen['peak_gb']:.1f} GB",
        highlight=False,
    )
    result = {
        **provenance(f"qerl bench card --shape {shape}"), "version": __version__,
        "capability": words(torch.cuda.get_device_capability()), "kernels": words(card.capability),
        "total_gb": total / 1e9, "shape": shape, "weights": "nvfp4", "lora_rank": RANK,
        "prompt_tokens": PROMPT, "group": GROUP, "parity": found, "rows": rows,
    }  # fmt: skip
    check(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {out}; docs/performance.md says how to send it.", highlight=False)


def _beside(shape: str, batch: int, speed: float) -> str:
    """Return the words behind a row's tokens/s: their ratio to an H200's; empty if it was not measured."""
    if shape not in H200:
        return ""
    theirs = H200[shape][1][batch]
    return f", {speed / theirs:.2f} of an H200 ({theirs})"


def largest_shape(total: int) -> str:
    """Return the largest standard shape whose decoding and step both fit in ``total`` bytes.

    Raises:
        QeRLError: No shape fits.
    """
    for shape in reversed(SHAPES):
        sizes = replace(SIZES[shape], tied=False)
        work = _work(sizes, ROWS[-1], DECODED)
        held = Weights(sizes, work.format).bytes + Adapter(sizes, RANK, sizes.targets).copies + CONTEXT_BYTES
        cache = Cache(sizes, work).bytes(total)
        if MARGIN * (held + cache) <= total and fastest(sizes, _work(sizes, GROUP, COMPLETION), total):
            return shape
    raise QeRLError(f"The smallest shape, {SHAPES[0]}, does not fit in {total / 1e9:.1f} GB.")


@torch.no_grad()
def parity(engine_of: Callable[[nn.Module], RolloutEngine], device: str) -> dict[str, float]:
    """Return the mean absolute differences of ``engine`` and ``trainer`` from FP32 on the same weights, in
    log-probabilities of the tokens that the engine sampled."""
    torch.manual_seed(0)
    model = as_if_trained(random_policy(SMALL, "nvfp4", 16, 256, device=device)).eval()
    engine = engine_of(model)
    prompts = [torch.randint(0, SMALL.vocabulary, (n,)).tolist() for n in (70, 1, 129)]
    sampled = engine.generate(prompts, GROUP, SamplingParams(max_tokens=64, seed=1)).completions
    engine.release()
    exact = copy.deepcopy(model).float()
    far: dict[str, list[torch.Tensor]] = {"engine": [], "trainer": []}
    for i, completion in enumerate(sampled):
        prompt = prompts[i // GROUP]
        truth = _logprobs(exact, prompt, completion.token_ids)
        far["engine"].append(torch.tensor(completion.logprobs) - truth)
        far["trainer"].append(_logprobs(model, prompt, completion.token_ids) - truth)
    return {name: float(torch.cat(parts).abs().mean()) for name, parts in far.items()}


def _logprobs(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion]], device=next(model.parameters()).device)
    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def whole_step(
    policy: PeftModel,
    engine: RolloutEngine,
    sizes: Sizes,
    update: dict[str, Any],
    completion: int = COMPLETION,
    **fields: Any,
) -> dict[str, Any]:
    """Measure GRPO steps of one group, after a first one that captures graphs and compiles kernels.

    Args:
        policy: Trained in place.
        engine: Samples from the policy.
        sizes: Sizes of the policy.
        update: Settings of the update, chosen by the memory plan.
        completion: Tokens of every sample.
        fields: More settings.

    Returns:
        Sizes and settings of the step, median seconds over the steps after the first, and peak memory over
        all steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = QeRLConfig(
            output_dir=folder, num_generations=GROUP, per_device_train_batch_size=GROUP,
            max_completion_length=completion, max_steps=STEPS + 1, learning_rate=1e-5, noise=False,
            report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, **update, **fields,
        )  # fmt: skip
        trainer = QeRLTrainer(
            policy, [random_rewards()], args,
            Dataset.from_dict({"prompt": random_prompts(STEPS + 1, PROMPT)}), engine=engine,
            processing_class=word_tokenizer(sizes.vocabulary),
        )  # fmt: skip
        trainer.train()
    logs = [log for log in trainer.state.log_history if "step_time" in log]
    names = {"step_s": "step_time", "rollout_s": "time/rollout", "update_s": "time/update"}
    seen = {name: statistics.median(log[key] for log in logs[1:]) for name, key in names.items()}
    peak = max(log["memory/peak_gb"] for log in logs)
    return {"samples": GROUP, "completion_tokens": completion, **update, **seen, "peak_gb": peak}


def _work(sizes: Sizes, sequences: int, completion: int) -> Work:
    """A step without offloading, so that the speed of a card does not depend on its machine."""
    return Work(
        weights="nvfp4", rank=RANK, targets=sizes.targets, prompt_tokens=PROMPT, completion_tokens=completion,
        group=GROUP, sequences=sequences, microbatch=GROUP, may_offload=False,
    )  # fmt: skip


def _update(sizes: Sizes, total: int) -> dict[str, Any]:
    """Return the settings of the update that a run on this GPU would choose without offloading."""
    found = fastest(replace(sizes, tied=False), _work(sizes, GROUP, COMPLETION), total)
    if found is None:
        raise QeRLError("The step does not fit this GPU; take a smaller --shape.")
    return {
        "tokens_per_forward": found.tokens_per_forward, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": found.checkpointing,
    }  # fmt: skip


def check(result: Any) -> None:
    """Raise unless a file's content is that of `measure_card`.

    Raises:
        QeRLError: A field is missing or wrong; the message names it.
    """
    if not isinstance(result, dict):
        raise QeRLError("A card's file must be a JSON object.")
    for name, kind in REQUIRED.items():
        if name not in result or not isinstance(result[name], kind):
            raise QeRLError(f"{name!r} of a card's file is missing or of a wrong type: {result.get(name)!r}.")
    rows = [(row.get("benchmark"), row.get("batch")) for row in result["rows"] if isinstance(row, dict)]
    wanted = [*(("decode", batch) for batch in ROWS), ("step", None)]
    if rows != wanted or result["shape"] not in SHAPES:
        raise QeRLError(f"A card's file must have the rows {wanted} of one of {', '.join(SHAPES)}.")
    numbers = [row["decode_tok_s"] for row in result["rows"][:-1]]
    numbers += [result["rows"][-1][name] for name in ("step_s", "rollout_s", "update_s", "peak_gb")]
    if not all(isinstance(number, float) and number > 0 for number in numbers):
        raise QeRLError("Speeds, seconds and memory of a card's file must be above 0.")
    if not result["parity"].get("engine", 1.0) <= PARITY * result["parity"].get("trainer", 0.0):
        raise QeRLError(f"The parity check of a card's file has failed: {result['parity']}.")
