"""The rollouts of another run, whose entropy a controlled temperature follows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Followed:
    """Recorded rollouts of a run, step by step; None where a number was not finite.

    Attributes:
        run: Name of the run.
        entropy: Mean entropy of the policy that drew its samples, nats per token.
        sigma: Standard deviation of its noise, 0 in a step without.
    """

    run: str
    entropy: list[float | None]
    sigma: list[float | None]
