"""Tables and numbers of README and docs, made from the JSON files in bench/results.

Each function reads results and returns Markdown; :data:`TABLES` and :data:`NUMBERS` map the marks in the
pages to them (:mod:`lab.writers.tables`). A caption names card, date, commit and files.
"""

from collections.abc import Callable
from statistics import fmean
from typing import Any

from bench.result import Row
from lab.writers import (
    backward_tables,
    card_tables,
    choice_tables,
    decode_tables,
    distilled_tables,
    endpoint_rates,
    family_tables,
    headline_tables,
    length_tables,
    noise_numbers,
    noise_tables,
    prefill_tables,
    question_tables,
    refilled_tables,
    serve_tables,
    testbed_tables,
    trust_tables,
    turn_tables,
)
from lab.writers.captions import RECOMPUTES, card, commits_of, files, recomputed, row, rows, source, table
from lab.writers.cookbook_numbers import cookbook_numbers

_WEIGHTS = {"nvfp4": "NVFP4", "bf16": "16-bit", "nf4": "NF4"}


def _size(found: Row) -> str:
    return f"{found['prompts'] * found['samples']} x {found['completion_tokens']}"


def _step_cells(found: Row) -> tuple[Any, ...]:
    return (
        f"{found['rollout_s']:.2f}",
        f"{found['update_s']:.2f}",
        f"{found['total_s']:.2f}",
        f"{found['tokens_per_s']:.0f}",
        f"{found['rollout_gb']:.1f}",
        f"{found['update_gb']:.1f}",
    )


_STEPS = (
    ("step-7b-h100", {"weights": "nvfp4"}),
    ("step-7b-h100", {"weights": "bf16"}),
    ("step-7b-nf4-h100", {"weights": "nf4"}),
    ("step-14b-h100", {"weights": "nvfp4"}),
    ("step-14b-h100", {"weights": "bf16"}),
    ("step-32b-h100", {"weights": "nvfp4", "prompts": 1}),
    ("step-32b-h100", {"weights": "nvfp4", "prompts": 4}),
    ("step-72b-h100", {"weights": "nvfp4"}),
    ("step-7b-128-h100", {"weights": "nvfp4"}),
    ("step-7b-128-trl-h100", {"engine": "qerl"}),
    ("step-7b-128-trl-h100", {"engine": "trl+vllm"}),
    ("step-7b-h200", {"engine": "qerl"}),
)


def steps() -> str:
    """Return the table of seconds and memory of whole GRPO steps."""
    lines = []
    for name, where in _STEPS:
        found = row(name, **where)
        peer = found.get("engine") == "trl+vllm"
        who = f"TRL 1.16 with vLLM 0.24, {_WEIGHTS[found['weights']]}" if peer else _WEIGHTS[found["weights"]]
        beside = " (in one run with the next)" if name.endswith("trl-h100") and not peer else ""
        beside += ", on an H200" if name.endswith("-h200") else ""
        lines.append(
            (
                f"{found['shape'].upper()}, {who}{beside}",
                _size(found),
                found["lora_rank"],
                recomputed(found),
                *_step_cells(found),
            )
        )
    names = list(dict.fromkeys(name for name, _ in _STEPS))
    return table(
        (
            "shape, frozen weights",
            "samples x tokens",
            "rank",
            "layers recomputed",
            "rollout, s",
            "update, s",
            "step, s",
            "tokens/s",
            "GB in rollout",
            "GB in update",
        ),
        lines,
        f"{RECOMPUTES} {source(*names)} {files(*names)}",
    )


def steps_tokens() -> str:
    """Return the table of a 7B step by number of tokens."""
    found = [*rows("step-7b-tokens-h100"), row("step-7b-128-h100", weights="nvfp4")]
    found.sort(key=lambda r: (r["tokens"], r["prompts"]))
    lines = [
        (
            _size(r),
            f"{r['tokens']:.0f}",
            *_step_cells(r)[:4],
            f"{1e6 * r['update_s'] / r['tokens']:.0f}",
        )
        for r in found
    ]
    names = ("step-7b-tokens-h100", "step-7b-128-h100")
    return table(
        (
            "7B: samples x tokens",
            "tokens per step",
            "rollout, s",
            "update, s",
            "step, s",
            "tokens/s",
            "ms of update per 1000 tokens",
        ),
        lines,
        f"{source(*names)} {files(*names)}",
    )


