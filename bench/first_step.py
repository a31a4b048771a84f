"""The first GRPO step of a real model on the GPU path against the portable path: loss and gradients.

    python -m bench parity --model HuggingFaceTB/SmolLM2-135M-Instruct

The GPU path samples and trains as a run does: paged engine, 16-bit activations, attention along branches,
fused kernels. The portable path gets the same completions and computes the same step on the CPU in FP32,
with a dense mask and transformers' own layers. A GPU with FP8 computes the step once more with
`backward_dtype: fp8`. LoRA's B is random instead of zero; with B zero, every gradient of A would be zero.

With `--steps`, the divergence of sampler and trainer over some steps on the GPU is measured instead.
"""

import logging
import tempfile
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from qerl.kernels.cards import card_of
from qerl.models.chat import Chat
from qerl.models.hub import find_model
from qerl.models.load import load_tokenizer
from qerl.rollout.engine import KvCacheDtype, RolloutEngine, RolloutResult
from qerl.rollout.select import make_engine
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.trainer.arguments import RUN_FIELDS
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.policy import load_policy


class ReplayEngine(RolloutEngine):
    """An engine that records the results of another engine, or replays recorded results call by call.

    Args:
        engine: The engine to sample with and record; None to replay.
        results: Recorded results; appended to while recording, consumed while replaying.
    """

    def __init__(self, engine: RolloutEngine | None, results: list[RolloutResult]) -> None:
        self._engine, self.results = engine, results
        self.model = engine.model if engine is not None else None

    def generate(self, *asked: Any, **settings: Any) -> RolloutResult:
        if self._engine is None:
            return self.results.pop(0)
        self.results.append(self._engine.generate(*asked, **settings))
        return self.results[-1]

    def release(self) -> None:
        if self._engine is not None:
            self._engine.release()


class GradientRecorder(TrainerCallback):
    """Callback that records the loss and, by parameter name, the gradients of a step, fp64 on the CPU."""

    def __init__(self) -> None:
        self.loss = float("nan")
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = parameter.grad.double().cpu()

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.loss = float(logs["loss"])


def settings(model: str, on_cpu: bool, folder: str, **changes: Any) -> QeRLConfig:
    """Return the settings of one step of the arithmetic task, 4 prompts x 8 samples."""
    fields: dict[str, Any] = {
        "model": model, "task": "arithmetic", "output_dir": folder, "num_generations": 8,
        "task_options": {"level": "wp1", "examples": 1, "train_size": 64}, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4, "max_completion_length": 24, "max_steps": 1, "max_grad_norm": 0.0,
        "loss_type": "dapo", "noise": False, "gradient_checkpointing": False, "report_to": "none",
        "save_strategy": "no", "use_cpu": on_cpu,
    }  # fmt: skip
    return QeRLConfig(**fields | changes)


def adapted_policy(args: QeRLConfig) -> PreTrainedModel:
    """Load the policy, with LoRA's B random and the same on every device."""
    policy = load_policy(args, find_model(str(args.model)))
    draw = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    return policy


def sampler(
    model: str, kv_cache_dtype: KvCacheDtype = "auto"
) -> tuple[PreTrainedModel, RolloutEngine, list[list[int]]]:
    """Return the policy on the GPU, its engine, and four prompts of the task."""
    with tempfile.TemporaryDirectory() as folder:
        args = settings(model, False, folder)
    policy, tokenizer = adapted_policy(args), load_tokenizer(model)
    rows = get_task(args.task or "", **args.task_options).train()["prompt"][:4]
    chat = Chat(tokenizer, args.chat_template_kwargs)
    prompts = [chat.ids(row) for row in rows]
    return policy, make_engine(policy, tokenizer.pad_token_id, None, kv_cache_dtype), prompts


