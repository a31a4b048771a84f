"""Sums: the tiny hybrid's language, its task, its runs, and that those of the result files have learned."""

from pathlib import Path

import pytest
import torch

from bench.result import read_rows
from lab import scratch
from lab.sums import policy, runs
from lab.sums.task import Sums
from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.models.load import load_model, load_tokenizer
from qerl.tasks import get_task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with a policy that was trained shorter than the real one: it is seldom right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QERL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(policy, "ENOUGH", 0.01)
        patch.setattr(runs, "HELD_OUT", 300)
        runs.sums_folder()
        yield


def test_training_writes_what_the_chat_template_and_the_tokenizer_write():
    tokenizer = policy.make_tokenizer()
    prompt = Chat(tokenizer).ids([{"role": "user", "content": policy.question(7, 58)}])
    (chat,) = policy.chats(torch.tensor([[7, 58]])).tolist()
    assert chat == prompt + tokenizer("560")["input_ids"] + [tokenizer.eos_token_id]
    assert tokenizer.decode(chat[-policy.ANSWER :], skip_special_tokens=True) == policy.answer(7, 58) == "560"
    assert tokenizer.unk_token_id not in chat


def test_the_task_rewards_the_right_digits_alone():
    task = Sums()
    row = task.test()[0]
    first, second = map(int, row["prompt"][-1]["content"].split("+"))
    right = policy.answer(first, second)
    answers = [right, right[::-1] if right != right[::-1] else "999", "", right + "0"]
    completions = [[{"role": "assistant", "content": text}] for text in answers]
    reward = next(each for each in task.rewards if each.__name__ == "accuracy")
    given = reward(prompts=[row["prompt"]] * 4, completions=completions, answer=[row["answer"]] * 4)
    assert given == [1.0, 0.0, 0.0, 0.0]
    train, test = ({str(row["prompt"]) for row in split} for split in (task.train(), task.test()))
    assert train and not train & test


def test_training_that_does_not_come_far_enough_is_an_error(monkeypatch):
    monkeypatch.setattr(policy, "MOST_STEPS", 2)
    with pytest.raises(QeRLError, match="right less often than 40% after 2 steps"):
        policy.train_policy("mixture")


def test_the_policy_that_is_saved_is_right_as_often_as_its_training_says(cache):
    folder = runs.sums_folder()
    model = load_model(folder, "bf16", torch.float32, "cpu")
    sums_B2 = torch.randint(policy.BELOW, (256, 2), generator=torch.Generator().manual_seed(3))
    # It is looked at every few steps, in which it may learn as much again.
    assert policy.ENOUGH / 2 < policy.right_probability(model, sums_B2).mean() < 5 * policy.ENOUGH
    assert load_tokenizer(folder).convert_tokens_to_ids("+") == policy.ID["+"] == len(scratch.SPECIAL)
    path = Path(runs.__file__).parent / "task.py"
    assert get_task(f"{path}:Sums").name == "sums"


def test_a_run_of_the_recipe_is_whole_and_a_rate_of_zero_changes_nothing(cache):
    fewer = {"max_steps": 2, "per_device_train_batch_size": 128}
    learned = runs.learn("hybrid", 0, fewer)
    control = runs.learn("hybrid", 0, fewer | {"max_steps": 1, "learning_rate": 0.0})
    assert control["after"] == control["before"] == learned["before"] > 0
    assert learned["after"] != learned["before"]
    assert (learned["weights"], learned["steps"], len(learned["reward_by_step"])) == ("nvfp4", 2, 2)
    assert learned["first_sampling_kl"] < 1e-6


@pytest.mark.parametrize("file", ["sums-h200", "sums-cpu"])
def test_every_seed_has_learned_beside_its_control(file):
    found = {(row["seed"], row["learning_rate"] > 0): row for row in read_rows(file)}
    assert found.keys() == {(seed, learns) for seed in range(3) for learns in (True, False)}
    for (_, learns), row in found.items():
        gain = row["after"] - row["before"]
        assert gain > 0.2 if learns else gain == 0
        assert row["weights"] == "nvfp4" and row["first_sampling_kl"] < 0.003


def test_every_seed_of_the_mixture_has_learned_beside_its_control():
    found = {(row["seed"], row["learning_rate"] > 0): row for row in read_rows("sums-mixture-cpu")}
    assert found.keys() == {(seed, learns) for seed in range(3) for learns in (True, False)}
    for (_, learns), row in found.items():
        gain = row["after"] - row["before"]
        assert gain > 0.1 if learns else gain == 0
        assert row["weights"] == "nvfp4" and row["policy"] == "mixture" and row["routing_differ"] is None


def test_the_mixture_has_learned_with_replay_and_without_and_replay_keeps_both_policies_closer():
    rows = read_rows("sums-mixture-h200")
    found = {(row["seed"], row["learning_rate"] > 0, row["replay_routing"]): row for row in rows}
    assert len(found) == len(rows) == 9
    for seed in range(3):
        replayed, anew, control = (found[seed, *arm] for arm in ((True, True), (True, False), (False, True)))
        assert min(replayed["after"], anew["after"]) > control["after"] + 0.1
        assert control["after"] == control["before"]
        assert replayed["sampling_kl"] < anew["sampling_kl"] / 2
        assert {row["engine"] for row in (replayed, anew, control)} == {"PagedEngine"}
        assert 0 < replayed["routing_differ"] < 0.01
