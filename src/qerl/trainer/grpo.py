"""`QeRLTrainer`: GRPO, DAPO and their relatives, with the arguments of TRL's `GRPOTrainer`, on the loop of
transformers.

A step, in order:

    transformers' loop      reads one batch of rows per microbatch and calls, for each,
    training_step           which makes a rollout when one is due (`rollout_step.RolloutStep`):
        rows                  a curriculum may replace some
        samples               the engine draws them, with noise if the settings ask for it
        rewards               functions are called; dynamic sampling replaces groups without signal
        advantages            and log-probabilities under the old and the reference policy, where the loss
                              reads them
      and, with the last microbatch, computes the update (`update_step.UpdateStep`):
        chunks                samples with a gradient, split by tokens; forward, loss and backward run per
                              chunk
    transformers' loop      clips the gradient and steps the optimizer
    log                     means of the metrics since the last log line

Engine and update run the same modules, so no weights are synchronised between them. A rollout is divided
into `steps_per_generation` microbatches, groups staying together, and is used `num_iterations` times.

TRL's public API is used (its settings, its functions for chat templates, `SyncRefModelCallback`), but not
its trainer. Seven private methods of transformers' `Trainer` are overridden: `_run_epoch`, `_get_grad_norm`
and five that save and load checkpoints.
"""

import contextlib
import dataclasses
import functools
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Sized
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from huggingface_hub import CommitScheduler, create_repo
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import PredictionOutput, rotate_checkpoints, seed_worker
from trl import GRPOConfig

from qerl.agents.conversations import Conversations
from qerl.agents.environment import EnvironmentFactory
from qerl.agents.loop import Limits
from qerl.agents.pool import ToolPool
from qerl.agents.tools import Tool
from qerl.checkpoint_folder import clear, move_into, publish
from qerl.errors import QeRLError, first_line
from qerl.families.parts import base_model
from qerl.fp4.linear import dense_weights_kept
from qerl.kernels.device import device_words
from qerl.lora.adapter import check_adapter
from qerl.lora.experts import state_of
from qerl.models.hub import hub_errors_said
from qerl.models.load import end_token_ids
from qerl.noise.draw import AdaptiveNoise
from qerl.ranks import is_first_process
from qerl.rollout.engine import RolloutEngine, RolloutResult
from qerl.run_folder import ADAPTER_FILE, UNFINISHED, last_checkpoint
from qerl.settings.groups import check_eval_batch
from qerl.settings.parents import replacements
from qerl.settings.recipe import dump
from qerl.trainer.advantages import Signal, judge_of
from qerl.trainer.arguments import complete
from qerl.trainer.balance import dealt
from qerl.trainer.callbacks import EarlyStop, MetricsFile, check_callbacks
from qerl.trainer.card import CARD_FILE, model_card
from qerl.trainer.data import check_enough, sound_rows
from qerl.trainer.demonstrations import READY
from qerl.trainer.order import RepeatedRows, repeated_stream
from qerl.trainer.prompt_choice import PromptChoice
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.reference import Reference, load_adapters
from qerl.trainer.refill import Refill
from qerl.trainer.resume.changes import checkpoint_of_a_trainer
from qerl.trainer.resume.claim import claimed
from qerl.trainer.resume.provenance import check_base, write_provenance
from qerl.trainer.rewards import Scorer
from qerl.trainer.rollout_step import RolloutStep
from qerl.trainer.sampler import Sampler
from qerl.trainer.step_log import StepLog, print_table
from qerl.trainer.teacher import ADAPTER, Teacher
from qerl.trainer.update_step import Microbatch, UpdateStep, load_rollouts, save_rollouts
from qerl.update.kernels import use_backward_dtype
from qerl.update.path import UpdatePath
from qerl.update.recompute import accept_every_n_layers, no_offload_on_cpu, recompute_every_layer
from qerl.update.routing import routing_of

logger = logging.getLogger(__name__)

# Methods that compute the loss or the rollout in other trainers.
_NOT_CALLED = (
    "compute_loss", "_compute_loss", "_prepare_inputs", "_generate", "_generate_and_score_completions",
    "_calculate_rewards", "_get_per_token_logps_and_entropies",
)  # fmt: skip

_LEAST_SAMPLE_SIZE = 0.5
"""Effective sample size, as a share of the number of ratios (one per token, or per sample with a
sequence-level correction), below which a warning calls the samples too old."""

_HUB_ADVICE = "`hf auth login` and hub_model_id, or remove push_to_hub"

# Errors that torch, safetensors and the operating system raise when a file cannot be written.
_CANNOT_WRITE = (OSError, SafetensorError, RuntimeError)


