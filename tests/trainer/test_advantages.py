"""Advantages are TRL's where groups teach, zero where they do not, and add up to zero in each group."""

import itertools
import math
from contextlib import contextmanager
from pathlib import Path

import pandas
import pytest
import torch
from datasets import Dataset, IterableDataset

from lab.study.arms import Run
from qerl.errors import QeRLError
from qerl.rollout.engine import Completion, RolloutEngine
from qerl.rollout.session import whole_completions
from qerl.settings.config import QeRLConfig
from qerl.trainer.advantages import Signal, best_of_k, judge_of
from qerl.trainer.grpo import QeRLTrainer
from tests.support.batched import RATE, a_batch, an_arm
from tests.support.sessions import WholeTurns
from tests.support.trainer import as_batch, rollout_of, samples_of, settings

NAN = math.nan
DATA = Dataset.from_dict({"prompt": [f"prompt {i}" for i in range(12)]})
SCALES = [("sum_then_normalize", scale) for scale in ("group", "batch", "none")]
SCALES += [("normalize_then_sum", "group")]


def signal(size, weights=(1.0,), scale="group", aggregation="sum_then_normalize", judge=None, k=None):
    return Signal(size, torch.tensor(weights), scale, aggregation, judge, k)


@pytest.mark.parametrize(("aggregation", "scale"), SCALES)
@pytest.mark.parametrize("size", [4, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("reward", [0.1, 1.1, 0.3, -0.7])
def test_equal_rewards_are_no_signal_whatever_their_rounding(size, reward, aggregation, scale):
    alive = [0.0, 1.0] * (size // 2) + [1.0] * (size % 2)
    rewards = torch.tensor([reward] * size + alive + [reward] * size)[:, None]
    rule = signal(size, scale=scale, aggregation=aggregation)
    assert rule.zero_advantage(rewards).tolist() == [True, False, True]
    advantages = rule.advantages(rewards).view(3, size)
    assert not advantages[[0, 2]].any()
    assert advantages[1].all() and abs(advantages[1].sum()) < 1e-5


@pytest.mark.parametrize(("aggregation", "scale"), SCALES)
def test_several_rewards_with_weights(aggregation, scale):
    constant = [[1.0, 0.1, 0.3]] * 8
    third_differs = [[1.0, 0.1, 0.3]] * 7 + [[1.0, 0.1, 0.0]]
    weightless_differs = [[1.0, 0.1, 0.3]] * 7 + [[1.0, 0.0, 0.3]]
    rule = signal(8, weights=(1.0, 0.0, 0.7), scale=scale, aggregation=aggregation)
    rewards = torch.tensor(constant + third_differs + weightless_differs)
    assert rule.zero_advantage(rewards).tolist() == [True, False, True]
    assert not rule.advantages(rewards).view(3, 8)[[0, 2]].any()


def test_rewards_that_make_up_for_each_other_are_no_signal():
    """In FP32 the totals .1 + .2 and .3 + 0 differ by the rounding of their terms."""
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]] * 4)
    assert signal(8, weights=(1.0, 1.0)).zero_advantage(rewards).tolist() == [True]


@pytest.mark.parametrize(("aggregation", "scale"), SCALES)
def test_samples_without_reward_are_in_no_mean(aggregation, scale):
    rule = signal(4, weights=(1.0, 1.0), scale=scale, aggregation=aggregation)
    given = [[1.0, 0.1], [0.0, 0.1], [0.0, NAN]]
    rewards = torch.tensor([*given, [NAN, NAN], *[[0.3, NAN]] * 3, [NAN, NAN], *given, given[0]])
    assert rule.zero_advantage(rewards).tolist() == [False, True, False]
    advantages = rule.advantages(rewards).view(3, 4)
    assert advantages[0, 3] == 0 and not advantages[1].any()
    assert advantages[0, :3].all()
    assert advantages.sum(dim=1).abs().max() < 1e-5


