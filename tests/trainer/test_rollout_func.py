"""What a `rollout_func` returns: lists and tensors are taken; another shape is refused by its name."""

import pytest
import torch

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import DATA, settings


@pytest.fixture
def train(tiny_model, tiny_tokenizer, tmp_path):
    def run(change, **more):
        def rollout(prompts, trainer):
            draw = torch.Generator().manual_seed(3)
            ids = [torch.randint(5, 90, (4 + at % 2,), generator=draw).tolist() for at in range(len(prompts))]
            output = {
                "prompt_ids": trainer.processing_class(prompts)["input_ids"],
                "completion_ids": ids,
                "logprobs": [[-4.0 - at % 3 / 10 for at in range(len(each))] for each in ids],
                "env_mask": [[1, 0] + [1] * (len(each) - 2) for each in ids],
                "seen": list(range(len(ids))),
            }
            change(output)
            return output

        def rewards(completion_ids, **_):
            return [float(ids[0] % 3) for ids in completion_ids]

        args = QeRLConfig(
            **settings(tmp_path, **({"max_steps": 1, "weights": "bf16", "tuning": "full"} | more))
        )
        trainer = QeRLTrainer(
            tiny_model("llama"), rewards, args, DATA, processing_class=tiny_tokenizer, rollout_func=rollout
        )
        trainer.train()
        return trainer

    return run


def tensors(output):
    for name in ("completion_ids", "logprobs", "env_mask"):
        output[name] = [torch.tensor(row) for row in output[name]]


def test_tensors_train_as_lists(train):
    plain, found = train(lambda output: None), train(tensors)
    first, second = (trainer.state.log_history[0] for trainer in (plain, found))
    assert first["grad_norm"] == second["grad_norm"] > 0
    for ours, theirs in zip(plain.model.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_entropy_is_that_of_computed_tokens_where_the_sampler_gives_none(train):
    logged = train(lambda output: None).state.log_history[0]
    assert logged["entropy"] == logged["entropy/computed"] > 0


def test_without_log_probabilities_later_updates_are_bounded_by_those_before_the_first(train):
    """The default loss takes its ratio to the sampler's, of which there are none."""
    options = {"max_steps": 4, "num_iterations": 4, "learning_rate": 0.05}
    rows = train(lambda output: output.update(logprobs=None), **options).state.log_history[:4]
    bounded = [row["clip_ratio/region_mean"] for row in rows]
    assert bounded[0] == 0 < max(bounded[1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda output: output["logprobs"][2].pop(),
            r"logprobs of rollout_func has 3 values in row 2, whose",
        ),
        (lambda output: output["logprobs"][1].append(0.0), "logprobs of rollout_func has 6 values in row 1"),
        (lambda output: output["env_mask"][0].pop(), "env_mask of rollout_func has 3 values in row 0"),
        (lambda output: output["env_mask"].pop(), "env_mask of rollout_func has .* rows for .* prompts"),
        (lambda output: output["prompt_ids"].pop(), "prompt_ids of rollout_func has .* rows for .* prompts"),
        (lambda output: output["seen"].pop(), "seen of rollout_func has .* values for .* prompts"),
        (lambda output: output.pop("logprobs"), "rollout_func returned no logprobs"),
        (lambda output: output["completion_ids"].__setitem__(0, []), "completions with tokens for"),
        (
            lambda output: output.update(logprobs=[[[x] for x in row] for row in output["logprobs"]]),
            "logprobs of rollout_func is nested in row 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused(train, change, said):
    with pytest.raises(QeRLError, match=said):
        train(change)
