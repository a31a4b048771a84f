"""The update of an optimizer step: scored samples in, gradients in `.grad` and a loss out.

All microbatches of the step are computed together, when the last of them is due, since the weights do not
change in between. The samples that have a gradient are divided into chunks by their number of tokens, across
microbatches (`qerl.update.chunks`). Each chunk is one packed row (`qerl.update.packed_row`), and runs forward
and backward before the next. A loss still gets its whole microbatch: earlier chunks as constants, the current
chunk with its graph, later ones as zeros, which get no gradient. A token's gradient depends on its own
log-probability, on those of its sample, and on normalisers known beforehand, but never on the model's outputs
for other samples; so at a microbatch's last chunk its loss is the one to report, and its metrics are those of
the undivided batch.

One option of TRL breaks this independence: `top_entropy_quantile` compares the tokens of a whole microbatch
with those of other processes. The step then runs forward once more, without a graph, ahead of its chunks.

Legend: B samples of a step, or of a microbatch of it; C completion columns.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.kernels.tensors import upload
from qerl.seeding import generator
from qerl.settings.config import QeRLConfig
from qerl.trainer.teacher import Teacher
from qerl.update.chunks import MemoryRetry
from qerl.update.distillation import divergence
from qerl.update.head import score
from qerl.update.packed_row import Lengths, Sample, choices_of_plain, pack_row, plain_choices
from qerl.update.path import UpdatePath
from qerl.update.policy_loss import (
    Correction,
    Metrics,
    PolicyLoss,
    Share,
    Tokens,
    adapted_entropy_coef,
    covariance,
    gathered,
    high_entropy,
    largest_covariance,
    mismatch,
    mismatch_metrics,
    within_covariance,
)
from qerl.update.routing import routing_of

ENTROPY_FILE = "entropy_ctrl_state.json"
"""File in a checkpoint with the state of the adaptive entropy bonus, under TRL's name."""

Outputs = tuple[torch.Tensor, ...]
"""Log-probabilities, entropies and, with a teacher, divergences from it, [B, C] each, zero outside of the
samples that were computed."""


@dataclass(frozen=True)
class Microbatch:
    """The input of one loss: samples, and figures of their rollout.

    Attributes:
        samples: The same number in every microbatch of a run.
        rollout_tokens: Tokens of the whole rollout, of all processes, that count in the losses' means.
        rollout_entropy: Mean entropy in nats of the sampler over all tokens of the rollout.
        counted: The share of the rollout's samples that count.
    """

    samples: list[Sample]
    rollout_tokens: int
    rollout_entropy: float
    counted: float = 1.0


@dataclass(frozen=True)
class Inputs:
    """Tensors of samples for the losses, [B, C] on the device, zero after a completion's end.

    Attributes:
        mask_BC: 1 on tokens that the loss sees.
        advantages_B, group_tokens_B: As in `Sample`.
        sampler_BC, sampler_entropy_BC: Log-probabilities and entropies under the sampler.
        old_BC, reference_BC: Log-probabilities under the old and the reference policy; None where samples
            have none.
        chosen_BC: Tokens that the loss holds back for their covariance; None for a loss that holds back none.
    """

    mask_BC: torch.Tensor
    advantages_B: torch.Tensor
    group_tokens_B: torch.Tensor
    sampler_BC: torch.Tensor
    sampler_entropy_BC: torch.Tensor
    old_BC: torch.Tensor | None
    reference_BC: torch.Tensor | None
    chosen_BC: torch.Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> "Inputs":
        """Return the inputs of samples, copied to the device in two uploads."""
        columns: list[list[Any]] = [
            [sample.loss_mask for sample in samples],
            [sample.logprobs for sample in samples],
            [sample.entropies for sample in samples],
        ]
        others = [
            [getattr(sample, name) for sample in samples] for name in ("old_logprobs", "reference_logprobs")
        ]
        given = [None not in values for values in others]
        columns += [values for values, has in zip(others, given, strict=True) if has]
        width = max(len(sample.tokens) for sample in samples)
        host = torch.zeros(len(columns), len(samples), width)
        for at, rows in enumerate(columns):
            for row_C, values in zip(host[at], rows, strict=True):
                row_C[: len(values)] = torch.tensor(values)
        mask, sampler, entropy, *rest = upload(host, device)
        found = iter(rest)
        old, reference = (next(found) if has else None for has in given)
        numbers = [[sample.advantage, sample.group_tokens] for sample in samples]
        advantages, group_tokens = upload(torch.tensor(numbers), device).unbind(1)
        return cls(mask, advantages, group_tokens, sampler, entropy, old, reference)

    def part(self, rows: slice) -> "Inputs":
        """Return the inputs of some of the samples."""
        return Inputs(
            *(self.mask_BC[rows], self.advantages_B[rows], self.group_tokens_B[rows]),
            *(self.sampler_BC[rows], self.sampler_entropy_BC[rows]),
            *(None if x is None else x[rows] for x in (self.old_BC, self.reference_BC, self.chosen_BC)),
        )


