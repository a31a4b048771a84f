"""The measured steps from which `qerl plan` estimates time: a file of the package, made from bench/results.

The newest step per card, model, format and size is used. Left out are older states of the code (files that
end in a commit), cards treated as another class, steps measured beside a server, with a teacher, with
adapted experts, on several GPUs, with groups without signal, with gradients in FP8, with rows refilled across
steps, and with drawn lengths, which the plan's time does not model.
"""

import dataclasses
import json
import re

from bench.result import RESULTS, Row, read_rows
from qerl.kernels.cards import CARDS
from qerl.plan.time import Step

_OLDER = re.compile(r"-[0-9a-f]{7}\.json$")
_OTHERWISE = ("teacher", "dead", "lora_experts", "arch", "backward_dtype", "max_staleness")


def step_times() -> str:
    """Return the content of qerl/plan/steps.json."""
    found: dict[tuple, Step] = {}
    for path in sorted(RESULTS.glob("step-*.json")):
        if _OLDER.search(path.name) or "-arch" in path.name or "beside" in path.name:
            continue
        for row in read_rows(path.stem):
            if (
                row["engine"] == "qerl"
                and row.get("processes", 1) == 1
                and row.get("lengths", "equal") == "equal"
            ):
                if any(row.get(name) for name in _OTHERWISE):
                    continue
                step = _step(row)
                key = dataclasses.astuple(step)[:-3]
                if key not in found or found[key].date <= step.date:
                    found[key] = step
    steps = sorted(found.values(), key=dataclasses.astuple)
    lines = ",\n".join(json.dumps(dataclasses.asdict(step)) for step in steps)
    return f"[\n{lines}\n]\n"


def _step(row: Row) -> Step:
    names = [name for card in CARDS.values() for name, _ in card.gpus]
    (card,) = {name for name in names if name in row["gpu"].replace("NVIDIA", "").split()}
    return Step(
        card, row["shape"], row["weights"], row["prompts"] * row["samples"], row["samples"],
        row["prompt_tokens"], row["completion_tokens"], round(row["rollout_s"], 2), round(row["update_s"], 2),
        row["date"][:10],
    )  # fmt: skip