class QeRLTrainer(Trainer):
    """A trainer with the signature of TRL's `GRPOTrainer`, whose rollouts run on the training modules.

    The parameters before ``engine`` are TRL's, in TRL's order, and act as TRL documents except as noted
    below.

    Args:
        model: Policy: a Hub id, folder or .gguf file, which is loaded as the settings say (`weights`,
            `tuning`, `lora_r`, ...); a causal LM, whose weights are trained; or a `PeftModel`, whose adapter
            is trained.
        reward_funcs: One or several functions `f(prompts, completions, **columns) -> list[float | None]`,
            reward models, or names of reward models.
        args: Settings; a `GRPOConfig` of TRL keeps TRL's defaults. None means a `QeRLConfig`
            with its defaults, which writes to `NAME-GRPO`.
        train_dataset: Rows with a column `prompt` and the columns that the reward functions read.
        eval_dataset: The same, for evaluation; several by name in a dictionary.
        processing_class: Tokenizer; None loads the model's.
        reward_processing_classes: As in TRL.
        callbacks: As in TRL.
        optimizers: As in TRL; an optimizer needs a loaded model, whose parameters it holds.
        peft_config: A fresh LoRA adapter for the model, instead of the one that the settings describe.
        quantization_config: Refused; see `arguments.REFUSED`.
        tools: As in TRL.
        environment_factory: As in TRL; an environment may also answer texts, see `qerl.agents.environment`.
        rollout_func: As in TRL: `f(prompts, trainer)`, called in place of the engine, which is available to
            it as `trainer.engine`.
        engine: Samples completions from `model`; None makes the fastest engine that supports it.
        acted_on: Names of settings that the caller has already applied; see `arguments`.

    Attributes:
        engine: Samples completions.
        rollouts, updates: The two halves of a step.
        update_path: Which parts of the update run on this project's kernels, and why others do not.
        reward_funcs, reward_func_names, reward_weights: As in TRL, including those that the settings add.
        eos_token_ids: Tokens that end a completion.

    Raises:
        QeRLError: An argument is missing, is refused or contradicts another one, or the model cannot be
            loaded or trained.
    """

    tags: tuple[str, ...] = ("qerl", "trl", "grpo")
    learns_from_demonstrations = False

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
        _check_overrides(type(self))
        _check_algorithm(self, args)
        self._is_of_a_run = bool(acted_on)
        given = complete(
            *(model, reward_funcs, args, train_dataset, eval_dataset),
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            peft_config=peft_config,
            engine=engine,
            acted_on=acted_on,
            tools=tools,
            environment_factory=environment_factory,
            rollout_func=rollout_func,
            refused={"quantization_config": quantization_config},
        )
        settings, policy = given.args, given.model
        if settings.replaced and is_first_process():
            logger.warning(replacements(settings.replaced))
        patience, threshold = settings.early_stopping_patience, settings.early_stopping_threshold
        callbacks = [*(callbacks or ()), *([EarlyStop(patience, threshold)] if patience else ())]
        # Both configs are saved beside the weights.
        policy.config.get_text_config().pad_token_id = given.tokenizer.pad_token_id
        policy.generation_config.pad_token_id = given.tokenizer.pad_token_id
        self.eos_token_ids = end_token_ids(policy, given.tokenizer)
        if isinstance(policy, PeftModel) and settings.gradient_checkpointing:
            policy.enable_input_require_grads()
        super().__init__(
            model=policy,
            args=settings,
            data_collator=list,  # rows as they are
            train_dataset=given.train_dataset,
            eval_dataset=given.eval_dataset,
            processing_class=given.processing_class,
            callbacks=[_Hooks(self), *callbacks],
            optimizers=optimizers,
        )
        self.model.add_model_tags([*self.tags])
        set_seed(settings.seed, device_specific=True)  # dropout differs between processes
        if settings.disable_dropout:
            for module in policy.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        self.engine, self.tools = given.engine, given.others.tools
        self._ready, self._has_environments = given.ready, bool(given.others.factories)
        self._start_update(policy, given.tokenizer, samples_itself=rollout_func is None)
        self._start_rollouts(given, rollout_func)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MetricsFile):
                callback.facts["update_path"] = self.update_path.record()

    def _start_update(self, policy: Any, tokenizer: PreTrainedTokenizerBase, samples_itself: bool) -> None:
        args = self.args
        self._base = base_model(policy)
        accept_every_n_layers(self.model)
        no_offload_on_cpu(args, self.accelerator.device)
        self._reference: Reference | None = None
        self._teacher: Teacher | None = None
        recompute = functools.partial(recompute_every_layer, self.model, args)
        self.updates, self.update_path = self._make_updates(policy, recompute)
        layers = use_backward_dtype(self._base, args.backward_dtype)
        self.update_path = dataclasses.replace(self.update_path, fp8_gradients=layers)
        self._rollout_every = args.steps_per_generation * args.num_iterations
        # A rollout that outlives an optimizer step trains the next one on samples of an older policy.
        older = args.gradient_accumulation_steps % self._rollout_every != 0
        # A `rollout_func` may return no log-probabilities to use as the old ones.
        self._keeps_old = older and not (args.use_rollout_logprobs and samples_itself)
        self._microbatch = 0  # of the epoch
        self._buffer: list[Microbatch] = []  # of the rollout in use
        self._due: list[Microbatch] = []  # of the optimizer step under way
        self._order: RepeatedRows | None = None  # None if the data set is a stream
        self._writes_to: Path | None = None
        self._warned = False  # that samples are too old

    def _make_updates(self, policy: Any, recompute: Callable[[], bool]) -> tuple[Any, UpdatePath]:
        """Return the half of a step that computes gradients, and its `UpdatePath`."""
        args = self.args
        path = ready_for_rows(policy, args)  # ahead of copies of the policy, which then run as it does
        if args.beta != 0.0:
            self._reference = Reference(args, policy)
            if (moves := self._reference.callback()) is not None:
                self.add_callback(moves)
            if self._reference.model is not None:
                routing_of(self._reference.model, args.replay_routing)
        if args.teacher is not None:
            self._teacher = Teacher(args, policy, path.by_segment, self.processing_class)
        updates = UpdateStep(
            *(args, self._base, path, self.accelerator, recompute, self._teacher),
            make_room=lambda: self.rollouts.make_room(),
        )
        return updates, path

    def _start_rollouts(self, given: Any, rollout_func: Callable[..., Any] | None) -> None:
        args, tokenizer, others = self.args, given.tokenizer, given.others
        scorer = Scorer(
            *(given.rewards, given.reward_processing_classes, given.calls),
            *(self.accelerator, lambda: self.state, args),
        )
        self.reward_funcs, self.reward_func_names = scorer.functions, scorer.names
        self.reward_processing_classes = scorer.processing_classes
        weights = args.reward_weights or [1.0] * (len(scorer.names) - len(given.episode_rewards))
        self.reward_weights = torch.tensor([*weights, *[1.0] * len(given.episode_rewards)])
        signal = Signal(
            group_size=args.num_generations,
            weights_F=self.reward_weights,
            scale=args.scale_rewards,
            aggregation=args.multi_objective_aggregation,
            judge=judge_of(scorer.names) if args.signal == "accuracy" else None,
            pass_at_k=args.pass_at_k,
        )
        self._conversations = None
        if others or args.thinking_budget is not None:
            pool = ToolPool(args.tool_timeout, args.tool_output_limit, given.calls.beside)
            limits = Limits(args.max_tool_calling_iterations, args.tool_errors, bool(args.stop_strings))
            self._conversations = Conversations(tokenizer, args.chat_template_kwargs, others, pool, limits)
        longest = args.generation_batch_size or args.per_device_eval_batch_size
        self._log = StepLog(self.accelerator.device, longest)
        sampler = Sampler(
            args=args,
            engine=self.engine,
            tokenizer=tokenizer,
            renderer=self.processing_class,
            eos_token_ids=self.eos_token_ids,
            embeddings=self._base.get_input_embeddings().weight.shape[0],
            conversations=self._conversations,
            noise=self._noise(),
            stops=given.stops,
            rollout_func=None if rollout_func is None else lambda prompts: rollout_func(prompts, self),
            ended=scorer.begin if scorer.early else None,
            log=self._log,
            rank=self.accelerator.process_index,
            state=lambda: self.state,
            teacher_positions=None if self._teacher is None else self._teacher.positions,
        )
        choice, refill = self._prompt_choice(), None
        if args.max_staleness:
            group, most = args.num_generations, args.max_staleness
            refill = Refill(sampler, self._rows_of_step, group, most, self._log)
        self.rollouts = RolloutStep(
            *(args, sampler, scorer, signal, choice, refill, self._log, self.accelerator, lambda: self.state)
        )
        if args.log_completions and args.log_completions_hub_repo and self.accelerator.is_main_process:
            repo, folder = args.log_completions_hub_repo, Path(str(args.output_dir)) / "completions"
            create_repo(repo, private=args.hub_private_repo, repo_type="dataset", exist_ok=True)
            self._commits = CommitScheduler(
                repo_id=repo, repo_type="dataset", folder_path=folder, every=2, allow_patterns=["*.parquet"]
            )

    def _prompt_choice(self) -> PromptChoice | None:
        args = self.args
        if not (args.curriculum or args.dynamic_sampling_batches):
            return None
        return PromptChoice(args, self.train_dataset, self.accelerator)

    def _noise(self) -> Callable[[], AdaptiveNoise] | None:
        """Return a function that makes the noise on its first call; None without noise.

        Making the noise runs the policy once and needs the length of the run.
        """
        args, policy = self.args, self.accelerator.unwrap_model(self.model)
        if not args.noise:
            return None
        return functools.cache(
            lambda: AdaptiveNoise(
                policy, args.noise_schedule_of(self.state.max_steps), args.seed, args.noise_scale
            )
        )

    # Training

    def train(self, resume_from_checkpoint: bool | str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' training loop, with checks of the checkpoint and the output folder.

        transformers resumes from any folder with any settings, and does not notice a second training that
        writes to the same folder. If no rollout had a signal, a warning says so at the end.
        """
        self.rollouts.begin_training(self._noise(), self._prompt_choice())
        self._buffer, self._due, self._microbatch, self._warned = [], [], 0, False
        self._log.begin("train")
        on_cpu = self.accelerator.device.type == "cpu"  # then each weight is dequantized once
        with contextlib.ExitStack() as block:
            block.callback(self.rollouts.end_training)
            if on_cpu:
                block.enter_context(dense_weights_kept(self.model))
                if self._teacher is not None and self._teacher.model is not None:
                    block.enter_context(dense_weights_kept(self._teacher.model))
            if not self._is_of_a_run:
                if resume_from_checkpoint:
                    resume_from_checkpoint = checkpoint_of_a_trainer(resume_from_checkpoint, self.args)
                folder = Path(str(self.args.output_dir))
                if not block.enter_context(claimed(folder, self.args.process_index)):
                    logger.warning(
                        "Another training writes to %s at present, and the checkpoints of both would replace "
                        "each other; give one of them another output_dir.",
                        folder,
                    )
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        taught = self.args.teacher is not None and self.args.distillation_weight == 1.0
        silent = self.rollouts.without_signal and not self.rollouts.had_signal
        if silent and not taught and is_first_process():
            logger.warning(
                "Nothing was learned from rewards: in none of the %d rollouts did a prompt have both better "
                "and worse samples. Read some completions (log_completions: true): the problems may be too "
                "hard or too easy for the model, its answers may be cut off (completions/clipped_ratio), or "
                "the rewards may not recognize right answers.",
                self.rollouts.without_signal,
            )
        return output

    def _run_epoch(self, **where: Any) -> None:
        """Run an epoch after setting its data order and its first microbatch.

        transformers and accelerate pass the epoch to samplers at most two wrappers deep; the loader of a
        resumed epoch on several processes has three. An epoch holds whole rollouts.
        """
        if self.state.global_step >= self.state.max_steps:  # resumed after the last step, to save the model
            self.control.should_training_stop = True
            return
        if self._order is not None:
            self._order.set_epoch(where["epoch"])
        where["model"].train()  # all modules: a model loaded by the caller may have some in eval mode
        resumed = where["resume_from_checkpoint"] is not None and where["epoch"] == where["epochs_trained"]
        self._microbatch = where["steps_trained_in_current_epoch"] if resumed else 0
        self._due = []  # microbatches of a step that a callback ended together with its epoch
        super()._run_epoch(**where)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make a rollout if one is due, and compute the update at the last microbatch of a step.

        Returns:
            The loss of the step at its last microbatch, else 0.
        """
        if not self.model.training:  # a test is cheaper than setting the mode of every module again
            model.train()
        with self._log.microbatch():
            if self._microbatch % self._rollout_every == 0 or not self._buffer:
                self._buffer = self._rollout(model, inputs)
            self._due.append(self._buffer[self._microbatch % self.args.steps_per_generation])
            self._microbatch += 1
            if not self.accelerator.sync_gradients:
                return torch.zeros((), device=self.args.device)
            due, self._due = self._due, []
            loss = self.updates.run(model, due, self.state.global_step + 1)
            every = self.args.torch_empty_cache_steps
            if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
                torch.cuda.empty_cache()
            return loss

    def _rollout(self, model: Any, rows: list[dict[str, Any]]) -> list[Microbatch]:
        """Make a rollout and return its microbatches, groups staying together."""
        first_group = self._microbatch // self._rollout_every * len(rows)
        found = self.rollouts.train(rows, first_group)
        samples = found.samples
        if self._keeps_old:
            with self._log.part("logprob"):
                for sample, values in zip(samples, self.updates.logprobs(model, samples), strict=True):
                    sample.old_logprobs = values
        if self._reference is not None:
            policy = self.accelerator.unwrap_model(self.model)
            with self._log.part("logprob"), self._reference.active(policy, model) as (reference, base):
                values_BC = self.updates.logprobs(reference, samples, base)
            for sample, values in zip(samples, values_BC, strict=True):
                sample.reference_logprobs = values
        if self.accelerator.num_processes > 1:
            samples = dealt(samples, self.updates.rows(samples), self.args, self.accelerator)
        size = len(samples) // self.args.steps_per_generation
        return [
            Microbatch(samples[start : start + size], found.tokens, found.entropy, found.counted)
            for start in range(0, size * self.args.steps_per_generation, size)
        ]

    def rollout(self, prompts: list[list[int]], samples: int) -> RolloutResult:
        """Sample completions of the current policy as a rollout does, for a `rollout_func`.

        Args:
            prompts: Token ids of each prompt.
            samples: Completions per prompt.
        """
        return self.rollouts.sampler.sample(prompts, samples, "train" if self.model.training else "eval")

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return transformers' gradient norm, computed before the optimizer step.

        Raises:
            QeRLError: The norm is not finite; the step would turn weights and optimizer state into NaN.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not torch.as_tensor(norm).isfinite():
            raise QeRLError(
                f"The gradient of step {self.state.global_step + 1} is not finite ({float(norm)}); no weight "
                "was changed. Go on from the last checkpoint with a lower max_grad_norm, or start anew with "
                "a lower learning_rate."
            )
        return norm

    def end_step(self) -> None:
        """Log the metrics of the optimizer step that has ended; reading them synchronises with the device."""
        metrics = self.updates.metrics()
        for name, values in metrics.items():
            self._log.metrics["train"][name] += values
        self._warn_of_staleness(*metrics.get("sampling/ratio/effective_sample_size", ()))
        of_step = self._log.end_step()
        if "memory/peak_gb" in of_step and self.accelerator.num_processes > 1:
            own = torch.tensor([of_step["memory/peak_gb"]], device=self.accelerator.device)
            of_step["memory/peak_gb"] = float(self.accelerator.gather(own).max())
        self._log.add("train", of_step)

    def _warn_of_staleness(self, effective: float = 1.0) -> None:
        """Warn once if samples of older policies bring the effective sample size below the threshold."""
        oldest = [0.0, *self._log.metrics["train"].get("staleness/max", ())][-1]
        if self._warned or not oldest or not effective < _LEAST_SAMPLE_SIZE:
            return
        self._warned = True
        logger.warning(
            "The effective sample size of step %d is only %.2f of its number of ratios: the policy has moved "
            "far from the older policies that drew the samples, up to %d optimizer steps ago; lower "
            "max_staleness or learning_rate.",
            *(self.state.global_step, effective, oldest),
        )

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose batch is this process's part of a rollout, see `qerl.trainer.order`."""
        args, rows = self.args, self.train_dataset
        prompts = args.generation_batch_size // args.num_generations
        if isinstance(rows, IterableDataset):
            rows = rows.shuffle(seed=args.seed) if args.shuffle_dataset else rows
            rows = repeated_stream(rows, args.num_generations, prompts, self._rollout_every)
        else:
            check_enough(args, len(rows), "train_dataset")
            seed = args.seed if args.shuffle_dataset else None
            self._order = RepeatedRows(rows, args.num_generations, prompts, self._rollout_every, seed)
        return self._loader(rows, args.per_device_train_batch_size * args.steps_per_generation, self._order)

    def _rows_of_step(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of an optimizer step, where a step is one rollout, as its epoch's loader does."""
        assert self._order is not None, "streams are refused"
        rows = self._read_columns(self.train_dataset)
        return [rows[index] for index in self._order.of_rollout(step)]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return a loader that gives each row once per sample.

        Rows of a stream are checked and filtered by length as they are read. A process's batch is no larger
        than its share of the rows; accelerate would fill a larger one with problems of other processes.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            named = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if rows not in named:
                known = f"those are {', '.join(named)}" if named else "there are none"
                raise QeRLError(
                    f"eval_dataset has no data set called {rows!r}; name one of its own ({known})."
                )
            rows = named[rows]
        if rows is None:
            raise QeRLError(
                "There is nothing to evaluate; give eval_dataset to the trainer or to evaluate()."
            )
        args, samples, order = self.args, self._eval_samples, None
        batch = args.per_device_eval_batch_size
        check_eval_batch(batch, samples)
        if isinstance(rows, IterableDataset):
            rows = self._ready(sound_rows(rows, "eval_dataset", self._has_environments), "evaluation prompts")
            rows = repeated_stream(rows.shuffle(seed=args.seed), samples)
        else:
            order = RepeatedRows(rows, samples, seed=args.seed)
            batch = min(batch, -(-len(cast(Sized, rows)) // self.accelerator.num_processes) * samples)
        return self._loader(rows, batch, order)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the loader that an evaluation of these rows would use."""
        return self.get_eval_dataloader(test_dataset)

    @property
    def environments(self) -> list[Any] | None:
        """Environments of the last rollout's samples; None if the run has no environments."""
        return None if self._conversations is None else self._conversations.environments

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference policy if it is a copy of the model; None otherwise, as with LoRA."""
        return None if self._reference is None else self._reference.model

    @property
    def _eval_samples(self) -> int:
        return self.args.num_generations_eval or self.args.num_generations

    def _read_columns(self, rows: Any) -> Any:
        """Drop the columns that the trainer does not read, if `remove_unused_columns` is set."""
        if self.args.remove_unused_columns and (names := getattr(rows, "column_names", None)):
            return rows.remove_columns([x for x in names if x not in ("prompt", *READY)])
        return rows

    def _loader(self, rows: Any, batch: int, order: RepeatedRows | None) -> DataLoader:
        args, streamed, rows = self.args, order is None, self._read_columns(rows)
        if streamed and args.dataloader_num_workers:
            logger.warning(
                "dataloader_num_workers is ignored for a stream: the main process reads it, which keeps "
                "groups whole."
            )
        workers = 0 if streamed else args.dataloader_num_workers
        options: dict[str, Any] = {}
        if workers:
            options = {
                "persistent_workers": args.dataloader_persistent_workers,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "prefetch_factor": args.dataloader_prefetch_factor,
                "in_order": args.dataloader_in_order,
                "worker_init_fn": functools.partial(
                    seed_worker, num_workers=workers, rank=args.process_index
                ),
            }
        if not streamed:
            options |= {"sampler": order, "drop_last": args.dataloader_drop_last}
        if streamed:  # batches of texts cannot be sent from one process to others
            self.accelerator.dataloader_config.dispatch_batches = False
        return self.accelerator.prepare(
            DataLoader(
                rows,
                batch_size=batch,
                collate_fn=self.data_collator,
                num_workers=workers,
                pin_memory=args.dataloader_pin_memory,
                **options,
            )
        )

    # Evaluation and logs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple:
        """Sample and score an evaluation batch, without computing a loss.

        GRPO's loss on fresh samples of the same policy is near zero whatever their rewards, so it would cost
        a forward pass and could not select a checkpoint.
        """
        self.rollouts.evaluate(inputs)
        return None, None, None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, and keep the completions in a table of their own.

        Data sets are checked, and filtered by `max_prompt_length`, as those given to the constructor.

        Raises:
            QeRLError: `metric_for_best_model` is not one of this run's metrics.
        """
        given = self._sound(eval_dataset, "eval_dataset", "evaluation prompts")
        with self._log.apart(metric_key_prefix):
            metrics = super().evaluate(given, ignore_keys, metric_key_prefix)
        if eval_dataset is None and self.args.goes_by_metric:
            name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
            if name not in metrics:
                known = ", ".join(metric for metric in metrics if "reward" in metric)
                raise QeRLError(
                    f"metric_for_best_model is {self.args.metric_for_best_model}, which the evaluations of "
                    f"this run do not report; choose one that they do, for example: {known}."
                )
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the metrics of an evaluation on these rows, without logging them."""
        test_dataset = self._sound(test_dataset, "test_dataset", "test prompts")
        with self._log.apart(metric_key_prefix):
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        self._log.put_runtimes(output.metrics)
        for name, value in self._log.means("eval").items():
            cast(dict[str, Any], output.metrics)[f"{metric_key_prefix}_{name}"] = value
        return output

    def _sound(self, rows: Any, argument: str, what: str) -> Any:
        """Return an evaluation data set, checked and filtered by length.

        None and the name of one of the trainer's data sets are left to transformers; streams are checked as
        they are read.
        """
        if rows is None or isinstance(rows, str | IterableDataset):
            return rows
        return self._ready(sound_rows(rows, argument, self._has_environments), what)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run an evaluation with the sampling seeds reset, and report minus the mean reward as its loss.

        Scripts that read a loss or select a checkpoint by it thus find one.
        """
        self.rollouts.begin_evaluation()
        self._log.begin(metric_key_prefix)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        rewards = self._log.metrics["eval"].get("reward", [])
        valid = [value for value in rewards if value == value]
        if valid:
            output.metrics[f"{metric_key_prefix}_loss"] = -sum(valid) / len(valid)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the mean of each metric added, and write the table of completions."""
        self._log.put_runtimes(logs)
        prefix = self._log.evaluation
        means = self._log.means("eval" if prefix else "train")
        named = {f"{prefix}_{name}" if prefix else name: value for name, value in means.items()}
        cast(dict[str, Any], logs).update(named)  # in place: an evaluation returns them
        super().log(logs, start_time)
        if not (means and self.args.log_completions and self._log.records):
            return  # without metrics it is the run's summary, after the table of its last step
        if not self.accelerator.is_main_process:
            return
        step = self.state.global_step
        table = self._log.write_table(Path(str(self.args.output_dir)), step)
        print_table(table, step, self.args.num_completions_to_print, prefix)
        shown = table[~table["prompt"].astype(str).duplicated()] if self.args.log_unique_prompts else table
        for reporter in _table_reporters(self.args.report_to or ()):
            reporter.log({"completions": reporter.Table(dataframe=shown)})

    # Saving

    def save_final(self, folder: Path) -> None:
        """Write the model or adapter and its tokenizer into the run folder, completely or not at all.

        Raises:
            QeRLError: The model cannot be written, which leaves checkpoints untouched, or cannot be pushed.
        """
        part = folder / UNFINISHED
        try:
            if self.args.should_save:
                clear(part)
                if (folder / CARD_FILE).is_file():  # from a checkpoint; PEFT would write an empty one
                    shutil.copy(folder / CARD_FILE, part)
                self.save_model(str(part), _internal_call=True)
                move_into(part, folder)
        except _CANNOT_WRITE as error:
            last = last_checkpoint(folder)
            advice = f"make room and go on from {last}, which is untouched" if last else "make room"
            raise QeRLError(
                f"The model could not be saved to {folder} ({first_line(error)}); {advice}."
            ) from error
        if self.args.push_to_hub:
            with hub_errors_said(f"The model was saved to {folder} and not pushed", _HUB_ADVICE):
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository of `push_to_hub`; transformers calls this before the first step."""
        with hub_errors_said("The repository of push_to_hub cannot be made", _HUB_ADVICE):
            super().init_hf_repo(*args, **kwargs)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **others: Any,
    ) -> None:
        """Write a model card that says how the model was trained.

        The named arguments are those of TRL's trainer; further ones of transformers' method are ignored.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        every = [*self.tags, *([tags] if isinstance(tags, str) else tags or ())]
        saved_as = self.args.hub_model_id or folder.as_posix()
        policy = self.accelerator.unwrap_model(self.model)
        name = model_name or Path(saved_as).name
        supervised = "sft" in self.tags  # of the trainer; `tags` are the user's
        card = model_card(policy, name, saved_as, every, dataset_name, supervised)
        card.save(folder / CARD_FILE)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint with everything that a resume needs.

        The checkpoint is written into a temporary folder, which is renamed once all processes have written
        their part. Older checkpoints are deleted after that.
        """
        run = Path(str(self.args.output_dir))
        part = run / UNFINISHED / f"checkpoint-{self.state.global_step}"
        checkpoint = run / part.name
        try:
            self.create_model_card()
            if self.args.should_save:
                clear(part.parent)
            self.accelerator.wait_for_everyone()
            self._write_checkpoint(model, trial, part)
            self.accelerator.wait_for_everyone()
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(checkpoint)
            if self.args.should_save:
                self.state.save_to_json(str(part / "trainer_state.json"))
                processes = self.accelerator.num_processes
                device = device_words(self.args.device)
                publish(part, checkpoint, self.state.global_step, processes, dump(self.args), device)
                best = self.state.best_model_checkpoint
                rotate_checkpoints(str(run), self.args.save_total_limit, best)
            self.accelerator.wait_for_everyone()
        except _CANNOT_WRITE as error:
            shutil.rmtree(part.parent, ignore_errors=True)
            raise QeRLError(
                f"The checkpoint {checkpoint} could not be saved ({first_line(error)}); earlier "
                "checkpoints are untouched."
            ) from error
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _write_checkpoint(self, model: Any, trial: Any, part: Path) -> None:
        """Write this process's part of a checkpoint, without transformers' rotation and push."""
        settings = {name: getattr(self.args, name) for name in ("save_total_limit", "push_to_hub")}
        self.args.save_total_limit, self.args.push_to_hub = None, False
        self._writes_to = part.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writes_to = None
            for name, value in settings.items():
                setattr(self.args, name, value)
        if self._reference is not None:
            self._reference.save(part)
        if self.args.should_save:
            self.updates.save(part)
            self.rollouts.save(part)
        # Drawn again after a resume, the samples would come from another policy.
        if self._microbatch % self._rollout_every != 0 and self._buffer:
            save_rollouts(self._buffer, self._rollout_file(part))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writes_to or super()._get_output_dir(trial))

    def _rollout_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"rollouts_{self.accelerator.process_index}.json"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        taught = self._teacher is not None and self._teacher.adapter is not None
        if state_dict is None and isinstance(self.model, PeftModel):
            state_dict = state_of(self.model)
        try:
            with _saved_without(self.model, ADAPTER) if taught else contextlib.nullcontext():
                super()._save(output_dir, state_dict)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(str(error)) from error  # the tokenizers' writer raises Exception itself
        if self.args.should_save:  # transformers may call this in every process
            write_provenance(self.args, self.model, Path(output_dir or str(self.args.output_dir)))

    # Resuming

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        folder, policy = Path(checkpoint), self.accelerator.unwrap_model(self.model)
        if (folder / ADAPTER_FILE).is_file():
            check_adapter(folder)
            check_base(folder, self._base, "the model that it was made with")
        with _fits(checkpoint):
            if isinstance(policy, PeftModel) and load_adapters(policy, folder, self._reference is not None):
                return
            if self._reference is not None:
                self._reference.load(folder)
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _fits(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            self._follow_schedule()
            self.updates.load(Path(checkpoint))
            self.rollouts.load(Path(checkpoint))
            self._buffer = load_rollouts(self._rollout_file(Path(checkpoint)))

    def _follow_schedule(self) -> None:
        """Set the optimizer's learning rates to those of the schedule.

        A checkpoint's optimizer has the rates of the schedule that it was saved with, and its next step would
        use them: the first step of a run that is made longer would have the last, lowest rate.
        """
        scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # accelerate wraps it
        if isinstance(scheduler, LambdaLR):
            pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            scheduler._last_lr = [rate * factor(scheduler.last_epoch) for rate, factor in pairs]
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate


class _Hooks(TrainerCallback):
    """Trainer code that must run as a callback of transformers' loop."""

    def __init__(self, trainer: QeRLTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # else a checkpoint's log, eval and save steps win

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.end_step()


def _check_overrides(subclass: type) -> None:
    """Raise if a subclass overrides a loss or rollout method that is never called here."""
    for name in _NOT_CALLED:
        if getattr(subclass, name, None) is not getattr(Trainer, name, None):
            raise QeRLError(
                f"{subclass.__name__} overrides {name}, which QeRLTrainer does not call; give rewards, "
                "rollout_func or loss_type, or call a loss of your own through qerl.update.driver.LossDriver."
            )


def _check_algorithm(trainer: QeRLTrainer, args: Any) -> None:
    """Raise if `algorithm` belongs to the other trainer."""
    if (getattr(args, "algorithm", "grpo") == "sft") == trainer.learns_from_demonstrations:
        return
    if trainer.learns_from_demonstrations:
        raise QeRLError(
            f"{type(trainer).__name__} learns from demonstrations; pass args=QeRLConfig(algorithm='sft')."
        )
    raise QeRLError("algorithm: sft learns from demonstrations; use QeRLSFTTrainer in place of QeRLTrainer.")


def _table_reporters(names: Collection[str]) -> Iterator[Any]:
    """Yield the modules of active reporters that can show tables."""
    if "wandb" in names:
        import wandb

        if wandb.run is not None:
            yield wandb
    if "trackio" in names:
        import trackio

        yield trackio


@contextlib.contextmanager
def _saved_without(model: PeftModel, adapter: str) -> Iterator[None]:
    """Inside the block, `model.save_pretrained` leaves out one adapter, which has a folder of its own."""
    others = [name for name in model.peft_config if name != adapter]
    vars(model)["save_pretrained"] = functools.partial(model.save_pretrained, selected_adapters=others)
    try:
        yield
    finally:
        del vars(model)["save_pretrained"]


@contextlib.contextmanager
def _fits(checkpoint: str) -> Iterator[None]:
    """Inside the block, turn loading errors (another model, a damaged file) into a `QeRLError`."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, *_CANNOT_WRITE) as error:
        if isinstance(error, QeRLError):
            raise
        raise QeRLError(
            f"The checkpoint {checkpoint} does not fit this run or is damaged ({first_line(error)}); "
            "give the model and the settings that it was made with."
        ) from error
