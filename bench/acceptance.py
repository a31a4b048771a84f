"""How many tokens drafts from what was written before would get accepted, counted on real completions.

    python -m bench acceptance --out bench/results/acceptance-smollm2-cpu.json --completions drawn.json

A draft for a row is what followed the row's last tokens where they stood before: in the row itself, in its
siblings (samples of the same prompt that are decoded beside it), or in completions of the same prompt from an
earlier epoch. Tokens are drawn by inverting the distribution at a number that belongs to the sequence and the
place alone (`qerl.rollout.sampling`), so a drafted token is accepted exactly if it is the token that is drawn
without drafts, and acceptance can be counted on completions that were drawn without any.

SmolLM2-135M-Instruct samples two tasks at temperature 1, groups of 8, each prompt twice with other seeds; the
first half is the earlier epoch, of the very policy that draws, which flatters it. Then the second half is
decoded again on paper, all rows of a group a pass at a time: a row looks for a draft, takes what agrees and
one token more. What a pass costs is read off measured decode steps (`bench.tail.milliseconds`): with drafts
of k tokens a step of R rows computes R (k + 1) tokens.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.result import write_result
from bench.tail import milliseconds, nvfp4_steps

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

SOURCES = ("own", "own and siblings", "own, siblings and earlier epoch")
LEAST, LENGTHS, LONGEST_MATCH = (1, 2, 3, 4), (1, 2, 3, 5, 7), 8
ROWS = (1, 4, 8, 16, 32, 64)

Tokens = list[int]


@dataclass(frozen=True)
class Group:
    """Samples of one prompt: those of an earlier epoch, and those that are decoded on paper."""

    prompt: Tokens
    earlier: list[Tokens]
    samples: list[Tokens]


def draw(task: str, count: int, samples: int, max_tokens: int) -> list[Group]:
    """Completions of the base model, in groups.

    Args:
        task: ``arithmetic`` or ``text``.
        count: Prompts.
        samples: Of each prompt, and again as many for the earlier epoch.
        max_tokens: Of a completion.
    """
    import torch

    from qerl.models.chat import Chat
    from qerl.models.load import load_model, load_tokenizer
    from qerl.models.smollm2 import HUB_ID
    from qerl.rollout.engine import SamplingParams
    from qerl.rollout.select import make_engine
    from qerl.tasks import get_task

    tokenizer = load_tokenizer(HUB_ID)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = load_model(HUB_ID, "bf16", dtype=dtype, device=device)
    if task == "arithmetic":
        problems = get_task("arithmetic", level="wp12", examples=1).test()
        messages = [row["prompt"] for row in problems.select(range(count))]
    else:
        texts = [(EXPLAIN if i < len(SUBJECTS) // 2 else WRITE).format(s) for i, s in enumerate(SUBJECTS)]
        messages = [[{"role": "user", "content": text}] for text in texts[:count]]
    chat = Chat(tokenizer, {})
    prompts = [chat.ids(each) for each in messages]
    stops = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *([stops] if isinstance(stops, int) else stops or [])}
    engine = make_engine(model, tokenizer.pad_token_id)
    epochs = []
    for seed in (0, 1):
        params = SamplingParams(max_tokens, stop_token_ids=tuple(sorted(stop_ids)), seed=seed)
        found = [each.token_ids for each in engine.generate(prompts, samples, params).completions]
        epochs.append([found[i : i + samples] for i in range(0, len(found), samples)])
    return [Group(*each) for each in zip(prompts, *epochs, strict=True)]


class Source:
    """Tokens that grow, and where each run of up to `LONGEST_MATCH` of them was last followed by another.

    Args:
        prompt: Tokens that come first.
        completion: What follows, of which `known` tokens are there.
    """

    def __init__(self, prompt: Tokens, completion: Tokens) -> None:
        self.tokens, self.start = prompt + completion, len(prompt)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self.grow(0)

    def grow(self, known: int) -> None:
        """Let so many tokens of the completion be known."""
        self.known = known
        for end in range(self._indexed + 1, self.start + known):  # followed by a token that is known
            for match in range(1, min(LONGEST_MATCH, end) + 1):
                self._ends[tuple(self.tokens[end - match : end])] = end
            self._indexed = end

    def suffix(self, match: int) -> tuple[int, ...]:
        """The last known tokens; fewer where there are fewer."""
        until = self.start + self.known
        return tuple(self.tokens[max(0, until - match) : until])

    def after(self, suffix: tuple[int, ...], length: int) -> Tokens:
        """What followed these tokens where they stood last, as far as it is known."""
        end = self._ends.get(suffix)
        return [] if end is None else self.tokens[end : min(end + length, self.start + self.known)]


@dataclass
class Count:
    """Passes of rows, tokens that they gave, drafts, and tokens drafted and accepted."""

    passes: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: "Count") -> None:
        """Count what another has counted."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def draft(row: Source, others: Sequence[Source], length: int, least: int) -> Tokens:
    """What followed the longest run of the row's last tokens: in the row itself, else in one of the others.

    Args:
        row: Prompt and completion so far.
        others: Where else to look.
        length: Tokens of a draft at most.
        least: Tokens that must agree.
    """
    for match in range(LONGEST_MATCH, least - 1, -1):
        suffix = row.suffix(match)
        for source in (row, *others) if len(suffix) == match else ():
            if found := source.after(suffix, length):
                return found
    return []