def steps_rank() -> str:
    """Return the table of a 7B step by LoRA rank."""
    found = sorted(rows("step-7b-rank-h100"), key=lambda r: r["lora_rank"])
    lines = [(r["lora_rank"], *_step_cells(r)[:3], f"{r['update_gb']:.1f}") for r in found]
    return table(
        ("rank, 7B, 8 x 1024", "rollout, s", "update, s", "step, s", "GB in update"),
        lines,
        f"{source('step-7b-rank-h100')} {files('step-7b-rank-h100')}",
    )


def _minutes(name: str) -> str:
    """Format the range of minutes of a demo's timed runs at the newest commit."""
    timed = [row["minutes"] for row in _newest_demo(name) if "minutes" in row]
    return f"{min(timed)} to {max(timed)} minutes"


def demo(name: str) -> str:
    """Return the table of a demo's accuracy and time, at its newest commit in this file."""
    newest = _newest_demo(name)
    lines = [
        (r["seed"], f"{r['before']:.0f}", f"{r['after']:.0f}", r.get("minutes", "not timed")) for r in newest
    ]
    return table(
        ("seed", "right answers before, %", "after, %", "minutes, both scores included"),
        lines,
        f"Greedy, 128 held-out problems; two CPU cores per run, {newest[0]['date'][:10]}, commit "
        f"{newest[0]['commit']}. {files(name)}",
    )


_MEMORY = (
    *_STEPS[:9],
    ("step-32b-h100-2665039", {"prompts": 1}),
    ("step-7b-h100-5ddacf3", {"weights": "nvfp4"}),
)


def memory() -> str:
    """Return the table of peak memory by number of recomputed layers."""
    lines = []
    for name, where in _MEMORY:
        found = row(name, **where)
        lines.append(
            (
                f"{found['shape'].upper()}, {_WEIGHTS[found['weights']]}",
                _size(found),
                found["lora_rank"],
                found.get("tokens_per_forward") or "a whole microbatch",
                recomputed(found),
                f"{found['total_s']:.1f}",
                f"{found['rollout_gb']:.1f}",
                f"{found['update_gb']:.1f}",
            )
        )
    names = list(dict.fromkeys(name for name, _ in _MEMORY))
    return table(
        (
            "shape, frozen weights",
            "samples x tokens",
            "rank",
            "tokens per forward pass",
            "layers recomputed",
            "step, s",
            "GB in rollout",
            "GB in update",
        ),
        lines,
        f"{source(*names)} {files(*names)}",
    )


_RUNS = (
    (1, "base", "noise 1e-2 to 5e-4, learning rate 3e-4"),
    (1, "small-noise", "noise 3e-3 to 5e-4, learning rate 3e-4"),
    (1, "nonoise", "no noise, learning rate 3e-4"),
    (1, "lr5", "noise, learning rate 5e-4"),
    (1, "lr10", "noise, learning rate 1e-3"),
    (2, "C8x8", "noise, learning rate 3e-4, 24 new tokens, 20 steps"),
)


def learning() -> str:
    """Return the table of the final accuracy of the demo's task by settings and seed."""
    first = rows("learning-smollm2-h100")[0]
    lines = []
    for wave, setting, words in _RUNS:
        finals = [
            row("learning-smollm2-h100", wave=wave, name=f"{setting}-s{seed}")["greedy_accuracy_by_step"][-1][
                1
            ]
            for seed in (1, 2, 3)
        ]
        lines.append((words, *(f"{final:.3f}".removeprefix("0") for final in finals)))
    commits = sorted({found["commit"] for found in rows("learning-smollm2-h100") if found["wave"] in (1, 2)})
    return table(
        ("GRPO, 25 steps of 8 x 8 samples, 32 new tokens", "seed 1", "seed 2", "seed 3"),
        lines,
        f"Final accuracy. {card(first)}, {first['date']}, "
        f"{commits_of(commits)}. {files('learning-smollm2-h100')}",
    )


def least_memory(shape: str) -> str:
    """Format the peak GB of a step of 8 x 2048 with every layer recomputed."""
    name, where = _MEMORY[-1] if shape == "7b" else _MEMORY[-2]
    found = row(name, **where)
    return f"{max(found['rollout_gb'], found['update_gb']):.1f} GB"


