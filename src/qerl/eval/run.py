"""Evaluation and single answers, from names to numbers: what `qerl eval` and `qerl generate` do.

An adapter in a run folder is scored on the weights it was trained on: where a setting is not given,
config.yaml of the run says which format and rounding those were.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.eval.adapter_check import prove_adapter
from qerl.eval.evaluate import EvalResult, evaluate
from qerl.lora import load_adapter
from qerl.model import Weights, load_model, load_tokenizer
from qerl.nvfp4.format import Method
from qerl.report.runs import CONFIG_FILE
from qerl.rollout.engine import RolloutEngine, SamplingParams
from qerl.rollout.select import make_engine
from qerl.tasks import get_task


@dataclass(frozen=True)
class Source:
    """Where a policy comes from.

    Attributes:
        model: Hub id, local folder or .gguf file.
        adapter: Folder of a PEFT adapter, or None.
        weights: Format of the linears; None takes the run's, else nvfp4.
        rounding: For checkpoints that are not packed yet; None takes the run's, else mse.
    """

    model: str
    adapter: Path | None = None
    weights: Weights | None = None
    rounding: Method | None = None

    def settings(self) -> tuple[Weights, Method]:
        """Format and rounding, with what is not given filled in."""
        trained: dict[str, Any] = {}
        if self.adapter is not None and (self.adapter / CONFIG_FILE).is_file():
            trained = yaml.safe_load((self.adapter / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = self.weights or trained.get("weights", "nvfp4")
        return weights, self.rounding or trained.get("rounding", "mse")


@dataclass(frozen=True)
class Policy:
    """A model that is ready to answer."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine
    stop_token_ids: tuple[int, ...]


def load(source: Source, console: Console) -> Policy:
    """Model, adapter, tokenizer and engine.

    Raises:
        QeRLError: Something cannot be loaded, or the adapter changes nothing.
    """
    weights, rounding = source.settings()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(source.model)
    model = load_model(source.model, weights=weights, dtype=dtype, device=device, method=rounding)
    if source.adapter is not None:
        model = load_adapter(model, source.adapter)
        prompt = tokenizer("The adapter must change what follows this.")["input_ids"]
        difference = prove_adapter(model, prompt)
        console.print(f"The adapter is in use: it moves logits by up to {difference:.3g}.")
    stops = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or [])}
    engine = make_engine(model, tokenizer.pad_token_id)
    return Policy(model, tokenizer, engine, tuple(sorted(stop_ids)))


def evaluate_model(
    source: Source,
    task: str,
    task_options: dict[str, Any],
    params: SamplingParams,
    samples: int,
    limit: int | None,
    out: Path | None,
    console: Console,
) -> EvalResult:
    """Score a policy on the held-out problems of a task and print the result.

    Args:
        source: The policy.
        task, task_options: As in a recipe.
        params: How completions are sampled; the model's stop tokens are added.
        samples: Completions for each problem.
        limit: Problems to score, None for all.
        out: Folder for result and completions, None for none.
        console: Where progress and result go.
    """
    policy = load(source, console)
    weights, rounding = source.settings()
    result = evaluate(
        policy.engine,
        policy.tokenizer,
        get_task(task, **task_options),
        samples=samples,
        params=replace(params, stop_token_ids=policy.stop_token_ids),
        console=console,
        limit=limit,
        out=out,
        source={
            "model": source.model,
            "adapter": str(source.adapter) if source.adapter else None,
            "weights": weights,
            "rounding": rounding,
            "task_options": task_options,
        },
    )
    console.print(result.summary())
    return result


def answer(source: Source, prompt: str, params: SamplingParams, console: Console) -> str:
    """The policy's reply to one user message."""
    policy = load(source, console)
    chat = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )
    seeded = replace(params, stop_token_ids=policy.stop_token_ids)
    result = policy.engine.generate([chat["input_ids"]], 1, seeded)
    return policy.tokenizer.decode(result.completions[0].token_ids, skip_special_tokens=True)
