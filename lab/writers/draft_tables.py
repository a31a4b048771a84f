"""The tables of drafts: what a pass costs with them on a GPU, and what they win on real completions."""

from lab.writers.captions import files, rows, source, table

_TASKS = {"arithmetic": "arithmetic, held out", "text": "explanations and stories"}


def cost(name: str) -> str:
    """Milliseconds of a pass in which no draft is worth anything, by rows and tokens of a draft.

    Args:
        name: The result file of `bench.drafts`, without its ending.
    """
    found = rows(name)
    first, lengths = found[0], dict.fromkeys(row["draft"] for row in found)
    lines = [
        (count, *(f"{_pass_ms(name, length, count):.2f}" for length in lengths))
        for count in dict.fromkeys(row["batch"] for row in found)
    ]
    head = ("sequences; ms a pass", *(f"drafts of {length}" if length else "none" for length in lengths))
    return table(
        head,
        lines,
        f"{first['shape'].upper()} in NVFP4 with random weights, LoRA rank {first['lora_rank']}, at "
        "temperature 1, where hardly a draft is found and none is accepted; whole calls of "
        f"{first['decode_tokens']} tokens a sequence behind a prompt of {first['prompt_tokens']}, by their "
        "passes, so prefill is in them. Medians of three calls, which differ by up to "
        f"{100 * max(row['spread'] for row in found):.0f} %. {source(name)} {files(name)}",
    )


def speed(won: str, paid: str) -> str:
    """Tokens a pass and speed relative to decoding without drafts, by task and length of a draft.

    Args:
        won: The result file of `bench.acceptance`, without its ending.
        paid: That of `bench.drafts`.
    """
    found = rows(won, sources="own and siblings", match=1)
    counts = dict.fromkeys(row["batch"] for row in rows(paid))
    lines = [
        (
            _TASKS[row["task"]],
            f"{row['entropy']:.2f}",
            f"{row['tokens'] / row['completions']:.0f}",
            row["draft"],
            f"{100 * row['accepted_share']:.0f} %",
            f"{row['tokens_per_pass']:.2f}",
            *(f"{row['tokens_per_pass'] / _longer(paid, row['draft'], count):.2f}" for count in counts),
        )
        for row in found
    ]
    first = found[0]
    head = (
        "completions", "entropy, nats", "tokens of each", "tokens of a draft", "of them accepted",
        "tokens a pass", *(f"speed at {count} row{'s' * (count > 1)}" for count in counts),
    )  # fmt: skip
    return table(
        head,
        lines,
        "Of SmolLM2-135M-Instruct after a demo's training in arithmetic, "
        f"{' and '.join(str(row['completions']) for row in found if row['draft'] == first['draft'])} "
        "completions in groups that are decoded side by side, with drafts from each and its siblings; they "
        "were read from a file that an earlier run had drawn. Speed is relative to decoding without drafts: "
        "the tokens a pass, by how many times as long a pass of 7B takes in the table above; where that is "
        "shorter than without drafts, which is chance, as long. Counted on "
        f"{first['machine']}, {first['date'][:10]}, commit {first['commit']}. {files(won, paid)}",
    )


def _longer(name: str, length: int, count: int) -> float:
    """How many times as long a pass of so many rows takes with drafts as without, which does less."""
    return max(1.0, _pass_ms(name, length, count) / _pass_ms(name, 0, count))


def _pass_ms(name: str, length: int, count: int) -> float:
    (found,) = rows(name, draft=length, batch=count)
    return float(found["pass_ms"])
