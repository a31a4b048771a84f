"""Tables of the Tinker cookbook's recipes against `qerl serve`, and of time and memory of a step there."""

from collections.abc import Callable, Sequence
from statistics import mean

from bench.cookbook import CUT, FINISHED
from bench.result import Row
from lab.writers.captions import files, rows, source, table
from qerl.errors import QeRLError
from qerl.families.sizes import Sizes

STEPS = 4
"""Steps averaged in a column, because the loss varies more between batches than it falls per step."""


def fine_tuning(name: str) -> str:
    """Return the table of the loss of supervised fine-tuning by step, beside that at learning rate 0.

    Args:
        name: The result file, without its suffix.
    """
    found = rows(name)
    count = len(found[0]["train_mean_nll"])
    starts = range(0, count, STEPS)
    lines = []
    for run in found:
        losses = [f"{mean(run['train_mean_nll'][start : start + STEPS]):.2f}" for start in starts]
        lines.append((f"{run['learning_rate']:g}", *losses))
    first = found[0]
    versions = first["versions"]
    return table(
        ("learning rate", *(f"steps {start + 1} to {start + STEPS}" for start in starts)),
        lines,
        f"Mean negative log-likelihood of the batches' target tokens in nats; recipe chat_sl of "
        f"tinker-cookbook {versions['tinker-cookbook']} and client {versions['tinker']} on the cookbook's "
        f"128 conversations, {count} steps, SmolLM2-135M in NVFP4. One run each on {first['machine']}, "
        f"{first['date'][:10]}, commit {first['commit']}. {files(name)}",
    )


def learning(*names: str) -> str:
    """Return the table of the arithmetic recipe's reward at start and end, beside runs of learning rate 0.

    Args:
        names: The result files of `bench.cookbook`, without their suffixes.

    Raises:
        QeRLError: A run failed, or the runs of a file have too few steps in common.
    """
    lines, sizes, sources = [], [], []
    for name in names:
        found = rows(name)
        first, least = found[0], _common(name, found)
        for noise, rate in dict.fromkeys((one["noise"], one["learning_rate"]) for one in found):
            arm = rows(name, noise=noise, learning_rate=rate)
            lines.append((_where(first), "yes" if noise else "no", f"{rate:g}", *_changes(arm, least)))
        sizes.append(
            f"{_where(first)} {first['groups']} problems x {first['group_size']} samples, "
            f"{_runs(found, True)} runs that learn and {_runs(found, False)} of learning rate 0 with each "
            f"setting of noise, the {least} of {first['steps']} steps that all of them made"
        )
        what = first["gpu"].removeprefix("NVIDIA ") if "gpu" in first else first["machine"]
        sources.append(f"{what}, {first['date'][:10]}, commit {first['commit']}")
    versions = first["versions"]
    return table(
        (
            "server", "noise", "learning rate", f"reward, first {STEPS} steps", f"last {STEPS}",
            f"right answers, first {STEPS}", f"last {STEPS}",
        ),
        lines,
        "Mean of the runs, and in brackets that of the lowest and of the highest. Recipe math_rl of "
        f"tinker-cookbook {versions['tinker-cookbook']} and client {versions['tinker']}, SmolLM2-135M in "
        f"NVFP4, adapters of rank {first['rank']}, at most {first['max_tokens']} tokens; "
        f"{'; '.join(sizes)}. All runs see the same problems in the same order; the reward is 1 for a right "
        f"answer, less 0.1 if it does not end. {'; '.join(sources)}. {files(*names)}",
    )  # fmt: skip


def _runs(found: Sequence[Row], learn: bool) -> int:
    return 1 + max(one["run"] for one in found if bool(one["learning_rate"]) is learn)


def _where(found: Row) -> str:
    return {"paged": "GPU", "portable": "CPU"}[found["engine"]]


def _common(name: str, found: Sequence[Row]) -> int:
    """Return the number of steps that all runs of a file made, to compare all on the same problems.

    Raises:
        QeRLError: A run failed, or the runs have too few steps in common.
    """
    failed = [one for one in found if one.get("status") not in (FINISHED, CUT)]
    if failed:
        raise QeRLError(
            f"{len(failed)} of {len(found)} runs in {name}.json failed or have no status; measure them again."
        )
    steps = min(len(one["reward"]) for one in found)
    if steps < 2 * STEPS:
        raise QeRLError(
            f"The runs in {name}.json have {steps} steps in common, and the table compares the first {STEPS} "
            f"with the last {STEPS}; measure at least {2 * STEPS}."
        )
    return steps


def _changes(arm: Sequence[Row], steps: int) -> list[str]:
    """Return the cells of reward and right answers at the start and at the end of ``steps`` steps."""
    cells = []
    for column in ("reward", "correct"):
        for part in (slice(STEPS), slice(steps - STEPS, steps)):
            means = [mean(found[column][part]) for found in arm]
            cells.append(f"{mean(means):.3f} ({min(means):.3f} to {max(means):.3f})")
    return cells


