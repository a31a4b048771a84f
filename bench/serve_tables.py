"""The tables of runs of the Tinker cookbook's recipes against `qerl serve`."""

from statistics import mean

from bench.captions import files, rows, table

STEPS = 4
"""Steps that a column is the mean of, because batches differ more than the loss falls between two of them."""


def fine_tuning(name: str) -> str:
    """Loss of supervised fine-tuning by step, beside that of the same batches without learning.

    Args:
        name: The result file, without its ending.
    """
    found = rows(name)
    count = len(found[0]["train_mean_nll"])
    starts = range(0, count, STEPS)
    lines = []
    for row in found:
        losses = [f"{mean(row['train_mean_nll'][start : start + STEPS]):.2f}" for start in starts]
        lines.append((f"{row['learning_rate']:g}", *losses))
    first = found[0]
    versions = first["versions"]
    return table(
        ("learning rate", *(f"steps {start + 1} to {start + STEPS}" for start in starts)),
        lines,
        f"Mean negative log-likelihood of the batches' target tokens in nats; recipe chat_sl of "
        f"tinker-cookbook {versions['tinker-cookbook']} and client {versions['tinker']} on the cookbook's "
        f"128 conversations, {count} steps, SmolLM2-135M in NVFP4. One run each on {first['machine']}, "
        f"{first['date'][:10]}, commit {first['commit']}. {files(name)}",
    )
