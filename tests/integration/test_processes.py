"""A run on two processes, of one machine or of two: collectives stay in step, and the adapter has moved."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from rich.console import Console

from qerl.lora.adapter import add_lora
from qerl.run_folder import table_path
from qerl.settings.config import QeRLConfig
from qerl.trainer.run import train
from tests.support.agents import tool_tokenizer
from tests.support.families import DELTA_NETS, MIXTURE, tiny
from tests.support.models import make_tiny_model, make_tiny_tokenizer, move_adapter
from tests.support.runs import results, run_command, run_python, write_recipe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


WHOLE = {
    "algorithm": "dapo",
    "signal": "reward",  # random text is never right
    "dynamic_sampling_batches": 1,
    "curriculum": True,
    "max_completion_length": 4,  # so short that many groups are equal
    "task_options": {"examples": 0, "train_size": 16, "test_size": 4},
    "lora_dropout": 0.0,
    "max_steps": 4,
    "noise_stages": 2,
    "eval_strategy": "no",
    "save_strategy": "no",
}
CHUNKS = WHOLE | {"tokens_per_forward": 40}
UNEQUAL = WHOLE | {
    "tokens_per_forward": 20,
    "dynamic_sampling_batches": 0,
}
BY_PROCESS = """import collections, json, os, traceback

import torch.distributed as dist

import qerl.trainer.balance

qerl.trainer.balance.moves = lambda owners: []  # or processes would differ less
MEETINGS = collections.Counter()  # of processes, by the function in which they meet


def counted(meet):
    def counts(*args, **kwargs):
        frames = {frame.name for frame in traceback.extract_stack()}
        MEETINGS.update(frames & {"_attempt", "end_step"})
        return meet(*args, **kwargs)

    return counts


for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"):
    setattr(dist, name, counted(getattr(dist, name)))


def by_process(completions, **kwargs):
    with open(__file__ + "." + os.environ["RANK"], "w") as file:
        json.dump(MEETINGS, file)
    return [float(i * int(os.environ["RANK"])) for i in range(len(completions))]
"""
APART = WHOLE | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SHARED = APART | {"tokens_per_forward": 500}
QUANTILE = WHOLE | {"top_entropy_quantile": 0.5, "dynamic_sampling_batches": 0, "max_steps": 2}
# Adam moves a number whose gradient is rounding as far as any other, unless epsilon is above that.
STATES = WHOLE | {"dynamic_sampling_batches": 0, "max_steps": 2, "adam_epsilon": 1e-3}
TAUGHT = STATES | {"algorithm": "distill", "teacher_prompt": "{prompt} {answer}", "curriculum": False}
EXPERTS = STATES | {"lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
PASSES = """import json, os

import torch

from qerl.trainer.update_step import UpdateStep

SAMPLES = []  # of each forward pass with a gradient
forward = UpdateStep._forward


def counted(self, model, samples, lengths, rows, *base, **teacher):
    if torch.is_grad_enabled():
        SAMPLES.append(len(rows))
    return forward(self, model, samples, lengths, rows, *base, **teacher)


UpdateStep._forward = counted


def passes(completion_ids, **kwargs):
    with open(__file__ + "." + os.environ["RANK"], "w") as file:
        json.dump(SAMPLES, file)
    # The second process has a group without signal.
    return [float(ids[-1] % 7) * (i > 1 or os.environ["RANK"] == "0") for i, ids in enumerate(completion_ids)]
"""
TOOLS = {
    "algorithm": "dapo",
    "signal": "reward",
    "dynamic_sampling_batches": 1,
    "max_completion_length": 100,
    "max_tool_calling_iterations": 2,
    "task_options": {"examples": 0, "train_size": 8, "test_size": 4},
    "temperature": 2.0,
    "max_steps": 2,
    "noise_stages": 2,
    "eval_strategy": "no",
    "save_strategy": "no",
    "log_completions": True,
}
ONE_CALLS = """import os

from qerl.agents.template import TurnTemplate


def double(n: int) -> int:
    \"\"\"Doubles a number.

    Args:
        n: The number.
    \"\"\"
    return 2 * n


def parse(self, token_ids, prefix_ids, tools):
    message = {"role": "assistant", "content": self.text(token_ids)}
    if os.environ["RANK"] == "1":
        message["tool_calls"] = [{"type": "function", "function": {"name": "double", "arguments": {"n": 4}}}]
    return message


