"""Trajectories with tools on the paged engine: who wrote what, probabilities of its tokens, and blocks."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from datasets import Dataset

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry, Pages
from qerl.rollout.paged.machine import Cuda
from qerl.rollout.paged.scheduler import Pace
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.calling import check_masks, late, play_late
from tests.support.models import make_tiny_tokenizer
from tests.support.paged import random_model, score
from tests.support.trainer import GROUP, logged, settings, sum_reward

PROMPTS = [list(range(5, 75)), [7], list(range(20, 99))]
STOPS = tuple(range(1, 1000, 20))


class FifteenBlocks(Cuda):
    """The GPU, with room for one long sequence of `random_model` and little more."""

    def cache_bytes(self, model, freed=0):
        return 15 * KVGeometry((None,), (Pages(0, 2, 64, 2),) * 3).bytes((1,))


@torch.no_grad()
def gaps(model, trajectories):
    """Mean |difference| at the policy's own tokens: engine and trainer, and of either from FP32."""
    exact = copy.deepcopy(model).float()
    own = torch.tensor([w for t in trajectories for w in t.written], device="cuda").bool()
    engine = torch.tensor([p for t in trajectories for p in t.logprobs], device="cuda")
    trainer, truth = (
        torch.cat([score(each, list(t.prompt_ids), t.token_ids) for t in trajectories])
        for each in (model, exact)
    )
    pairs = ((engine, trainer), (engine, truth), (trainer, truth))
    return tuple(float((a - b)[own].abs().mean()) for a, b in pairs)


@pytest.mark.parametrize("machine", [Cuda(), FifteenBlocks()], ids=["plenty", "scarce"])
@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_tools_that_answer_late(packed, machine):
    model = random_model("qwen2", packed)
    engine = PagedEngine(model, pad_token_id=0, machine=machine, pace=Pace(spare_rounds=0))
    params = SamplingParams(max_tokens=400, seed=5, stop_token_ids=STOPS)
    found, session, beside = play_late(engine, PROMPTS, 6, params)
    for trajectory in found:
        check_masks(trajectory)
    to_trainer, engine_error, trainer_error = gaps(model, found)
    turns = sum(trajectory.turns for trajectory in found)
    heard = sum(trajectory.written.count(0) for trajectory in found)
    print(
        f"{packed or 'bf16'}: {turns} turns, {beside} times decoded beside calls, {session.prefilled_tokens} "
        f"tokens prefilled; mean |difference| {to_trainer:.1e}, from fp32: engine {engine_error:.1e}, "
        f"trainer {trainer_error:.1e}"
    )
    assert turns > 3 * len(found) and beside > 0
    assert engine_error < 1.2 * trainer_error
    assert to_trainer < 2 * trainer_error
    if type(machine) is Cuda:
        assert session.prefilled_tokens == sum(map(len, PROMPTS)) + heard, "keys are kept between turns"
    else:
        assert session.prefilled_tokens > sum(map(len, PROMPTS)) + heard, "and given up where memory is short"
    scheduler = session._scheduler
    assert not scheduler.idle and not scheduler.busy
    assert scheduler.memory.free == scheduler.memory.count


class Echo:
    """Answers late with a text as long as what it heard."""

    def reset(self, **row):
        return None

    def respond(self, text):
        return late(len(text) % 40) + "." * len(text)


def test_a_run_with_an_environment_that_answers_late(tmp_path):
    """Two steps with noise in the second; the update finds the probabilities that the sampler had."""
    tokenizer = make_tiny_tokenizer()
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} and?"}]} for i in range(2)])
    args = QeRLConfig(
        **settings(
            tmp_path, use_cpu=False, per_device_train_batch_size=2 * GROUP, max_completion_length=300,
            max_tool_calling_iterations=4, max_steps=2, learning_rate=1e-3, noise=True, noise_stages=2,
        )
    )  # fmt: skip
    model = random_model("qwen2", "nvfp4", vocab_size=128).train()
    trainer = QeRLTrainer(
        model, [sum_reward], args, data, processing_class=tokenizer, environment_factory=Echo
    )
    trainer.train()
    assert isinstance(trainer.engine, PagedEngine)
    first, second = logged(trainer)
    print({name: value for name, value in first.items() if name.startswith(("sampling", "rollout"))})
    assert first["rollout/turns"] > 1 and second["rollout/turns"] > 1
    assert first["noise/norms"] == 0 and second["noise/norms"] == 6
    assert first["grad_norm"] > 0 and second["grad_norm"] > 0
    assert first["sampling/kl"] < 1e-2 and first["sampling/ratio/mean"] == pytest.approx(1, abs=0.02)
    assert second["sampling/kl"] > first["sampling/kl"], "noise"
