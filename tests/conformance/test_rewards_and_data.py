"""Rewards, data, callbacks and evaluation: what is called, with what, and what becomes of it, as in TRL."""

import asyncio
import re
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from tests.conformance.harness import DATA, GROUP, PROMPTS, Bench, sum_reward

COLUMNS = DATA.add_column("answer", list(range(len(PROMPTS)))).add_column("kind", ["a", "b"] * 4)


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def sometimes(completion_ids, **kwargs):
    """None for two of five samples, and for one whole group."""
    out = [None if sum(ids) % 5 < 2 else float(ids[0] % 3) for ids in completion_ids]
    return [None] * GROUP + out[GROUP:]


async def later(completion_ids, **kwargs):
    await asyncio.sleep(0)
    return [float(max(ids) % 4) for ids in completion_ids]


REWARDS: dict[str, dict[str, Any]] = {
    "two": {"rewards": [sum_reward, length_reward]},
    "weights": {"rewards": [sum_reward, length_reward], "reward_weights": [0.2, 3.0]},
    "normalize_then_sum": {
        "rewards": [sum_reward, length_reward],
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [1.0, 0.5],
    },
    "none for some samples": {"rewards": [sum_reward, sometimes]},
    "none at all for some samples": {"rewards": [sometimes]},
    "asynchronous": {"rewards": [later, sum_reward]},
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_are_combined_as_in_trl(bench: Bench, name: str) -> None:
    theirs, ours = bench.both(**REWARDS[name])
    for row, other in zip(theirs.rows, ours.rows, strict=True):
        # AdamW forgets the advantages' scale, which the gradient's norm has.
        names = [key for key in row if "reward" in key or key == "grad_norm"]
        assert len(names) >= 6
        for key in names:
            if row[key] is None:  # no sample of the batch has this reward
                assert other[key] is None, key
            else:
                assert other[key] == pytest.approx(row[key], rel=1e-4, abs=1e-6), key


def test_a_reward_model_scores_as_in_trl(bench: Bench, tmp_path) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    bench.tokenizer.save_pretrained(tmp_path)
    judge = LlamaForSequenceClassification.from_pretrained(tmp_path)
    theirs, ours = bench.both(rewards=[judge])
    assert [row["reward"] for row in ours.rows] == pytest.approx([row["reward"] for row in theirs.rows])


def test_a_reward_is_given_what_trl_gives(bench: Bench) -> None:
    calls = []
    for is_ours in (False, True):
        seen: list[dict[str, Any]] = []

        def reward(seen=seen, log_metric=None, log_extra=None, trainer_state=None, **given):
            seen.append(given | {"step": trainer_state.global_step})
            log_metric("share", 0.25 * len(seen))
            log_extra("first", [ids[0] for ids in given["completion_ids"]])
            return sum_reward(given["completion_ids"])

        run = bench.run(is_ours, rewards=[reward], data=COLUMNS, log_completions=True)
        tables = [pd.read_parquet(file) for file in sorted((bench.folder / "completions").glob("*.parquet"))]
        calls.append((seen, [row["share"] for row in run.rows], tables[:4]))
    (theirs, metrics, tables), (ours, own_metrics, own_tables) = calls
    assert theirs == ours and [call["step"] for call in ours] == [0, 1, 2, 3]
    assert ours[0].keys() >= {"prompts", "completions", "completion_ids", "answer", "kind"}
    assert own_metrics == metrics == [0.25, 0.5, 0.75, 1.0]
    assert len(tables) == 4 and "first" in tables[0]
    for table, other in zip(tables, own_tables, strict=True):
        assert list(table.columns) == list(other.columns)
        pd.testing.assert_frame_equal(table, other, atol=1e-3)


def test_a_stream_of_data_trains_as_in_trl(bench: Bench) -> None:
    bench.both(data=DATA.to_iterable_dataset(), num_iterations=2)


def test_chat_prompts_are_rendered_as_in_trl(bench: Bench) -> None:
    template = bench.tokenizer.chat_template
    chats = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    bench.tokenizer.chat_template = template + "{% if loud %}!{% endif %}"
    try:
        _, quiet = bench.both(data=chats)
        _, loud = bench.both(data=chats, chat_template_kwargs={"loud": True})
    finally:
        bench.tokenizer.chat_template = template
    assert all(
        [*short, long[-1]] == long
        for short, long in zip(quiet.script.asked[0], loud.script.asked[0], strict=True)
    )


class Recorder(TrainerCallback):
    """Every event of a run, with the step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []


def _record(name: str) -> Any:
    return lambda self, args, state, control, **kwargs: self.events.append((name, state.global_step))


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _event, _record(_event))


def test_callbacks_hear_what_they_hear_in_trl(bench: Bench) -> None:
    recorders = Recorder(), Recorder()
    for is_ours, recorder in enumerate(recorders):
        bench.run(
            bool(is_ours), callbacks=[recorder], eval_dataset=DATA, eval_strategy="steps", eval_steps=2,
            gradient_accumulation_steps=2,
        )  # fmt: skip
    theirs, ours = (recorder.events for recorder in recorders)
    assert theirs == ours and ("on_evaluate", 4) in ours and ours[-1] == ("on_train_end", 4)


# Times, and what takes a forward pass of the trainer, which an evaluation does not make.
NOT_EVALUATED = re.compile("time|per_second|eval_loss|eval_entropy|clip_ratio|sampling/")


@pytest.mark.parametrize("samples", [None, 1, 2])
def test_evaluation_reports_what_it_does_in_trl(bench: Bench, samples: int | None) -> None:
    """Except a loss, which is minus the reward; and each of several sets has metrics of its own, which in TRL
    overwrite each other."""
    sets = {"easy": DATA, "hard": Dataset.from_dict({"prompt": ["x", "yy"]}).to_iterable_dataset()}
    theirs, _ = bench.trainer(False, "lora", num_generations_eval=samples)
    ours, _ = bench.trainer(True, "lora", num_generations_eval=samples, eval_dataset=sets)
    expected = {name: theirs.evaluate(data) for name, data in sets.items()}
    found = ours.evaluate()
    for name, metrics in expected.items():
        for key, value in metrics.items():
            if not NOT_EVALUATED.search(key):
                assert found[key.replace("eval_", f"eval_{name}_", 1)] == pytest.approx(value), key
        assert found[f"eval_{name}_loss"] == -found[f"eval_{name}_reward"]
