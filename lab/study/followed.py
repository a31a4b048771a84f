"""What a controlled temperature follows: the rollouts of one other run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Followed:
    """A run's rollouts, step by step, as its record has them; None where a number was not finite.

    Attributes:
        run: Name of the run.
        entropy: Mean entropy of the policy that drew its samples, nats per token.
        sigma: Standard deviation of its noise, 0 in a step without.
    """

    run: str
    entropy: list[float | None]
    sigma: list[float | None]