TurnTemplate.parse = parse
"""
STOPS = WHOLE | {
    "stop_strings": [*"abcdefghijkl", "no"],
    "mask_truncated_completions": True,
    "dynamic_sampling_batches": 0,
    "max_completion_length": 8,
    "max_steps": 2,
    "log_completions": True,
    "eval_strategy": "steps",
    "eval_on_start": True,
    "eval_samples": 4,
    "num_generations_eval": 2,
}
LAST_TOKENS = """import os


def last_token(completion_ids, log_extra, **columns):
    log_extra("rank", [int(os.environ.get("RANK", 0))] * len(completion_ids))
    log_extra("last", [ids[-1] for ids in completion_ids])
    return [float(ids[-1] % 2) for ids in completion_ids]
"""
BEGUN_EARLY = """

from qerl.tasks.guard import judges_outside

judges_outside(last_token)
"""
SLURM = {
    "scontrol": "echo localhost; echo localhost",
    "srun": """for node in 0 1; do "$@" >"${0%/*}/machine-$node.log" 2>&1 & jobs[node]=$!; done
for node in 0 1; do wait "${jobs[node]}" || { status=$?; cat "${0%/*}/machine-$node.log"; }; done
exit "${status:-0}\"""",
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
}
"""What the job calls: a step of SLURM is its command twice, one for each machine."""
SAME_LOGS = """import json, os


def odd(completion_ids, log_extra, trainer_state, **columns):
    rank = os.environ["RANK"]
    with open(__file__ + "." + rank, "w") as file:
        json.dump(trainer_state.log_history, file)
    log_extra("rank", [int(rank)] * len(completion_ids))
    return [float(len(ids) % 2) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory, tiny_runs):
    """Folders of runs on two processes that are forks of one, where torch is imported once."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "rewards.py").write_text(BY_PROCESS)
    runs = {
        "whole": WHOLE,
        "chunks": CHUNKS,
        "unequal": UNEQUAL | {"reward_files": [f"{folder / 'rewards.py'}:by_process"]},
    }
    for name, limit in {"quantile": None, "quantile_chunks": 20}.items():
        (folder / f"{name}.py").write_text(BY_PROCESS)
        rewards = {"reward_files": [f"{folder / name}.py:by_process"]}
        runs[name] = QUANTILE | rewards | {"tokens_per_forward": limit}
    for name, settings in {"apart": APART, "shared": SHARED}.items():
        (folder / f"{name}_passes.py").write_text(PASSES)
        runs[name] = settings | {"reward_files": [f"{folder / name}_passes.py:passes"]}
    tiny(DELTA_NETS).save_pretrained(folder / "delta_nets")
    make_tiny_tokenizer().save_pretrained(folder / "delta_nets")
    for name, limit in {"states": None, "states_chunks": 30}.items():
        runs[name] = STATES | {"model": str(folder / "delta_nets"), "tokens_per_forward": limit}
    tiny(MIXTURE).save_pretrained(folder / "mixture")
    make_tiny_tokenizer().save_pretrained(folder / "mixture")
    for name, limit in {"experts": None, "experts_chunks": 30}.items():
        runs[name] = EXPERTS | {"model": str(folder / "mixture"), "tokens_per_forward": limit}
    taught = move_adapter(add_lora(make_tiny_model(), rank=4, alpha=8, dropout=0.0))
    taught.save_pretrained(folder / "teacher")
    for name, limit in {"taught": None, "taught_chunks": 30}.items():
        runs[name] = TAUGHT | {"teacher": f"adapter:{folder / 'teacher'}", "tokens_per_forward": limit}
    (folder / "tools.py").write_text(ONE_CALLS)
    (folder / "odd.py").write_text(SAME_LOGS)
    runs["tools"] = TOOLS | {
        "model": model_with_tools(folder),
        "tools": [f"{folder / 'tools.py'}:double"],
        "reward_files": [f"{folder / 'odd.py'}:odd"],
    }
    (folder / "last.py").write_text(LAST_TOKENS)
    runs["stops"] = STOPS | {"reward_files": [f"{folder / 'last.py'}:last_token"]}
    (folder / "early.py").write_text(LAST_TOKENS + BEGUN_EARLY)
    runs["early"] = STOPS | {"reward_files": [f"{folder / 'early.py'}:last_token"]}
    recipes = [write_recipe(tiny_runs, folder / name, settings) for name, settings in runs.items()]
    run_python("-m", "tests.support.two_processes", *recipes)
    return folder