def test_accuracy_is_between_right_and_wrong():
    right, wrong, penalty = [1.0, 0.1], [0.0, 0.1], [0.0, 0.0]
    rule = signal(4, weights=(1.0, 1.0), judge=0)
    groups = [[right, *[wrong] * 3], [wrong, wrong, wrong, penalty], [right, right, right, [1.0, 0.0]]]
    groups += [[right] * 4, [right, [NAN, 0.1], right, right]]
    rewards = torch.tensor(groups).flatten(0, 1)
    assert rule.zero_advantage(rewards).tolist() == [False, True, True, True, True]
    assert not rule.advantages(rewards)[4:].any()
    found = signal(4, weights=(1.0, 1.0)).zero_advantage(rewards)
    assert found.tolist() == [False, False, False, True, False]


def test_groups_outside_of_daposs_batch_are_not_in_its_scale():
    teaches, form_only = [[1.0], [0.0], [0.0], [0.0]], [[-0.5], [0.0], [-1.0], [0.0]]
    rule = signal(4, scale="batch", judge=0)
    both = rule.advantages(torch.tensor(teaches + form_only))
    assert torch.equal(both[:4], rule.advantages(torch.tensor(teaches)))


def test_the_judge_is_called_accuracy_or_alone():
    assert judge_of(["format", "accuracy"]) == 1
    assert judge_of(["my_reward"]) == 0
    assert judge_of(["soft_overlong_punishment_reward", "my_reward"]) == 1
    with pytest.raises(QeRLError, match=r"named 'accuracy', .* \(form, length\); .* set signal: reward"):
        judge_of(["form", "length"])


# MaxRL


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("logit", [-1.5, 0.4])
def test_maxrl_advantages_follow_the_gradient_of_the_likelihood(size, logit):
    """Over all groups of coin flips, the mean of A grad log p is on average the gradient of the series of
    log p in 1 - p, - sum (1 - p)^k / k, up to k = size - 1."""
    logit = torch.tensor(logit, dtype=torch.double, requires_grad=True)
    p = logit.sigmoid()
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.double)
    logps = torch.where(outcomes > 0, p.log(), (1 - p).log())
    advantages = signal(size, scale="mean").advantages(outcomes.view(-1, 1)).view(-1, size).double()
    chances = logps.sum(dim=1).exp().detach()
    (found,) = torch.autograd.grad(
        (chances * (advantages * logps).mean(dim=1)).sum(), logit, retain_graph=True
    )
    likelihood = -sum((1 - p) ** k / k for k in range(1, size))
    (wanted,) = torch.autograd.grad(likelihood, logit)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_a_group_without_any_success_has_no_maxrl_signal():
    groups = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4, [0.0, -1.0, -1.0, 0.5], [3.0, 1.0, NAN, 0.5]]
    rule = signal(4, scale="mean")
    rewards = torch.tensor(groups).view(-1, 1)
    assert rule.zero_advantage(rewards).tolist() == [False, True, True, True, False]
    wanted = [[3.0, -1, -1, -1], [0.0] * 4, [0.0] * 4, [0.0] * 4, [1.0, -1 / 3, 0, -2 / 3]]
    torch.testing.assert_close(rule.advantages(rewards).view(-1, 4), torch.tensor(wanted))


# pass@k


def test_best_of_k_by_hand():
    rewards = torch.tensor([[0, 1, 0, 0], [2, 0, NAN, 1], [1, 1, 1, 0], [5, NAN, NAN, NAN]])
    third = 1 / 3
    expected = torch.tensor([[third, 1, third, third], [2, 1.5, NAN, 1.5], [1, 1, 1, 1], [NAN] * 4]).double()
    torch.testing.assert_close(best_of_k(rewards, 2), expected, equal_nan=True)
    torch.testing.assert_close(best_of_k(rewards, 1), rewards.double(), equal_nan=True)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_k_is_a_mean_over_sets(k):
    rewards = torch.randn(3, 6, generator=torch.Generator().manual_seed(k)).double()
    rewards[0, 2] = rewards[0, 3]  # a tie
    for rewards_G, found_G in zip(rewards, best_of_k(rewards, k), strict=True):
        for i, found in enumerate(found_G):
            sets = [s for s in itertools.combinations(range(6), k) if i in s]
            assert found == pytest.approx(sum(rewards_G[list(s)].max().item() for s in sets) / len(sets))