def decode(group: Group, sources: str, length: int, least: int) -> Count:
    """Decode a group's samples on paper.

    Args:
        group: The samples.
        sources: Where drafts come from, one of `SOURCES`.
        length: Tokens of a draft at most.
        least: Tokens that must agree before one is made.
    """
    rows = [Source(group.prompt, sample) for sample in group.samples]
    earlier = [Source(group.prompt, sample) for sample in group.earlier] if sources == SOURCES[2] else []
    for source in earlier:
        source.grow(len(source.tokens) - source.start)
    count = Count()
    while running := [row for row in rows if row.start + row.known < len(row.tokens)]:
        drafts = []
        for row in running:
            siblings = [each for each in rows if each is not row] if sources != SOURCES[0] else []
            drafts.append(draft(row, [*siblings, *earlier], length, least))
        for row, tokens in zip(running, drafts, strict=True):
            drawn = row.tokens[row.start + row.known :]
            accepted = 0
            while accepted < min(len(tokens), len(drawn)) and tokens[accepted] == drawn[accepted]:
                accepted += 1
            given = min(accepted + 1, len(drawn))
            count.add(Count(1, given, bool(tokens), len(tokens), accepted))
            row.grow(row.known + given)
    return count


def rows_of(task: str, groups: list[Group], steps: dict[str, dict[int, float]]) -> Iterator[dict[str, Any]]:
    """A row for each way of drafting: tokens a pass, share accepted, and how much faster rows decode."""
    for sources in SOURCES:
        for least in LEAST:
            for length in LENGTHS:
                total = Count()
                for group in groups:
                    total.add(decode(group, sources, length, least))
                gain = total.tokens / total.passes
                yield {
                    "task": task,
                    "groups": len(groups),
                    "sources": sources,
                    "match": least,
                    "draft": length,
                    **asdict(total),
                    "tokens_per_pass": gain,
                    "accepted_share": total.accepted / max(1, total.drafted),
                    "speedup": {
                        name: {
                            rows: gain * milliseconds(rows, of) / milliseconds(rows * (length + 1), of)
                            for rows in ROWS
                        }
                        for name, of in steps.items()
                    },
                }


def main(arguments: list[str]) -> None:
    """Runs `python -m bench acceptance` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench acceptance", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--completions", type=Path, help="JSON of completions, which are drawn if it is not there"
    )
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--steps", nargs="+", default=["rollout-7b-h100", "rollout-32b-h100"], help="results")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    if args.completions and args.completions.exists():
        drawn = json.loads(args.completions.read_text())
    else:
        drawn = {
            task: [asdict(group) for group in draw(task, count, args.samples, most)]
            for task, (count, most) in TASKS.items()
        }
        if args.completions:
            args.completions.write_text(json.dumps(drawn))
    steps = {name: nvfp4_steps(name) for name in args.steps}
    rows = []
    for task, groups in drawn.items():
        for row in rows_of(task, [Group(**group) for group in groups], steps):
            rows.append(row)
            print(
                f"{task}: {row['sources']}, match {row['match']}, draft {row['draft']}: "
                f"{row['tokens_per_pass']:.2f} tokens a pass, {row['accepted_share']:.0%} of what is drafted"
            )
    if args.out:
        write_result(args.out, " ".join(["acceptance", *arguments]), rows)