def same_run(folder, other, steps, metrics=("loss", "grad_norm")):
    """The rows and the adapter of a run, which are those of another that goes about it differently."""
    (rows, adapter), (others, expected) = results(folder), results(other)
    for row, wanted in zip(rows[:steps], others[:steps], strict=True):
        for name in metrics:
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-6), name
        assert row["grad_norm"] > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=0, atol=1e-4)
    return rows[:steps], adapter


def test_two_processes_train_together(forked):
    """DAPO: ranks differ in samples, live groups, even in having a loss at all.

    In chunks, of which ranks have different numbers, the result is the same.
    """
    rows, adapter = same_run(forked / "chunks", forked / "whole", 4)
    assert [row["noise/norms"] for row in rows] == [0, 0, 4, 4]
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)


def test_launchers_of_two_machines_find_each_other(forked, tiny_runs, tmp_path):
    """The job of docs/training.md, with a stand-in for SLURM: its two launchers run here, side by side.

    The adapter is that of two processes of one machine, bit for bit.
    """
    job = tmp_path / "train.sh"
    job.write_text(documented_job())
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    recipe = write_recipe(tiny_runs, tmp_path / "apart", WHOLE)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_JOB_ID": str(free_port() - 20000),
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_NNODES": "2",
    }
    run_command("bash", "-eu", str(job), recipe, env=env)
    machines = [(tmp_path / f"machine-{node}.log").read_text() for node in (0, 1)]
    assert sum("step 1/4" in text for text in machines) == 1, "what is said is said by one of the two"
    adapter, alone = results(tmp_path / "apart")[1], results(forked / "whole")[1]
    assert adapter.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(adapter[name], tensor), name


def test_processes_that_differ_in_forward_passes_from_the_second_step_on(forked):
    """The first process computes one sample, the second several chunks: no collective meets another one.

    In an update there is no collective but that of gradients: metrics travel when the step ends.
    """
    rows, _ = results(forked / "unequal")
    assert [row["grad_norm"] > 0 for row in rows[:4]] == [True] * 4
    for rank in (0, 1):  # in front of the fourth step's rewards
        assert json.loads((forked / f"rewards.py.{rank}").read_text()) == {"end_step": 3 * 2}


def test_the_quantile_of_entropies_is_one_of_both_processes(forked):
    """Each process runs forward ahead of its chunks, of which it has its own number."""
    metrics = ("loss", "grad_norm", "entropy/computed")
    same_run(forked / "quantile_chunks", forked / "quantile", 2, metrics)


def test_a_teacher_is_asked_by_each_process(forked):
    """In each chunk, between whose backward passes its adapter takes the place of the one that trains."""
    metrics = ("loss", "grad_norm", "distillation/divergence")
    rows, adapter = same_run(forked / "taught_chunks", forked / "taught", 2, metrics)
    for row in rows:
        assert row["loss"] == pytest.approx(row["distillation/divergence"], rel=1e-3) and row["loss"] > 0
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize(("kind", "adapted"), [("states", "in_proj_qkv"), ("experts", "experts.0.down_proj")])
def test_layers_of_other_kinds_train_on_two_processes(forked, kind, adapted):
    """In chunks prompts are computed anew, states with them, and the result is the same. Chunks, like
    processes, have experts to which no token goes."""
    _, adapter = same_run(forked / f"{kind}_chunks", forked / kind, 2)
    assert any(tensor.any() for name, tensor in adapter.items() if f"{adapted}.lora_B" in name)


def test_processes_share_forward_passes_each_for_itself(forked):
    """Gradients are averaged with the last pass of a step, and are those of one pass a microbatch."""
    same_run(forked / "shared", forked / "apart", 4)
    for rank in (0, 1):  # in front of the fourth step's rewards
        shared, apart = (
            json.loads((forked / f"{name}_passes.py.{rank}").read_text()) for name in ("shared", "apart")
        )
        assert 3 <= len(shared) < len(apart) <= 3 * 4 and sum(shared) == sum(apart)


