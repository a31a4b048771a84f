"""What an algorithm sets where the recipe says nothing.

GRPO's groups and advantages are those of arXiv 2402.03300. DAPO is that of arXiv 2503.14476, sections 3.1
(clip-higher) to 3.4 (soft overlong punishment, whose interval there is a fifth of the longest response).
DAPO's authors punish truncated samples instead of masking them; both at once would leave short wrong answers
with an advantage and nothing against it.
"""

from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "dynamic_sampling_rounds": 0,
        "overlong_buffer": 0.0,
        "signal": "reward",
    },
    "dapo": {
        "epsilon_high": 0.28,
        "dynamic_sampling_rounds": 2,
        "overlong_buffer": 0.2,
        "signal": "accuracy",
    },
}
