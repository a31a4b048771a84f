"""Divergence of a server's sampler from its trainer, as measured by the cookbook's recipe."""

from collections.abc import Callable
from functools import partial
from statistics import mean

from lab.writers.captions import rows


def cookbook_numbers(name: str) -> dict[str, Callable[[], str]]:
    """Return the writers of a result file of `bench.cookbook`, by mark."""
    return {
        "sample-train": partial(sample_train, name, noise=False),
        "sample-train-noise": partial(sample_train, name, noise=True),
    }


def sample_train(name: str, noise: bool) -> str:
    """Format the range over runs of the mean of the recipe's kl_sample_train_v1, in nats per token.

    Args:
        name: The result file of `bench.cookbook`, without its suffix.
        noise: Whether to use the runs whose server samples with noise, or those without.
    """
    found = [mean(run["kl_sample_train"]) for run in rows(name, noise=noise)]
    return f"{min(found):.4f} to {max(found):.4f}"