def sampling_gap(model: str, steps: int) -> dict[str, Any]:
    """Measure the divergence of a real model's sampler and trainer, 128 samples of up to 256 tokens per step.

    No step changes a weight, and samples have seeds, so two source trees with the same sampler score the same
    tokens.

    Returns:
        tokens, kl (mean over all tokens, nats per token) and kl_of_steps.
    """
    logging.getLogger("qerl").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        args = settings(
            model, False, folder, gradient_accumulation_steps=16, max_completion_length=256, logging_steps=1,
            learning_rate=0.0, temperature=1.0, max_steps=steps,
        )  # fmt: skip
        policy, tokenizer = adapted_policy(args), load_tokenizer(model)
        task = get_task(args.task or "", **args.task_options)
        trainer = QeRLTrainer(
            policy, list(task.rewards), args, task.train(), acted_on=RUN_FIELDS, processing_class=tokenizer,
            engine=make_engine(policy, tokenizer.pad_token_id),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "sampling/kl" in row]
    tokens = [128 * row["completions/mean_length"] for row in logs]
    kl = [row["sampling/kl"] for row in logs]
    mean = sum(one * count for one, count in zip(kl, tokens, strict=True)) / sum(tokens)
    return {"model": model, "tokens": round(sum(tokens)), "kl": mean, "kl_of_steps": kl}


def step(model: str, on_cpu: bool, results: list[RolloutResult], **changes: Any) -> GradientRecorder:
    """Run the step; it samples into ``results`` if they are empty, else it replays them."""
    with tempfile.TemporaryDirectory() as folder:
        args = settings(model, on_cpu, folder, **changes)
        policy, tokenizer = adapted_policy(args), load_tokenizer(model)
        made = None if on_cpu else make_engine(policy, tokenizer.pad_token_id)  # also lays out the weights
        engine = ReplayEngine(None if results else made, results)
        task = get_task(args.task or "", **args.task_options)
        seen = GradientRecorder()
        trainer = QeRLTrainer(
            policy, list(task.rewards), args, task.train(), engine=engine, processing_class=tokenizer,
            callbacks=[seen], acted_on=RUN_FIELDS,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return seen


def compare(model: str) -> list[dict[str, Any]]:
    """Compare the step on the GPU, per `backward_dtype`, with the portable path.

    Returns:
        A dictionary per backward_dtype with backward_dtype, loss, loss_portable, gradients (their number),
        gradient_error (norm of the difference of all gradients over the norm of the portable path's),
        gradient_cosine, worst_error and worst (the parameter's name).
    """
    logging.getLogger("qerl").setLevel(logging.ERROR)
    results: list[RolloutResult] = []
    found = {"auto": step(model, False, results)}
    if card_of(torch.device("cuda", 0)).fp8:
        found["fp8"] = step(model, False, list(results), backward_dtype="fp8")
    truth = step(model, True, list(results))
    return [{"backward_dtype": name, **_against(seen, truth)} for name, seen in found.items()]


def _against(found: GradientRecorder, truth: GradientRecorder) -> dict[str, Any]:
    gaps = {
        name: float((found.gradients[name] - exact).norm() / exact.norm())
        for name, exact in truth.gradients.items()
        if exact.norm() > 0
    }
    worst = max(gaps, key=lambda name: gaps[name])
    joined, exact = (torch.cat([side.gradients[name].flatten() for name in gaps]) for side in (found, truth))
    return {
        "loss": found.loss, "loss_portable": truth.loss, "gradients": len(gaps),
        "gradient_error": float((joined - exact).norm() / exact.norm()),
        "gradient_cosine": float(torch.nn.functional.cosine_similarity(joined, exact, dim=0)),
        "worst_error": gaps[worst], "worst": worst,
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """Format one result of :func:`compare` as a sentence."""
    return (
        f"backward {found['backward_dtype']}: loss {found['loss']:.6f} on the GPU, "
        f"{found['loss_portable']:.6f} on the portable path; {found['gradients']} gradients, together off by "
        f"{found['gradient_error']:.1e} (cosine {found['gradient_cosine']:.4f}), at most "
        f"{found['worst_error']:.1e} ({found['worst']})"
    )