@pytest.mark.parametrize("k", [2, 3])
def test_pass_at_k_advantages_follow_the_gradient_of_pass_at_k(k):
    """Over all groups of 5 coin flips, sum(A grad log p) has the mean (5 - k) / k times grad pass@k."""
    logit = torch.tensor(-0.8, dtype=torch.double, requires_grad=True)
    p = logit.sigmoid()
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=torch.double)
    logps = torch.where(outcomes > 0, p.log(), (1 - p).log())
    advantages = signal(5, scale="none", k=k).advantages(outcomes.view(-1, 1)).view(-1, 5)
    surrogate = (logps.sum(1).exp().detach() * (advantages * logps).sum(1)).sum()
    estimated = torch.autograd.grad(surrogate, logit, retain_graph=True)[0]
    exact = torch.autograd.grad(1 - (1 - p) ** k, logit)[0]
    assert estimated.item() == pytest.approx((5 - k) / k * exact.item(), rel=1e-6)


def test_pass_at_k_has_no_signal_where_any_set_is_right():
    rewards = torch.tensor([[0.1, 1.1, 1.1, 1.1], [0.1, 0.1, 1.1, 1.1], [0.1] * 4, [0.1, 0.1, 0.1, 1.1]])
    rule = signal(4, k=2)
    assert rule.zero_advantage(rewards.view(-1, 1)).tolist() == [True, False, True, False]
    advantages = rule.advantages(rewards.view(-1, 1)).view(4, 4)
    assert not advantages[[0, 2]].any() and advantages[[1, 3]].all()
    assert advantages.sum(dim=1).abs().max() < 1e-5
    # Two values are as far apart as any two others in standard deviations of their group, which is why the
    # settings refuse this scale.
    torch.testing.assert_close(advantages[3], signal(4).advantages(rewards[3][:, None]), rtol=1e-3, atol=0)


def test_pass_at_k_in_a_study_is_not_what_grpo_does():
    """With 3 of 8 right, a wrong sample's sets of 4 have a right one in 31 of 35 cases."""
    runs = [Run(an_arm(name=str(k), pass_at_k=k), 7, RATE) for k in (None, 4)]
    batch = a_batch(*runs, prompts_per_step=1, samples_per_prompt=8)
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0])
    grpo, best_of_4 = batch._advantages(rewards.expand(2, 8)[..., None])
    expected = torch.where(rewards > 0, 1 / 14, -3 / 70)
    torch.testing.assert_close(best_of_4, expected)
    torch.testing.assert_close(grpo, (rewards - 3 / 8) / (rewards.std() + 1e-4))


# In the trainer


class Engine(RolloutEngine):
    """Completions of one to six tokens; the last has no stop token where `cut_off` says so."""

    def __init__(self, stop: int, cut_off=lambda sample: False) -> None:
        self.stop, self.cut_off, self.prompts = stop, cut_off, []

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None):
        return whole_completions(self.session(params), prompts, samples_per_prompt)

    @contextmanager
    def session(self, params, norm_offsets=None, growing=False, longest_prompt=None):
        yield Turns(self, params)


class Turns(WholeTurns):
    def __init__(self, engine, params):
        super().__init__(params, positions=None)
        self._engine, self._draw = engine, torch.Generator().manual_seed(params.seed)

    def _add(self, sequences):
        super()._add(sequences)
        self._engine.prompts.append([tuple(p.token_ids) for p in dict.fromkeys(s.prompt for s in sequences)])

    def turn(self, sequence):
        ids = torch.randint(5, 90, (1 + sequence.index % 6,), generator=self._draw).tolist()
        if not self._engine.cut_off(sequence.index):
            ids[-1] = self._engine.stop
        return Completion(ids, [-4.5] * len(ids), [4.5] * len(ids), "stop")


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path: Path):
    def build(*rewards, cut_off=lambda sample: False, data=DATA, **changes):
        args = QeRLConfig(**settings(tmp_path, **({"max_steps": 2} | changes)))
        return QeRLTrainer(
            tiny_model("llama"), list(rewards), args, data,
            engine=Engine(tiny_tokenizer.eos_token_id, cut_off), processing_class=tiny_tokenizer,
        )  # fmt: skip

    return build


