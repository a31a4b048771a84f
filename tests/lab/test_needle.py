"""The needle: its language, the policy whose prior is known, the task, and that it is learned."""

import itertools
import logging
import math
from pathlib import Path

import pytest
import torch

from lab.needle import folder, training
from lab.needle.language import (
    COUNTS,
    DOORS,
    PRIORS,
    RIGHT,
    door_probabilities,
    make_tokenizer,
    question,
    walk,
)
from lab.needle.task import Needle
from lab.study.named import find_model, find_task
from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.models.chat import Chat
from qerl.models.load import load_model, load_tokenizer
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.settings.recipe import load_config
from qerl.tasks import get_task
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import settings

pytestmark = pytest.mark.slow

CELLS = [*itertools.product(PRIORS.values(), range(1, len(COUNTS) + 1))]


@pytest.fixture(scope="module")
def needle(tmp_path_factory):
    """Folder of a policy that was trained shorter than the real one: its priors are less exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QERL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(training, "STEPS", 60)
        patch.setattr(training, "TOLERANCE", 1.0)
        return folder.needle_folder()


@pytest.fixture
def policy(needle):
    return load_model(needle, "bf16", torch.float32, "cpu")


@pytest.mark.parametrize(("prior", "decisions"), CELLS)
def test_the_right_doors_have_the_prior_and_are_never_the_likeliest(prior, decisions):
    every = [door_probabilities(prior, decisions, place) for place in range(decisions)]
    right = [doors[DOORS.index(door)] for doors, door in zip(every, RIGHT, strict=False)]
    assert math.prod(right) == pytest.approx(prior)
    assert all(sum(doors) == pytest.approx(1) and max(doors) > 0.5 for doors in every)


def test_training_writes_what_the_chat_template_and_the_tokenizer_write():
    tokenizer = make_tokenizer()
    keys, places = torch.tensor([6, 0]), torch.tensor([[0, 1, 15], [2, 2, 2]])
    texts = [question(0.003, 2, "7", "abp"), question(0.003, 2, "1", "ccc")]
    ids = [Chat(tokenizer).ids([{"role": "user", "content": text}]) for text in texts]
    assert training.prompts(0.003, 2, keys, places).tolist() == ids
    doors = torch.tensor([[5, 2], [5, 0]])
    walks = [walk("FC", "7"), walk("FA", "1")]
    assert walks == ["F7C7", "F1A0"]
    end = tokenizer.eos_token_id
    assert training.walks(keys, doors).tolist() == [tokenizer(text)["input_ids"] + [end] for text in walks]
    assert tokenizer.batch_decode(training.walks(keys, doors), skip_special_tokens=True) == walks
    assert tokenizer.unk_token_id not in itertools.chain(*ids, *training.walks(keys, doors).tolist())


def test_a_success_is_the_right_walk_to_the_letter():
    task = Needle(prior=0.01, decisions=2)
    accuracy, form = task.rewards
    completions = ["F7C7", "F7A0", "A7C7", "F7C7C7", "F7", "77", "F8C8"]
    columns = {"prompts": [""] * 7, "completions": completions}
    assert accuracy(**columns, answer=["F7C7"] * 7) == [1.0, 0, 0, 0, 0, 0, 0]
    assert form(**columns) == [0.1, 0.1, 0.1, 0, 0, 0, 0.1]
    assert [message["role"] for message in task.train()[0]["prompt"]] == ["user"]


def test_no_held_out_problem_is_a_training_problem():
    sets = [Needle(seed=seed, train_size=500) for seed in (0, 1)]
    train, test = ({row["prompt"][0]["content"] for one in sets for row in part(one)}
                   for part in (type(sets[0]).train, type(sets[0]).test))  # fmt: skip
    assert len(train) > 900 and len(test) > 400 and not train & test
    with pytest.raises(QeRLError, match=r"only .* held-out problems of needle, not 99999"):
        Needle(test_size=99999).test()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prior": 0.2}, r"prior is 0.2; use one of: 0.1, 0.03, 0.01, 0.003"),
        ({"decisions": 4}, "decisions is 4; use a number from 1 to 3"),
        ({"answer_format": "tags"}, "Task needle has its own language"),
        ({"prio": 0.1}, r"Task needle has no option 'prio' \(did you mean 'prior'"),
    ],
)
def test_an_option_that_the_model_does_not_know_is_refused(options, error):
    with pytest.raises(QeRLError, match=error):
        find_task("needle", options)


def test_a_prior_is_exact_and_what_sampling_gives(policy, needle):
    """All walks together have probability 1, and the engine draws the right one as often as it says."""
    keys, places = torch.tensor([3]), torch.tensor([[0, 1, 2]])
    prompt = training.prompts(0.1, 2, keys, places)
    probability = training.success_probability(policy, prompt, keys).item()
    assert probability == pytest.approx(0.1, rel=0.4)
    doors = torch.tensor([*itertools.product(range(len(DOORS)), repeat=2)])
    walks = training.walks(keys.expand(len(doors)), doors)
    with torch.no_grad():
        logits = policy(torch.cat([prompt.expand(len(doors), -1), walks], dim=1)).logits.double()
    logps = logits[:, prompt.size(1) - 1 : -1].log_softmax(-1).gather(2, walks[..., None])[..., 0].sum(1)
    assert logps.exp().sum().item() == pytest.approx(1, abs=0.03)
    assert logps[5 * 8 + 2].exp().item() == pytest.approx(probability)
    engine = PortableEngine(policy, 0, max_sequences=1024)
    params = SamplingParams(max_tokens=8, stop_token_ids=(policy.config.eos_token_id,), seed=1)
    drawn = engine.generate(prompt.tolist(), 2048, params).completions
    share = sum(c.token_ids == walks[5 * 8 + 2].tolist() for c in drawn) / len(drawn)
    assert share == pytest.approx(probability, abs=4 * math.sqrt(probability / len(drawn)))


def test_packing_keeps_the_priors(needle, policy):
    packed = load_model(needle, "nvfp4", torch.float32, "cpu")
    before, after = (training.measured_priors(model, 16) for model in (policy, packed))
    assert set(before) == set(CELLS)
    assert before != after and after == pytest.approx(before, rel=0.25)


def test_a_policy_without_its_priors_is_refused(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 1)
    with pytest.raises(QeRLError, match=r"needle policy of seed 3 has a prior of .* in place of 0.1 with 1"):
        training.train_policy(seed=3)


def test_the_policy_is_made_once_and_anew_when_its_source_changes(monkeypatch, tmp_path, policy, caplog):
    made = []
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.setattr(training, "train_policy", lambda: made.append(policy) or policy)
    with caplog.at_level(logging.WARNING):
        first, second = folder.needle_folder(), find_model("needle").folder
    assert first == second and len(made) == 1 == caplog.text.count("Training the policy of needle")
    assert load_tokenizer(find_model("needle")).eos_token_id == policy.config.eos_token_id
    monkeypatch.setattr(folder, "SOURCES", (training,))
    assert folder.needle_folder() != first and len(made) == 2


def test_the_recipe_is_a_run_of_this_task(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(["lab/needle/recipe.yaml"], {"model": "needle"})
    assert get_task(config.task, **config.task_options).name == "needle"


def test_grpo_finds_the_needle(needle, tmp_path):
    """A prior of .1 passes a half within twenty steps: the whole loop learns what its reward says."""
    task = Needle(prior=0.1, decisions=1, train_size=512)
    model = add_lora(load_model(needle, "nvfp4", torch.float32, "cpu"), rank=8, alpha=8, dropout=0.0)
    changes = {"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 6}
    args = QeRLConfig(
        **settings(tmp_path, max_steps=20, learning_rate=3e-3, lr_scheduler_type="constant", **changes)
    )
    trainer = QeRLTrainer(model, task.rewards, args, task.train(), processing_class=load_tokenizer(needle))
    trainer.train()
    curve = [row["rewards/accuracy/mean"] for row in trainer.state.log_history if "loss" in row]
    assert sum(curve[:3]) / 3 < 0.35 and sum(curve[-3:]) / 3 > 0.5, curve
    prompts = training.prompts(0.1, 1, torch.arange(9), torch.randint(16, (9, 3)))
    assert training.success_probability(model, prompts, torch.arange(9)).min() > 0.5
