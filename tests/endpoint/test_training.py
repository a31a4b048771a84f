"""Training with external agents: what they were sent is what is trained on, forks included."""

import functools

import pytest
import torch
from datasets import Dataset

from qerl.agents.outside import Endpoint
from qerl.environments.registry import get_environment
from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import multiply
from tests.support.endpoint import chat, message_of, user
from tests.support.models import make_tiny_tokenizer
from tests.support.tools import make_args, make_policy
from tests.support.trainer import GROUP, logged, logged_of

pytestmark = pytest.mark.slow

DATA = Dataset.from_list([{"prompt": [user(text)], "answer": text} for text in ("ab", "cd", "ef")])


def letters(text):
    return sum(each in "abcdefghij" for each in text) / max(len(text), 1)


def agent(endpoint, row):
    """Two turns, of which every other trajectory writes the first anew, and one fails."""
    first = chat(endpoint, row["prompt"], max_tokens=10)
    second = chat(endpoint, [*row["prompt"], message_of(first), user("again")], max_tokens=10)
    text = message_of(first)["content"] + message_of(second)["content"]
    if ord(text[0] if text else "a") % 2:
        chat(endpoint, [*row["prompt"], message_of(first), user("other")], max_tokens=10)
        chat(endpoint, [user("summary"), {"role": "assistant", "content": "none"}, user("on")], max_tokens=10)
    if text.startswith("~"):
        raise ValueError("no tilde")
    return letters(text)


def make_trainer(folder, run=agent, data=DATA, options=None, **changes):
    return QeRLTrainer(
        make_policy(),
        [],
        make_args(folder, **({"max_completion_length": 120} | changes)),
        data,
        processing_class=make_tiny_tokenizer(),
        environment_factory=functools.partial(Endpoint, run, **(options or {})),
    )


def test_a_step_is_trained_on_what_was_sampled(tmp_path):
    seen = []
    trainer = make_trainer(tmp_path, max_steps=2)
    train = trainer.rollouts.train

    def kept(*args):
        found = train(*args)
        seen.append(found.samples)
        return found

    trainer.rollouts.train = kept
    trainer.train()
    rows = logged(trainer)
    assert all(row["loss"] != 0 for row in rows)
    assert all(row["rollout/turns"] > 2 and row["rollout/forks"] > 0 for row in rows)
    # The trainer's own pass over all trained tokens, those of forks too, has the sampler's log-probabilities.
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert all(row["rewards/Endpoint/mean"] > 0 for row in rows)
    for samples in seen:
        assert len(samples) > 2 * GROUP
        counted = [sample for sample in samples if not sample.masked]
        assert sum(sum(sample.written) for sample in counted) == sum(sum(s.loss_mask) for s in samples)
        assert all(not sample.forks for sample in samples)
        by_group = {}
        for sample in samples:
            assert by_group.setdefault(sample.group, sample.prompt) == sample.prompt
    assert trainer.reward_func_names == ["Endpoint"]
    trainer._conversations.__exit__()


def test_forks_have_the_advantage_of_their_trajectory_and_microbatches_are_even(tmp_path):
    trainer = make_trainer(tmp_path, per_device_train_batch_size=GROUP, gradient_accumulation_steps=2)
    found = trainer.rollouts.train([dict(row) for row in list(DATA)[:2] for _ in range(GROUP)], 0)
    samples = found.samples
    assert len(samples) % 2 == 0
    filling = [sample for sample in samples if sample.tokens == sample.prompt == [0]]
    assert found.counted == pytest.approx(1 - len(filling) / len(samples))
    by_prompt = {}
    for sample in samples:
        if not sample.masked:
            by_prompt.setdefault((tuple(sample.rewards), sample.advantage), []).append(sample)
    assert any(len(each) > 1 for each in by_prompt.values()), "forks share reward and advantage"
    assert found.tokens == sum(sum(sample.loss_mask) for sample in samples)
    with torch.no_grad():
        values = trainer.updates.logprobs(trainer.model, samples)
    for sample, own in zip(samples, values, strict=True):
        for written, mine, given in zip(sample.written or [0], own, sample.logprobs, strict=True):
            assert not written or sample.masked or abs(mine - given) < 1e-4