def rows_of(trainer, prompts: int | None = None):
    size = trainer.args.num_generations
    count = prompts or trainer.args.generation_batch_size // size
    return [trainer.train_dataset[i] for i in range(count) for _ in range(size)]


def rollout(trainer):
    """A rollout as TRL would have it."""
    return as_batch(rollout_of(trainer, rows_of(trainer)), trainer.processing_class.pad_token_id)


def place_of(prompt):
    """Number of a prompt in `DATA`, the first of which `rows_of` proposes."""
    return int(prompt.split()[1])


def form_alone(completions, **_):
    """Wrong throughout, right form: the group of a hard problem."""
    return [0.1] * len(completions)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("batches", [0, 1])
def test_no_sample_of_a_group_without_signal_is_computed(make, size, batches):
    trainer = make(
        form_alone, num_generations=size, per_device_train_batch_size=16, dynamic_sampling_batches=batches
    )
    samples = samples_of(rollout_of(trainer, rows_of(trainer)))
    assert not any(sample.advantage for sample in samples)
    assert trainer.updates.rows(samples) == []
    groups = sum(map(len, trainer.engine.prompts))
    assert groups == (1 + batches) * 16 // size, "as many were asked for again"


@pytest.mark.parametrize("leave_out", [False, True])
def test_groups_without_signal_count_or_not(make, leave_out):
    """Two of four groups teach; the others are in the tokens and samples of the means, or in neither."""

    def half(completion_ids, **_):
        return [float(i % 4) * (i // 4 % 2) for i in range(len(completion_ids))]

    trainer = make(half, filter_zero_advantages=leave_out)
    parts = rollout_of(trainer, rows_of(trainer))
    lengths = [[len(sample.tokens) for sample in samples_of(parts)[at : at + 4]] for at in (0, 4, 8, 12)]
    counted = lengths[1::2] if leave_out else lengths
    assert {part.rollout_tokens for part in parts} == {sum(map(sum, counted))}
    assert {part.counted for part in parts} == {0.5 if leave_out else 1.0}
    for group, size in enumerate(lengths):
        found = {sample.group_tokens for sample in samples_of(parts)[4 * group : 4 * group + 4]}
        assert found == {sum(size) / 4}


def form(completion_ids, **_):
    return [None if len(ids) == 5 else 0.1 * (len(ids) % 2) for ids in completion_ids]


PRESETS = {
    "grpo": {"algorithm": "grpo"},
    "grpo, masked": {"algorithm": "grpo", "mask_truncated_completions": True},
    "dapo": {"algorithm": "dapo"},
    "dapo, masked": {"algorithm": "dapo", "mask_truncated_completions": True},
    "dapo, batch": {"algorithm": "dapo", "scale_rewards": "batch"},
    "dapo, each": {"algorithm": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_advantages_that_the_loss_sees_add_up_to_zero(make, preset):
    """Half of each group is cut off and punished for it."""

    def accuracy(prompts, **_):
        return [float(i % 4 == 0 and place_of(prompt) % 3 > 0) for i, prompt in enumerate(prompts)]

    def too_long(completion_ids, **_):
        return [-float(i % 2) for i in range(len(completion_ids))]

    trainer = make(accuracy, too_long, cut_off=lambda sample: sample % 2 == 1, **preset)
    batch = rollout(trainer)
    seen = batch["completion_mask"].any(dim=1)
    assert seen.all() == (not trainer.args.mask_truncated_completions)
    sums = (batch["advantages"] * seen).view(-1, 4).sum(dim=1)
    assert batch["advantages"].any() and sums.abs().max() < 1e-5
    wrong_and_masked = ~batch["advantages"].view(-1, 4).any(dim=1)
    if trainer.args.mask_truncated_completions and trainer.args.dynamic_sampling_batches == 0:
        assert wrong_and_masked.tolist() == [True, False, False, True], (
            "short wrong answers are not trained up"
        )


@pytest.mark.parametrize(("aggregation", "scale"), SCALES)
def test_replaced_groups_are_on_the_scale_of_the_batch_they_join(make, aggregation, scale):
    def grows(prompts, **_):
        """Every second of the proposed groups is alive; others all are, ten times as far apart."""
        assert len(prompts) == 4, "a group is scored by itself"
        place = place_of(prompts[0])
        return [10.0 * i if place > 3 else float(i * (place % 2 == 0)) for i in range(4)]

    options = {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    batch = rollout(make(grows, dynamic_sampling_batches=1, **options))
    steps = torch.arange(4.0)
    rewards = torch.cat([steps, 10 * steps] * 2)[:, None]
    expected = signal(4, scale=scale, aggregation=aggregation).advantages(rewards)
    torch.testing.assert_close(batch["advantages"], expected)


def test_a_step_samples_no_prompt_twice(make):
    trainer = make(form_alone, dynamic_sampling_batches=2, per_device_train_batch_size=16)
    rollout(trainer)
    sampled = [prompt for prompts in trainer.engine.prompts for prompt in prompts]
    assert len(sampled) == len(set(sampled)) == 12


def test_the_table_of_completions_is_of_the_batch_that_trains(make, tmp_path):
    def alive_later(prompts, log_extra, **_):
        place = place_of(prompts[0])
        log_extra("rollout", [f"{'later' if place > 3 else place} {i}" for i in range(len(prompts))])
        return [float(i == 0) * (place > 1) for i in range(len(prompts))]

    trainer = make(alive_later, dynamic_sampling_batches=1, log_completions=True)
    batch = rollout(trainer)
    trainer.log({})
    table = pandas.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    assert table["completion"].tolist() == texts
    assert table["advantage"].tolist() == batch["advantages"].tolist()
    groups = ("later", "later", 2, 3)
    assert table["rollout"].tolist() == [f"{group} {i}" for group in groups for i in range(4)]
    assert table["alive_later"].tolist() == [1.0, 0.0, 0.0, 0.0] * 4
    prompts = trainer.processing_class.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    assert table["prompt"].tolist() == prompts


def test_a_judge_that_is_none_is_told(make, caplog):
    def always_above_zero(completion_ids, **_):
        return [1.0 + i % 4 for i in range(len(completion_ids))]

    for signal_, count in (("accuracy", 1), ("reward", 0)):
        caplog.clear()
        trainer = make(always_above_zero, signal=signal_)
        for _ in range(2):
            assert rollout(trainer)["advantages"].any() == (signal_ == "reward")
        assert caplog.text.count("always_above_zero above 0") == count


def test_a_judge_that_gives_credit_for_parts_is_told(make, caplog):
    def accuracy(completion_ids, **_):
        return [i % 4 / 3 for i in range(len(completion_ids))]

    def passed(completion_ids, **_):
        return [2.0 * (i % 4 > 1) - 1 for i in range(len(completion_ids))]

    for reward, signal_, count in (
        (accuracy, "accuracy", 1),
        (accuracy, "reward", 0),
        (passed, "accuracy", 0),
    ):
        caplog.clear()
        trainer = make(reward, signal=signal_)
        for _ in range(2):
            assert rollout(trainer)["advantages"].any()
        assert caplog.text.count("accuracy has several values above 0") == count


def test_dapo_without_a_judge_is_refused(make):
    with pytest.raises(QeRLError, match="set signal: reward"):
        make(form, form_alone, algorithm="dapo")
    make(form, form_alone, algorithm="dapo", signal="reward")


def test_dynamic_sampling_of_a_stream_is_refused(make):
    stream = IterableDataset.from_generator(lambda: iter(DATA))
    with pytest.raises(QeRLError, match="set dynamic_sampling_batches: 0"):
        make(form_alone, algorithm="dapo", data=stream)
