"""`QeRLSFTTrainer`: supervised fine-tuning with the trainer of RL, whose samples are demonstrations.

It serves to warm a model up before RL. So it is `QeRLTrainer` with another source of samples and another
update: a microbatch is `per_device_train_batch_size` demonstrations, and the update is `LossDriver` with
cross-entropy (`qerl.update.driver`), in packed rows, chunks and retries as everywhere. Optimizer, schedule,
logs, checkpoints and the saved adapter are the same, and so is the evaluation: held-out problems are sampled
and judged as in RL, where there are rewards, and their demonstrations have a loss.

The loss of an optimizer step is the mean over all tokens that count, of all its microbatches and of all
processes, as in TRL with `average_tokens_across_devices`: not a mean of microbatches' means. Held-out loss is
the mean over all tokens, too, which does not depend on how an evaluation is divided; TRL's is the mean of its
batches' means. tests/conformance compares losses and weights with TRL's `SFTTrainer`.

Given up: streams, images, tools, packing of several demonstrations as one (rows are packed without that), and
the loss of Dynamic Fine-Tuning.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from qerl.settings.config import QeRLConfig
from qerl.trainer.demonstrations import ADDED, check_prompts, warn_of_endless_turns
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.order import RepeatedRows
from qerl.update.driver import LossDriver
from qerl.update.losses import TARGETS, Datum
from qerl.update.packed_row import IGNORE

Row = dict[str, Any]

_BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients per all-reduce, for which a temporary copy of this size is made."""


