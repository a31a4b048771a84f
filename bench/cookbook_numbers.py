"""How far a server's samples lie from the model that trains on them, as the cookbook's recipe measures it."""

from statistics import mean

from bench.captions import rows


def sample_train(name: str, noise: bool) -> str:
    """The least and the largest mean of a run's steps of the recipe's kl_sample_train_v1, in nats a token.

    Args:
        name: The result file of `bench.cookbook`, without its ending.
        noise: Of the runs whose server samples with noise, or of those without.
    """
    found = [mean(run["kl_sample_train"]) for run in rows(name, noise=noise)]
    return f"{min(found):.4f} to {max(found):.4f}"
