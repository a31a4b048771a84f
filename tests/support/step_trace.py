"""What one step of the plainest run goes through: `python -m tests.support.step_trace` prints it.

A tiny model in hand, all of whose weights train, one microbatch, one reward function, no tools, noise or
checkpoint. From the start of one optimizer step to that of the next, so with its log line and the next data.
"""

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

import qerl
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.models import make_tiny_model, make_tiny_tokenizer

_OURS = str(Path(qerl.__file__).parent) + "/"
_THEIRS = ("/site-packages/transformers/", "/site-packages/trl/")


@dataclass
class Trace:
    """A step.

    Attributes:
        modules: Modules of the package that were entered, by number of calls.
        crossings: (caller, callee) where the trainer calls transformers or TRL, or is called by them.
        calls: Functions of the package in the order of their first calls, as ``module.Class.function``.
    """

    modules: Counter[str] = field(default_factory=Counter)
    crossings: list[tuple[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


def _place(frame: FrameType) -> tuple[bool, str] | None:
    """Whether a frame is the package's, and its name; None of others than the package's and the
    libraries'."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if file.startswith(_OURS):
        return True, f"{file.removeprefix(_OURS).removesuffix('.py').replace('/', '.')}.{name}"
    for folder in _THEIRS:
        if folder in file:
            library, module = folder.split("/")[2], file.partition(folder)[2].removesuffix(".py")
            return False, f"{library}.{module.replace('/', '.')}.{name}"
    return None


class _Tracer(TrainerCallback):
    def __init__(self) -> None:
        self.trace = Trace()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(self._called if state.global_step == 1 else None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        here = _place(frame) if event == "call" else None
        if here is None:
            return
        ours, name = here
        if ours:
            self.trace.modules[frame.f_code.co_filename.removeprefix(_OURS)] += 1
            if name not in self.trace.calls:
                self.trace.calls.append(name)
        caller, above = frame.f_back, None
        while caller is not None and above is None:
            above, caller = _place(caller), caller.f_back
        if above is not None and above[0] != ours and (name if ours else above[1]).startswith("trainer."):
            self.trace.crossings.append((above[1], name))


def trace_step(weights: str | None = None) -> Trace:
    """The second of three steps of a tiny model on the CPU.

    Args:
        weights: Loads the model by its name in this format, with LoRA; None hands it over and trains all of
            it.
    """
    with tempfile.TemporaryDirectory() as folder:
        model: Any = make_tiny_model("llama")
        tokenizer = make_tiny_tokenizer()
        if weights is not None:
            model.save_pretrained(f"{folder}/model")
            tokenizer.save_pretrained(f"{folder}/model")
            model = f"{folder}/model"
        settings = {} if weights is None else {"weights": weights, "lora_r": 4}
        if weights is None:
            settings = {"weights": "bf16", "tuning": "full"}
        args = QeRLConfig(
            output_dir=f"{folder}/run", num_generations=4, per_device_train_batch_size=8, max_steps=3,
            max_completion_length=6, use_cpu=True, logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, **settings,
        )  # fmt: skip
        rows = Dataset.from_dict({"prompt": ["one two", "three", "four five six", "seven eight"] * 3})
        tracer = _Tracer()
        trainer = QeRLTrainer(model, _length, args, rows, processing_class=tokenizer, callbacks=[tracer])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return tracer.trace


def _length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) + sum(ids) % 3) for ids in completion_ids]


def main() -> None:
    """Print both numbers, and what they count."""
    for title, weights in (("all weights of a model in hand", None), ("NVFP4 with LoRA", "nvfp4")):
        trace = trace_step(weights)
        print(f"{title}: {len(trace.modules)} modules, {len(trace.crossings)} crossings")
        for module, calls in sorted(trace.modules.items()):
            print(f"  {calls:5d} {module}")
        for pair in trace.crossings:
            print("        {} -> {}".format(*pair))


if __name__ == "__main__":
    main()
