"""Conversations to learn from, without answers that could be judged (``demonstrations:NAME``).

Rows have the columns that TRL's `SFTTrainer` takes::

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Hello."}
    {"prompt": "The sky is", "completion": " blue."}

A prompt of messages has a completion of messages, or a text that the assistant says. A prompt of text is no
chat and gets no template. No instruction is put in front: a system message must be in the rows. Held-out rows
give a loss and no accuracy; a task whose answers are judged has both (`Task.demonstrations`).

Given up: tool calls, and columns with other names, which `Dataset.map` can rename. Columns with which TRL
would render a row, and messages with more than role and content, are refused; other columns are left out.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset

from qerl.errors import QeRLError
from qerl.tasks.guard import RewardFunction
from qerl.tasks.hub import part_of
from qerl.tasks.jsonl import Jsonl, completion_of, messages_of

COLUMNS = ("messages", "prompt", "completion")

UNREAD = ("tools", "image", "images", "chat_template_kwargs")
"""Columns with which TRL renders a row, and which are refused here."""


class Demonstrations(Jsonl):
    """Conversations of a file or of a data set on the Hub.

    Args:
        name: A path that ends in .jsonl, else the data set's id.
        test_size: As in :class:`Jsonl`.
        test_path: A second file with the held-out rows; on the Hub, the name of their split.
        split: For a data set on the Hub, the split to train on.
        config: For a data set on the Hub, the folder with its files, such as ``data``; None where they lie at
            the top.
    """

    def __init__(
        self,
        name: str,
        test_size: int = 0,
        test_path: str | None = None,
        split: str = "train",
        config: str | None = None,
    ) -> None:
        super().__init__(name, test_size, test_path)
        self.on_hub = not name.endswith(".jsonl")
        self.name, self._dataset, self._config = f"demonstrations:{name}", name, config
        if self.on_hub:
            self.path = Path(split)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """None: there is no answer to compare with."""
        return []

    def _rows(self, held_out: bool, solved: bool = False) -> Dataset:
        if not solved:
            raise QeRLError(
                f"Task {self.name} has no answers that could be rewarded; train on it with algorithm: sft."
            )
        return super()._rows(held_out, solved)

    def _read(self, path: Path, solved: bool) -> list[dict[str, Any]]:
        if not self.on_hub:
            return super()._read(path, solved)
        where = f"{self._dataset}{f' ({self._config})' if self._config else ''}, split {path}"
        rows = []
        for number, row in enumerate(part_of(self._dataset, self._config, str(path), where)):
            try:
                rows.append(self._row(row, solved))
            except ValueError as error:
                raise QeRLError(f"The data set {where}, row {number}: {error}.") from error
        return rows

    def _row(self, row: dict[str, Any], solved: bool) -> dict[str, Any]:
        if unread := [name for name in UNREAD if row.get(name)]:
            raise ValueError(
                f"demonstrations are not rendered with the column {unread[0]}; leave such rows out"
            )
        if row.get("messages") is not None:
            return {"messages": messages_of(row["messages"], "messages", "assistant")}
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str) and prompt and completion:
            return {"prompt": prompt, "completion": completion}
        if not isinstance(prompt, list):
            raise ValueError(
                "a demonstration needs the column messages, or prompt and completion, both text or both chat "
                f"messages; this has {', '.join(row) or 'no columns'}"
            )
        return {"prompt": messages_of(prompt, "the prompt", "user"), "completion": completion_of(row)}