class UpdateStep:
    """Computes gradients of optimizer steps, and log-probabilities of samples.

    Args:
        args: Settings of the run.
        base: The transformers model in the policy.
        path: Tells which of the project's kernels the policy runs on.
        accelerator: Accelerator of the run.
        recompute_every_layer: Turns on recomputation of every layer and returns whether it was off.
        teacher: Gives the distributions that the loss compares the policy's with; None without one.
        make_room: As in `MemoryRetry`.

    Attributes:
        retry: Divides steps into chunks, and halves these where memory runs out.
    """

    def __init__(
        self,
        args: QeRLConfig,
        base: PreTrainedModel,
        path: UpdatePath,
        accelerator: Accelerator,
        recompute_every_layer: Callable[[], bool],
        teacher: Teacher | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._args, self._base, self._accelerator = args, base, accelerator
        self._by_segment = path.by_segment
        self._routing = routing_of(base, args.replay_routing)
        self._loss, self._teacher = policy_loss(args), teacher
        self._correction = Correction(
            args.vllm_importance_sampling_correction,
            args.vllm_importance_sampling_mode,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
            bool(args.use_rollout_logprobs),
            args.rollout_rs,
            args.rollout_rs_threshold or 0.0,
        )
        self.retry = MemoryRetry(
            args.tokens_per_forward,
            accelerator.num_processes,
            recompute_every_layer,
            checkpointing=args.gradient_checkpointing_kwargs,
            make_room=make_room,
        )
        self._entropy_coef, self._last_entropy = args.entropy_coef, torch.inf  # entropy of the step before
        self._reports: list[Metrics] = []
        self._rollout_entropy = torch.nan

    def run(self, model: nn.Module, microbatches: Sequence[Microbatch], step: int) -> torch.Tensor:
        """Return the loss of an optimizer step, a scalar on the device; add its gradients to those in
        `.grad`.

        Args:
            model: The policy as it trains, wrapped by PEFT and for several processes or not.
            microbatches: Microbatches of the step.
            step: Number of the step, from 1.

        Raises:
            QeRLError: Memory ran out, and one sample alone does not fit or there are several processes.
        """
        rebuild_buckets(model)
        work = functools.partial(self._attempt, model, microbatches, step)
        return self.retry.run(step, work, model.zero_grad)

    def _attempt(self, model: nn.Module, microbatches: Sequence[Microbatch], step: int) -> torch.Tensor:
        samples = [sample for part in microbatches for sample in part.samples]
        inputs, lengths = Inputs.of(samples, self._accelerator.device), Lengths.of(samples)
        seen = sum(sum(sample.loss_mask) for sample in samples)
        inputs = replace(inputs, chosen_BC=self._chosen(inputs, seen, step))
        size = len(samples) // len(microbatches)
        rows = self.rows(samples)
        chunks = self._chunks(rows, lengths, size)
        forward = functools.partial(self._forward, model, samples, lengths)
        thresholds = self._entropy_thresholds(forward, chunks, inputs, size)
        forward = functools.partial(forward, teacher=self._teacher)
        losses = [functools.partial(self._loss_of, part, len(microbatches)) for part in microbatches]
        reports: dict[int, tuple[torch.Tensor, Metrics]] = {}
        values, done = None, list[int]()
        for number, chunk in enumerate(chunks):
            done += chunk
            touched = sorted({row // size for row in chunk})
            if number == len(chunks) - 1:  # and those without a computed sample
                touched = sorted({*touched, *(set(range(len(microbatches))) - reports.keys())})
            apart = number < len(chunks) - 1
            with self._accelerator.no_sync(model) if apart else contextlib.nullcontext():
                outputs = _with_known(values, forward(chunk), chunk)
                computed_BC = inputs.mask_BC * _rows_mask(done, len(samples), inputs.mask_BC)
                total = torch.zeros((), device=inputs.mask_BC.device)
                for at in touched:
                    rows_at = slice(at * size, (at + 1) * size)
                    loss, metrics = losses[at](
                        inputs.part(rows_at),
                        tuple(output[rows_at] for output in outputs),
                        computed_BC[rows_at],
                        thresholds[at] if thresholds else None,
                    )
                    total = total + loss
                    reports[at] = loss.detach(), metrics
                self._accelerator.backward(total)
            values = tuple(output.detach() for output in outputs)
            del outputs, total, loss  # the next chunk begins without what is left of this one's graph
        assert values is not None, "there is at least one chunk"
        self._note(microbatches, reports, inputs, values, computed_BC)
        return torch.stack([loss for loss, _ in reports.values()]).sum()

    def _note(
        self,
        microbatches: Sequence[Microbatch],
        reports: dict[int, tuple[torch.Tensor, Metrics]],
        inputs: Inputs,
        values: Outputs,
        computed_BC: torch.Tensor,
    ) -> None:
        """Keep the metrics of a step on the device, to be logged later; nothing is read from the device."""
        self._reports = [reports[at][1] for at in range(len(microbatches))]
        entropies = [part.rollout_entropy for part in microbatches]
        self._rollout_entropy = sum(entropies) / len(entropies)
        trainer_BC = values[0] if inputs.old_BC is None else inputs.old_BC
        ratio = self._correction.ratio(trainer_BC, inputs.sampler_BC, computed_BC)
        apart = mismatch(
            *(trainer_BC, inputs.sampler_BC, values[1], inputs.sampler_entropy_BC, computed_BC),
            *(ratio, self._correction.weight(ratio)),
            (self._correction.clip_min, self._correction.clip_max),
        )
        self._reports.append(apart)

    def metrics(self) -> dict[str, list[float]]:
        """Return the metrics of the last step's losses, one value each; every process must call this.

        Reading the values waits for the device. Sets the weight of the adaptive entropy bonus.
        """
        if not self._reports:
            return {}
        gather, args = self._accelerator.gather, self._args
        found = mismatch_metrics(gathered(self._reports, gather), self._rollout_entropy)
        self._reports = []
        if self._routing is not None:
            counts_12 = torch.tensor([self._routing.take_counts()], device=self._accelerator.device)
            differ, known = gather(counts_12).sum(0).tolist()
            found |= {"routing/differ": [differ / known]} if known else {}
        if not self._loss.entropy_bonus:
            return found
        nats, tokens = (sum(found.pop(f"entropy_bonus/{part}")) for part in ("nats", "tokens"))
        if args.use_adaptive_entropy:
            self._last_entropy = nats / max(tokens, 1.0)
            self._entropy_coef = adapted_entropy_coef(
                *(self._entropy_coef, self._last_entropy, args.entropy_target, args.entropy_coef_delta),
                *(args.entropy_coef_min, args.entropy_coef_max),
            )
        return found | {"entropy_coef": [self._entropy_coef]}

    def save(self, folder: Path) -> None:
        """Write memory limits, and the state of the adaptive entropy bonus, into a checkpoint."""
        self.retry.save(folder)
        if self._args.use_adaptive_entropy:
            state = {"entropy_coef": self._entropy_coef, "last_world_entropy": self._last_entropy}
            (folder / ENTROPY_FILE).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.retry.load(folder)
        if self._args.use_adaptive_entropy and (folder / ENTROPY_FILE).is_file():
            state = json.loads((folder / ENTROPY_FILE).read_text(encoding="utf-8"))
            self._entropy_coef, self._last_entropy = state["entropy_coef"], state["last_world_entropy"]

    def logprobs(
        self, model: nn.Module, samples: Sequence[Sample], base: PreTrainedModel | None = None
    ) -> list[list[float]]:
        """Return the log-probabilities of samples' tokens under a model, without a graph; 0 where a sample is
        masked.

        Args:
            model: The policy as it trains, or another one of its kind.
            samples: Whole groups.
            base: The transformers model in ``model``; None: the policy's.
        """
        lengths = Lengths.of(samples)
        rows = [row for row, sample in enumerate(samples) if not sample.masked]
        chunks = self._chunks(rows, lengths, self._args.per_device_train_batch_size)
        with torch.no_grad():
            outputs = [self._forward(model, samples, lengths, chunk, base)[0] for chunk in chunks]
        logps = sum(outputs[1:], outputs[0]).tolist()
        return [row[: len(sample.tokens)] for row, sample in zip(logps, samples, strict=True)]

    # Which samples, in which passes

    def rows(self, samples: Sequence[Sample]) -> list[int]:
        """Indices of the samples whose tokens have a gradient."""
        args = self._args
        all_pull = (
            args.beta != 0.0
            or self._loss.entropy_bonus
            or args.top_entropy_quantile < 1.0
            or self._teacher is not None
        )
        seen = [sum(sample.loss_mask) for sample in samples]
        rows = [row for row, s in enumerate(samples) if seen[row] and (all_pull or s.advantage != 0.0)]
        if not rows and self._accelerator.num_processes > 1:
            # Every process must run a backward pass for gradients to be averaged; this sample's own is zero.
            rows = [seen.index(max(seen))]
        return rows

    def _chunks(self, rows: list[int], lengths: Lengths, size: int) -> list[list[int]]:
        """Divide samples into forward passes, at least one; without a limit of tokens by microbatches of this
        size."""
        if self.retry.max_tokens is not None:
            return self.retry.split(rows, lengths)
        parts: dict[int, list[int]] = {}
        for row in rows:
            parts.setdefault(row // size, []).append(row)
        return [*parts.values()] or [[]]

    def _forward(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        lengths: Lengths,
        rows: list[int],
        base: PreTrainedModel | None = None,
        teacher: Teacher | None = None,
    ) -> Outputs:
        """Return the outputs [B, C] of these samples, zero elsewhere; with a teacher also the divergences
        from it.

        The teacher runs before the policy, so that nothing of its pass is in memory beside the policy's
        activations. Without any samples the zeros are connected to the weights: the optimizer sees zero
        gradients.
        """
        self.retry.note_forward(rows, lengths)
        shape, device = (len(samples), max(len(s.tokens) for s in samples)), self._accelerator.device
        if not rows:
            zeros_BC = torch.zeros(shape, device=device)
            anchor = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
            zero_BC = zeros_BC + anchor.to(zeros_BC)
            return (zero_BC, zeros_BC) if teacher is None else (zero_BC, zeros_BC, zero_BC)
        row = pack_row(samples, rows, device)
        compare = None
        if teacher is not None:
            compare = functools.partial(divergence, target=teacher.target(model, samples, rows, device))
        outputs = score(
            *(model, base or self._base, row, self._by_segment),
            *(self._args.temperature, self._loss.entropy_bonus, self._loss.reads_logps, compare),
        )
        return tuple(row.scatter(values_S, *shape) for values_S in outputs)

    # The loss

    def _entropy_thresholds(
        self, forward: Callable[[list[int]], Outputs], chunks: list[list[int]], inputs: Inputs, size: int
    ) -> list[torch.Tensor]:
        """Return for each microbatch the entropy, over all processes, from which on tokens count; empty
        without the option."""
        quantile = self._args.top_entropy_quantile
        if quantile >= 1.0:
            return []
        with torch.no_grad():
            parts = [forward(chunk)[1] for chunk in chunks]
        entropy_BC, mask_BC = sum(parts[1:], parts[0]), inputs.mask_BC.bool()
        found = []
        for start in range(0, len(mask_BC), size):
            own = entropy_BC[start : start + size][mask_BC[start : start + size]]
            own = nn.functional.pad(own, (0, 1), value=torch.nan)
            padded = self._accelerator.pad_across_processes(own, pad_index=torch.nan)
            # NaN if there is no token; it keeps none.
            found.append(self._accelerator.gather(padded).nanquantile(1 - quantile))
        return found

    def _chosen(self, inputs: Inputs, seen: int, step: int) -> torch.Tensor | None:
        """Return the tokens of this process's step that the losses "clip_cov" and "kl_cov" hold back; None
        for other losses.

        Covariances are taken of log-probabilities that are known before the update, the old ones or the
        sampler's, so that each chunk can be computed by itself; in the first update of a rollout these are
        the policy's. Tokens without an advantage have no gradient to hold back.
        """
        args = self._args
        if args.loss_type not in ("clip_cov", "kl_cov"):
            return None
        logps_BC = inputs.sampler_BC if inputs.old_BC is None else inputs.old_BC
        mask_BC = inputs.mask_BC.bool() & ~logps_BC.isnan()
        covariance_BC = covariance(logps_BC.nan_to_num(nan=0.0), inputs.advantages_B, mask_BC)
        covariance_BC = covariance_BC.masked_fill(inputs.advantages_B[:, None] == 0, -torch.inf)
        share = args.clip_cov_ratio if args.loss_type == "clip_cov" else args.kl_cov_ratio
        count = max(1, int(share * seen))
        if args.loss_type == "kl_cov":
            return largest_covariance(covariance_BC, count)
        draw = generator("clip_cov", args.seed, step, self._accelerator.process_index)
        uniform_BC = upload(torch.rand(covariance_BC.shape, generator=draw), covariance_BC.device)
        return within_covariance(covariance_BC, args.clip_cov_lb, args.clip_cov_ub, count, uniform_BC)

    def _loss_of(
        self,
        microbatch: Microbatch,
        microbatches: int,
        inputs: Inputs,
        outputs: Outputs,
        computed_BC: torch.Tensor,
        threshold: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the loss of a microbatch, given the policy's outputs for the tokens that are computed."""
        (logps_BC, entropy_BC, *divergences), mask_BC = outputs, inputs.mask_BC
        trainer_BC = logps_BC.detach() if inputs.old_BC is None else inputs.old_BC
        between = (trainer_BC, inputs.sampler_BC, computed_BC)
        ratio = self._correction.ratio(*between)
        old_BC = inputs.old_BC
        if self._args.use_rollout_logprobs:
            old_BC = torch.where(inputs.sampler_BC.isnan(), trainer_BC, inputs.sampler_BC)
        tokens = Tokens(
            mask_BC=mask_BC,
            advantages_B=inputs.advantages_B,
            logps_BC=logps_BC,
            entropy_BC=entropy_BC,
            # Tokens that are not computed get the ratio 1: infinity times an advantage of 0 would be NaN.
            old_BC=None if old_BC is None else torch.where(computed_BC > 0, old_BC, 0.0),
            sampler_BC=inputs.sampler_BC,
            reference_BC=inputs.reference_BC,
            correction=self._correction.weight(ratio),
            high_entropy_BC=None
            if threshold is None
            else high_entropy(entropy_BC.detach(), mask_BC, threshold),
            kept_B1=self._correction.kept(*between),
            chosen_BC=inputs.chosen_BC,
            group_tokens_B=inputs.group_tokens_B,
            divergence_BC=divergences[0] if divergences else None,
        )
        args = self._args
        part = microbatches / (args.steps_per_generation or 1) / self._accelerator.num_processes
        seen = max(microbatch.rollout_tokens, 1) * part
        waits = args.use_adaptive_entropy and self._last_entropy > args.entropy_target
        share = Share(microbatches, seen, microbatch.counted)
        return self._loss(tokens, share, 0.0 if waits else self._entropy_coef)


def save_rollouts(buffer: list[Microbatch], file: Path) -> None:
    """Write the microbatches of a rollout that later steps still use."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = [asdict(part) for part in buffer]
    for sample in (sample for part in parts for sample in part["samples"]):
        sample["choices"] = plain_choices(sample["choices"])
    file.write_text(json.dumps(parts), encoding="utf-8")


def load_rollouts(file: Path) -> list[Microbatch]:
    """Read what `save_rollouts` wrote; empty where the checkpoint has no such file.

    Raises:
        QeRLError: An earlier version wrote the rollout.
    """
    if file.with_suffix(".safetensors").is_file():
        raise QeRLError(
            f"{file.parent} holds a rollout that is half used, as QeRL 0.2 wrote it; resume with that "
            "version, or from a checkpoint without such a file."
        )
    if not file.is_file():
        return []
    parts = json.loads(file.read_text(encoding="utf-8"))
    for sample in (sample for part in parts for sample in part["samples"]):
        sample["choices"] = choices_of_plain(sample["choices"])
    return [Microbatch(**part | {"samples": [Sample(**each) for each in part["samples"]]}) for part in parts]


def policy_loss(args: QeRLConfig) -> PolicyLoss:
    """Return the loss that the settings name."""
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
        aggregation=args.loss_agg_mode,
        kl_tau=args.kl_tau,
        kl_cov_coef=args.ppo_kl_coef,
        distillation_weight=0.0 if args.teacher is None else args.distillation_weight,
    )


def rebuild_buckets(model: nn.Module) -> None:
    """Make DistributedDataParallel rebuild its buckets here, where all processes are at the same place.

    It does so once, after the first gradients, by broadcasts at the start of a forward pass. Which of a
    step's chunks that is would differ between processes, and so would the order of collectives.
    """
    if isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        model.reducer._rebuild_buckets()


def _rows_mask(rows: Sequence[int], count: int, like: torch.Tensor) -> torch.Tensor:
    """Return a mask [count, 1], 1 for these rows."""
    mask_B1 = torch.zeros(count, 1)
    mask_B1[list(rows)] = 1
    return upload(mask_B1, like.device)


def _with_known(values: Outputs | None, outputs: Outputs, chunk: Sequence[int]) -> Outputs:
    """Return a chunk's outputs for its samples and the known values for all others."""
    if values is None:
        return outputs
    new_B1 = _rows_mask(chunk, len(outputs[0]), outputs[0]).bool()
    return tuple(torch.where(new_B1, *pair) for pair in zip(outputs, values, strict=True))