def study_speed() -> str:
    """Return the table of seconds per seed-step of a study, by the number of concurrent runs."""
    keys = ("seed_step_s", "step_s", "rollout_s", "reward_s", "update_s")
    lines = [
        (r["runs"], *(f"{r[key]:.3f}" for key in keys), f"{r['evaluation_s']:.1f}", f"{r['peak_gb']:.0f}")
        for r in sorted(rows("study-h200"), key=lambda r: r["runs"])
    ]
    head = ("runs", "s per seed-step", "step", "rollout", "rewards", "update", "evaluation", "peak, GB")
    return table(head, lines, f"{source('study-h200')} {files('study-h200')}")


def _logits_kl(which: int) -> str:
    """Format `sampling/kl` of a real model with the update's logits rounded to bf16 (0) or in FP32 (1)."""
    return f"{rows('sampling-kl-smollm2-h200')[which]['kl']:.5f}"


def _newest_demo(name: str) -> list[Row]:
    return rows(name, commit=rows(name)[-1]["commit"])


def _sums(when: str) -> str:
    found = [100 * row[when] for row in rows("sums-h200") if row["learning_rate"]]
    least, most = f"{min(found):.0f}", f"{max(found):.0f}"
    return f"{least} %" if least == most else f"{least} to {most} %"


def _update_of_mixture(name: str) -> str:
    return f"{rows(name)[-1]['update_s']:.1f} s"


_VERIFIERS = "endpoint:docs/examples/verifiers_calculator.py:play"


def _agents(name: str, environment: str, what: str) -> str:
    """Format a ratio of the agents' rollout to the built-in loop's."""
    return f"{row(name, environment=environment)[what]:.2f}"


def _requests(way: str) -> str:
    """Format the CPU seconds of conversations whose turns are requests."""
    return f"{row('turns-requests-smollm2-cpu', way=way)['cpu_seconds']:.0f} s"


def _requests_7b(turns: int, way: str) -> str:
    """Format the seconds on a GPU of conversations of ``turns`` turns, each a request."""
    name = "turns-7b-requests-h200" if turns > 1 else "turns-7b-requests-1-h200"
    return f"{row(name, turns=turns, way=way)['seconds']:.2f} s"


def _step_refilled(max_staleness: int) -> str:
    """Format the seconds of a whole step with refilled rows."""
    return f"{rows(f'step-7b-refilled-{max_staleness}-h200')[-1]['total_s']:.1f} s"


def _long_refilled(key: str) -> str:
    """Format the mean seconds of long samples' counted steps with refilled rows, whose tokens differ."""
    counted = rows("step-7b-8192-refilled-2-h200")[-1]["steps"][1:]
    return f"{fmean(step[key] for step in counted):.1f} s"


def _demo_after() -> str:
    after = [found["after"] for found in _newest_demo("demo-cpu")]
    return f"{min(after):.0f} to {max(after):.0f} %"


