"""How a call of the paged engine is cut into rounds, passes and steps: plain numbers, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Lengths that change how fast a call runs, not what it samples. The fastest on an H100 are the defaults.

    Attributes:
        round_steps: Decode steps between two plans of the scheduler.
        spare_rounds: Rounds whose blocks admission leaves free for the sequences that run.
        small_rows: Rows up to which a decode step hardly takes longer than with one; a step of so many rows
            is not exchanged for a smaller one.
        prefill_tokens: Tokens that a prefill pass is made for, ascending.
    """

    round_steps: int = 16
    spare_rounds: int = 4
    small_rows: int = 8
    prefill_tokens: tuple[int, ...] = (64, 512, 2048)
