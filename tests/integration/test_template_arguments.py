"""chat_template_kwargs reach every prompt: of training, evaluations, the length filter, eval and generate."""

import pytest
import yaml
from datasets import Dataset
from transformers import AutoTokenizer

from qerl.cli import main
from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.models.chat import Chat
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.tasks import get_task
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import settings

pytestmark = pytest.mark.slow

# Like Qwen3's: thinking that is turned off is an empty section, which the prompt has already.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %} <think> </think>{% endif %}"
)
SHORT = {"max_steps": 2, "save_steps": 2, "noise": False, "eval_steps": 2}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def model(tiny_run, tmp_path):
    """``model(**changes)``: trains a tiny model with that template; the words of its recipe."""
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")

    def run(**changes):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tiny_run(tmp_path / "run", **(SHORT | changes))))
        return main(["train", str(recipe)])

    return run


@pytest.fixture
def sampled(monkeypatch, tiny_tokenizer):
    """``sampled()``: whether the prompts sampled since the last call close their thinking; all alike."""
    prompts = []
    generate = PortableEngine.generate

    def spy(engine, ids, *args, **kwargs):
        prompts.extend(ids)
        return generate(engine, ids, *args, **kwargs)

    monkeypatch.setattr(PortableEngine, "generate", spy)

    def closed():
        texts = tiny_tokenizer.batch_decode(prompts)
        prompts.clear()
        (found,) = {text.replace(" ", "").endswith("assistant:<think></think>") for text in texts}
        return found

    return closed


def test_training_evaluation_and_generate_render_prompts_with_them(model, sampled, tmp_path, capsys):
    folder, adapter = str(tmp_path / "model"), ["--adapter", str(tmp_path / "run")]
    assert model(**OFF) == 0 and sampled() is True, "prompts of training and of its evaluation"
    evaluate = ["eval", folder, *adapter, "--limit", "2"]
    assert main(evaluate) == 0 and sampled() is True, "from the run"
    assert "chat_template_kwargs {'enable_thinking': False}" in capsys.readouterr().out
    on = ["--chat_template_kwargs", "{enable_thinking: true}"]
    assert main([*evaluate, *on]) == 0 and sampled() is False, "a flag goes over the run"
    generate = ["generate", folder, "What is 1 + 1?", *adapter]
    assert main(generate) == 0 and sampled() is True, "from the run"
    assert main([*generate, *on]) == 0 and sampled() is False
    off = ["--chat_template_kwargs", "{enable_thinking: false}"]
    assert main(["generate", folder, "What is 1 + 1?", *off]) == 0 and sampled() is True, "without a run"


def test_the_length_filter_counts_the_prompt_with_them(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TEMPLATE)
    prompt = [{"role": "user", "content": "one two"}]
    short = len(Chat(tiny_tokenizer).ids(prompt))
    rows = Dataset.from_dict({"prompt": [prompt] * 4})

    def make(**changes):
        return QeRLTrainer(
            add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0),
            lambda completions, **_: [0.0] * len(completions),
            QeRLConfig(**settings(tmp_path, max_prompt_length=short, **changes)),
            rows,
            processing_class=tiny_tokenizer,
        )

    assert len(make().train_dataset) == 4
    with pytest.raises(QeRLError, match=f"None of the 4 training prompts has at most {short} tokens"):
        make(**OFF)


def test_the_length_filter_of_a_recipe_counts_the_prompt_with_them(model, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = get_task("arithmetic", examples=0, train_size=6).train()
    plain = [len(Chat(tokenizer).ids(prompt)) for prompt in rows["prompt"]]
    assert model(max_prompt_length=min(plain), **OFF) == 2
    assert f"None of the 6 training prompts has at most {min(plain)} tokens" in capsys.readouterr().err
