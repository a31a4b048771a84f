"""A reward function that fails on everything ends a run, on all processes; the template reaches the task."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from rich.console import Console

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.tasks.together import guarded
from qerl.trainer.rewards import ScoredBatch, stop_if_all_failed, tallied
from qerl.trainer.run import build, train

BROKEN = """
def words(completions, **kwargs):
    return [len(c.split()) for c in completions]  # chat messages have no split
"""


def run(tiny_run, tmp_path: Path, function: str, **changes):
    (tmp_path / "broken.py").write_text(BROKEN)
    once = {"max_steps": 1, "save_strategy": "no", "noise": False, "eval_strategy": "no"}
    fields = tiny_run(tmp_path / "run", reward_files=[f"{tmp_path}/broken.py:{function}"], **once)
    return train(QeRLConfig(**fields | changes), Console(quiet=True))


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_reward_that_fails_on_every_sample_ends_the_run_with_its_error(
    tiny_run, tmp_path: Path, rounds: int
) -> None:
    with pytest.raises(
        QeRLError,
        match=r"'words' failed on all 4 samples of a step; its first error is AttributeError: 'list' object "
        r"has no attribute 'split'\. Mend it, or set reward_errors: tolerate",
    ):
        run(tiny_run, tmp_path, "words", dynamic_sampling_batches=rounds)


def test_zeros_are_given_to_those_who_ask_for_them(tiny_run, tmp_path: Path, caplog) -> None:
    result = run(tiny_run, tmp_path, "words", reward_errors="tolerate")
    assert result.step == 1
    assert '"rewards/words/failed": 1.0' in (result.folder / "metrics.jsonl").read_text()
    assert caplog.text.count("'words' failed on 4 of 4 samples, which score 0") == 1


def test_one_that_fails_on_some_samples_does_not(tiny_run, tmp_path: Path) -> None:
    some = tmp_path / "some.py"
    some.write_text(
        "seen = []\n"
        "def some(completions, **kwargs):\n"
        "    assert len(completions) == 1\n"
        "    seen.append(1)\n"
        "    return [1 / (len(seen) % 4)]\n"
    )
    result = run(tiny_run, tmp_path, "", reward_files=[f"{some}:some"])
    assert '"rewards/some/failed": 0.25' in (result.folder / "metrics.jsonl").read_text()


ASYNCHRONOUS = """
import asyncio
import sys

met = sys.modules.setdefault("met", asyncio.Barrier(2))  # each function's file is loaded as its own module

async def first(completions, **kwargs):
    await met.wait()  # for the other one: neither can end by itself
    return [0.5] * len(completions)

async def second(completions, **kwargs):
    await met.wait()
    return [float(i % 2) for i in range(len(completions))]

async def hanging(completions, **kwargs):
    if len(completions) == 1 and not hasattr(hanging, "hung"):
        hanging.hung = True
        return [1.0]
    await asyncio.sleep(60)
"""


@pytest.mark.slow
def test_asynchronous_rewards_of_a_run_wait_at_the_same_time_within_their_limit(tiny_run, tmp_path) -> None:
    (tmp_path / "asynchronous.py").write_text(ASYNCHRONOUS)
    files = [f"{tmp_path}/asynchronous.py:{name}" for name in ("first", "second", "hanging")]
    result = run(tiny_run, tmp_path, "", reward_files=files, reward_timeout=0.5)
    metrics = (result.folder / "metrics.jsonl").read_text()
    assert '"rewards/first/mean": 0.5' in metrics
    assert '"rewards/second/mean": 0.5' in metrics
    assert '"rewards/first/failed": 0.0' in metrics
    assert '"rewards/hanging/failed": 0.75' in metrics


def a_rank(rank: int, address: Path, said: multiprocessing.Queue) -> None:
    """What one of two processes says after calls in which the function fails on some of them."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in own.items()})
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    torch.distributed.init_process_group("gloo", init_method=address.as_uri(), rank=rank, world_size=2)
    accelerator = Accelerator(cpu=True)
    broken: list[int] = []

    def fails(prompts, completions, **columns):
        if rank in broken:
            raise ValueError(f"of rank {rank}")
        return [1.0] * len(completions)

    functions = [guarded(lambda completions, **_: [1.0] * len(completions)), guarded(fails)]
    for broken in ([0], [1], [], [0, 1]):
        for function in functions:
            function(prompts=["p"] * 3, completions=["c"] * 3)
        try:
            batch = ScoredBatch([], [], {})
            batch.judged = [(function.__name__, function.last) for function in functions]
            stop_if_all_failed(tallied([batch]), accelerator)
            said.put((rank, broken, "goes on"))
        except QeRLError as error:
            said.put((rank, broken, str(error)))


def test_processes_end_together_and_say_the_same(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # the libraries are imported already
    said = fork.Queue()
    ranks = [fork.Process(target=a_rank, args=(rank, tmp_path / "address", said)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    heard = {(rank, *broken): text for rank, broken, text in (said.get(timeout=60) for _ in range(8))}
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    sentences = [heard.pop((rank, 0, 1)) for rank in (0, 1)]
    assert set(heard.values()) == {"goes on"}
    assert sentences[0] == sentences[1]
    assert "failed on all 6 samples of a step; its first error is ValueError: of rank 0." in sentences[0]


def test_the_task_knows_that_the_template_opens_the_thinking(tiny_run, tmp_path: Path) -> None:
    fields = tiny_run(tmp_path / "run", eval_strategy="no")
    template = Path(fields["model"]) / "chat_template.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "assistant: {% if opens %}<think>\n{% endif %}"
    )
    completions = [[{"role": "assistant", "content": text}] for text in ("#### 7", "well </think>\n#### 7")]
    for opens, earned in ((False, [1.0, 1.0]), (True, [0.0, 1.0])):
        config = QeRLConfig(**fields | {"chat_template_kwargs": {"opens": opens}})
        trainer, _ = build(config, Console(quiet=True))
        accuracy = trainer.reward_funcs[0]
        assert accuracy(prompts=["p"] * 2, completions=completions, answer=["7"] * 2) == earned
        prompt = trainer.train_dataset[0]["prompt"]
        assert [message["role"] for message in prompt] == ["user"]
        assert "####" in prompt[0]["content"]