TABLES: dict[str, Callable[[], str]] = {
    "first-screen": headline_tables.first_screen,
    "families": family_tables.families,
    "decode": decode_tables.decode,
    "decode-vllm": decode_tables.beside_vllm,
    "decode-configurations": decode_tables.configurations,
    "decode-ways": decode_tables.ways_of_128,
    "ways-few": decode_tables.ways_of_few,
    "ways-many": decode_tables.ways_of_many,
    "ways-tried": decode_tables.ways_tried,
    "kernels-together": decode_tables.kernels_together,
    "kernels-decided": decode_tables.kernels_decided,
    "long-prompts": decode_tables.long_prompts,
    "prefill": prefill_tables.passes,
    "steps": steps,
    "backward": backward_tables.products,
    "steps-lengths": length_tables.steps,
    "refilled": length_tables.refilled,
    "steps-tokens": steps_tokens,
    "steps-rank": steps_rank,
    "demo": lambda: demo("demo-cpu"),
    "demo-tools": lambda: demo("demo-tools-cpu"),
    "demo-verifiers": lambda: demo("demo-verifiers-cpu"),
    "turns": lambda: turn_tables.kept("turns-smollm2-cpu"),
    "turns-gpu": lambda: turn_tables.on_gpu("turns-smollm2-h200"),
    "memory": memory,
    "small-cards": card_tables.small_cards,
    "longest": card_tables.longest,
    "context": card_tables.context,
    "cards": card_tables.cards,
    "older-path": card_tables.older_path,
    "capped": card_tables.capped,
    "runs-on": card_tables.runs_on,
    "choices": choice_tables.choices,
    "set-by-recipes": choice_tables.set_by_recipes,
    "learning": learning,
    "serve-sft": lambda: serve_tables.fine_tuning("serve-sft-smollm2-cpu"),
    "serve-learning": lambda: serve_tables.learning("cookbook-smollm2-h200", "cookbook-smollm2-cpu"),
    "serve-steps": lambda: serve_tables.steps(
        "step-7b-beside-serve-h200", "serve-7b-h200", "serve-7b-adapters-h200"
    ),
    "serve-rivals": lambda: serve_tables.rivals("serve-rival-4b-h200"),
    "study-speed": study_speed,
    **distilled_tables.TABLES,
    **refilled_tables.TABLES,
    **noise_tables.TABLES,
    **trust_tables.TABLES,
    **endpoint_rates.TABLES,
    **question_tables.TABLES,
    **testbed_tables.TABLES,
}

NUMBERS: dict[str, Callable[[], str]] = {
    **backward_tables.NUMBERS,
    "least-memory-7b": lambda: least_memory("7b"),
    "least-memory-32b": lambda: least_memory("32b"),
    "step-refilled-0": lambda: _step_refilled(0),
    "step-refilled-2": lambda: _step_refilled(2),
    "rollout-8192": lambda: f"{rows('step-7b-8192-h200')[0]['rollout_s']:.1f} s",
    "rollout-8192-refilled": lambda: _long_refilled("rollout_s"),
    "step-8192": lambda: f"{rows('step-7b-8192-h200')[0]['total_s']:.1f} s",
    "step-8192-refilled": lambda: _long_refilled("total_s"),
    "requests-anew": lambda: _requests("anew"),
    "requests-prefixes": lambda: _requests("prefixes"),
    "requests-7b-anew": lambda: _requests_7b(4, "anew"),
    "requests-7b-prefixes": lambda: _requests_7b(4, "prefixes"),
    "requests-7b-once-anew": lambda: _requests_7b(1, "anew"),
    "requests-7b-once-prefixes": lambda: _requests_7b(1, "prefixes"),
    "agents-cpu": lambda: _agents("agents-verifiers-cpu", _VERIFIERS, "cpu_ratio"),
    "agents-7b": lambda: _agents("agents-7b-h200", "openai", "ratio"),
    "agents-7b-process": lambda: _agents("agents-7b-h200", "openai in a process", "ratio"),
    "demo-before": lambda: f"{rows('demo-cpu')[-1]['before']:.0f} %",
    "demo-after": _demo_after,
    "sums-before": lambda: _sums("before"),
    "sums-after": lambda: _sums("after"),
    "experts-before": lambda: _update_of_mixture("step-qwen3-30b-a3b-24gb-h200-526223e"),
    "experts-after": lambda: _update_of_mixture("step-qwen3-30b-a3b-24gb-h200"),
    **cookbook_numbers("cookbook-smollm2-h200"),
    **serve_tables.rival_numbers("serve-rival-4b-h200"),
    "demo-minutes": lambda: _minutes("demo-cpu"),
    "fp8-keys-faster-32": lambda: decode_tables.fp8_keys_faster(32),
    "fp8-keys-faster-64": lambda: decode_tables.fp8_keys_faster(64),
    "long-prompts-8k": lambda: decode_tables.long_prompts_faster("ways-7b-long-prompts-h200", "apart", 64),
    "long-prompts-32k": lambda: decode_tables.long_prompts_faster(
        "ways-7b-longest-prompts-h200", "apart-32", 64
    ),
    "logits-kl-rounded": lambda: _logits_kl(0),
    "logits-kl": lambda: _logits_kl(1),
    **distilled_tables.NUMBERS,
    **refilled_tables.NUMBERS,
    **noise_numbers.NUMBERS,
    **question_tables.NUMBERS,
    **trust_tables.NUMBERS,
    **endpoint_rates.NUMBERS,
}