def test_what_forks_add_is_what_single_samples_would_add(tmp_path):
    """The gradient of samples with forks is that of the same tokens, each in a row of its own."""
    trainer = make_trainer(tmp_path, loss_type="dapo")
    rows = [dict(row) for row in list(DATA)[:2] for _ in range(GROUP)]
    microbatches = trainer._rollout(trainer.model, rows)
    samples = [sample for part in microbatches for sample in part.samples]
    trainer.model.train()
    trainer.updates.run(trainer.model, microbatches, 1)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    found = [p.grad.clone() for p in parameters]
    trainer.model.zero_grad()
    total = sum(sum(sample.loss_mask) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        if sample.masked or not sample.advantage:
            continue
        ids = torch.tensor([[*sample.prompt, *sample.tokens]])
        logprobs_TV = trainer.model(ids).logits[0].log_softmax(-1)
        begin = len(sample.prompt) - 1
        for at, (token, own) in enumerate(zip(sample.tokens, sample.loss_mask, strict=True)):
            if own:
                logprob = logprobs_TV[begin + at, token]
                loss = loss - (logprob - logprob.detach()).exp() * sample.advantage / total
    loss.backward()
    for parameter, own in zip(parameters, found, strict=True):
        assert torch.allclose(parameter.grad, own, atol=1e-6, rtol=1e-3)
    assert max(own.abs().max() for own in found) > 1e-4


def test_dynamic_sampling_takes_the_first_groups_with_a_signal(tmp_path):
    """Groups enter the open call list by list; what is taken is what each draws when it enters alone."""
    data = Dataset.from_list([{"prompt": [user(str(at))], "answer": str(at)} for at in range(12)])

    def every_third(endpoint, row):
        reward = agent(endpoint, row)
        return reward if int(row["answer"]) % 3 == 0 else 0.0

    def make(folder):
        fields = {"dynamic_sampling_batches": 2, "signal": "reward", "shuffle_dataset": False}
        trainer = make_trainer(folder, every_third, data, per_device_train_batch_size=3 * GROUP, **fields)
        trainer.rollouts.begin_training(None, trainer._prompt_choice())
        return trainer

    rows = [dict(row) for row in list(data)[:3] for _ in range(GROUP)]
    trainer = make(tmp_path / "a")
    found = trainer.rollouts.train(rows, 0)
    metrics = logged_of(trainer)
    assert metrics["dynamic_sampling/replaced_groups"] == 2 and metrics["rollout/forks"] > 0
    assert metrics["rollout/tokens_per_second"] > 0
    assert found.tokens == sum(sum(sample.loss_mask) for sample in found.samples)

    reference = make(tmp_path / "b")
    every, _ = reference.rollouts._prompts.chosen(rows, 0)
    every = [*every, *reference.rollouts._prompts.others(6)]
    expected, forks = [], 0
    with reference.rollouts.sampler.open_call(every, GROUP) as call:
        for group in range(9):
            if len(expected) == 3:
                break
            call.start(range(group, group + 1))
            ((number, drawn),) = call.next(False)
            assert number == group
            read = sum(len(sample.prompt) for sample in drawn.samples)
            wrote = sum(sample.drawn_tokens for sample in drawn.samples)
            assert (drawn.result.prompt_tokens, drawn.result.generated_tokens) == (read, wrote)
            if int(drawn.rows[0]["answer"]) % 3 == 0:
                expected.append({(*s.prompt, *s.tokens) for one in drawn.samples for s in (one, *one.forks)})
                forks += sum(len(one.forks) for one in drawn.samples)
            reference.rollouts.sampler.close(drawn)
    assert len(expected) == 3 and forks > 0
    taken = {(*s.prompt, *s.tokens) for s in found.samples if s.tokens != s.prompt}
    assert taken == set().union(*expected)
    made = trainer._conversations._made[None]
    assert len(made) <= 2 * 3 * GROUP, "environments of groups that were scored are used again"


def test_it_learns_over_the_endpoint(tmp_path):
    """In two turns, with forks, the policy learns to write the letters that its agent counts."""
    trainer = make_trainer(tmp_path, max_steps=20, learning_rate=2e-2, lr_scheduler_type="constant")
    trainer.train()
    rewards = [row["rewards/Endpoint/mean"] for row in logged(trainer)]
    assert sum(rewards[-4:]) / 4 > 2 * sum(rewards[:4]) / 4, rewards


def test_nothing_is_learned_from_an_agent_that_failed(tmp_path):
    def fails(endpoint, row):
        text = message_of(chat(endpoint, row["prompt"], max_tokens=10))["content"]
        if row["answer"] == "ab":
            raise ValueError("broken")
        return letters(text)

    trainer = make_trainer(tmp_path, run=fails)
    found = trainer.rollouts.train([dict(row) for row in list(DATA)[:2] for _ in range(GROUP)], 0)
    assert [sample.masked for sample in found.samples] == [True] * GROUP + [False] * GROUP
    assert all(sample.advantage == 0 for sample in found.samples[:GROUP])
    assert any(sample.advantage for sample in found.samples[GROUP:])


def test_a_run_whose_agents_all_fail_ends_with_their_error(tmp_path):
    def fails(endpoint, row):
        raise ValueError("broken everywhere")

    with pytest.raises(QeRLError, match="broken everywhere"):
        make_trainer(tmp_path, run=fails, max_steps=1).train()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"thinking_budget": 5}, "thinking_budget has no effect on an agent"),
        ({"tool_timeout": 5.0}, "tool_timeout has no effect on an agent"),
        (
            {"teacher_prompt": "{prompt}", "teacher": "base", "algorithm": "distill"},
            "teacher_prompt has no effect on an agent",
        ),
    ],
)
def test_what_agents_cannot_be_given_is_refused(tmp_path, changes, says):
    with pytest.raises(QeRLError, match=says):
        make_trainer(tmp_path, **changes)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(QeRLConfig, "world_size", 2)
    with pytest.raises(QeRLError, match="there are 2"):
        make_trainer(tmp_path)


def test_an_agent_has_no_tools_beside_it(tmp_path):
    with pytest.raises(QeRLError, match="brings its own tools"):
        QeRLTrainer(
            make_policy(), [], make_args(tmp_path), DATA, processing_class=make_tiny_tokenizer(),
            tools=[multiply], environment_factory=functools.partial(Endpoint, agent),
        )  # fmt: skip


def test_a_recipe_names_the_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def play(endpoint, row):\n    return 1.0\n")
    environment = get_environment(f"endpoint:{file}:play", {"timeout": 5})()
    assert environment.agent(None, {}) == 1.0 and environment.timeout == 5
    with pytest.raises(QeRLError, match="environment_options do not fit"):
        get_environment(f"endpoint:{file}:play", {"seconds": 5})
    with pytest.raises(QeRLError, match="not of the form"):
        get_environment("endpoint:mine", {})
    for options in ({"timeout": 0}, {"at_once": 0}):
        with pytest.raises(QeRLError):
            get_environment(f"endpoint:{file}", options)()
