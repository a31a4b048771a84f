"""GRPO and DAPO on TRL's `GRPOTrainer`, with this project's engine, noise and update. Tied to trl 1.16.

The overrides of TRL's methods stand in six classes, one on top of the other, and each says what it replaces:
resuming (`resume.trainer`), sampling (`sampler`), rewards (`rollouts`), forward passes (`scores`), the update
(`updates`), and here the constructor, evaluation and what is logged of a step. `trl` holds what stands in the
place of TRL's parts. The six classes, and `turns`, `others` and `early` beside them, override private methods
and read private attributes of TRL's trainer, so another version of TRL may change any of them. What is
replaced, and why:

- **Rollout.** The engine takes the place of TRL's vLLM client: TRL then keeps the log-probabilities of the
  sampler, and the loss of each token is multiplied by pi_trainer / pi_sampler. Samples come from the noisy
  policy, and the ratio makes each choice of a token count as often as the clean policy makes it; in which
  contexts it stood, and how the answer went on, stays the noisy policy's (docs/numerics.md says what
  follows). Nothing is synced, since engine and trainer run the same modules.
- **Advantages** are computed here (`advantages`): those of groups that teach nothing are exactly zero.
- **Old log-probabilities.** When every rollout is used for one optimizer step, the policy has not moved since
  it sampled, and the loss forward's own detached values are the old ones: TRL's second forward is left out.
  The importance ratio is computed inside the loss in either case, and measured there (`correction`).
- **The loss forward** runs the prompt of a group once (`update.joined_row`), and leaves out samples without
  advantage: their gradient is zero. A microbatch of more than `tokens_per_forward` tokens is computed in
  chunks (`update.chunks`), and in smaller ones where memory runs out (`update.memory_retry`). Losses are
  those of TRL's names, with their options (`update.policy_loss`).
- **Groups** are an index that travels with the samples (`batch`), so that nobody has to guess from tokens
  which samples share a prompt.
- **Trajectories** of several turns are sampled by `qerl.agents`, in place of TRL's loop over tools (`turns`).
- **Dynamic sampling** is added. Sampling seeds are keyed by step, so a resume draws what the run would have
  (`resume.trainer`).
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PredictionOutput
from trl import GRPOConfig

from qerl.agents.environment import EnvironmentFactory
from qerl.agents.tools import Tool
from qerl.errors import QeRLError
from qerl.ranks import is_first_process
from qerl.rollout.engine import RolloutEngine
from qerl.seeding import ProblemSeeds
from qerl.settings.parents import replacements
from qerl.trainer.arguments import complete
from qerl.trainer.callbacks import EarlyStop, MetricsFile, check_callbacks
from qerl.trainer.data import sound_rows
from qerl.trainer.dynamic_sampling import empty_log
from qerl.trainer.others import check_others
from qerl.trainer.rewards import reward_models_found
from qerl.trainer.trl.evaluation import mean, name_metrics
from qerl.trainer.trl.reference import none_by_trl
from qerl.trainer.trl.tables import written_whole
from qerl.trainer.updates import UpdateTrainer

logger = logging.getLogger(__name__)


class QeRLTrainer(UpdateTrainer):
    """`GRPOTrainer` whose rollouts run on the training modules and may be noisy.

    The parameters before ``engine`` are TRL's, in TRL's order, and act as TRL documents except where it is
    said here.

    Args:
        model: Policy: a Hub id, folder or .gguf file, which is loaded as the settings say (`weights`,
            `tuning`, `lora_r`, ...); or a causal LM, whose weights are tuned, or a `PeftModel`, whose adapter
            is.
        reward_funcs: One or several: functions `f(prompts, completions, **columns) -> list[float | None]`,
            and reward models or their names.
        args: Settings; a `GRPOConfig` of TRL keeps TRL's defaults. None is a `QeRLConfig`
            with its defaults, which writes to `NAME-GRPO`.
        train_dataset: Column `prompt` and what the rewards need.
        eval_dataset: The same, for evaluation; several by name in a dictionary.
        processing_class: Tokenizer; None loads the model's.
        reward_processing_classes, callbacks: As in TRL.
        optimizers: As in TRL; an optimizer needs a model in hand, whose parameters it has.
        peft_config: A fresh LoRA adapter for the model, instead of the one that the settings describe.
        quantization_config: Refused; see `arguments.REFUSED`.
        tools, environment_factory: As in TRL; an environment may also answer texts, see
            `qerl.agents.environment`.
        rollout_func: As in TRL: `f(prompts, trainer)` in the engine's place, which it may use as
            `trainer.engine`.
        engine: Samples completions from `model`; None makes the fastest one that can.
        acted_on: Fields of the settings that the caller has acted on; see `arguments`.

    Attributes:
        update_path: Which parts of the update run on this project's kernels, and why others do not.

    Raises:
        QeRLError: An argument is missing, is refused or contradicts another one, or the model cannot be
            loaded or trained.
    """

    _tag_names = ["qerl", "trl", "grpo"]  # noqa: RUF012 - TRL reads it from the class
    _evaluating = ""

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
        tools: list[Tool] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        *,
        engine: RolloutEngine | None = None,
        acted_on: Collection[str] = (),
    ) -> None:
        check_callbacks(callbacks)
        others = check_others(tools, environment_factory, rollout_func)
        self._is_of_a_run = bool(acted_on)
        given = complete(
            *(model, reward_funcs, args, train_dataset, eval_dataset),
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            peft_config=peft_config,
            engine=engine,
            acted_on=acted_on,
            others=others,
            refused={"quantization_config": quantization_config},
        )
        if given.args.replaced and is_first_process():
            logger.warning(replacements(given.args.replaced))
        if environment_factory is not None:
            given.args.make_room_for_environments()
        patience, threshold = given.args.early_stopping_patience, given.args.early_stopping_threshold
        callbacks = [*(callbacks or ()), *([EarlyStop(patience, threshold)] if patience else ())]
        trained = [parameter for parameter in given.model.parameters() if parameter.requires_grad]
        dtypes = [parameter.dtype for parameter in trained]
        with none_by_trl(given.args), reward_models_found(given.for_trl["reward_funcs"]):
            super().__init__(model=given.model, args=given.args, callbacks=callbacks, **given.for_trl)
        if self.aux_loss_enabled:
            raise QeRLError(
                "A mixture of experts trains without its router loss: pass router_aux_loss_coef=0."
            )
        for parameter, dtype in zip(trained, dtypes, strict=True):
            # TRL rounds adapters of four-bit models to bf16, in which an update of 5e-6 is mostly lost.
            parameter.data = parameter.data.to(dtype)
        self._ready, self._has_environments = given.ready, environment_factory is not None
        others.join(self, given.args.reward_timeout, given.calls)
        self._start_rollouts(given.engine, given.calls)
        self._start_update()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MetricsFile):
                callback.facts["update_path"] = self.update_path.record()

    def _send_telemetry(self) -> None:
        """Replaces TRL's report to its server: nothing is sent anywhere."""

    # Evaluation and logs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple:
        """Replaces TRL's loss of an evaluation: it samples and scores, and computes no loss."""
        self._prepare_inputs(inputs)
        return None, None, None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Wraps transformers': data sets are checked and cut by `max_prompt_length` as those of the
        constructor, and the completions of an evaluation are a table of their own."""
        eval_dataset = self._sound(eval_dataset, "eval_dataset", "evaluation prompts")
        with self._table_apart(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Wraps transformers', to which TRL gives no rewards: the metrics are those of an evaluation of these
        rows, and nothing is logged."""
        test_dataset = self._sound(test_dataset, "test_dataset", "test prompts")
        with self._table_apart(""):
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        self._runtimes.put_into(output.metrics)
        for name, values in self._metrics["eval"].items():
            output.metrics[f"{metric_key_prefix}_{name}"] = mean(values)
        self._metrics["eval"].clear()
        return output

    def _sound(self, rows: Any, argument: str, what: str) -> Any:
        """Rows that are handed over, checked and cut. None, and the name of a set that the trainer has, are
        left to transformers; streams are made sound when they are read."""
        if rows is None or isinstance(rows, str | IterableDataset):
            return rows
        return self._ready(sound_rows(rows, argument, self._has_environments), what)

    @contextlib.contextmanager
    def _table_apart(self, evaluation: str) -> Iterator[None]:
        """What is sampled in the block is in no table of training, but in that of an evaluation, if any."""
        former, self._evaluating = (self._evaluating, self._logs), evaluation
        self._logs = empty_log(self._logs)
        try:
            yield
        finally:
            self._evaluating, self._logs = former

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Replaces transformers': rows are sampled from as in an evaluation."""
        return self.get_eval_dataloader(test_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Wraps TRL's: rows of a stream are checked and cut as they are read, and a process's batch is no
        larger than its share, or accelerate would fill it up with problems that others have."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        found = self.eval_dataset[given] if isinstance(given, str) else given
        if isinstance(found, IterableDataset):
            rows = sound_rows(found, "eval_dataset", self._has_environments)
            eval_dataset = self._ready(rows, "evaluation prompts")
        most = self.args.per_device_eval_batch_size
        if isinstance(found, Sized):
            share = -(-len(found) // self.accelerator.num_processes) * self.num_generations_eval
            self.args.per_device_eval_batch_size = min(most, share)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.per_device_eval_batch_size = most

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Wraps transformers': each of several evaluation sets has metrics of its own, each evaluation meets
        its problems anew, and its loss is minus its reward."""
        self._problem_seeds = ProblemSeeds(self.args.seed)
        self._runtimes.begin(metric_key_prefix)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        reward = mean(self._metrics["eval"]["reward"])
        if reward is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = -reward
        self._clock.clear()  # the time of an evaluation is no step's
        if self._evaluating:
            name_metrics(self._metrics["eval"], metric_key_prefix)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Wraps TRL's, which takes the mean of each metric and writes the table of completions."""
        self._runtimes.put_into(logs)
        if not (self.log_completions and self.accelerator.is_main_process):
            return super().log(logs, start_time)
        run = Path(str(self.args.output_dir))
        with written_whole(run, self.state.global_step, self._evaluating, self._logs):
            return super().log(logs, start_time)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Wraps transformers': a metric that evaluations do not have is a sentence."""
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            known = ", ".join(name for name in metrics if "reward" in name)
            raise QeRLError(
                f"metric_for_best_model is {self.args.metric_for_best_model}, which the evaluations of this "
                f"run do not have; choose one of theirs, for example of: {known}."
            ) from error

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Wraps transformers' hook behind the optimizer's step, and behind an epoch."""
        if self._clock.running:
            self._log_step()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _log_step(self) -> None:
        """Log what is known of an optimizer step once it is done; reading the sums waits for the device."""
        for name, values in self._metrics_of_losses().items():
            self._metrics["train"][name] += values
        metrics = self._mismatch.metrics(self.accelerator)
        self._forget_losses()
        metrics |= self._clock.report()
        metrics["memory/peak_gb"] = max(self._of_ranks(self._memory.report_gb()))
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
