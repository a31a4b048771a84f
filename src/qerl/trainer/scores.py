"""What the update asks of the policy: log-probabilities and entropies of samples, and of which samples.

Legend: B samples of a microbatch, C completion columns.
"""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.trainer.batch import Batch, padded_rollout
from qerl.trainer.correction import loss_mask, rows_with_gradient
from qerl.trainer.processes import averaged
from qerl.trainer.rollouts import RolloutTrainer
from qerl.update.chunks import Outputs, without_graph
from qerl.update.forward import score
from qerl.update.joined_row import join
from qerl.update.memory_retry import MemoryRetry
from qerl.update.padded import PaddedBatch
from qerl.update.path import UpdatePath


class ScoringTrainer(RolloutTrainer):
    """`GRPOTrainer` whose forward passes read joined rows, in which a group shares its prompt.

    Attributes:
        update_path: Which parts of the update run on this project's kernels, and why others do not.
    """

    update_path: UpdatePath
    _base: PreTrainedModel
    _retry: MemoryRetry

    def _rows_to_compute(self, inputs: Batch) -> list[int]:
        """Rows of the microbatch that the loss forward must run, by its copy on the CPU."""
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
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Replaces TRL's forward pass for log-probabilities and entropies, [B, C] each, of a whole rollout,
        whose prompts are shared."""
        if names := [name for name, value in images.items() if value is not None and value is not False]:
            raise QeRLError(f"Only text models are supported; the batch carries {', '.join(names)}.")
        if not self._reads_logps:
            return None, None, None
        with self._clock.part("logprob"):
            ids, mask = input_ids.cpu(), attention_mask.cpu()
            batch = padded_rollout(ids, mask, logits_to_keep, self.num_generations)
            rows = (mask[:, -logits_to_keep:].sum(dim=1) > 0).nonzero().flatten().tolist()
            logps, entropy = self._scores(model, batch, rows, batch_size or len(input_ids))
        return logps, entropy if compute_entropy else None, None

    def _scores(
        self, model: torch.nn.Module, batch: PaddedBatch, rows: list[int], microbatch: int
    ) -> Outputs:
        """Log-probabilities and entropies [B, C] of these rows without a graph, zero elsewhere."""
        starts = range(0, max(len(rows), 1), microbatch)
        chunks = [
            chunk
            for start in starts
            for chunk in self._retry.split(rows[start : start + microbatch], batch.lengths)
        ]
        return without_graph(partial(self._forward, model, batch), chunks)

    def _shared_forward(
        self, model: torch.nn.Module, batch: PaddedBatch, rows: list[int], ends_step: bool
    ) -> Outputs:
        """`_forward` of a pass that microbatches share; whether an optimizer step ends with its backward."""
        with averaged(model, ends_step):
            return self._forward(model, batch, rows)

    def _forward(self, model: torch.nn.Module, batch: PaddedBatch, rows: list[int]) -> Outputs:
        """Log-probabilities and entropies [B, C] of these rows under the policy or its reference, else zero.

        Without any rows the zeros are connected to the weights: the optimizer sees zero gradients, as it
        would in TRL.
        """
        self._retry.note_forward(rows, batch.lengths)
        shape, device = batch.completion_ids_BC.shape, self.accelerator.device
        if not rows:
            zeros_BC = torch.zeros(shape, device=device)
            anchor = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
            return zeros_BC + anchor.to(zeros_BC), zeros_BC
        base = base_model(model) if model is self.ref_model else self._base
        row = join(batch, rows, device)
        outputs = score(
            *(model, base, row, self.update_path.by_stretch),
            *(self.temperature, self._entropy_bonus_enabled),
        )
        return tuple(row.scatter(values_S, *shape) for values_S in outputs)
