"""A GPU and a step that tests of the plan begin with."""

from qerl.families.sizes import SIZES
from qerl.plan.work import Work

LINEARS = SIZES["7b"].targets
GB80 = 84_600_000_000


def work(**changes) -> Work:
    values = {
        "weights": "nvfp4", "rank": 32, "targets": LINEARS, "prompt_tokens": 256,
        "completion_tokens": 2048, "group": 8, "sequences": 8, "microbatch": 8,
    }  # fmt: skip
    return Work(**(values | changes))
