"""Tools beside what else a run may have: a resume, a curriculum, dynamic sampling, a reward model."""

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification

from qerl.rollout.portable.engine import PortableEngine
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import SayingEngine, call, multiply, tool_tokenizer
from tests.support.calling import CallingTemplate
from tests.support.models import TINY, make_tiny_tokenizer
from tests.support.tools import DATA, make_args, make_policy, written_reward
from tests.support.trainer import GROUP, ScriptedEngine, logged

pytestmark = pytest.mark.slow


class Echo:
    def reset(self, **row):
        self.heard = 0

    def respond(self, text):
        self.heard += len(text)
        return f"{self.heard}"


def multiplications(token_ids, before):
    """What a random policy is taken to call: nothing, one or two products, one of them with a wrong name."""
    calls = [("multiply", {"a": before, "b": len(token_ids)}), ("multiply", {"a": 1, "c": 2})]
    return calls[: sum(token_ids) % 3]


TEXTS = {"environment_factory": Echo, "processing_class": make_tiny_tokenizer}
TOOLS = {"tools": [multiply], "processing_class": tool_tokenizer}
DRAWN_AGAIN = {"curriculum": True, "dynamic_sampling_batches": 1, "signal": "reward"}
ROWS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i} for i in range(5)])


@pytest.mark.parametrize(
    ("others", "length", "settings"),
    [(TEXTS, 60, {}), (TOOLS, 120, DRAWN_AGAIN)],
    ids=["texts", "tools, a curriculum and dynamic sampling"],
)
def test_a_resume_is_bit_exact(tmp_path, others, length, settings):
    """On the real engine, several turns each: four steps, and two with two more after them."""

    def coarse(completion_ids, **_):
        return [float(sum(ids) % 9 == 0) for ids in completion_ids]

    def trained(resume=None):
        policy = make_policy().eval()
        policy.generation_config.eos_token_id = [1, *range(10, 100, 6)]  # a random policy ends its turns
        tokenizer = others["processing_class"]()
        args = make_args(
            tmp_path, max_steps=4, save_strategy="steps", save_steps=2, max_completion_length=length,
            max_tool_calling_iterations=3, learning_rate=1e-2, noise=True, noise_stages=2,
            lr_scheduler_type="constant", temperature=3.0, **settings,
        )  # fmt: skip
        reward = coarse if settings else written_reward
        trainer = QeRLTrainer(
            policy, [reward], args, ROWS, engine=PortableEngine(policy, tokenizer.pad_token_id),
            **others | {"processing_class": tokenizer},
        )  # fmt: skip
        if "tools" in others:
            trainer._conversations._template = CallingTemplate(multiplications)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained()
    rows = logged(whole)
    assert any(row["rollout/turns"] > 1 for row in rows)
    assert "tools" not in others or any(row["tools/failure_frequency"] > 0 for row in rows)
    if settings:
        assert any(row.get("dynamic_sampling/replaced_groups") for row in rows)
        assert any(row["curriculum/passed_over"] for row in rows[2:])
    resumed = trained(str(tmp_path / "checkpoint-2"))
    for (name, weight), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_a_reward_model_reads_whole_conversations(tmp_path):
    """It scores turns, calls and results as its own chat template writes them, beside a function."""

    def say(row, so_far):
        if so_far or row.sample == 0:
            return "So it is." + "!" * row.sample
        return call("multiply", a=row.sample, b=7)

    tokenizer = tool_tokenizer()
    torch.manual_seed(0)
    sizes = TINY | {"num_hidden_layers": 1, "num_labels": 1, "max_position_embeddings": 4096}
    scorer = LlamaForSequenceClassification(LlamaConfig(**sizes)).eval()
    trainer = QeRLTrainer(
        make_policy(), [scorer, written_reward], make_args(tmp_path, max_steps=1), DATA, tools=[multiply],
        processing_class=tokenizer, engine=SayingEngine(tokenizer, say),
        reward_processing_classes=[tokenizer, None],
    )  # fmt: skip
    trainer.train()
    name, other = trainer.reward_func_names
    assert other == "written_reward"
    messages = [[*record.prompt, *record.completion] for record in trainer._log.records]
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in messages]
    assert sum("<tool_response>\n14\n</tool_response>" in text for text in texts) == 2, "one in each group"
    with torch.no_grad():
        scores = [scorer(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    found = [record.rewards[name] for record in trainer._log.records]
    assert found == pytest.approx(scores, abs=1e-5)
    assert len(set(scores)) == 2 * GROUP
    (row,) = logged(trainer)
    assert row["tools/call_frequency"] == 0.75 and row["loss"] != 0


def test_an_environment_may_have_reset_alone(tmp_path):
    """It says what the problem is and hears nothing; beside a data set it adds to the prompts."""

    class Sums:
        def reset(self, **row):
            return "What is 2 + 3?"

    given = {"processing_class": tool_tokenizer(), "environment_factory": Sums}
    args = make_args(tmp_path, max_steps=1, max_completion_length=6)
    trainer = QeRLTrainer(make_policy(), [written_reward], args, engine=ScriptedEngine(100, stop=1), **given)
    trainer.train()
    (row,) = logged(trainer)
    assert row["loss"] != 0 and "tools/call_frequency" not in row
    assert all(record.prompt[-1]["content"] == "What is 2 + 3?" for record in trainer._log.records)
    trainer = QeRLTrainer(
        make_policy(),
        [written_reward],
        args,
        DATA,
        engine=ScriptedEngine(100, stop=1),
        eval_dataset=DATA,
        **given,
    )
    trainer.train()
    shown = {row["prompt"][0]["content"] + "What is 2 + 3?" for row in DATA}
    assert {record.prompt[-1]["content"] for record in trainer._log.records} <= shown
    assert trainer.evaluate()["eval_completions/mean_length"] > 0


def test_the_reward_of_an_environment_may_be_called_with_environments_alone(tmp_path):
    """As TRL's own: those of its class are scored, others have no reward."""

    class Plain:
        def reset(self, **row):
            return None

        def act(self, x: int) -> int:
            """Acts.

            Args:
                x: A value.
            """
            return x

    class Scored(Plain):
        def get_reward(self):
            return 1.0

    data = Dataset.from_dict({"environment": ["a", "b", "c"]})
    trainer = QeRLTrainer(
        make_policy(), written_reward, make_args(tmp_path), data,
        processing_class=tool_tokenizer(), environment_factory={"a": Scored, "b": Scored, "c": Plain},
    )  # fmt: skip
    assert trainer.reward_func_names == ["written_reward", "Scored"]
    assert trainer.reward_funcs[-1](environments=[Scored(), Plain()]) == [1.0, None]