def test_tools_that_only_one_of_two_processes_calls(forked):
    """Nobody waits for calls of the other; what is logged is the same on both, of the samples of both."""
    rows, adapter = results(forked / "tools")
    first, second = (json.loads((forked / f"odd.py.{rank}").read_text()) for rank in (0, 1))
    assert len(first) == len(second) == 1, "of the step before the last"
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        own = {name for name in one if "time" in name or "memory" in name or "per_second" in name}
        assert {name for name in one if one[name] != other[name]} <= own
    assert all(row["tools/call_frequency"] > 0 and row["rollout/turns"] > 1 for row in rows[:2])
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)
    for step in (1, 2):
        table = pyarrow.parquet.read_table(table_path(forked / "tools", step)).to_pylist()
        assert [row["rank"] for row in table] == [0] * 4 + [1] * 4
        roles = [[message["role"] for message in row["completion"]] for row in table]
        assert roles[:4] == [["assistant"]] * 4 and any("tool" in each for each in roles[4:])


def test_texts_end_completions_on_two_processes(forked):
    """What is logged is of both; those that a text has ended are whole, and are trained."""
    rows, adapter = results(forked / "stops")
    ends = {*make_tiny_tokenizer().convert_tokens_to_ids([*"abcdefghijkl"]), 1}
    steps = [row for row in rows if "loss" in row]
    for step, row in enumerate(steps, start=1):
        table = pyarrow.parquet.read_table(table_path(forked / "stops", step)).to_pylist()
        assert [each["rank"] for each in table] == [0] * 4 + [1] * 4
        cut = [each["last"] not in ends for each in table]
        assert any(cut) and not all(cut)
        assert row["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))
    assert len(steps) == 2 and steps[0]["grad_norm"] > 0
    assert any(torch.any(tensor != 0) for name, tensor in adapter.items() if "lora_B" in name)


def test_rewards_begin_early_on_two_processes(forked):
    """Each begins those of its own samples; adapter and tables are those of rewards that begin late."""
    (rows, adapter), (others, expected) = (results(forked / name) for name in ("early", "stops"))
    for name, tensor in expected.items():
        assert tensor.equal(adapter[name]), name
    for step in (1, 2):
        early, late = (
            pyarrow.parquet.read_table(table_path(forked / name, step)) for name in ("early", "stops")
        )
        assert early.equals(late) and early.column("rank").to_pylist() == [0] * 4 + [1] * 4
    assert all("time/reward_hidden" in row for row in rows if "loss" in row)
    assert not any("time/reward_hidden" in row for row in others)


def test_an_evaluation_draws_on_two_processes_what_it_draws_on_one(forked, tiny_runs):
    """Before the first step, where both have the same policy."""
    alone = forked / "alone"
    reward = {"reward_files": [f"{forked / 'last.py'}:last_token"], "per_device_train_batch_size": 8}
    train(QeRLConfig(**tiny_runs(alone, **STOPS | reward | {"max_steps": 2})), Console(quiet=True))
    found = []
    for run in (forked / "stops", alone):
        table = pyarrow.parquet.read_table(table_path(run, 0, "eval")).to_pylist()
        found.append(sorted((str(row["prompt"]), str(row["completion"]), row["last"]) for row in table))
        ranks = {row["rank"] for row in table}
        assert ranks == ({0} if run == alone else {0, 1})
    assert len(found[0]) == 8 and len(set(found[0])) == 8
    assert found[0] == found[1]


def model_with_tools(folder):
    """A tiny model with a chat template for tools, which ends its turns often."""
    model = make_tiny_model("llama", num_hidden_layers=1, max_position_embeddings=4096)
    model.generation_config.eos_token_id = [1, *range(10, 100, 6)]
    model.save_pretrained(folder / "model")
    tool_tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


def documented_job():
    """The SLURM job of docs/training.md."""
    text = (ROOT / "docs" / "training.md").read_text()
    job = re.search(r"^    #!/bin/bash\n(?:(?:    .*)?\n)+", text, re.MULTILINE)
    assert job is not None
    return job[0].replace("\n    ", "\n").strip() + "\n"


def free_port():
    """A port from 20000 to 39999 on which nobody listens."""
    for port in range(20000 + os.getpid() % 20000, 40000):
        with socket.socket() as free:
            if free.connect_ex(("localhost", port)):
                return port
    raise AssertionError("no free port")
