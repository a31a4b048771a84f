"""How far a server's samples lie from the model that trains on them, as the cookbook's recipe measures it."""

from collections.abc import Callable
from functools import partial
from statistics import mean

from lab.writers.captions import rows


def cookbook_numbers(name: str) -> dict[str, Callable[[], str]]:
    """The numbers of a result file of `bench.cookbook`, by the name of their marks."""
    return {
        "sample-train": partial(sample_train, name, noise=False),
        "sample-train-noise": partial(sample_train, name, noise=True),
    }


def sample_train(name: str, noise: bool) -> str:
    """The least and the largest mean of a run's steps of the recipe's kl_sample_train_v1, in nats a token.

    Args:
        name: The result file of `bench.cookbook`, without its ending.
        noise: Of the runs whose server samples with noise, or of those without.
    """
    found = [mean(run["kl_sample_train"]) for run in rows(name, noise=noise)]
    return f"{min(found):.4f} to {max(found):.4f}"
