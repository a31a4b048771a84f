"""The half of the trainer that updates: a batch of scored completions in, gradients and a loss out.

TRL's loss stays as it is, with its formulas, normalisers and options. Around it: a microbatch is computed in
chunks, of the samples that have a gradient, on rows in which a group shares its prompt; the importance ratio
is applied and measured where the loss is; and a step for which memory runs out is done again.

Legend: B samples of a microbatch, C completion columns.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import split_tensor_dict

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.fp4.linear import dense_weights_kept
from qerl.kernels.upload import upload
from qerl.trainer.balance import dealt
from qerl.trainer.batch import Batch, on_host, padded
from qerl.trainer.correction import Correction, Mismatch, loss_mask
from qerl.trainer.microbatches import Microbatches
from qerl.trainer.processes import rebuild_buckets
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.scores import ScoringTrainer
from qerl.trainer.trl.known_outputs import known_where
from qerl.trainer.trl.late_metrics import LateMetric, metrics_later
from qerl.trainer.trl.recompute import no_offload_on_cpu, recompute_every_layer
from qerl.trainer.trl.reference import add_reference
from qerl.trainer.trl.trials import Trials
from qerl.update.chunks import Outputs, loss_in_chunks
from qerl.update.memory_retry import MemoryRetry
from qerl.update.recompute import accept_every_n_layers


class UpdateTrainer(ScoringTrainer):
    """`GRPOTrainer` whose loss is computed in chunks on joined rows."""

    _tr_loss: torch.Tensor  # transformers': the loss since it was last logged
    _loss_so_far: torch.Tensor | float

    def _start_update(self) -> None:
        """Make what the update needs, once TRL's constructor is through."""
        accept_every_n_layers(self.model)
        no_offload_on_cpu(self.args, self.accelerator.device)
        policy = self.accelerator.unwrap_model(self.model)
        self._decoder = base_model(policy).base_model  # to unwrap is a walk over all modules
        self.update_path = ready_for_rows(policy, self.args)
        add_reference(self)
        self._correction = Correction(
            self.vllm_importance_sampling_correction,
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
            self.args.noise_share,
        )
        self._mismatch = Mismatch.none(self.accelerator.device)
        self._microbatches = Microbatches()
        self._trials = Trials(self, "_mismatch")
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
            self._buffered_inputs = split_tensor_dict(self._with_noisy_logps(batch), slices)
        self._microbatches.know(self._buffered_inputs)
        return self._buffered_inputs[self._step % slices]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Wraps TRL's: times it with its rollout, and does the step again where memory runs out."""
        # To ask is cheaper than to tell every module again; evaluation turns off what DDP has wrapped.
        if not self.model.training:
            model.train()
        with self._clock.microbatch():
            batch = self._prepare_inputs(inputs)
            if self._retry.start_step(self.state.global_step):
                self._trials.start_step()
                self._loss_so_far = 0.0
                first = self._step % self.args.steps_per_generation
                self._microbatches.start_step(first, self.current_gradient_accumulation_steps)
            microbatch = partial(self._microbatch, model, num_items_in_batch)
            return self._handed_on(self._retry.run(batch, microbatch, self._undo_step))

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

    def _microbatch(self, model: Any, num_items_in_batch: Any, batch: Batch, newest: bool) -> torch.Tensor:
        """TRL's forward and backward; one that is done again is neither logged again nor ends the step."""
        ends_step = newest and self.accelerator.sync_gradients
        noise = self._noise.in_loss(batch)  # around backward too, which recomputes layers
        with noise, self._trials.ends_step(ends_step), self._trials.metrics_apart() as metrics:
            loss = super().training_step(model, batch, num_items_in_batch)
            self._microbatches.end(batch)
        metrics.pop("step_time", None)  # of forward and backward alone; `_log_step` has the whole
        if newest:
            for name, values in metrics.items():
                self._metrics["train"][name] += values
        return loss

    def _undo_step(self) -> None:
        """Undo every microbatch of this optimizer step. Rollouts are kept."""
        self.model.zero_grad()
        self._microbatches.forget_passes()
        self._trials.undo_step()

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
        """Replaces TRL's loss of a microbatch: the same loss, in chunks or in a pass that it shares with
        others, of samples that have a gradient."""
        known = self._microbatches.copy_of(inputs)
        batch, rows = padded(known), self._rows_to_compute(known)
        rebuild_buckets(model)
        meet, limit = self._losses_meet and self.accelerator.num_processes > 1, self._retry.max_tokens
        # Noise is put in for one microbatch, and processes that meet in losses have as many of them.
        if limit is not None and not meet and not self.args.noise_in_loss:
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
            partial(self._trials.no_trace, model),
            look_ahead=self.top_entropy_quantile < 1.0,
        )

    @property
    def _losses_meet(self) -> bool:
        """Whether processes meet in a loss, which compares its tokens or their entropy with all."""
        return self.top_entropy_quantile < 1.0 or self.use_adaptive_entropy

    def _loss_of(self, inputs: Batch, outputs: Outputs, rows: list[int]) -> torch.Tensor:
        """TRL's loss of a microbatch, given the policy's outputs for these rows."""
        mask_BC = loss_mask(inputs)
        known, inputs = known_where(mask_BC, outputs, inputs)
        computed_B1 = torch.zeros(len(mask_BC), 1, dtype=mask_BC.dtype)
        computed_B1[rows] = 1
        computed_BC = mask_BC * upload(computed_B1, mask_BC.device)
        inputs, mismatch = self._correction.apply(
            inputs, known.logps_BC.detach(), known.entropy_BC, computed_BC
        )
        self._mismatch += mismatch
        with contextlib.nullcontext() if self._losses_meet else metrics_later(self):
            loss = super()._compute_loss(known, inputs)
        metrics: dict[str, list[Any]] = self._metrics["train"]
        metrics["entropy"].pop()  # of all rows, though only these were computed; `Mismatch` has it
        if self.loss_type == "vespo":
            computed_B1 = computed_BC.any(dim=1, keepdim=True)
            metrics["vespo/phi_seq_mean"][-1] = LateMetric.mean_of(self._phi_B1, computed_B1)
        return loss

    def get_gamma_weights(self, **kwargs: Any) -> torch.Tensor:
        """Keeps TRL's weights of the VESPO loss, [B, 1], whose mean is logged of the computed rows alone."""
        self._phi_B1 = super().get_gamma_weights(**kwargs)
        return self._phi_B1
