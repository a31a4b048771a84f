"""What makes TRL's trainer resumable to the bit, and its checkpoints whole.

- **Order of the data** is keyed by (seed, epoch). transformers and accelerate tell the epoch to samplers that
  they find by looking two wrappers deep; the loader of a resumed epoch on several processes has three. So the
  epoch is told to the sampler here.
- **Where in a rollout a run stands** is a count of microbatches, which TRL begins anew at 0. An epoch ends
  with a short step where the steps do not divide it, so the count does not follow from the step alone; it
  does from the place in the epoch, since an epoch holds whole rollouts.
- **Rollouts that are half used** are saved: sampled again they would come from another policy.
- **What was learned on the way** is saved: limits of memory, and which problems a curriculum has found
  settled.
- **Saving** goes into a folder aside, which is renamed when all processes have written their part
  (`qerl.checkpoint_folder`). Older checkpoints are deleted after that.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub.utils import httpx  # the client it speaks through, whose name differs by version
from safetensors import SafetensorError
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer

from qerl.checkpoint_folder import clear, move_into, publish
from qerl.errors import QeRLError, first_line
from qerl.families.parts import base_model
from qerl.kernels.device import device_words
from qerl.lora.adapter import check_adapter
from qerl.models.fingerprint import fingerprint
from qerl.run_folder import ADAPTER_FILE, UNFINISHED, last_checkpoint, read_policy
from qerl.settings.recipe import dump
from qerl.trainer.batch import Batch
from qerl.trainer.data import check_enough
from qerl.trainer.prompt_choice import PromptChoice
from qerl.trainer.resume.changes import checkpoint_of_a_trainer
from qerl.trainer.resume.claim import claimed
from qerl.trainer.resume.provenance import write_provenance
from qerl.trainer.resume.rollout_file import load_rollouts, save_rollouts
from qerl.trainer.trl.card import CARD_FILE, name_base
from qerl.trainer.trl.client import EpochRepeatSampler
from qerl.trainer.trl.reference import load_reference, save_reference
from qerl.update.memory_retry import MemoryRetry

logger = logging.getLogger(__name__)

# What torch, safetensors and the system raise where a file cannot be written.
_CANNOT_WRITE = (OSError, SafetensorError, RuntimeError)


class ResumableTrainer(GRPOTrainer):
    """`GRPOTrainer` that goes on from a checkpoint as if it had never stopped."""

    _retry: MemoryRetry
    _prompts: PromptChoice
    _step: int
    _buffered_inputs: list[Batch] | None
    _order: EpochRepeatSampler | None = None  # none where the data are iterable
    _writes_to: Path | None = None
    _is_of_a_run = False  # `trainer.run` checks what it resumes before it loads the model

    @property
    def _generate_every(self) -> int:
        """Microbatches that use one rollout."""
        return self.args.steps_per_generation * self.num_iterations

    def train(self, resume_from_checkpoint: bool | str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wraps transformers', which goes on from any folder, with whatever settings, and knows of nobody
        else who writes there."""
        if self._is_of_a_run:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint:
            resume_from_checkpoint = checkpoint_of_a_trainer(resume_from_checkpoint, self.args)
        folder = Path(str(self.args.output_dir))
        with claimed(folder, self.args.process_index) as alone:
            if not alone:
                logger.warning(
                    "Another training writes to %s at present, and the checkpoints of both would replace "
                    "each other; give one of them another output_dir.",
                    folder,
                )
            return super().train(resume_from_checkpoint, *args, **kwargs)

    # Order of the data

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochRepeatSampler:
        rows = self.train_dataset if dataset is None else dataset
        check_enough(self.args, len(rows), "train_dataset")
        self._order = EpochRepeatSampler(
            data_source=rows,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self._generate_every,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return self._order

    def _run_epoch(self, **where: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # a run that was ended before its model was saved
            self.control.should_training_stop = True
            return
        if self._order is not None:
            self._order.set_epoch(where["epoch"])
        super()._run_epoch(**where)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        epochs, microbatches = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)  # those of a checkpoint would win over the settings
        self._step = microbatches
        self._retry.forget_step()  # one that was cut off, or the last one of an earlier training
        return epochs, microbatches

    # Saving

    def save_final(self, folder: Path) -> None:
        """Write the model or adapter and its tokenizer into the run folder, whole or not at all.

        Raises:
            QeRLError: It cannot be written, which leaves checkpoints untouched, or not be pushed.
        """
        part = folder / UNFINISHED
        try:
            if self.args.should_save:
                clear(part)
                if (folder / CARD_FILE).is_file():  # TRL's, of a checkpoint; PEFT would begin an empty one
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
            with _hub_errors_said(f"The model was saved to {folder} and not pushed"):
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Wraps transformers', which makes the repository of `push_to_hub` before the first step."""
        with _hub_errors_said("The repository of push_to_hub cannot be made"):
            super().init_hf_repo(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Wraps TRL's, which knows no base that is not on the Hub."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir))
            name_base(folder / CARD_FILE, self.accelerator.unwrap_model(self.model), folder.as_posix())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial))
        part = run / UNFINISHED / f"checkpoint-{self.state.global_step}"
        checkpoint = run / part.name
        try:
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
        """Write this process's part of a checkpoint; what transformers does with a whole one is left out."""
        settings = {name: getattr(self.args, name) for name in ("save_total_limit", "push_to_hub")}
        self.args.save_total_limit, self.args.push_to_hub = None, False
        self._writes_to = part.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writes_to = None
            for name, value in settings.items():
                setattr(self.args, name, value)
        save_reference(self, part)
        if self.args.should_save:
            self._retry.save(part)
            self._prompts.save(part)
        if self._step % self._generate_every != 0 and self._buffered_inputs is not None:
            save_rollouts(self._buffered_inputs, self._rollout_file(part))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writes_to or super()._get_output_dir(trial))

    def _rollout_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"rollouts_{self.accelerator.process_index}.safetensors"

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        try:
            super()._save(output_dir, state_dict)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(str(error)) from error  # the tokenizers' writer raises Exception itself
        if self.args.should_save:  # transformers may call this in every process
            folder = Path(output_dir or str(self.args.output_dir))
            write_provenance(self.args, self.model, folder)

    # Loading

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if (Path(checkpoint) / ADAPTER_FILE).is_file():
            check_adapter(Path(checkpoint))
            self._check_base(Path(checkpoint))
        with _fits(checkpoint):
            if not load_reference(self, Path(checkpoint)):
                super()._load_from_checkpoint(checkpoint, model)

    def _check_base(self, checkpoint: Path) -> None:
        """Refuse a checkpoint of an adapter on another model, which may have the same name."""
        base = base_model(self.accelerator.unwrap_model(self.model))
        expected = read_policy(checkpoint).get("fingerprint")
        if expected is not None and expected != fingerprint(base.named_parameters()):
            raise QeRLError(
                f"{checkpoint} was trained on another model than {base.name_or_path}, whose norms or "
                "embeddings are not the same; give the model that it was made with."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _fits(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            self._retry.load(Path(checkpoint))
            self._prompts.load(Path(checkpoint))
            file = self._rollout_file(Path(checkpoint))
            if file.exists():
                slices = self.args.steps_per_generation
                self._buffered_inputs = load_rollouts(file, slices, self.args.device)


@contextlib.contextmanager
def _fits(checkpoint: str) -> Iterator[None]:
    """Inside the block a checkpoint of another model, or a damaged one, ends in a sentence."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, *_CANNOT_WRITE) as error:
        raise QeRLError(
            f"The checkpoint {checkpoint} does not fit this run or is damaged ({first_line(error)}); "
            "give the model and the settings that it was made with."
        ) from error


@contextlib.contextmanager
def _hub_errors_said(what: str) -> Iterator[None]:
    """Inside the block a Hub that does not answer or refuses ends in a sentence that begins so."""
    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:  # ValueError: an id that is none
        raise QeRLError(
            f"{what} ({first_line(error)}); see to the network, `hf auth login` and hub_model_id, or remove "
            "push_to_hub."
        ) from error
