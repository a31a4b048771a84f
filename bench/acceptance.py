"""How many tokens drafts from what was written before would get accepted, counted on real completions.

    python -m bench acceptance --out bench/results/acceptance-smollm2-cpu.json --completions drawn.json

A draft for a row is what followed the row's last tokens where they stood before: in the row itself, in its
siblings (samples of the same prompt that are decoded beside it), or in completions of the same prompt from an
earlier epoch. Tokens are drawn by inverting the distribution at a number that belongs to the sequence and the
place alone (`qerl.rollout.engine`), so a drafted token is accepted exactly if it is the token that is drawn
without drafts, and acceptance can be counted on completions that were drawn without any.

SmolLM2-135M-Instruct samples two tasks at temperature 1, groups of 8, each prompt twice with other seeds; the
first half is the earlier epoch, of the very policy that draws, which flatters it. Then the second half is
decoded again on paper, all rows of a group a pass at a time or one row after another: a row looks for a
draft, takes what agrees and one token more. What a pass with drafts costs, `bench.drafts` measures.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from bench.result import write_result
from qerl.eval.policy import Policy, load
from qerl.models.chat import Chat
from qerl.models.decide import Loading
from qerl.models.hub import find_model
from qerl.models.smollm2 import HUB_ID
from qerl.rollout.drafts import Text, draft
from qerl.rollout.engine import SamplingParams
from qerl.tasks import get_task

EXPLAIN = "Explain {} to somebody who has never heard of it, in two paragraphs."
WRITE = "Write a short story about {}."
SUBJECTS = (
    "how a bicycle stays upright", "why the sky is blue", "what a bank does", "how bread is made",
    "how vaccines work", "what photosynthesis is", "how a refrigerator works", "why there are seasons",
    "a lighthouse keeper", "two brothers who find a map", "a robot that learns to paint",
    "a village without clocks", "a teacher's last day", "a cat that travels by train",
    "a storm at sea", "a letter that arrives too late",
)  # fmt: skip

TASKS = {"arithmetic": (32, 96), "text": (16, 256)}
"""Prompts of each task, and tokens of its longest completion."""

ALONE = "own and ended siblings"
SOURCES = ("own", "own and siblings", ALONE, "own, siblings and earlier epoch")
LEAST, LENGTHS = (1, 2, 3, 4), (1, 2, 3, 5, 7)

Tokens = list[int]


@dataclass(frozen=True)
class Group:
    """Samples of one prompt: those of an earlier epoch, those that are decoded on paper, and the mean entropy
    in nats at which the tokens of each of these were drawn."""

    prompt: Tokens
    earlier: list[Tokens]
    samples: list[Tokens]
    entropies: list[float]


def load_policy(adapter: Path | None) -> Policy:
    """SmolLM2-135M-Instruct as its file has it, or in NVFP4 below an adapter that was trained on it so.

    Args:
        adapter: Folder of the adapter.
    """
    model, dtype = find_model(HUB_ID), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if adapter is None:
        return load(Loading(model, None, "bf16", None, dtype), Console())
    return load(Loading(model, adapter, "nvfp4", "mse", dtype), Console())


def sample(
    policy: Policy, messages: list[list[dict[str, str]]], samples: int, max_tokens: int
) -> list[Group]:
    """A policy's completions, in groups.

    Args:
        policy: What draws, at temperature 1.
        messages: Prompts as chat messages.
        samples: Of each prompt, and again as many for the earlier epoch.
        max_tokens: Of a completion.
    """
    chat = Chat(policy.tokenizer, {})
    prompts = [chat.ids(each) for each in messages]
    epochs = []
    for seed in (0, 1):
        params = SamplingParams(max_tokens, stop_token_ids=policy.stop_token_ids, seed=seed)
        found = policy.engine.generate(prompts, samples, params).completions
        epochs.append([found[i : i + samples] for i in range(0, len(found), samples)])
    return [
        Group(
            prompt,
            [each.token_ids for each in earlier],
            [each.token_ids for each in now],
            [fmean(each.entropies) for each in now],
        )
        for prompt, earlier, now in zip(prompts, *epochs, strict=True)
    ]


def messages_of(task: str, count: int, level: str) -> list[list[dict[str, str]]]:
    """The first prompts of a task, ``arithmetic`` of some level or ``text``."""
    if task == "arithmetic":
        return list(get_task("arithmetic", level=level, examples=1).test().select(range(count))["prompt"])
    texts = [(EXPLAIN if i < len(SUBJECTS) // 2 else WRITE).format(s) for i, s in enumerate(SUBJECTS)]
    return [[{"role": "user", "content": text}] for text in texts[:count]]


class Row(Text):
    """A sample that is decoded on paper.

    Args:
        prompt: Tokens that come first.
        completion: What follows, of which none is known.
    """

    def __init__(self, prompt: Tokens, completion: Tokens) -> None:
        super().__init__(prompt)
        self.rest = completion

    def draw(self, count: int) -> None:
        """Let so many more tokens be known."""
        self.extend(self.rest[:count])
        self.rest = self.rest[count:]


@dataclass
class Count:
    """Passes of rows, tokens that they gave, drafts, and tokens drafted and accepted; and passes and tokens
    of rows that are the last of their groups, as in the tail of a rollout."""

    passes: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    last_passes: int = 0
    last_tokens: int = 0

    def add(self, other: "Count") -> None:
        """Count what another has counted."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def decode(group: Group, sources: str, length: int, least: int) -> Count:
    """Decode a group's samples on paper, side by side or, with the sources `ALONE`, one after another.

    Args:
        group: The samples.
        sources: Where drafts come from, one of `SOURCES`.
        length: Tokens of a draft at most.
        least: Tokens that must agree before one is made.
    """
    rows = [Row(group.prompt, sample) for sample in group.samples]
    earlier = [Text(group.prompt + sample) for sample in group.earlier] if sources == SOURCES[-1] else []
    count = Count()
    while running := [row for row in rows if row.rest][: 1 if sources == ALONE else None]:
        last = len(running) == 1
        drafts = []
        for row in running:
            siblings = [each for each in rows if each is not row] if sources != SOURCES[0] else []
            drafts.append(draft(row, [*siblings, *earlier], length, least))
        for row, tokens in zip(running, drafts, strict=True):
            agree = zip(tokens, row.rest, strict=False)
            accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], agree))
            given = min(accepted + 1, len(row.rest))
            count.add(Count(1, given, bool(tokens), len(tokens), accepted, last, last * given))
            row.draw(given)
    return count


