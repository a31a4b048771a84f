r"""Mathematics data sets of the Hub: a table of their sources, and one class that reads them all.

:data:`SOURCES` lists the data sets that the QeRL paper trains on and evaluates with (arXiv 2510.11696,
section 4.1). Prompts ask for ``\boxed{}``, the form in which the paper's models were trained to answer; for
GSM8K they ask for ``####``, the form of GSM8K's own solutions.

If a data set has a test split, that split is the held-out set. Big-Math and DAPO-Math have none, so one
problem in 32 is held out by a hash of its text (:mod:`qerl.tasks.base`). A model trained on some levels of
Big-Math is therefore never tested on one of its training problems, whichever levels the test uses. The
remaining data sets are benchmarks without training problems.

Files are fetched with :func:`qerl.models.hub.download` and read from the Hub's cache, not by name with
``load_dataset``: without a network the former uses the cached copy or fails at once, and the latter retries
for 23 s (datasets 5.2, no name resolution).

If a data set has several parts, only the needed part is downloaded, and ``load_dataset`` receives a list of
its files. Given the folder, ``load_dataset`` would look for the first part that the data set's README lists,
and would fail if another part was downloaded.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from qerl.errors import QeRLError, first_line
from qerl.models.hub import Unreachable, download
from qerl.tasks.answers import after_hashes
from qerl.tasks.base import Task, as_dataset, assistant_says, holdout_rank
from qerl.tasks.formats import get_format

HELD_OUT_SHARE = 1 / 32
"""The held-out share of a data set without a test split: about 440 problems of DAPO-Math and 1,300 of each
level of Big-Math."""

BIGMATH_LEVELS = range(1, 6)


@dataclass(frozen=True)
class Source:
    """The place of a task's problems on the Hub.

    Attributes:
        dataset: Id of the data set.
        train: The split to train on; None for a benchmark.
        test: The held-out split; None sets a share of the training split aside.
        question, answer: Columns of the problem and of the answer.
        answer_format: A name from :data:`qerl.tasks.formats.FORMATS`.
        configs: The parts of the data set to read, in this order; None for a data set without parts.
        read_answer: Extracts the answer from the text of the answer column; returns None if there is none.
        read_reasoning: Extracts the reasoning from that text; None if the text is the answer alone.
    """

    dataset: str
    train: str | None
    test: str | None
    question: str
    answer: str
    answer_format: str = "boxed"
    configs: tuple[str | None, ...] = (None,)
    read_answer: Callable[[str], str | None] = str.strip
    read_reasoning: Callable[[str], str | None] | None = None


def _before_hashes(solution: str) -> str:
    """Return the reasoning of a GSM8K solution, without its calculator annotations (``<<48/2=24>>``)."""
    return re.sub(r"<<[^>]*>>", "", solution.rpartition("####")[0]).strip()


SOURCES = {
    "gsm8k": Source(
        *("openai/gsm8k", "train", "test", "question", "answer", "hashes", ("main",)),
        *(after_hashes, _before_hashes),
    ),
    # Its parts are the levels; see bigmath().
    "bigmath": Source("open-r1/Big-Math-RL-Verified-Processed", "train", None, "prompt", "solution"),
    # "en" leaves out the 3,282 Chinese problems, as the paper's released code does.
    "dapo-math": Source(
        "open-r1/DAPO-Math-17k-Processed", "train", None, "prompt", "solution", configs=("en",)
    ),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "aime24": Source("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "aime25": Source("math-ai/aime25", None, "test", "problem", "answer"),
    "amc23": Source("math-ai/amc23", None, "test", "question", "answer"),
}
"""The source of each task, by the task's name."""


