"""GRPO and DAPO on TRL's `GRPOTrainer`, with this project's engine, noise and update. Tied to trl 1.16.

This class holds overrides of TRL's methods, each of which says what it replaces; `rollouts` and
`resume.trainer` hold those of sampling and of resuming, `trl` what stands in the place of TRL's parts, and
`update.forward` calls the policy through TRL's output head. Nothing else touches TRL's internals. What is
replaced, and why:

- **Rollout.** The engine takes the place of TRL's vLLM client: TRL then keeps the log-probabilities of the
  sampler and multiplies each token's loss by pi_trainer / pi_sampler. Samples come from the noisy policy, and
  the ratio makes each choice of a token count as often as the clean policy makes it; in which contexts it
  stood, and how the answer went on, stays the noisy policy's (docs/numerics.md says what follows). Nothing is
  synced, since engine and trainer run the same modules.
- **Advantages** are computed here (`advantages`): those of groups that teach nothing are exactly zero.
- **Old log-probabilities.** When every rollout is used for one optimizer step, the policy has not moved since
  it sampled, and the loss forward's own detached values are the old ones: TRL's second forward is left out.
  The importance ratio is computed inside the loss in either case, and measured there (`update.correction`).
- **The loss forward** runs the prompt of a group once (`update.joined_row`), and leaves out samples without
  advantage: their gradient is zero. A microbatch of more than `tokens_per_forward` tokens is computed in
  chunks (`update.chunks`), and in smaller ones where memory runs out (`update.memory_retry`). Loss formulas,
  normalisers and options stay TRL's (`trl.known_outputs`).
- **Groups** are an index that travels with the samples (`batch`), so that nobody has to guess from tokens
  which samples share a prompt.
- **Dynamic sampling** is added. Sampling seeds are keyed by step, so a resume draws what the run would have
  (`resume.trainer`).
"""

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOConfig
from trl.trainer.utils import split_tensor_dict

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import unpacked
from qerl.rollout.engine import RolloutEngine
from qerl.trainer.arguments import complete
from qerl.trainer.batch import Batch
from qerl.trainer.processes import rebuild_buckets
from qerl.trainer.rewards import guard_rewards
from qerl.trainer.rollouts import RolloutTrainer, check_data
from qerl.trainer.trl.evaluation import check_metric, name_metrics
from qerl.trainer.trl.known_outputs import KnownOutputs
from qerl.trainer.trl.recompute import accept_every_n_layers, recompute_every_layer
from qerl.trainer.trl.reference import add_reference, none_by_trl
from qerl.trainer.trl.trials import Trials
from qerl.trainer.update.chunks import Outputs, loss_in_chunks, without_graph
from qerl.trainer.update.correction import Correction, Mismatch, loss_mask, rows_with_gradient
from qerl.trainer.update.forward import score_rows
from qerl.trainer.update.memory_retry import MemoryRetry
from qerl.trainer.update.padded import PaddedBatch
from qerl.trainer.update.policy import ready_for_rows


