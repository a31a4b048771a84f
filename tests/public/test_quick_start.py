"""Scripts as a user of TRL writes them, run as they stand with two names changed.

The names of model and data set are those of TRL's documentation. In the folder where a script runs they are
folders with a tiny random model and four problems, which load under the same names as from the Hub.
"""

import json
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.scripts import run_offline

pytestmark = pytest.mark.slow

PROBLEMS = [("What is 1 + 1?", "$2$"), ("What is 2 + 2?", "$4$"), ("What is 3 x 3?", "$9$"), ("Why?", "$0$")]

# https://huggingface.co/docs/trl/grpo_trainer, "Quick start".
TRLS_QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""

ONE_LINE = """
from datasets import load_dataset
from peft import LoraConfig
from qerl import QeRLConfig, QeRLTrainer

def f(completions, solution, **columns):
    return [float(len(set(c[0]["content"]))) for c in completions]

ds = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = QeRLTrainer(model="Qwen/Qwen3-8B", reward_funcs=f, args=QeRLConfig(output_dir="runs/x"), train_dataset=ds, peft_config=LoraConfig(r=32))
trainer.train()
trainer.save_model()
"""  # noqa: E501


@pytest.fixture
def run(tmp_path, tiny_model, tiny_tokenizer):
    """``run(script)``: the lines that a script prints, in a fresh process without a GPU or network."""
    for name in ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen3-8B"):
        model = tiny_model("llama", max_position_embeddings=1024)
        model.generation_config.eos_token_id = [1, *range(5, 25)]  # short completions
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    data = tmp_path / "trl-lib" / "DeepMath-103K"
    data.mkdir(parents=True)
    rows = [
        {"prompt": [{"role": "user", "content": question}], "solution": solution}
        for question, solution in PROBLEMS
    ]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return lambda script: run_offline(script, tmp_path).splitlines()


def test_trls_quick_start_runs_with_two_names_changed(run):
    script = TRLS_QUICK_START.replace("from trl import GRPOTrainer", "from qerl import QeRLTrainer")
    script = script.replace("GRPOTrainer(", "QeRLTrainer(")
    shown = run(script + "print(trainer.state.global_step, trainer.args.output_dir, trainer.args.weights)")
    assert shown[-1] == "12 Qwen2-0.5B-Instruct-GRPO nvfp4"


def test_one_line_replaces_trls(run, tmp_path):
    shown = run(ONE_LINE + "print(trainer.state.global_step, trainer.model.active_peft_config.r)")
    assert shown[-1] == "12 32"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "Qwen" / "Qwen3-8B")
    adapted = PeftModel.from_pretrained(base, tmp_path / "runs" / "x")
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)
    assert Path(tmp_path / "runs" / "x" / "config.yaml").is_file()
