"""The model card names the base, whether the Hub has it or not, and outlives the end of a run."""

import ast

import pytest

from qerl import add_lora
from qerl.trainer.grpo import QeRLTrainer
from tests.support.arguments import ROWS, first_letter, run_settings

LINKED = "[some/model](https://huggingface.co/some/model)"


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("{}/my-model", "my-model"),
        ("{}/my-model.Q4_1.gguf", "my-model.Q4_1.gguf"),
        ("", "a LlamaForCausalLM without a name"),
        ("some/model", LINKED),
    ],
)
def test_the_card_names_the_base(tiny_model, tiny_tokenizer, tmp_path, name, shown, adapted):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model.Q4_1.gguf").touch()
    model = tiny_model("llama")
    model.name_or_path = model.config._name_or_path = name.format(tmp_path)
    run = tmp_path / "run"
    args = run_settings(run)
    policy = add_lora(model, 4, 8, 0.0) if adapted else model
    trainer = QeRLTrainer(policy, first_letter, args, ROWS, processing_class=tiny_tokenizer)
    trainer.create_model_card(model_name="run", tags="sft")  # the user's tag, which is not how it was trained
    card = (run / "README.md").read_text()
    assert "- sft\n" in card and "trained by reinforcement learning" in card
    assert f"This model is a fine-tuned version of {shown}.\n" in card
    assert "None" not in card and f'model="{run}"' in card
    code, rest = card.partition("```python\n")[2].split("```")
    assert ast.parse(code).body and "Framework versions" in rest


def test_the_card_of_a_finished_run_is_that_of_its_checkpoints(llama_folder, tmp_path):
    args = run_settings(tmp_path, weights="bf16", max_steps=1, save_strategy="steps", save_steps=1)
    trainer = QeRLTrainer(str(llama_folder), first_letter, args, ROWS)
    trainer.train()
    trainer.save_final(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "a fine-tuned version of tiny-llama." in card and "library_name: peft" in card
    assert "More Information Needed" not in card