class QeRLTrainer(RolloutTrainer):
    """`GRPOTrainer` whose rollouts run on the training modules and may be noisy.

    The parameters before ``engine`` are TRL's, in TRL's order, and act as TRL documents except where it is
    said here.

    Args:
        model: Policy: a Hub id, folder or .gguf file, which is loaded as the settings say (`weights`,
            `tuning`, `lora_r`, ...); or a causal LM, whose weights are tuned, or a `PeftModel`, whose adapter
            is.
        reward_funcs: One or several: functions `f(prompts, completions, **columns) -> list[float | None]`,
            and reward models or their names.
        args: Settings; a `GRPOConfig` of TRL keeps TRL's defaults and has no noise. None is a `QeRLConfig`
            with its defaults, which writes to `NAME-GRPO`.
        train_dataset: Column `prompt` and what the rewards need.
        eval_dataset: The same, for evaluation; several by name in a dictionary.
        processing_class: Tokenizer; None loads the model's.
        reward_processing_classes, callbacks: As in TRL.
        optimizers: As in TRL; an optimizer needs a model in hand, whose parameters it has.
        peft_config: A fresh LoRA adapter for the model, instead of the one that the settings describe.
        quantization_config, tools, rollout_func, environment_factory: Refused; see `arguments.REFUSED`.
        engine: Samples completions from `model`; None makes the fastest one that can.
        acted_on: Fields of the settings that the caller has acted on; see `arguments`.

    Attributes:
        update_path: Which parts of the update run on this project's kernels, and why others do not.

    Raises:
        QeRLError: An argument is missing, is refused or contradicts another one, or the model cannot be
            loaded or trained.
    """

    _tag_names = ["qerl", "trl", "grpo"]  # noqa: RUF012 - TRL reads it from the class

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: None = None,
        peft_config: LoraConfig | None = None,
        tools: None = None,
        rollout_func: None = None,
        environment_factory: None = None,
        *,
        engine: RolloutEngine | None = None,
        acted_on: Collection[str] = (),
    ) -> None:
        given = complete(
            *(model, reward_funcs, args, train_dataset),
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            peft_config=peft_config,
            engine=engine,
            acted_on=acted_on,
            refused={
                "quantization_config": quantization_config,
                "tools": tools,
                "rollout_func": rollout_func,
                "environment_factory": environment_factory,
            },
        )
        settings, policy = given.args, given.model
        check_data(settings, given.for_trl["train_dataset"])
        check_metric(settings.metric_for_best_model, eval_dataset)
        dtypes = {parameter: parameter.dtype for parameter in policy.parameters() if parameter.requires_grad}
        rewards = guard_rewards(given.for_trl["reward_funcs"], settings.reward_timeout)
        with none_by_trl(settings):
            super().__init__(
                model=policy,
                args=settings,
                eval_dataset=eval_dataset,
                callbacks=callbacks,
                **(given.for_trl | {"reward_funcs": rewards}),
            )
        if self.aux_loss_enabled:
            raise QeRLError(
                "A mixture of experts trains without its router loss: pass router_aux_loss_coef=0."
            )
        for parameter, dtype in dtypes.items():
            # TRL rounds adapters of four-bit models to bf16, in which an update of 5e-6 is mostly lost.
            parameter.data = parameter.data.to(dtype)
        self._start_rollouts(given.engine)
        self._start_update()

    def _start_update(self) -> None:
        """Make what the update needs, once TRL's constructor is through."""
        accept_every_n_layers(self.model)
        policy = self.accelerator.unwrap_model(self.model)
        self._decoder = base_model(policy).base_model  # to unwrap is a walk over all modules
        self.update_path = ready_for_rows(policy, self.args)
        add_reference(self)
        self._correction = Correction(
            self.vllm_importance_sampling_correction,
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        self._mismatch = Mismatch.none(self.accelerator.device)
        self._trials = Trials(self, "_mismatch")
        self._retry = MemoryRetry(
            self.args.tokens_per_forward,
            self.accelerator.num_processes,
            partial(recompute_every_layer, self.model, self.args),
        )

    def _send_telemetry(self) -> None:
        """Replaces TRL's report to its server: nothing is sent anywhere."""

    # A step

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """Replaces TRL's buffering of a rollout: groups stay together instead of being shuffled."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        if isinstance(generation_batch, dict):  # `training_step` has prepared it
            return generation_batch
        slices = self.args.steps_per_generation
        if self._step % self._generate_every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(batch, slices)
        return self._buffered_inputs[self._step % slices]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Wraps TRL's: times it with its rollout, and does the step again where memory runs out."""
        # To ask is cheaper than to tell every module again; evaluation turns off what DDP has wrapped.
        if not self.model.training:
            model.train()
        with self._clock.microbatch(), self._dense_weights_kept():
            batch = self._prepare_inputs(inputs)
            if self._retry.start_step(self.state.global_step):
                self._trials.start_step()
            microbatch = partial(self._microbatch, model, num_items_in_batch)
            return self._retry.run(batch, microbatch, self._undo_step)

    def _microbatch(self, model: Any, num_items_in_batch: Any, batch: Batch, newest: bool) -> torch.Tensor:
        """TRL's forward and backward; one that is done again is neither logged again nor ends the step."""
        ends_step = newest and self.accelerator.sync_gradients
        with self._trials.ends_step(ends_step), self._trials.metrics_apart() as metrics:
            loss = super().training_step(model, batch, num_items_in_batch)
        metrics.pop("step_time", None)  # of forward and backward alone; `_log_step` has the whole
        if newest:
            for name, values in metrics.items():
                self._metrics["train"][name] += values
        return loss

    def _undo_step(self) -> None:
        """Undo every microbatch of this optimizer step. Rollouts are kept."""
        self.model.zero_grad()
        self._trials.undo_step()

    def _dense_weights_kept(self) -> contextlib.AbstractContextManager[None]:
        """On a CPU, dequantize each weight once per microbatch instead of twice per layer."""
        on_cpu = self.accelerator.device.type == "cpu"
        return unpacked(self.model) if on_cpu else contextlib.nullcontext()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Wraps transformers', which runs ahead of the optimizer's step.

        Raises:
            QeRLError: The norm is not finite; the step would turn weights and the optimizer's state into NaN.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not torch.as_tensor(norm).isfinite():
            raise QeRLError(
                f"The gradient of step {self.state.global_step + 1} is not finite ({float(norm)}); no weight "
                "was changed. Go on from the last checkpoint with a lower max_grad_norm, or start anew with "
                "a lower learning_rate."
            )
        return norm

    # The loss

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> torch.Tensor:
        """Replaces TRL's loss of a microbatch: the same loss, in chunks, of samples that have a gradient."""
        batch = PaddedBatch.of(inputs)
        chunks = self._retry.split(self._rows_to_compute(inputs), batch.lengths)
        if self.accelerator.num_processes > 1:  # the loss gathers: every rank computes it as many times
            rebuild_buckets(model)
            chunks = [[] for _ in range(max(self._of_ranks(len(chunks))) - len(chunks))] + chunks
        return loss_in_chunks(
            partial(self._forward, model, batch),
            chunks,
            partial(self._loss_of, inputs),
            self.accelerator.backward,
            partial(self._trials.no_trace, model),
            look_ahead=self.top_entropy_quantile < 1.0,
        )

    def _loss_of(self, inputs: Batch, outputs: Outputs, rows: list[int]) -> torch.Tensor:
        """TRL's loss of a microbatch, given the policy's outputs for these rows."""
        known = KnownOutputs(*outputs)
        mask_BC = loss_mask(inputs)
        computed_BC = torch.zeros_like(mask_BC)
        computed_BC[rows] = mask_BC[rows]
        inputs, mismatch = self._correction.apply(
            inputs, known.logps_BC.detach(), known.entropy_BC, computed_BC
        )
        self._mismatch += mismatch
        loss = super()._compute_loss(known, inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["entropy"].pop()  # of all rows, though only these were computed; `Mismatch` has it
        if self.loss_type == "vespo":
            computed_B1 = computed_BC.any(dim=1, keepdim=True)
            metrics["vespo/phi_seq_mean"][-1] = self._mean_over_ranks(self._phi_B1, computed_B1)
        return loss

    def get_gamma_weights(self, **kwargs: Any) -> torch.Tensor:
        """Keeps TRL's weights of the VESPO loss, [B, 1], whose mean is logged of the computed rows alone."""
        self._phi_B1 = super().get_gamma_weights(**kwargs)
        return self._phi_B1

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

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module | KnownOutputs,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Replaces TRL's forward pass for log-probabilities and entropies, [B, C] each.

        TRL calls it inside the loss, where they are known, and for a whole rollout, whose prompts are shared.
        """
        if isinstance(model, KnownOutputs):
            return model.logps_BC, model.entropy_BC, None
        if names := [name for name, value in images.items() if value is not None and value is not False]:
            raise QeRLError(f"Only text models are supported; the batch carries {', '.join(names)}.")
        if not self._reads_logps:
            return None, None, None
        with self._clock.part("logprob"):
            batch = PaddedBatch.of_rollout(input_ids, attention_mask, logits_to_keep, self.num_generations)
            rows = (attention_mask[:, -logits_to_keep:].sum(dim=1) > 0).nonzero().flatten().tolist()
            size = batch_size or len(input_ids)
            microbatches = [rows[start : start + size] for start in range(0, max(len(rows), 1), size)]
            chunks = [chunk for rows in microbatches for chunk in self._retry.split(rows, batch.lengths)]
            logps, entropy = without_graph(partial(self._forward, model, batch), chunks)
        return logps, entropy if compute_entropy else None, None

    def _forward(self, model: torch.nn.Module, batch: PaddedBatch, rows: list[int]) -> Outputs:
        """Log-probabilities and entropies [B, C] of these rows under the policy or its reference."""
        self._retry.note_forward(rows, batch.lengths)
        decoder = base_model(model).base_model if model is self.ref_model else self._decoder
        return score_rows(model, decoder, batch, rows, self.update_path.by_stretch)

    # Evaluation and logs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple:
        """Replaces TRL's loss of an evaluation: it samples and scores, and there is no loss to report."""
        self._prepare_inputs(inputs)
        return None, None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Wraps transformers': each of several evaluation sets has metrics of its own."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._clock.clear()  # the time of an evaluation is no step's
        name_metrics(self._metrics["eval"], metric_key_prefix)
        return output

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Wraps transformers' hook behind the optimizer's step, and behind an epoch."""
        if self._clock.running:
            self._log_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _log_step(self) -> None:
        """Log what is known of an optimizer step once it is done; reading the sums waits for the device."""
        metrics = self._mismatch.metrics(self.accelerator)
        self._mismatch = Mismatch.none(self.accelerator.device)
        metrics |= self._clock.report()
        metrics["memory/peak_gb"] = max(self._of_ranks(self._memory.report_gb()))
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _mean_over_ranks(self, values_BC: torch.Tensor, mask_BC: torch.Tensor) -> float:
        """The mean over what the masks of all ranks hold; NaN, which no log has, where that is nothing."""
        totals = torch.stack([(values_BC * mask_BC).sum().float(), mask_BC.sum().float()]).detach()
        total, count = self.accelerator.reduce(totals, "sum").tolist()
        return total / count if count else float("nan")
