"""Marks of the pages that hold no mean, interval or verdict of training runs or probes, and why.

The audit fails for a mark that is neither recomputed nor here, and for one here that it recomputes or that no
page has.
"""

NOT_OF_RUNS = {
    "pictures; the tables beside them are recomputed": (
        "noise-figures", "wp12-figures", "wp1-figures", "needle-figures", "probe-figures",
    ),
    "seconds, tokens per second or memory, measured on one machine": (
        "first-screen", "demo-minutes", "serve-rival-ours", "serve-rival-theirs", "agents-7b",
        "agents-7b-process", "agents-cpu", "decode", "decode-vllm", "decode-configurations", "decode-ways",
        "prefill", "ways-few", "ways-many", "ways-tried", "long-prompts", "long-prompts-8k",
        "long-prompts-32k", "fp8-keys-faster-32", "fp8-keys-faster-64", "kernels-together",
        "kernels-decided", "steps", "steps-lengths", "steps-tokens", "steps-rank", "older-path", "capped",
        "turns", "turns-gpu",
        "backward-auto-step", "backward-fp8-step", "backward-auto-update", "backward-fp8-update",
        "experts-before", "experts-after", "context", "memory", "least-memory-7b", "least-memory-32b",
        "serve-steps", "serve-rivals", "requests-prefixes", "requests-anew", "requests-7b-prefixes",
        "requests-7b-anew", "requests-7b-once-prefixes", "requests-7b-once-anew", "study-speed",
        "rollout-8192", "rollout-8192-refilled", "step-8192", "step-8192-refilled", "step-refilled-0",
        "step-refilled-2",
    ),
    "times of simulated rollouts, of lengths that are drawn, not of runs": ("refilled",),
    "times and errors of single products, and gradients of one step, without seeds": (
        "backward", "backward-auto-error", "backward-auto-cosine", "backward-auto-norm",
        "backward-fp8-error", "backward-fp8-cosine", "backward-fp8-norm",
    ),
    "what the package plans or can do; nothing was run for it": (
        "runs-on", "cards", "families", "choices", "set-by-recipes", "small-cards", "longest",
    ),
}  # fmt: skip
"""Names of marks by the reason why they are not recomputed."""
