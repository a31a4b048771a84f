"""GRPO and DAPO on TRL's `GRPOTrainer`, with this project's engine, noise and update. Tied to trl 1.16.

With `rollouts`, `resumable`, `stand_ins` and `recompute` this is all that touches TRL's internals. What it
replaces, and why:

- **Rollout.** The engine takes the place of TRL's vLLM client: TRL then keeps the log-probabilities of the
  sampler and multiplies each token's loss by pi_trainer / pi_sampler. Samples come from the noisy policy, and
  the ratio makes each choice of a token count as often as the clean policy makes it; in which contexts it
  stood, and how the answer went on, stays the noisy policy's (docs/numerics.md says what follows). Nothing is
  synced, since engine and trainer run the same modules.
- **Advantages** are computed here (`advantages`): those of groups that teach nothing are exactly zero.
- **Old log-probabilities.** When every rollout is used for one optimizer step, the policy has not moved since
  it sampled, and the loss forward's own detached values are the old ones: TRL's second forward is left out.
  The importance ratio is computed inside the loss in either case, and measured there (`correction`).
- **The loss forward** runs the prompt of a group once (`packing`), and leaves out samples without advantage:
  their gradient is zero. A microbatch of more than `tokens_per_forward` tokens is computed in pieces
  (`pieces`), and in smaller ones where memory runs out (`oom`). Loss formulas, normalisers and options stay
  TRL's.
- **Dynamic sampling** is added. Sampling seeds are keyed by step, so a resume draws what the run would have
  (`resumable`).
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.utils import split_tensor_dict

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import unpacked
from qerl.rollout.engine import RolloutEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.by_hand import check_by_hand, short_prompts, with_length_penalty
from qerl.trainer.processes import rebuild_buckets
from qerl.trainer.resume.rollout_file import Batch
from qerl.trainer.rewards import guard_rewards
from qerl.trainer.rollouts import RolloutTrainer, check_data
from qerl.trainer.trl.evaluation import check_metric, name_metrics
from qerl.trainer.trl.recompute import recompute_every_layer, understand_every_n_layers
from qerl.trainer.trl.reference import add_reference, none_by_trl
from qerl.trainer.update.chunks import Outputs, loss_in_pieces, without_graph
from qerl.trainer.update.correction import Mismatch, importance_ratio, loss_mask, rows_with_gradient, weights
from qerl.trainer.update.forward import Padded, score_rows
from qerl.trainer.update.memory_retry import StepRedo
from qerl.trainer.update.policy import check_policy, ready_for_rows

# What is counted and controlled over the microbatches of an optimizer step.
_STEP_STATE = ("_step", "entropy_coef", "_entropy_window_stats", "_last_world_entropy", "_mismatch")


class QeRLTrainer(RolloutTrainer):
    """`GRPOTrainer` whose rollouts run on the training modules and may be noisy.

    Args:
        model: Policy; a `PeftModel` for LoRA, a plain model for full tuning.
        reward_funcs: Functions with TRL's signature, `f(prompts, completions, **columns) -> list[float]`.
        args: Settings.
        train_dataset: Column `prompt` and what the rewards need.
        engine: Samples completions from `model`.
        eval_dataset, processing_class, callbacks: As in TRL.
        acted_on: Fields of the settings that the caller has acted on; see `by_hand`.
    """

    _tag_names = ["qerl", "trl", "grpo"]  # noqa: RUF012 - TRL reads it from the class

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        reward_funcs: list[Callable[..., list[float | None]]],
        args: QeRLConfig,
        train_dataset: Dataset,
        engine: RolloutEngine,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        acted_on: Collection[str] = (),
    ) -> None:
        check_by_hand(args, acted_on, model)
        check_policy(model, engine)
        check_data(args, train_dataset)
        dtypes = {parameter: parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        check_metric(args.metric_for_best_model, eval_dataset)
        with none_by_trl(args):
            super().__init__(
                model=model,
                reward_funcs=guard_rewards(with_length_penalty(reward_funcs, args), args.reward_timeout),
                args=args,
                train_dataset=short_prompts(train_dataset, args, acted_on, processing_class),
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
            )
        if self.aux_loss_enabled:
            raise QeRLError(
                "A mixture of experts trains without its router loss: pass router_aux_loss_coef=0."
            )
        for parameter, dtype in dtypes.items():
            # TRL rounds adapters of four-bit models to bf16, in which an update of 5e-6 is mostly lost.
            parameter.data = parameter.data.to(dtype)
        self._start_rollouts(engine)
        understand_every_n_layers(self.model)
        policy = self.accelerator.unwrap_model(self.model)
        self._decoder = base_model(policy).base_model  # to unwrap is a walk over all modules
        self._branch_attention = ready_for_rows(policy, args)
        add_reference(self)
        self._mismatch = Mismatch.none(self.accelerator.device)
        self._policy_forward: tuple[torch.Tensor, torch.Tensor] | None = None
        self._redo = StepRedo(
            args.tokens_per_forward,
            self.accelerator.num_processes,
            partial(recompute_every_layer, self.model, args),
        )
        self._at_step_start: dict[str, Any] = {}

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    # Update

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """TRL's buffering of a rollout, with groups kept together instead of shuffled over microbatches."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        if isinstance(generation_batch, dict):  # `training_step` has prepared it
            return generation_batch
        slices = self.args.steps_per_generation
        if self._step % (slices * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, slices)
        return self._buffered_inputs[self._step % slices]

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        padded = Padded(input_ids, attention_mask, inputs["completion_ids"].size(1))
        pieces = self._redo.cut(self._rows_to_compute(inputs), padded.lengths)
        if self.accelerator.num_processes > 1:  # the loss gathers: every rank computes it as many times
            rebuild_buckets(model)
            pieces = [[] for _ in range(max(self._of_ranks(len(pieces))) - len(pieces))] + pieces
        return loss_in_pieces(
            partial(self._forward, model, padded),
            pieces,
            partial(self._whole_loss, model, inputs),
            self.accelerator.backward,
            partial(self._apart, model),
            look_ahead=self.top_entropy_quantile < 1.0,
        )

    def _whole_loss(
        self, model: torch.nn.Module, inputs: Batch, outputs: Outputs, rows: list[int]
    ) -> torch.Tensor:
        """TRL's loss of a microbatch, given the forward pass's outputs for these rows."""
        logps_BC, entropy_BC = outputs
        mask_BC = loss_mask(inputs)
        computed_BC = torch.zeros_like(mask_BC)
        computed_BC[rows] = mask_BC[rows]
        inputs = self._corrected(inputs, logps_BC.detach(), entropy_BC, computed_BC)
        self._policy_forward = (logps_BC, entropy_BC)
        loss = super()._compute_loss(model, inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["entropy"].pop()  # of all rows, though only these were computed; `Mismatch` has it
        if self.loss_type == "vespo":
            computed_B1 = computed_BC.any(dim=1, keepdim=True)
            metrics["vespo/phi_seq_mean"][-1] = self._mean_over_ranks(self._phi_B1, computed_B1)
        return loss

    def get_gamma_weights(self, **kwargs: Any) -> torch.Tensor:
        """TRL's weights of the VESPO loss, [B, 1]; kept, because their mean is of the computed rows alone."""
        self._phi_B1 = super().get_gamma_weights(**kwargs)
        return self._phi_B1

    @contextlib.contextmanager
    def _apart(self, model: torch.nn.Module) -> Iterator[None]:
        """A loss in this block adds to this rank's gradients; nothing is logged and no state of TRL moves."""
        state = {name: getattr(self, name) for name in _STEP_STATE}
        with self.accelerator.no_sync(model), self._step_ends(False), self._metrics_apart():
            yield
        for name, value in state.items():
            setattr(self, name, value)

    @contextlib.contextmanager
    def _step_ends(self, whether: bool) -> Iterator[None]:
        """What TRL reads of accelerate to know that a microbatch is the last of its optimizer step."""
        state, before = self.accelerator.gradient_state, self.accelerator.sync_gradients
        state._set_sync_gradients(whether)
        try:
            yield
        finally:
            state._set_sync_gradients(before)

    def _rows_to_compute(self, inputs: Batch) -> list[int]:
        """Rows of the microbatch that the loss forward must run."""
        advantages, mask_BC = inputs["advantages"], loss_mask(inputs)
        if self.beta != 0.0 or self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0:
            advantages = torch.ones_like(advantages)  # these terms have a gradient without an advantage
        rows = rows_with_gradient(advantages, mask_BC)
        if not rows and self.accelerator.num_processes > 1:
            # Every rank must run a backward pass for gradients to be averaged; this row's own is zero.
            rows = [int(mask_BC.sum(dim=1).argmax())]
        return rows

    def _corrected(
        self, inputs: Batch, logps_BC: torch.Tensor, entropy_BC: torch.Tensor, computed_BC: torch.Tensor
    ) -> Batch:
        """The batch with the importance weights of its loss; the mismatch is measured, corrected or not."""
        mode = self.vllm_importance_sampling_mode
        bounds = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        trainer_BC = inputs.get("old_per_token_logps", logps_BC)
        sampler_BC = inputs["sampling_per_token_logps"]
        ratio = importance_ratio(trainer_BC, sampler_BC, computed_BC, mode)
        corrects = self.vllm_importance_sampling_correction
        weight = weights(ratio, mode, *bounds) if corrects else torch.ones_like(ratio)
        self._mismatch += Mismatch.of(
            *(trainer_BC, sampler_BC, entropy_BC, inputs["sampling_entropies"], inputs["rollout_entropy"]),
            *(computed_BC, ratio, weight, bounds),
        )
        return inputs | {"importance_sampling_ratio": weight}

    def _mean_over_ranks(self, values_BC: torch.Tensor, mask_BC: torch.Tensor) -> float:
        """Mean over what the mask holds on all ranks; NaN, which no log has, where that is nothing."""
        totals = torch.stack([(values_BC * mask_BC).sum().float(), mask_BC.sum().float()]).detach()
        total, count = self.accelerator.reduce(totals, "sum").tolist()
        return total / count if count else float("nan")

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **unsupported: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """TRL's forward for log-probabilities, with shared prompts. Shapes [B, C]."""
        if any(value is not None and value is not False for value in unsupported.values()):
            names = ", ".join(name for name, value in unsupported.items() if value)
            raise QeRLError(f"Only text models are supported; the batch carries {names}.")
        if not self._reads_logps:
            return None, None, None
        if self._policy_forward is not None:
            (logps, entropy), self._policy_forward = self._policy_forward, None
            return logps, entropy, None
        with self._timed("logprob"):
            padded = Padded(input_ids, attention_mask, logits_to_keep)
            has_tokens = attention_mask[:, -logits_to_keep:].sum(dim=1) > 0
            rows, lengths = has_tokens.nonzero().flatten().tolist(), padded.lengths
            size = batch_size or len(input_ids)
            microbatches = [rows[start : start + size] for start in range(0, max(len(rows), 1), size)]
            pieces = [piece for microbatch in microbatches for piece in self._redo.cut(microbatch, lengths)]
            logps, entropy = without_graph(partial(self._forward, model, padded), pieces)
        return logps, entropy if compute_entropy else None, None

    def _forward(self, model: torch.nn.Module, padded: Padded, rows: list[int]) -> Outputs:
        self._redo.forward_of(rows, padded.lengths)
        decoder = base_model(model).base_model if model is self.ref_model else self._decoder
        return score_rows(model, decoder, padded, rows, self._branch_attention)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple:
        """Evaluation samples and scores; there is no loss to report."""
        self._prepare_inputs(inputs)
        return None, None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._seconds.clear()  # no step's; it stands between two of them
        name_metrics(self._metrics["eval"], metric_key_prefix)
        return output

    # Time

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        # To ask is cheaper than to tell every module again; evaluation turns off what DDP has wrapped.
        if not self.model.training:
            model.train()
        with self._timed("total"), self._weights_at_hand():
            batch = self._prepare_inputs(inputs)
            if self._redo.begins(self.state.global_step):
                self._at_step_start = {name: getattr(self, name) for name in _STEP_STATE}
            microbatch = partial(self._microbatch, model, num_items_in_batch)
            loss = self._redo.run(batch, microbatch, self._forget_step)
        self._step_ended = time.perf_counter()
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Transformers' hook behind the optimizer's step, and behind an epoch."""
        if "total" in self._seconds:
            self._log_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _microbatch(self, model: Any, num_items_in_batch: Any, batch: Batch, newest: bool) -> torch.Tensor:
        """TRL's forward and backward; one that is done again is neither logged again nor ends the step."""
        with self._step_ends(newest and self.accelerator.sync_gradients), self._metrics_apart() as metrics:
            loss = super().training_step(model, batch, num_items_in_batch)
        metrics.pop("step_time", None)  # of forward and backward alone; `_log_step` has the whole
        if newest:
            for name, values in metrics.items():
                self._metrics["train"][name] += values
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """transformers' norm, asked for in front of the optimizer's step.

        Raises:
            QeRLError: It is not finite; the step would turn weights and the optimizer's state into NaN.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not torch.as_tensor(norm).isfinite():
            raise QeRLError(
                f"The gradient of step {self.state.global_step + 1} is not finite ({float(norm)}); no weight "
                "was changed. Go on from the last checkpoint with a lower max_grad_norm, or start anew with "
                "a lower learning_rate."
            )
        return norm

    def _forget_step(self) -> None:
        """As if no microbatch of this optimizer step had run; rollouts stay."""
        self._policy_forward = None
        self.model.zero_grad()
        for name, value in self._at_step_start.items():
            setattr(self, name, value)

    def _weights_at_hand(self) -> contextlib.AbstractContextManager[None]:
        """Decoded weights on a CPU, which has no four-bit product: once a microbatch, not twice a layer."""
        on_cpu = self.accelerator.device.type == "cpu"
        return unpacked(self.model) if on_cpu else contextlib.nullcontext()

    def _log_step(self) -> None:
        """What is known of an optimizer step once it is done; reading the sums waits for the device."""
        metrics = self._mismatch.metrics(self.accelerator)
        self._mismatch = Mismatch.none(self.accelerator.device)
        self._seconds["total"] += time.perf_counter() - self._step_ended
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        parts = {name: self._seconds.pop(name, 0.0) for name in ("rollout", "reward", "logprob")}
        total = self._seconds.pop("total")
        parts["update"] = total - sum(parts.values())
        self._metrics["train"]["step_time"].append(total)
        for name, seconds in parts.items():
            self._metrics["train"][f"time/{name}"].append(seconds)
        self._metrics["train"]["memory/peak_gb"].append(max(self._of_ranks(self._memory.report_gb())))
