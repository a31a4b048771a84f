"""The half of the trainer that updates: a batch of scored completions in, gradients and a loss out.

The loss is one of `qerl.update.policy_loss`. Around it: a microbatch is computed in chunks, of the samples
that have a gradient, on rows in which a group shares its prompt; the importance ratio is applied and measured
where the loss is; and a step for which memory runs out is done again.

Legend: B samples of a microbatch, C completion columns.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import dense_weights_kept
from qerl.kernels.device import upload
from qerl.settings.config import QeRLConfig
from qerl.trainer.balance import dealt
from qerl.trainer.batch import Batch, on_host, padded
from qerl.trainer.correction import Correction, Mismatch, loss_mask
from qerl.trainer.microbatches import Microbatches
from qerl.trainer.processes import rebuild_buckets
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.scores import ScoringTrainer
from qerl.trainer.trl.recompute import no_offload_on_cpu, recompute_every_layer
from qerl.trainer.trl.reference import add_reference
from qerl.update.chunks import Outputs, loss_in_chunks
from qerl.update.memory_retry import MemoryRetry
from qerl.update.metrics import Metrics, gathered
from qerl.update.policy_loss import PolicyLoss, Share, Tokens, adapted_entropy_coef, high_entropy
from qerl.update.recompute import accept_every_n_layers


class UpdateTrainer(ScoringTrainer):
    """`GRPOTrainer` whose loss is this project's, computed in chunks on joined rows."""

    entropy_coef: float
    _last_world_entropy: float  # TRL's name, under which it is in checkpoints
    _tr_loss: torch.Tensor  # transformers': the loss since it was last logged
    _loss_so_far: torch.Tensor | float

    def _start_update(self) -> None:
        """Make what the update needs, once TRL's constructor is through."""
        accept_every_n_layers(self.model)
        no_offload_on_cpu(self.args, self.accelerator.device)
        policy = self.accelerator.unwrap_model(self.model)
        self._base = base_model(policy)  # to unwrap is a walk over all modules
        self.update_path = ready_for_rows(policy, self.args)
        add_reference(self)
        self._correction = Correction(
            self.vllm_importance_sampling_correction,
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        self._policy_loss = _policy_loss(self.args)
        self._microbatches = Microbatches()
        self._forget_losses()
        self._retry = MemoryRetry(
            self.args.tokens_per_forward,
            self.accelerator.num_processes,
            partial(recompute_every_layer, self.model, self.args),
            checkpointing=self.args.gradient_checkpointing_kwargs,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Wraps transformers': on a CPU each weight is dequantized once, and not for every microbatch."""
        on_cpu = self.accelerator.device.type == "cpu"
        with dense_weights_kept(self.model) if on_cpu else contextlib.nullcontext():
            return super().train(*args, **kwargs)

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
            if self.accelerator.num_processes > 1:
                rows = self._rows_to_compute(on_host(batch))
                batch = dealt(batch, rows, self.args, self._tokenizer.pad_token_id, self.accelerator)
            self._buffered_inputs = split_tensor_dict(batch, slices)
        self._microbatches.know(self._buffered_inputs)
        return self._buffered_inputs[self._step % slices]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Replaces TRL's, which times and counts transformers': times it with its rollout, and does the step
        again where memory runs out."""
        # To ask is cheaper than to tell every module again; evaluation turns off what DDP has wrapped.
        if not self.model.training:
            model.train()
        with self._clock.microbatch():
            batch = self._prepare_inputs(inputs)
            if self._retry.start_step(self.state.global_step):
                self._forget_losses()
                self._loss_so_far = 0.0
                first = self._step % self.args.steps_per_generation
                self._microbatches.start_step(first, self.current_gradient_accumulation_steps)
            microbatch = partial(self._microbatch, model, num_items_in_batch)
            loss = self._retry.run(batch, microbatch, self._undo_step)
        self._step += 1
        return self._handed_on(loss)

    def _handed_on(self, loss: torch.Tensor) -> torch.Tensor:
        """What transformers gets of a microbatch's loss: nothing, and with the last one that of the step.

        It asks of each loss whether it is finite, which waits until the device is done with its gradient.
        Several processes gather their losses, and keep them where they are.
        """
        if self.accelerator.num_processes > 1:
            return loss
        self._tr_loss = self._tr_loss.cpu()
        self._loss_so_far = total = self._loss_so_far + loss
        return total.cpu() if self.accelerator.sync_gradients else torch.zeros(())

    def _microbatch(self, model: Any, num_items_in_batch: Any, batch: Batch) -> torch.Tensor:
        """transformers' forward and backward of a microbatch."""
        loss: torch.Tensor = super(GRPOTrainer, self).training_step(model, batch, num_items_in_batch)
        self._microbatches.end(batch)
        return loss

    def _undo_step(self) -> None:
        """Undo every microbatch of this optimizer step. Rollouts are kept."""
        self.model.zero_grad()
        self._microbatches.forget_passes()
        self._forget_losses()

    def _forget_losses(self) -> None:
        """Begin anew with what the losses of an optimizer step report."""
        self._mismatch = Mismatch.none(self.accelerator.device)
        self._losses: list[Metrics] = []

    def _metrics_of_losses(self) -> dict[str, list[float]]:
        """What the losses of the step have reported, a number of each; sets the adaptive bonus's weight."""
        found = gathered(self._losses, self.accelerator.gather)
        if not self._policy_loss.entropy_bonus:
            return found
        nats, tokens = (sum(found.pop(f"entropy_bonus/{part}")) for part in ("nats", "tokens"))
        if self.use_adaptive_entropy:
            args, entropy = self.args, nats / max(tokens, 1.0)
            self.entropy_coef = adapted_entropy_coef(
                *(self.entropy_coef, entropy, args.entropy_target, args.entropy_coef_delta),
                *(args.entropy_coef_min, args.entropy_coef_max),
            )
            self._last_world_entropy = entropy
        return found | {"entropy_coef": [self.entropy_coef]}

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

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Replaces TRL's loss of a microbatch: the same loss, in chunks or in a pass that it shares with
        others, of samples that have a gradient."""
        loss, (metrics, mismatch) = self._loss_and_report(model, inputs)
        self._losses.append(metrics)
        self._mismatch += mismatch
        return loss

    def _loss_and_report(
        self, model: torch.nn.Module, inputs: Batch
    ) -> tuple[torch.Tensor, tuple[Metrics, Mismatch]]:
        known = self._microbatches.copy_of(inputs)
        batch, rows = padded(known), self._rows_to_compute(known)
        rebuild_buckets(model)
        meet, limit = self._losses_meet and self.accelerator.num_processes > 1, self._retry.max_tokens
        # Processes that meet in losses have as many of them.
        if limit is not None and not meet:
            forward = partial(self._shared_forward, model)
            outputs = self._microbatches.shared_outputs(inputs, limit, self._rows_to_compute, forward)
            if outputs is not None:
                return self._loss_of(inputs, outputs, rows)
        chunks = self._retry.split(rows, batch.lengths)
        if meet:
            chunks = [[] for _ in range(max(self._of_ranks(len(chunks))) - len(chunks))] + chunks
        return loss_in_chunks(
            partial(self._forward, model, batch),
            chunks,
            partial(self._loss_of, inputs),
            self.accelerator.backward,
            partial(self.accelerator.no_sync, model),
            look_ahead=self._losses_meet,
        )

    @property
    def _losses_meet(self) -> bool:
        """Whether a loss compares the entropies of its tokens with those of all processes."""
        return self.top_entropy_quantile < 1.0

    def _loss_of(
        self, inputs: Batch, outputs: Outputs, rows: list[int]
    ) -> tuple[torch.Tensor, tuple[Metrics, Mismatch]]:
        """The loss of a microbatch, given the policy's outputs for these rows, and what it reports."""
        logps_BC, entropy_BC = outputs
        mask_BC = loss_mask(inputs)
        computed_B1 = torch.zeros(len(mask_BC), 1, dtype=mask_BC.dtype)
        computed_B1[rows] = 1
        computed_BC = mask_BC * upload(computed_B1, mask_BC.device)
        weight, mismatch = self._correction.apply(inputs, logps_BC.detach(), entropy_BC, computed_BC)
        tokens = Tokens(
            mask_BC=mask_BC,
            advantages_B=inputs["advantages"],
            logps_BC=logps_BC,
            entropy_BC=entropy_BC,
            old_BC=inputs.get("old_per_token_logps"),
            sampler_BC=inputs["sampling_per_token_logps"],
            reference_BC=inputs.get("ref_per_token_logps"),
            correction=weight,
            high_entropy_BC=self._high_entropy(entropy_BC.detach(), mask_BC) if self._losses_meet else None,
        )
        microbatches = self.current_gradient_accumulation_steps
        part = microbatches / self.args.steps_per_generation / self.accelerator.num_processes
        share = Share(microbatches, inputs["num_items_in_batch"].clamp(min=1.0) * part)
        waits = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        loss, metrics = self._policy_loss(tokens, share, 0.0 if waits else self.entropy_coef)
        return loss, (metrics, mismatch)

    def _high_entropy(self, entropy_BC: torch.Tensor, mask_BC: torch.Tensor) -> torch.Tensor:
        """The tokens [B, C] whose entropy is in the upper quantile of all processes' microbatches."""
        own = torch.nn.functional.pad(entropy_BC[mask_BC.bool()], (0, 1), value=torch.nan)
        all_N = self.accelerator.gather(self.accelerator.pad_across_processes(own, pad_index=torch.nan))
        threshold = all_N.nanquantile(1 - self.top_entropy_quantile)  # NaN of no token, which keeps none
        return high_entropy(entropy_BC, mask_BC, threshold)


def _policy_loss(args: QeRLConfig) -> PolicyLoss:
    """The loss that the settings name."""
    assert args.epsilon_high is not None, "the settings have filled it in"
    return PolicyLoss(
        name=args.loss_type,
        of_sequence=args.importance_sampling_level == "sequence",
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
        beta=args.beta,
        kl_times_ratio=args.use_bias_correction_kl,
        off_policy_threshold=args.off_policy_mask_threshold,
        sapo=(args.sapo_temperature_pos, args.sapo_temperature_neg),
        vespo_positive=(args.vespo_k_pos, args.vespo_lambda_pos),
        vespo_negative=(args.vespo_k_neg, args.vespo_lambda_neg),
        longest=args.max_completion_length,
        entropy_bonus=args.entropy_coef != 0.0 or args.use_adaptive_entropy,
    )