def steps(beside: str, *names: str) -> str:
    """Return the table of a step through the server, beside one of the trainer with as many tokens.

    Args:
        beside: The result file of `bench.step`, without its suffix.
        names: The result files of `bench.serve`. Rows with a single counted step show their memory alone.

    Raises:
        QeRLError: The files are not of the same step, or settings changed because memory ran out.
    """
    served = [one for name in names for one in rows(name)]
    first = served[0]
    trained = _beside(beside, served)
    own = f"{trained['rollout_s']:.2f}", f"{trained['update_s']:.2f}", f"{trained['total_s']:.2f}"
    lines: list[tuple[str | None, ...]] = [
        ("`qerl train`", *own, None, f"{trained['peak_gb']:.1f}", None, None)
    ]
    for found in served:
        times: tuple[str | None, ...] = (None,) * 4
        if len(found["steps"]) > 1:
            seconds = [f"{found[key]:.2f}" for key in ("sample_s", "update_s", "total_s")]
            times = (*seconds, f"{found['total_s'] / trained['total_s']:.2f}")
        count = found["adapters"]
        what = f"`qerl serve`, {count} adapter{'s' if count > 1 else ''}"
        memory = (f"{found[key]:.1f}" for key in ("peak_gb", "allocated_gb", "planned_gb"))
        lines.append((what, *times, *memory))
    return table(
        (
            "", "rollout, s", "update, s", "step, s", "times `qerl train`", "peak, GB", "allocated, GB",
            "planned, GB",
        ),
        lines,
        f"7B in NVFP4 with random weights, LoRA rank {first['lora_rank']}, {first['prompts']} prompts of "
        f"{first['prompt_tokens']} tokens x {first['samples']} samples of {first['completion_tokens']}; "
        f"updates of both at most {first['tokens_per_forward']} tokens at a time, {_again(first)}. "
        f"Times are of one client, with the package tinker in a process of its own: medians of "
        f"{len(first['steps'])} steps, for `qerl train` of {len(trained['steps'])}. Peaks are read while "
        f"all adapters hold gradients and moments. Allocated is what torch's tensors take at "
        "their peak; most of the rest are segments that torch's allocator keeps ([memory](memory.md"
        f"#what-was-planned-and-what-was-measured)). {source(beside, *names)} {files(beside, *names)}",
    )  # fmt: skip


def rivals(name: str) -> str:
    """Return the table of a step through servers of other projects, beside ours.

    Args:
        name: The result file of `bench.loop`, without its suffix.
    """
    found = rows(name)
    first, last = found[0], found[-1]
    counted = " and ".join(str(len(one["steps"]) - one["warm_up"]) for one in found)
    lines = [
        (
            one["server"],
            {"nvfp4": "NVFP4", "bf16": "16-bit"}[one["weights"]],
            *(f"{one[key]:.2f}" for key in ("sample_s", "update_s", "total_s")),
            round(one["tokens_per_s"]),
        )
        for one in found
    ]
    return table(
        ("", "weights", "rollout, s", "update, s", "step, s", "tokens/s"),
        lines,
        f"Shape of Qwen3 4B with random weights, LoRA rank {first['lora_rank']}, {first['prompts']} prompts "
        f"of {first['prompt_tokens']} tokens x {first['samples']} samples of {first['completion_tokens']}, "
        "the samples of a prompt in one request. One server after the other on the same GPU; medians of "
        f"{counted} steps behind the first, which compiles. {first['server']} had its defaults, which "
        f"compute every layer again for backward, and client {first['client']}. {last['server']} had its "
        f"backend in JAX, {last['settings']['train_micro_batch_size']} sequences a pass and no layer "
        f"computed again, the one setting that was tried, and client {last['client']}, the last that sends "
        "tensors as it reads them; of its other backend, with vLLM, this says nothing. "
        f"{source(name)} {files(name)}",
    )


def rival_numbers(name: str) -> dict[str, Callable[[], str]]:
    """Return writers of the seconds of a step through our server and the other one, by mark."""

    def of(place: int) -> str:
        return f"{rows(name)[place]['total_s']:.1f} s"

    return {"serve-rival-ours": lambda: of(0), "serve-rival-theirs": lambda: of(-1)}


_SAME = (
    "shape", "weights", "lora_rank", "prompts", "samples", "prompt_tokens", "completion_tokens",
    "tokens_per_forward", "every_n_layers",
)  # fmt: skip
"""Fields in which a step through the server must equal the trainer's step beside it."""


def _beside(name: str, served: Sequence[Row]) -> Row:
    """Return the trainer's row with the same settings as all rows of the server.

    Raises:
        QeRLError: The server's rows differ, there is not exactly one such row, or memory ran out.
    """
    wanted = {key: served[0][key] for key in _SAME}
    for found in served:
        if differing := [key for key in _SAME if found[key] != wanted[key]]:
            raise QeRLError(f"Rows of steps through the server differ in {', '.join(differing)}.")
        for key in ("tokens_per_forward", "every_n_layers"):
            if found[f"held_{key}"] != found[key]:
                raise QeRLError(
                    f"With {found['adapters']} adapters {key} was {found[key]} and became "
                    f"{found[f'held_{key}']}, because memory ran out; measure with smaller ones."
                )
    matching = rows(name, **wanted)
    if len(matching) != 1:
        said = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise QeRLError(f"{name}.json has {len(matching)} rows with {said}, and one is needed.")
    return matching[0]


def _again(found: Row) -> str:
    """Return the layers that an update recomputes, in words."""
    every = found["every_n_layers"]
    if every > Sizes.by_name(found["shape"]).layers:
        return "no layer computed again"
    return f"{'every layer' if every == 1 else f'one layer of {every}'} computed again"
