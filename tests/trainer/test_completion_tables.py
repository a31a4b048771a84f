"""What a run keeps of its completions: a table for each logged step, and those of evaluations beside them."""

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.run_folder import table_path, table_paths
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.step_log import Record, StepLog
from tests.support.trainer import DATA, ScriptedEngine, settings, sum_reward

HELD_OUT = Dataset.from_dict({"prompt": ["nine", "ten two"]})


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def write(path, values):
    table = pyarrow.Table.from_pylist([{"completion": value} for value in values])
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path)


def test_an_evaluation_keeps_a_table_of_its_own_and_leaves_those_of_training(
    tiny_model, tiny_tokenizer, tmp_path, capsys
):
    """Each rollout is used for two steps: the table of the second one is of that rollout, too."""
    model = tiny_model("llama")
    config = QeRLConfig(
        **settings(
            tmp_path, log_completions=True, num_iterations=2, eval_strategy="steps", eval_steps=1,
            per_device_eval_batch_size=8,
        )
    )  # fmt: skip
    engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
    trainer = QeRLTrainer(
        model, [sum_reward], config, DATA, {"near": HELD_OUT, "far": HELD_OUT}, engine=engine,
        processing_class=tiny_tokenizer,
    )  # fmt: skip
    trainer.train()
    printed = capsys.readouterr().out
    assert [printed.count(f" Step {step} ") for step in range(1, 5)] == [1] * 4, "also the last one once"
    tables = table_paths(tmp_path)
    assert {name: sorted(paths) for name, paths in tables.items()} == {
        "": [1, 2, 3, 4], "eval_near": [1, 2, 3, 4], "eval_far": [1, 2, 3, 4],
    }  # fmt: skip
    trained = [rows(path) for path in tables[""].values()]
    assert [{row["prompt"] for row in table} <= set(DATA["prompt"]) for table in trained] == [True] * 4
    texts = [[row["completion"] for row in table] for table in trained]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert {row["prompt"] for row in rows(tables["eval_far"][3])} == set(HELD_OUT["prompt"])


def test_calls_of_tools_with_other_arguments_or_none_are_written(tmp_path):
    """One type for all arguments does not exist, and a structure without a field is none that Parquet has."""

    def says(name, arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]

    completions = [says("a", {}), says("b", {"x": 1}), says("b", {"x": "é"})]
    with pytest.raises(Exception, match=r"cannot be written|no child field|Could not convert"):
        write(tmp_path / "raw.parquet", completions)
    log = StepLog(torch.device("cpu"), 8)
    log.keep([Record("p", completion, {}) for completion in completions])
    log.write_table(tmp_path, 3)
    calls = [row["completion"][0]["tool_calls"][0]["function"] for row in rows(table_path(tmp_path, 3))]
    assert calls == [
        {"name": "a", "arguments": "{}"},
        {"name": "b", "arguments": '{"x": 1}'},
        {"name": "b", "arguments": '{"x": "é"}'},
    ]


def test_a_table_that_cannot_be_written_is_a_sentence_and_leaves_the_one_of_training(tmp_path):
    write(table_path(tmp_path, 2), ["of training"])
    table_path(tmp_path, 2, "eval").mkdir()
    log = StepLog(torch.device("cpu"), 8)
    with log.apart("eval"), pytest.raises(QeRLError, match="completions of step 2 cannot be written to"):
        log.write_table(tmp_path, 2)
    assert rows(table_path(tmp_path, 2)) == [{"completion": "of training"}]
