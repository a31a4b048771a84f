"""The Python of README runs as it stands."""

import json
import re
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.scripts import run_offline

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
MODEL = "Qwen/Qwen2.5-7B-Instruct"


def test_the_trainer_of_readme_trains(tmp_path, tiny_model, tiny_tokenizer):
    """Its model and data are folders of these names with a tiny random model and four problems."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (script,) = [block for block in blocks if "QeRLTrainer(" in block]
    model = tiny_model("llama", max_position_embeddings=2048)
    model.generation_config.eos_token_id = [1, *range(5, 25)]  # short completions
    model.save_pretrained(tmp_path / MODEL)
    tiny_tokenizer.save_pretrained(tmp_path / MODEL)
    rows = [
        {"prompt": [{"role": "user", "content": f"Name {letter}."}], "answer": letter} for letter in "abcd"
    ]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_offline(script, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / MODEL)
    adapted = PeftModel.from_pretrained(base, tmp_path / "runs" / "mine")
    assert any(parameter.any() for name, parameter in adapted.named_parameters() if "lora_B" in name)