class HubTask(Task):
    """The problems of one data set of the Hub."""

    on_hub = True

    def __init__(self, name: str, source: Source) -> None:
        super().__init__(name, get_format(source.answer_format))
        self.source = source

    def train(self) -> Dataset:
        """The training problems without the held-out ones; see :meth:`Task.train`."""
        if self.source.train is None:
            raise QeRLError(
                f"Task {self.name} is a benchmark without training problems; train on another task and use "
                f"{self.name} with `qerl eval`."
            )
        problems = self._problems(self.source.train)
        if self.source.test is None:
            problems = ((q, a) for q, a in problems if holdout_rank(q) >= HELD_OUT_SHARE)
        return self._rows(problems, "training")

    def test(self) -> Dataset:
        """The test split in its own order, or the held-out problems in an order that mixes the parts;
        see :meth:`Task.test`."""
        if self.source.test is not None:
            return self._rows(self._problems(self.source.test), "test")
        assert self.source.train is not None  # a source has one of the two
        held_out = {q: a for q, a in self._problems(self.source.train) if holdout_rank(q) < HELD_OUT_SHARE}
        return self._rows(sorted(held_out.items(), key=lambda problem: holdout_rank(problem[0])), "held-out")

    def demonstrations(self, held_out: bool = False) -> Dataset:
        """The problems with the solutions of the data set, in the form that the prompt asks for; see
        :meth:`Task.demonstrations`."""
        split, read = self.source.test if held_out else self.source.train, self.source.read_reasoning
        if read is None or split is None:
            return super().demonstrations(held_out)
        rows = self.test() if held_out else self.train()
        reasoning = (text for _, text in self._problems(split, read))
        solved = [self.format.write(text, a) for text, a in zip(reasoning, rows["answer"], strict=True)]
        return rows.add_column("completion", list(map(assistant_says, solved)))

    def _rows(self, problems: Iterator[tuple[str, str]] | Sequence[tuple[str, str]], what: str) -> Dataset:
        rows = ({"prompt": self.prompt(question), "answer": answer} for question, answer in problems)
        return as_dataset(rows, f"Task {self.name}, {what} set,")

    def _problems(
        self, split: str, read: Callable[[str], str | None] | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield question and answer of each problem of a split; ``read`` replaces the source's
        ``read_answer``."""
        source = self.source
        read = read or source.read_answer
        for config in source.configs:
            where = f"{source.dataset}{f' ({config})' if config else ''}, split {split}"
            data = part_of(source.dataset, config, split, where)
            for column in (source.question, source.answer):
                if column not in data.column_names:
                    raise QeRLError(
                        f"The data set {where}, has no column {column!r} but {', '.join(data.column_names)}; "
                        "if it has changed on the Hub, train on a copy of your own with jsonl:PATH."
                    )
            for number, row in enumerate(data.select_columns([source.question, source.answer])):
                question, stated = row[source.question], row[source.answer]
                answer = None if stated is None else read(str(stated))
                if not question or not answer:
                    raise QeRLError(
                        f"The data set {where}, states no {'answer' if question else 'question'} in row "
                        f"{number}; use a copy without that row with jsonl:PATH."
                    )
                yield question, answer


def bigmath(levels: Sequence[int] = (3, 4, 5)) -> HubTask:
    """The task Big-Math with the given levels of difficulty, from 1 (easy) to 5 (hard); the paper trains on 3
    to 5.

    Raises:
        QeRLError: ``levels`` is empty or has an entry outside 1 to 5.
    """
    if isinstance(levels, str | int) or not levels or not set(levels) <= set(BIGMATH_LEVELS):
        raise QeRLError(f"The levels of bigmath are {levels!r}; give a list of numbers from 1 to 5.")
    configs = tuple(f"level_{level}" for level in sorted(set(levels)))
    return HubTask("bigmath", replace(SOURCES["bigmath"], configs=configs))


def part_of(dataset: str, config: str | None, split: str, where: str) -> Dataset:
    """Load one part of a data set from the Hub or its cache.

    Args:
        dataset: Id on the Hub.
        config: The data set's folder with the part; None where its files lie at the top.
        split: Name of the part.
        where: The part in words, for messages.

    Raises:
        QeRLError: The Hub is out of reach and the cache lacks the files, or they cannot be read.
    """
    files = [f"{config}/*.parquet"] if config else ["README.md", "*.parquet", "*.jsonl"]
    try:
        folder = download(dataset, files, "dataset")
    except Unreachable as error:
        raise QeRLError(
            f"The data set {dataset} was found neither on the Hub nor in its cache ({error}); connect to "
            "the network, or use the task arithmetic or a file of your own with jsonl:PATH."
        ) from error
    try:
        if config is None:
            return load_dataset(str(folder), split=split)
        parts = sorted(map(str, (folder / config).glob(f"{split}-*.parquet")))
        if not parts:
            raise FileNotFoundError(f"no file {config}/{split}-*.parquet")
        return load_dataset("parquet", data_files={split: parts}, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise QeRLError(
            f"The data set {where}, cannot be read from {folder} ({first_line(error)}); run again with a "
            "network connection to download missing files, or use a copy of your own with jsonl:PATH."
        ) from error
