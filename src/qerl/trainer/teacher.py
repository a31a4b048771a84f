"""The teacher of a distillation (`algorithm: distill`): its model, its prompt, and its output.

`teacher` names one of three, by their cost beside the policy:

- `base`: with LoRA the policy's base without an adapter, which takes no memory; with full tuning a frozen
  copy of the model as it was given. It teaches something where it reads more than the policy does
  (`teacher_prompt`), or where the policy has moved away from it.
- `adapter:PATH`: the same base with a saved adapter, which stays frozen beside the one that trains. The path
  identifies it, so checkpoints and run folders do not hold it.
- anything else: a model of its own, by Hub id, folder or file, in the format `teacher_weights`. Its
  vocabulary has to be the policy's, token by token.

It is a frozen policy, like the reference of the KL penalty (`qerl.trainer.reference`), but its pass is in the
update and not after the rollout: whole distributions are compared, and the hidden states from which its head
computes them are needed for one chunk at a time. So a checkpoint holds nothing of a teacher, and a step that
is repeated in smaller chunks runs the teacher again.

**Its prompt.** `teacher_prompt` is the text that a teacher reads in place of the user's last message, or of a
prompt that is a text: `{prompt}` in it is that message or text, `{NAME}` the column NAME of the row; `{{` and
`}}` are braces. The messages before it, the system's included, and the generation prompt after it are the
policy's. The completion's tokens are the same, each after its model's own prompt, so at each position both
predict the next token of the same text. The policy's rows do not contain the teacher's prompt.

A teacher that is a mixture of experts chooses its own experts: the choices that are replayed for the update
are the policy's.

Legend: S positions that are scored, E hidden size of the teacher.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.families.parts import base_model, eval_mode
from qerl.families.sizes import positions_of
from qerl.lora.adapter import add_frozen_adapter, check_adapter
from qerl.models.hub import find_model
from qerl.models.load import load_model, load_tokenizer
from qerl.settings.config import QeRLConfig
from qerl.settings.groups import TEACHER_ADAPTER
from qerl.trainer.policy import compute_dtype
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.reference import Frozen, check_biases, frozen_copy, is_fresh
from qerl.trainer.resume.provenance import check_base
from qerl.update.distillation import Target
from qerl.update.head import Head, run_row
from qerl.update.packed_row import Sample, pack_row

ADAPTER = "teacher"
"""Name of the teacher's adapter on the policy's base."""

_PLACE = re.compile(r"\{\{|\}\}|\{(\w+)\}")


class Teacher(Frozen):
    """The teacher of a run with `algorithm: distill`.

    Args:
        args: Settings of the run.
        policy: The policy before training, where it trains; PEFT-wrapped or not.
        by_segment: Whether the policy's attention reads segments of a packed row.
        tokenizer: The policy's tokenizer.

    Attributes:
        positions: Maximum number of tokens of a sample that it can read; None sets no limit.

    Raises:
        QeRLError: The teacher does not exist, has another vocabulary or base, or is the policy as it begins
            and reads the same prompt.
    """

    def __init__(
        self, args: QeRLConfig, policy: nn.Module, by_segment: bool, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        super().__init__()
        self._args, self._policy, self._by_segment = args, policy, by_segment
        self._base = base_model(policy)
        name = str(args.teacher)
        if name == "base":
            self._take_base()
        elif name.startswith(TEACHER_ADAPTER):
            self._take_adapter(Path(name.removeprefix(TEACHER_ADAPTER)).expanduser())
        else:
            self._load(name, tokenizer)
        self.positions = positions_of((self.model or self._base).config.get_text_config(decoder=True))

    def _take_base(self) -> None:
        is_lora = isinstance(self._policy, PeftModel)
        if isinstance(self._policy, PeftModel):
            check_biases(self._policy, "teacher: base", "the teacher has")
        if self._args.teacher_prompt is None and (not is_lora or is_fresh(self._policy)):
            raise QeRLError(
                "teacher: base is the same model as the policy at its start, so it has nothing to teach; set "
                "teacher_prompt, or name another teacher."
            )
        if not is_lora:
            self.model = frozen_copy(self._base)

    def _take_adapter(self, folder: Path) -> None:
        assert isinstance(self._policy, PeftModel), "the settings have refused it"
        check_biases(self._policy, "teacher: adapter", "the teacher has")
        check_adapter(folder)
        check_base(folder, self._base, "a teacher of this model")
        add_frozen_adapter(self._policy, ADAPTER, folder)
        self.adapter = ADAPTER

    def _load(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        args, found = self._args, find_model(name)
        _check_tokens(name, load_tokenizer(found, False, args.trust_remote_code), tokenizer)
        model = load_model(
            found,
            weights=args.teacher_weights,
            dtype=compute_dtype(args, args.device),
            device=args.device,
            rounding=args.rounding,
            trust_remote_code=args.trust_remote_code,
        ).requires_grad_(False)
        own, theirs = (_vocabulary(each) for each in (self._base, model))
        if own != theirs:
            raise QeRLError(
                f"The teacher {name} has a vocabulary of {theirs} and the policy one of {own}; name a "
                "teacher of the same vocabulary."
            )
        self._by_segment = ready_for_rows(model, args).by_segment
        self.model = model

    def target(
        self, model: nn.Module, samples: Sequence[Sample], rows: Sequence[int], device: torch.device
    ) -> Target:
        """Return the teacher's output for the positions that the packed row of these samples scores.

        Args:
            model: The policy as it trains, wrapped for several processes or not.
            samples, rows, device: As in `qerl.update.packed_row.pack_row`.
        """
        seen = [
            replace(sample, prompt=sample.teacher_prompt or sample.prompt, choices=None) for sample in samples
        ]
        row = pack_row(seen, rows, device)
        with torch.no_grad(), self.active(self._policy, model) as (teacher, base), eval_mode(teacher):
            base = base or self._base
            hidden_SE = run_row(teacher, base, row, self._by_segment, lambda hidden_SE: hidden_SE)
        args = self._args
        return Target(hidden_SE, Head.of(base, args.temperature), args.distillation_alpha)


def teacher_prompt(template: str, prompt: Any, row: Mapping[str, Any]) -> Any:
    """Return the prompt that a teacher reads, a text or messages as the policy's is.

    Args:
        template: `teacher_prompt` of the settings.
        prompt: The policy's prompt.
        row: The row of the data.

    Raises:
        QeRLError: The row lacks a column or has None in it, or the prompt has no user message that is a text.
    """
    if isinstance(prompt, str):
        return _filled(template, prompt, row)
    users = [at for at, message in enumerate(prompt) if message["role"] == "user"]
    if not users:
        raise QeRLError(
            "teacher_prompt replaces the last user message, and a prompt has no user message; give each "
            "prompt one."
        )
    asked = prompt[users[-1]]
    if not isinstance(asked["content"], str):
        raise QeRLError(
            "teacher_prompt repeats the user's last message as a text, and a prompt has one of type "
            f"{type(asked['content']).__name__}; give messages whose content is a text."
        )
    return [
        *prompt[: users[-1]],
        asked | {"content": _filled(template, asked["content"], row)},
        *prompt[users[-1] + 1 :],
    ]


def check_teacher_room(longest: int, positions: int) -> None:
    """Raise if samples after the teacher's prompt may be longer than its positions.

    Args:
        longest: Maximum number of tokens of such a sample, prompt included.
        positions: Positions of the teacher.

    Raises:
        QeRLError: They may.
    """
    if longest - 1 > positions:  # a last token is never an input
        raise QeRLError(
            f"The teacher's prompt and a completion may have {longest} tokens together, and the teacher has "
            f"{positions} positions; shorten teacher_prompt, or lower max_completion_length."
        )


def check_teacher_prompt(template: str, columns: Collection[str]) -> None:
    """Raise if a template does not contain ``{prompt}``, or names a column that the data do not have.

    Raises:
        QeRLError: Either is the case.
    """
    names = set(_PLACE.findall(template)) - {""}  # "" for the escaped braces
    if "prompt" not in names:
        raise QeRLError(
            "teacher_prompt replaces the user's message but does not contain {prompt}; put {prompt} where "
            "the message belongs."
        )
    if missing := sorted(names - {*columns, "prompt"}):
        raise QeRLError(
            f"teacher_prompt names {{{missing[0]}}}, which is no column of the data (those are "
            f"{', '.join(sorted(columns))}); name one of them."
        )


def _filled(template: str, asked: str, row: Mapping[str, Any]) -> str:
    values = {**row, "prompt": asked}
    check_teacher_prompt(template, values)

    def said(place: re.Match[str]) -> str:
        if place[1] is None:
            return place[0][0]
        if values[place[1]] is None:
            raise QeRLError(
                f"teacher_prompt names {{{place[1]}}}, and a row has nothing in that column; fill it, or "
                "leave such rows out."
            )
        return str(values[place[1]])

    return _PLACE.sub(said, template)


def _vocabulary(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    return len(head.weight)


def _check_tokens(name: str, theirs: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
    """Raise if the teacher's tokenizer gives a token id another text than the policy's.

    Raises:
        QeRLError: It does.
    """
    words = {number: word for word, number in theirs.get_vocab().items()}
    for word, number in own.get_vocab().items():
        if words.get(number, word) != word:
            raise QeRLError(
                f"The teacher {name} has {words[number]!r} as token {number}, which the policy has as "
                f"{word!r}; name a teacher of the same vocabulary."
            )
