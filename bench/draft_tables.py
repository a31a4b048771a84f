"""The table of `bench.acceptance`: what drafts of the engines' own would win, counted on paper."""

from bench.captions import files, rows, source, table
from bench.result import Row
from bench.tail import milliseconds, nvfp4_steps

_STEPS = "rollout-7b-h200"
_ROWS = (1, 4, 8)
_TASKS = {"arithmetic": "arithmetic, held out", "text": "explanations and stories"}


def on_paper(name: str) -> str:
    """Tokens a pass and speed relative to decoding without drafts, by task and length of a draft.

    Args:
        name: The result file, without its ending.
    """
    found, measured = rows(name, sources="own and siblings", match=1), nvfp4_steps(_STEPS)
    lines = [
        (
            _TASKS[row["task"]],
            f"{row['entropy']:.2f}",
            f"{row['tokens'] / row['completions']:.0f}",
            row["draft"],
            f"{100 * row['accepted_share']:.0f} %",
            f"{row['tokens_per_pass']:.2f}",
            *(_speed(row, count, measured) for count in _ROWS),
        )
        for row in found
    ]
    first = found[0]
    head = (
        "completions", "entropy, nats", "tokens of each", "tokens of a draft", "of them accepted",
        "tokens a pass", *(f"speed at {count} row{'s' * (count > 1)}" for count in _ROWS),
    )  # fmt: skip
    return table(
        head,
        lines,
        "Of SmolLM2-135M-Instruct after a demo's training in arithmetic, "
        f"{' and '.join(str(row['completions']) for row in found if row['draft'] == first['draft'])} "
        "completions in groups that are decoded side by side, with drafts from each and its siblings. Speed "
        "is relative to decoding without drafts: the tokens a pass, and what measured steps of a 7B take "
        f"with so many more tokens ({source(_STEPS)[:-1]}); to find drafts counts as nothing. The engines "
        "draft at up to 4 rows. The completions were read from a file that an earlier run had drawn. Counted "
        f"on {first['machine']}, {first['date'][:10]}, commit {first['commit']}. {files(name, _STEPS)}",
    )


def _speed(row: Row, count: int, measured: dict[int, float]) -> str:
    """By the newest steps; the result was counted with those of its time."""
    slower = milliseconds(count * (row["draft"] + 1), measured) / milliseconds(count, measured)
    return f"{row['tokens_per_pass'] / slower:.2f}"
