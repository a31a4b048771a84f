"""Tools and environments in the trainer by TRL's interface, with noise, dynamic sampling and resuming."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch

from qerl.errors import QeRLError
from tests.support.models import make_tiny_tokenizer
from tests.support.tools import (
    DATA,
    Guessing,
    Riddle,
    guessing,
    make_trainer,
    riddle,
    sampled,
    written_reward,
)
from tests.support.trainer import GROUP, logged, samples_of

pytestmark = pytest.mark.slow


def test_a_calculator_trains_as_with_trl(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    rows = logged(trainer)
    assert len(rows) == 2 and all(row["tools/call_frequency"] == 0.75 for row in rows)
    assert all(row["tools/failure_frequency"] == 0 for row in rows)
    assert all(row["rollout/turns"] == 1.75 for row in rows), "1, 2, 1 and 3, of which the third is cut off"
    assert all(row["loss"] != 0 for row in rows)


def test_a_game_trains_and_scores_itself(tmp_path):
    Guessing.made = 0
    trainer = make_trainer(
        tmp_path,
        rewards=(), script=guessing, tools=(), environment_factory=Guessing, max_completion_length=600,
        max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_func_names == ["Guessing"]
    assert Guessing.made == 2 * GROUP, "one for each sample, made once"
    rows = logged(trainer)
    assert all(row["rewards/Guessing/mean"] > 0.2 and row["rewards/Guessing/failed"] == 0 for row in rows)
    assert "Guess my number." in trainer._log.records[0].prompt[-1]["content"]


def test_an_environment_of_texts_needs_no_tools(tmp_path):
    trainer = make_trainer(
        tmp_path,
        rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Riddle,
        max_steps=1, max_tool_calling_iterations=2,
    )  # fmt: skip
    batch = sampled(trainer)
    assert trainer.reward_func_names == ["Riddle"]
    rewards = [record.rewards["Riddle"] for record in trainer._log.records]
    assert rewards[:GROUP] == [1.0, 0.0, 0.0, 0.0], "the answer to the first row is 0"
    assert rewards[-GROUP:] == [1.0, 1.0, 0.0, 0.0], "of the last one 1, said at once or in the second turn"
    text = "".join(trainer._log.records[-4].completion[i]["content"] for i in range(3))
    assert text == "0No.1"
    assert any(0 in sample.written for sample in samples_of(batch))
    trainer.train()


def test_several_environments_are_chosen_by_a_column(tmp_path):
    data = DATA.add_column("environment", ["game", "quiz"])

    class Other(Riddle):
        async def get_reward(self):
            return 0.5

    trainer = make_trainer(
        tmp_path, rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), data=data,
        environment_factory={"game": Riddle, "quiz": Other},
    )  # fmt: skip
    sampled(trainer, data)
    assert trainer.reward_func_names == ["Riddle", "Other"], "the order is that of every process"
    scored = [record.rewards["Other"] for record in trainer._log.records]
    assert all(math.isnan(reward) for reward in scored[:GROUP]) and scored[GROUP:] == [0.5] * GROUP
    assert [type(each).__name__ for each in trainer.environments[::GROUP]] == ["Riddle", "Other"]


def test_weights_of_rewards_are_kept_as_they_were_given(tmp_path):
    trainer = make_trainer(
        tmp_path, script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Riddle,
        reward_weights=[0.5],
    )  # fmt: skip
    assert trainer.args.reward_weights == [0.5] and trainer.reward_weights.tolist() == [0.5, 1.0]


def test_an_environment_may_have_the_data(tmp_path):
    """Each sample has a problem of its own; they share no prompt, and the loss is computed all the same."""
    draw = random.Random(0)

    class Own(Riddle):
        def reset(self, **row):
            self.secret, self.won = draw.randint(0, 9), False
            return f"Which is the number after {self.secret - 1}?"

    script = lambda track, so_far: str(track.prompt_number % 10)  # noqa: E731
    options = {
        "rewards": (written_reward,), "script": script, "tools": (), "data": None, "environment_factory": Own,
        "tokenizer": make_tiny_tokenizer(), "max_steps": 2, "max_tool_calling_iterations": 1,
    }  # fmt: skip
    trainer = make_trainer(tmp_path, **options)
    batch = sampled(trainer, trainer.train_dataset)
    prompts = [sample.prompt for sample in samples_of(batch)]
    shared = [sample.group for sample in samples_of(batch)]
    assert len(set(shared)) > 2, "two groups of four"
    assert all((prompts[i] == prompts[i - 1]) or (shared[i] != shared[i - 1]) for i in range(1, len(prompts)))
    trainer.train()
    with pytest.raises(QeRLError, match="the length of the run is unknown; set max_steps"):
        make_trainer(tmp_path, **options | {"max_steps": -1})


def test_a_trajectory_has_one_noise(tmp_path):
    trainer = make_trainer(tmp_path, noise=True, noise_stages=2)
    trainer.state.max_steps, trainer.state.global_step = 4, 2
    sampled(trainer)
    (call,) = trainer.engine.calls
    assert len(call[1]) == 2, "two norms in the only layer"
    assert trainer._log.metrics["train"]["noise/norms"] == [2.0], "logged once, not once for each turn"


@pytest.mark.parametrize("waits", [False, True])
def test_dynamic_sampling_draws_groups_with_environments_of_their_own(tmp_path, monkeypatch, waits):
    monkeypatch.setattr("qerl.tasks.together.PATIENCE", 0.0)
    seen = []

    def dead_at_first(completion_ids, environments, **_):
        assert all(each.tries for each in environments), "these are the ones that were played in"
        seen.append(environments)
        return [float(i % 2) * (len(seen) % 2) for i in range(len(completion_ids))]

    async def later(**columns):
        rewards = dead_at_first(**columns)
        await asyncio.sleep(0.05)
        return rewards

    trainer = make_trainer(
        tmp_path, rewards=(later if waits else dead_at_first,), script=guessing, tools=(),
        environment_factory=Guessing, max_completion_length=600, dynamic_sampling_batches=2, signal="reward",
    )  # fmt: skip
    signal = trainer.rollouts._signal
    trainer.rollouts._signal = replace(signal, weights_F=torch.tensor([1.0, 0.0]))
    parts = sampled(trainer)
    samples = samples_of(parts)
    assert len(trainer.engine.calls) == 1 and len(seen) > 2
    different = {id(each) for environments in seen for each in environments}
    assert len(different) <= 3 * GROUP, "those of a group that was scored are used again"
    assert (torch.tensor([s.advantage for s in samples]).view(-1, GROUP) != 0).any(dim=1).all()
    assert parts[0].rollout_tokens == sum(sum(sample.written) for sample in samples)
    prompts, shared = [sample.prompt for sample in samples], [sample.group for sample in samples]
    assert shared == [0] * GROUP + [GROUP] * GROUP
    assert all(prompts[i] == prompts[i - i % GROUP] for i in range(2 * GROUP))