class CrossEntropyUpdate:
    """Computes gradients of optimizer steps on demonstrations; the counterpart of RL's `UpdateStep`.

    Args:
        args: Settings of the run.
        policy: The model where it trains, not wrapped for several processes.
        accelerator: Accelerator of the run.
        recompute_every_layer: As in `LossDriver`.

    Attributes:
        driver: Computes the gradients.
    """

    def __init__(
        self,
        args: QeRLConfig,
        policy: nn.Module,
        accelerator: Accelerator,
        recompute_every_layer: Callable[[], bool],
    ) -> None:
        self._policy, self._accelerator = policy, accelerator
        self._together = args.per_device_train_batch_size
        self.driver = LossDriver(
            policy,
            tokens_per_forward=args.tokens_per_forward,
            advice="set max_length",
            recompute_every_layer=recompute_every_layer,
        )

    def run(self, model: nn.Module, microbatches: Sequence[list[Row]], step: int) -> torch.Tensor:
        """Return the loss of an optimizer step, a scalar on the device; add its gradients to those in
        `.grad`.

        Arguments and errors are those of `UpdateStep.run`; microbatches are rows with the columns `READY`.
        Gradients are summed over processes here, since no pass goes through the wrapped model.
        """
        rows, device = [row for part in microbatches for row in part], self._accelerator.device
        tokens, alone = sum(row["loss_tokens"] for row in rows), self._accelerator.num_processes == 1
        if not alone:
            tokens = int(self._summed(torch.tensor(tokens, device=device)))
        data = [datum(row, 1 / tokens) for row in rows]
        loss = self.driver.forward_backward(data, "cross_entropy").metrics["loss:sum"]
        if not alone:
            self._sum_gradients()
        return self._summed(torch.tensor(loss, device=device))

    def held_out(self, rows: Sequence[Row]) -> tuple[float, int]:
        """Return the summed loss of this process's rows, and the number of their tokens that count.

        An evaluation hands over as many rows as are sampled at a time; here they are computed in parts of
        `per_device_train_batch_size` rows, as in training.
        """
        loss = 0.0
        for at in range(0, len(rows), self._together):
            data = [datum(row, 1.0) for row in rows[at : at + self._together]]
            loss += self.driver.forward(data, "cross_entropy").metrics["loss:sum"]
        return loss, sum(row["loss_tokens"] for row in rows)

    def metrics(self) -> dict[str, list[float]]:
        """Return no metrics: there are none beside the loss."""
        return {}

    def save(self, folder: Path) -> None:
        """Write memory limits into a checkpoint."""
        self.driver.retry.save(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.driver.retry.load(folder)

    def _sum_gradients(self) -> None:
        """Sum each gradient over all processes, in all-reduces of many gradients of one dtype."""
        found = [x.grad for x in self._policy.parameters() if x.grad is not None]
        for gradients in _buckets(found, _BUCKET_BYTES):
            summed = self._summed(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, part in zip(gradients, summed.split([x.numel() for x in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _summed(self, value: torch.Tensor) -> torch.Tensor:
        return self._accelerator.reduce(value, "sum")


def _buckets(tensors: list[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Group tensors by dtype, in order, into lists of at most `most` bytes; a larger tensor is alone in its
    list."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[torch.Tensor] = []
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if bucket and sum(x.nbytes for x in bucket) + tensor.nbytes > most:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def datum(row: Row, weight: float) -> Datum:
    """Return a demonstration for `cross_entropy`, in which each token that counts has this weight."""
    ids, counts = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])[1:] != IGNORE
    return Datum(ids[:-1], {TARGETS: ids[1:], "weights": counts * torch.tensor(weight, dtype=torch.float64)})


class QeRLSFTTrainer(QeRLTrainer):
    """A trainer for demonstrations, with the data of TRL's `SFTTrainer`.

    Arguments are those of `QeRLTrainer`, by name: ``args`` is a `QeRLConfig` with ``algorithm="sft"``;
    ``train_dataset`` and ``eval_dataset`` have the columns `messages`, or `prompt` and `completion`
    (`qerl.trainer.demonstrations`). With ``reward_funcs``, evaluations also sample from prompts and score.

    Raises:
        QeRLError: As `QeRLTrainer`, or an argument has no meaning here.
    """

    tags = ("qerl", "trl", "sft")
    learns_from_demonstrations = True
    _held_out = 0.0, 0  # summed loss and tokens of the evaluation under way

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Extends `QeRLTrainer.train`: warns if the demonstrations do not show how a turn ends."""
        warn_of_endless_turns(self.train_dataset, {*self.eos_token_ids}, self.args.max_length)
        return super().train(*args, **kwargs)

    def _make_updates(self, policy: Any, recompute: Callable[[], bool]) -> tuple[Any, Any]:
        updates = CrossEntropyUpdate(self.args, policy, self.accelerator, recompute)
        return updates, updates.driver.update_path

    def _rollout(self, model: Any, rows: list[Row]) -> list[Any]:
        """Replaces the rollout: a microbatch is these demonstrations."""
        return [rows]

    def get_train_dataloader(self) -> DataLoader:
        """Replaces that of rollouts: each demonstration once per epoch, in an order that differs by epoch;
        the last batch may be smaller."""
        args = self.args
        self._order = RepeatedRows(self.train_dataset, 1, seed=args.seed if args.shuffle_dataset else None)
        return self._loader(self.train_dataset, args.per_device_train_batch_size, self._order)

    @property
    def _eval_samples(self) -> int:
        return super()._eval_samples if self.reward_funcs else 1

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple:
        """Extends that of RL, and treats rows as RL does: adds the loss of the demonstrations."""
        loss, tokens = self.updates.held_out(inputs[:: self._eval_samples])
        self._held_out = self._held_out[0] + loss, self._held_out[1] + tokens
        if not self.reward_funcs:
            return None, None, None
        rows = [{name: row[name] for name in row if name not in ADDED} for row in inputs]
        return super().prediction_step(model, rows, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Extends that of RL: the loss is that of the demonstrations, over all processes; where rows do not
        divide evenly among them, some count twice."""
        self._held_out = 0.0, 0
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = torch.tensor(self._held_out, device=self.args.device, dtype=torch.float64)
        loss, tokens = self.accelerator.reduce(sums, "sum").tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
        return output

    def _sound(self, rows: Any, argument: str, what: str) -> Any:
        rows = rows if isinstance(rows, str) else self._ready(rows, what)
        if self.reward_funcs and not isinstance(rows, str):
            check_prompts(rows)
        return rows
