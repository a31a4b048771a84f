"""Rates of false claims and of true claims made by the plan of lab/trained/refilled.yaml.

    python -m lab refilled_rates --seeds 16 32 --out bench/results/refilled-rates.json

The differences of three arms from their common control come from a study of samplers that are whole steps
behind, at the end of as many steps of as many samples. They are moved to given centres, and seeds are drawn
with all three, which preserves their skew and their correlation. Needs no GPU.
"""

import argparse
from pathlib import Path

import numpy as np

from bench.result import write_result
from lab.study.statistics import hodges_lehmann
from lab.trained.plan import read_plan
from lab.writers.refilled_tables import MARGIN, claims
from lab.writers.study_tables import by_seed, tested

STUDY, CONTROL = "trust-regions-wp12", "dppo_kl"
SHAPES = {"refilled-1": "dppo_tv", "refilled-2": "dppo_kl_stale_2", "refilled-4": "dppo_kl_stale_4"}
"""Arms of the plan, and the arms of the study whose differences stand in for theirs."""

CENTRES = (
    (0.0, 0.0, 0.0),
    (-MARGIN, -MARGIN, -MARGIN),
    (0.0, -MARGIN / 2, -MARGIN),
    *((0.0, 0.0, -cost) for cost in (0.04, 0.05, 0.06)),
)
"""Centres of the differences of the three arms, in the order of the plan."""


def shapes() -> np.ndarray:
    """Return the differences of final accuracy, moved to a centre of 0, [seeds, arms]."""
    ends = {arm: by_seed(STUDY, arm, lambda run: run.accuracy[-1]) for arm in (CONTROL, *SHAPES.values())}
    seeds = [run.run.seed for run in tested(STUDY, CONTROL)]
    d = np.array([[ends[arm][seed] - ends[CONTROL][seed] for arm in SHAPES.values()] for seed in seeds])
    return np.stack([column - hodges_lehmann(column) for column in d.T], axis=1)


def rates(d: np.ndarray, centres: tuple[float, ...], seeds: int, draws: int) -> dict[str, object]:
    """Return the shares of draws with a claim that an arm costs something, or no more than the margin.

    Args:
        d: Differences with a centre of 0, [any number, arms].
        centres: Centre to which each arm's differences are moved.
        seeds: Seeds per draw.
        draws: Number of draws.

    Returns:
        `costs` and `no_more`, by arm; `any_costs` and `any_no_more`, for at least one arm.
    """
    rng = np.random.default_rng(0)
    said = np.zeros((draws, 2, len(centres)), bool)
    for at in range(draws):
        drawn = d[rng.integers(len(d), size=seeds)] + centres
        found = claims(dict(zip(SHAPES, drawn.T, strict=True)), seeds)
        for i, claim in enumerate(found.values()):
            said[at, :, i] = ["costs" in claim.verdict, "no more" in claim.verdict]
    costs, no_more = said.mean(axis=0).tolist()
    any_costs, any_no_more = said.any(axis=2).mean(axis=0).tolist()
    return {"costs": costs, "no_more": no_more, "any_costs": any_costs, "any_no_more": any_no_more}


def main(arguments: list[str]) -> None:
    """Run `python -m lab refilled_rates` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab refilled_rates", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[len(read_plan("refilled").seeds)])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    d, found = shapes(), []
    for seeds in args.seeds:
        for centres in CENTRES:
            found.append({"seeds": seeds, "centres": centres, **rates(d, centres, seeds, args.draws)})
            print(found[-1], flush=True)
    if args.out:
        deviations = dict(zip(SHAPES, d.std(axis=0, ddof=1).round(4).tolist(), strict=True))
        command = " ".join(["refilled_rates", *arguments])
        write_result(args.out, command, found, "lab", draws=args.draws, standard_deviations=deviations)