def rows_of(groups: list[Group], matches: list[int], lengths: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each way of drafting: tokens a pass and share accepted."""
    for sources in SOURCES:
        for least in matches:
            for length in lengths:
                total = Count()
                for group in groups:
                    total.add(decode(group, sources, length, least))
                yield {
                    "groups": len(groups),
                    "completions": sum(len(group.samples) for group in groups),
                    "entropy": fmean(value for group in groups for value in group.entropies),
                    "sources": sources,
                    "match": least,
                    "draft": length,
                    **asdict(total),
                    "tokens_per_pass": total.tokens / total.passes,
                    "tokens_per_last_pass": total.last_tokens / max(1, total.last_passes),
                    "accepted_share": total.accepted / max(1, total.drafted),
                }


def drawn_by_all(args: argparse.Namespace) -> dict[str, dict[str, list[Group]]]:
    """Groups of each task, by policy."""
    if args.completions and args.completions.exists():
        saved = json.loads(args.completions.read_text())
        return {
            policy: {task: [Group(**each) for each in groups] for task, groups in tasks.items()}
            for policy, tasks in saved.items()
        }
    drawn: dict[str, dict[str, list[Group]]] = {}
    for adapter in args.adapter or [None]:
        policy = load_policy(adapter)
        drawn["not trained" if adapter is None else adapter.name] = {
            task: sample(policy, messages_of(task, count, args.level), args.samples, most)
            for task, (count, most) in TASKS.items()
        }
    if args.completions:
        as_json = {
            policy: {task: [asdict(each) for each in groups] for task, groups in tasks.items()}
            for policy, tasks in drawn.items()
        }
        args.completions.write_text(json.dumps(as_json))
    return drawn


def main(arguments: list[str]) -> None:
    """Runs `python -m bench acceptance` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench acceptance", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--completions", type=Path, help="JSON of completions, which are drawn if it is not there"
    )
    parser.add_argument("--adapter", type=Path, nargs="+", help="trained policies; without, the base model")
    parser.add_argument("--level", default="wp12", help="of the arithmetic")
    parser.add_argument("--match", type=int, nargs="+", default=LEAST, help="tokens that agree at least")
    parser.add_argument("--draft", type=int, nargs="+", default=LENGTHS, help="tokens of a draft at most")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    shared = {}
    if args.completions and args.completions.exists():
        shared["note"] = f"the completions were read from {args.completions.name}, drawn by an earlier run"
    rows = []
    for policy, tasks in drawn_by_all(args).items():
        for task, groups in tasks.items():
            for row in rows_of(groups, args.match, args.draft):
                rows.append({"policy": policy, "task": task, **row})
                print(
                    f"{policy}, {task}: {row['sources']}, match {row['match']}, draft {row['draft']}: "
                    f"{row['tokens_per_pass']:.2f} tokens a pass, {row['tokens_per_last_pass']:.2f} of a "
                    f"group's last row, {row['accepted_share']:.0%} of what is drafted"
                )
    if args.out:
        write_result(args.out, " ".join(["acceptance", *arguments]), rows, **shared)
