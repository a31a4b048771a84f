"""Supervised fine-tuning as a run: what it evaluates, saves and resumes, RL after it, and what is refused."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

from qerl import QeRLConfig, QeRLSFTTrainer, QeRLTrainer
from qerl.cli import main
from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.run_folder import read_metrics
from qerl.settings.recipe import load_config
from qerl.tasks import get_task
from qerl.trainer.demonstrations import ReadyDemonstrations, warn_of_endless_turns
from qerl.trainer.run import _datasets, train
from qerl.trainer.sft import CrossEntropyUpdate, _buckets
from qerl.update.packed_row import IGNORE
from tests.support.arguments import ones

QUIET = Console(quiet=True)
SFT = {
    "algorithm": "sft",
    "noise": False,
    "num_generations": 8,
    "num_generations_eval": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
PAIRS = Dataset.from_dict(
    {"prompt": [CHAT[:1]] * 3, "completion": [[{"role": "assistant", "content": c}] for c in "abc"]}
)


def settings(folder: Path, **fields) -> QeRLConfig:
    quiet = {"report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
    return QeRLConfig(**({"output_dir": str(folder), "algorithm": "sft", "max_steps": 1} | quiet | fields))


def policy(tiny_model):
    return add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0, seed=1)


# Labels


@pytest.fixture
def labels_of(tiny_tokenizer, tmp_path):
    """``labels_of(row, **settings)``: the text that the loss looks at, in a demonstration's tokens."""

    def chosen(row, **fields):
        ready = ReadyDemonstrations(settings(tmp_path, **fields), tiny_tokenizer, positions=200)
        (found,) = ready(Dataset.from_list([row]), "training demonstrations")
        assert all(x in (token, IGNORE) for token, x in zip(found["input_ids"], found["labels"], strict=True))
        return tiny_tokenizer.decode([x for x in found["labels"] if x != IGNORE])

    return chosen


WHOLE = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"


@pytest.mark.parametrize(
    ("fields", "row", "seen"),
    [
        ({}, {"messages": [*CHAT, *CHAT]}, "two<|im_end|>\n" * 2),
        ({"assistant_only_loss": False}, {"messages": CHAT}, WHOLE),
        ({}, {"prompt": CHAT[:1], "completion": CHAT[1:]}, "two<|im_end|>\n"),
        ({"completion_only_loss": False}, {"prompt": CHAT[:1], "completion": CHAT[1:]}, WHOLE),
        ({}, {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]}, "two<|im_end|>\n"),
        (
            {"completion_only_loss": False, "assistant_only_loss": True},
            {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]},
            "two<|im_end|>\n" * 2,
        ),
        ({}, {"prompt": "one", "completion": " two"}, " two<|im_end|>"),
        (
            {"completion_only_loss": False},
            {"prompt": "one", "completion": " two<|im_end|>"},
            "one two<|im_end|>",
        ),
    ],
)
def test_the_loss_looks_at(labels_of, fields, row, seen):
    assert labels_of(row, **fields) == seen


@pytest.mark.parametrize(
    ("fields", "row", "said"),
    [
        ({"completion_only_loss": True}, {"messages": CHAT}, "Row 0 of .*needs prompt and completion"),
        ({"assistant_only_loss": True}, {"prompt": "a", "completion": "b"}, "needs chat messages"),
        ({"max_length": 3}, {"messages": CHAT}, "has a token with a loss within max_length"),
        ({"max_length": None}, {"messages": CHAT * 20}, "the model 200 positions; set max_length: 200"),
        ({}, {"text": "a"}, "neither the column `messages` nor `prompt` and `completion`, only text"),
        (
            {},
            {"prompt": "a", "completion": CHAT[1:]},
            "neither messages nor a prompt and a completion of the same kind",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_refused(labels_of, fields, row, said):
    with pytest.raises(QeRLError, match=said):
        labels_of(row, **fields)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"messages": [CHAT[0], CHAT[1] | {"content": "", "tool_calls": [{"name": "f"}]}]},
            r"Row 0 of the training demonstrations has a message with tool_calls \(role assistant\)",
        ),
        (
            {"prompt": CHAT[:1], "completion": [CHAT[1] | {"reasoning_content": "Hm."}]},
            "has a message with reasoning_content",
        ),
        ({"messages": [CHAT[0], CHAT[1] | {"content": None}]}, r"without content \(role assistant\)"),
        ({"messages": [m | {"content": [{"type": "image"}]} for m in CHAT]}, r"is not text \(image\)"),
        ({"messages": CHAT, "tools": ["f"]}, "has the column tools, which QeRL does not use in rendering"),
        ({"messages": CHAT, "images": [1]}, "has the column images"),
        ({"messages": CHAT, "chat_template_kwargs": {"a": 1}}, "has the column chat_template_kwargs"),
    ],
)
def test_what_would_be_lost_is_refused(labels_of, row, said):
    with pytest.raises(QeRLError, match=said):
        labels_of(row)


def test_tokens_of_others_are_refused(tiny_tokenizer, tmp_path):
    ready = ReadyDemonstrations(settings(tmp_path), tiny_tokenizer, None)
    for row in ({"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, 2], "messages": CHAT}):
        with pytest.raises(
            QeRLError, match="has the column input_ids, but demonstrations are tokenized here"
        ):
            ready(Dataset.from_list([row]), "training demonstrations")
    rows = ready(Dataset.from_list([{"messages": CHAT}]), "training demonstrations")
    assert ready(rows, "training demonstrations") is rows
    assert rows["loss_tokens"] == [sum(label != IGNORE for label in rows[0]["labels"])]


def test_text_needs_an_end_that_prompts_lack(tiny_tokenizer, tmp_path):
    without, appending = copy.deepcopy(tiny_tokenizer), copy.deepcopy(tiny_tokenizer)
    without.eos_token = None
    eos = (tiny_tokenizer.eos_token, tiny_tokenizer.eos_token_id)
    appending.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos[0]}", special_tokens=[eos]
    )
    rows = Dataset.from_list([{"prompt": "one", "completion": " two"}])
    for tokenizer, said in ((without, "has no EOS token"), (appending, "set add_eos_token: false")):
        with pytest.raises(QeRLError, match=f"Row 0 of the training demonstrations: it is text, .*{said}"):
            ReadyDemonstrations(settings(tmp_path), tokenizer, None)(rows, "training demonstrations")


def test_parts_of_text_are_joined_wherever_they_stand(labels_of):
    def parts(message):
        return message | {"content": [{"type": "text", "text": x} for x in message["content"]]}

    chat = [parts(message) for message in CHAT]
    for row in ({"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}):
        assert labels_of(row) == "two<|im_end|>\n"
        assert labels_of(row, assistant_only_loss=False, completion_only_loss=None) in (
            WHOLE,
            "two<|im_end|>\n",
        )


def test_rows_of_both_kinds_stand_in_one_data_set(tiny_tokenizer, tmp_path):
    rows = Dataset.from_list(
        [
            {"messages": CHAT, "prompt": None, "completion": None},
            {"messages": None, "prompt": CHAT[:1], "completion": CHAT[1:]},
        ]
    )
    ready = ReadyDemonstrations(settings(tmp_path, max_prompt_length=50), tiny_tokenizer, None)
    first, second = ready(rows, "training demonstrations")
    assert first["input_ids"] == second["input_ids"] and first["labels"] == second["labels"]


def test_tokens_that_merge_across_a_prompts_end_are_refused(labels_of):
    with pytest.raises(QeRLError, match="A token spans the end of the prompt"):
        labels_of({"prompt": "one<|im_", "completion": "end|> two"})


def test_longer_demonstrations_are_cut_and_counted(tiny_tokenizer, tmp_path, caplog):
    ready = ReadyDemonstrations(settings(tmp_path, max_length=24), tiny_tokenizer, None)
    long = [{"role": "user", "content": "one " * 30}, CHAT[1]]
    found = ready(Dataset.from_list([{"messages": long}, {"messages": CHAT}]), "training demonstrations")
    assert len(found) == 1 and len(found[0]["input_ids"]) == 24
    assert "Of 2 training demonstrations, 2 have more than max_length (24) tokens" in caplog.text
    assert "1 are left out" in caplog.text


def test_turns_without_their_end_are_said_once(tiny_model, tiny_tokenizer, tmp_path, caplog):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}END{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    for end, said in (("{% endgeneration %}<|im_end|>", 1), ("<|im_end|>\n{% endgeneration %}", 0)):
        caplog.clear()
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = template.replace("END", end)
        chats = Dataset.from_dict({"messages": [CHAT * 2, CHAT]})
        trainer = QeRLSFTTrainer(
            policy(tiny_model), args=settings(tmp_path), train_dataset=chats, processing_class=tokenizer
        )
        trainer.train()
        assert caplog.text.count("In 2 of the first 2 demonstrations, a trained turn does not end") == said


def test_a_turn_that_was_cut_may_lack_its_end(caplog):
    stop, other = 2, 5
    cut = Dataset.from_dict({"labels": [[IGNORE, other, stop, IGNORE, other, other]]})
    warn_of_endless_turns(cut, {stop}, 6)
    assert not caplog.text
    for rows in (cut, Dataset.from_dict({"labels": [[IGNORE, other, IGNORE, stop, IGNORE, other]]})):
        caplog.clear()
        warn_of_endless_turns(rows, {stop}, 7)
        assert "In 1 of the first 1 demonstrations" in caplog.text


# Refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_generations": 4}, "num_generations has no effect with algorithm: sft"),
        ({"steps_per_generation": 4}, "steps_per_generation has no effect"),
        ({"generation_batch_size": 16}, "generation_batch_size has no effect"),
        ({"beta": 0.1}, "beta has no effect"),
        ({"loss_type": "grpo"}, "loss_type has no effect"),
        ({"noise": True, "max_steps": 10}, "noise has no effect"),
        ({"curriculum": True}, "curriculum has no effect"),
        ({"tools": ["calculator"]}, "tools has no effect"),
        ({"algorithm": "grpo", "max_length": 8}, "max_length acts only with algorithm: sft"),
    ],
)
def test_fields_without_meaning_are_refused(tmp_path, fields, said):
    with pytest.raises(QeRLError, match=said):
        settings(tmp_path, **fields)


def test_settings_of_a_run_can_be_read_again(tmp_path):
    fields = {"model": "m", "task": "arithmetic", "output_dir": str(tmp_path), "use_cpu": True}
    config = load_config(
        [],
        SFT
        | fields
        | {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5, "save_steps": 5},
    )
    assert (config.learning_rate, config.metric_for_best_model, config.greater_is_better) == (
        2e-4,
        "eval_loss",
        False,
    )
    from qerl.settings.recipe import dump

    (tmp_path / "config.yaml").write_text(dump(config))
    assert vars(load_config([tmp_path / "config.yaml"], {})).keys() == vars(config).keys()


def test_each_trainer_refuses_the_settings_of_the_other(tiny_model, tiny_tokenizer, tmp_path):
    given = {"train_dataset": PAIRS, "processing_class": tiny_tokenizer}
    with pytest.raises(QeRLError, match="use QeRLSFTTrainer"):
        QeRLTrainer(policy(tiny_model), ones, settings(tmp_path), **given)
    for args in (None, QeRLConfig(output_dir=str(tmp_path), use_cpu=True)):
        with pytest.raises(QeRLError, match=r"pass args=QeRLConfig\(algorithm='sft'\)"):
            QeRLSFTTrainer(policy(tiny_model), args=args, **given)
    with pytest.raises(QeRLError, match="leave tools, environment_factory and rollout_func out"):
        QeRLSFTTrainer(policy(tiny_model), args=settings(tmp_path), rollout_func=print, **given)
    stream = PAIRS.to_iterable_dataset()
    with pytest.raises(QeRLError, match="is a IterableDataset; algorithm: sft learns from a Dataset"):
        QeRLSFTTrainer(policy(tiny_model), args=settings(tmp_path), **(given | {"train_dataset": stream}))


def test_a_task_without_solutions_is_refused_before_anything_is_loaded(tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "6 x 7?", "answer": 42}) + "\n")
    words = ["train", "--algorithm", "sft", "--model", "no/model", "--task", str(problems)]
    assert main([*words, "--output_dir", str(tmp_path / "run"), "--dry_run"]) == 2


# Evaluation


def test_held_out_rows_beyond_those_evaluated_are_never_rendered(tiny_tokenizer, tmp_path):
    class Ready(ReadyDemonstrations):
        def __call__(self, rows, what):
            made[what] = len(rows)
            return super().__call__(rows, what)

    made: dict[str, int] = {}
    config = settings(tmp_path, eval_strategy="steps", eval_steps=1, eval_samples=3, max_length=None)
    task = get_task("arithmetic", train_size=5, test_size=8, examples=0)
    _, held_out = _datasets(config, task, Ready(config, tiny_tokenizer, None))
    assert made == {"training demonstrations": 5, "held-out demonstrations": 3} and len(held_out) == 3
    assert list(held_out["answer"]) == list(task.test()["answer"])[:3]


def test_held_out_loss_is_the_mean_over_all_tokens(tiny_model, tiny_tokenizer, tmp_path):
    """Whatever the batch: the reference is transformers' own loss of each demonstration, in float64."""
    model = policy(tiny_model)
    given = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tiny_tokenizer}
    trainer = QeRLSFTTrainer(
        model, args=settings(tmp_path, per_device_eval_batch_size=2, num_generations_eval=1), **given
    )
    losses = []
    for row in trainer.eval_dataset:
        logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1].detach().double().log_softmax(-1)
        losses += [-float(logits[i, x]) for i, x in enumerate(row["labels"][1:]) if x != IGNORE]
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert not any("reward" in name for name in metrics)
    rows, lengths = [*trainer.eval_dataset] * 3, []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, given, out: lengths.append(out.shape))
    trainer.updates.held_out(rows)
    hook.remove()
    assert len(lengths) == 5  # nine rows, two at a time as in training
    longer = PAIRS.select([0, 0, 1])
    assert trainer.evaluate(longer)["eval_loss"] != metrics["eval_loss"]


def test_reward_functions_need_prompts_to_sample_from(tiny_model, tiny_tokenizer, tmp_path):
    chats = Dataset.from_dict({"messages": [CHAT] * 2})
    given = {"args": settings(tmp_path), "train_dataset": chats, "processing_class": tiny_tokenizer}
    with pytest.raises(
        QeRLError, match="held-out rows have `messages`; give them as `prompt` and `completion`"
    ):
        QeRLSFTTrainer(policy(tiny_model), reward_funcs=ones, eval_dataset=chats, **given)
    trainer = QeRLSFTTrainer(policy(tiny_model), reward_funcs=ones, **given)
    with pytest.raises(QeRLError, match="held-out rows have `messages`"):
        trainer.evaluate(chats)


def test_accuracy_is_that_of_rl_and_stands_beside_the_loss(tiny_model, tiny_tokenizer, tmp_path):
    """The same policy samples the same completions of the same problems in both trainers."""

    def letters(completions, answer, **columns):
        assert not {"completion", "input_ids", "labels"} & columns.keys()
        return [len(c[0]["content"]) + float(a) for c, a in zip(completions, answer, strict=True)]

    problems = Dataset.from_dict({"prompt": [CHAT[:1], CHAT[:1] * 1], "answer": ["1", "2"]})
    solved = problems.add_column("completion", [CHAT[1:], CHAT[1:]])
    common = {
        "max_completion_length": 8,
        "num_generations_eval": 2,
        "per_device_eval_batch_size": 4,
        "temperature": 0.7,
    }
    sft = QeRLSFTTrainer(
        policy(tiny_model), args=settings(tmp_path, **common), reward_funcs=letters,
        train_dataset=solved, eval_dataset=solved, processing_class=tiny_tokenizer,
    )  # fmt: skip
    rl = QeRLTrainer(
        policy(tiny_model), letters, settings(tmp_path, algorithm="grpo", num_generations=2, **common),
        problems, problems, tiny_tokenizer,
    )  # fmt: skip
    found, wanted = sft.evaluate(), rl.evaluate()
    compared = {name for name in wanted if "reward" in name or "completions/" in name}
    assert len(compared) > 5 and {name: found[name] for name in compared} == {
        name: wanted[name] for name in compared
    }
    assert wanted["eval_loss"] == -wanted["eval_reward"] and found["eval_loss"] > 0


# Runs


def test_gradients_of_processes_are_summed_in_buckets(tiny_model, tmp_path):
    """Two processes with the same gradients: each becomes its double, whatever its dtype and shape."""

    class Doubling:
        num_processes, device, calls = 2, torch.device("cpu"), 0

        def reduce(self, value, how):
            self.calls += 1
            return value * 2

    model = policy(tiny_model)
    update = CrossEntropyUpdate(settings(tmp_path), model, (accelerator := Doubling()), lambda: False)
    trained = [x for x in model.parameters() if x.requires_grad]
    assert len(trained) > 3 and len({x.shape for x in trained}) > 1
    trained[1].data = trained[1].data.bfloat16()
    for number, parameter in enumerate(trained[:-1]):
        parameter.grad = torch.randn_like(parameter) + number
    wanted = [2 * x.grad for x in trained[:-1]]
    update._sum_gradients()
    assert all(map(torch.equal, [x.grad for x in trained[:-1]], wanted)) and trained[-1].grad is None
    assert accelerator.calls == 2
    sizes = [[x.nbytes for x in bucket] for bucket in _buckets([torch.zeros(n) for n in (1, 2, 9, 3)], 16)]
    assert sizes == [[4, 8], [36], [12]]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tiny_run, tmp_path):
    """With dropout, evaluations in between, and an epoch that steps do not divide."""
    options = {"level": "wp1", "examples": 0, "train_size": 7, "test_size": 4}
    changes = SFT | {"task_options": options, "reward_files": []}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(QeRLConfig(**tiny_run(whole, **changes)), QUIET)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    train(QeRLConfig(**tiny_run(resumed, resume_from_checkpoint="true", **changes)), QUIET)
    files = [load_file(f / "adapter_model.safetensors") for f in (whole, resumed, whole / "checkpoint-3")]
    assert all(tensor.equal(files[1][name]) for name, tensor in files[0].items())
    assert any(not tensor.equal(files[2][name]) for name, tensor in files[0].items())
    logs = [
        [row for row in read_metrics(f) if "eval_loss" in row and row["step"] > 3] for f in (whole, resumed)
    ]
    keep = ("eval_loss", "eval_reward", "eval_rewards/accuracy/mean")
    assert [[row[k] for k in keep] for row in logs[0]] == [[row[k] for k in keep] for row in logs[1]]
    assert len(logs[0]) == 3


@pytest.mark.slow
def test_a_run_begins_where_rl_would_with_a_template_that_takes_no_system_message(tiny_run, tmp_path):
    """Before the first step both score the same samples of the same held-out problems."""
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    common = {"noise": False, "eval_on_start": True, "max_steps": 1, "eval_steps": 5, "save_strategy": "no"}
    fields = tiny_run(tmp_path / "rl", num_generations_eval=2, **common)
    (Path(fields["model"]) / "chat_template.jinja").write_text(no_system)
    train(QeRLConfig(**fields), QUIET)
    train(QeRLConfig(**tiny_run(tmp_path / "sft", **common | SFT)), QUIET)
    found, wanted = (
        next(row for row in read_metrics(tmp_path / run) if "eval_reward" in row) for run in ("sft", "rl")
    )
    same = [name for name in wanted if "rewards/" in name or "completions/" in name]
    assert len(same) > 8 and {n: found[n] for n in same} == {n: wanted[n] for n in same}
    assert found["eval_rewards/digits/mean"] > 0


@pytest.mark.slow
def test_the_command_learns_and_rl_goes_on_from_its_adapter(tiny_run, tmp_path, capsys):
    demonstrations = tmp_path / "chats.jsonl"
    demonstrations.write_text(
        f"{json.dumps({'messages': CHAT})}\n" * 4 + json.dumps({"messages": CHAT * 2}) + "\n"
    )
    fields = tiny_run(tmp_path / "sft") | SFT | {
        "task": f"demonstrations:{demonstrations}", "task_options": {"test_size": 1}, "max_steps": 20,
        "reward_files": [], "eval_steps": 20, "save_steps": 20, "learning_rate": 3e-2, "lora_dropout": 0.0,
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if not name.startswith("noise")}
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(json.dumps(fields))
    assert main(["train", str(recipe)]) == 0
    assert "loss" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "sft")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] / 2 and rows[-1].keys() and any("eval_loss" in row for row in rows)
    assert "supervised fine-tuning" in (tmp_path / "sft" / "README.md").read_text()
    again = tiny_run(
        tmp_path / "rl", adapter=str(tmp_path / "sft"), max_steps=1, noise=False, eval_on_start=False
    )
    again = {name: value for name, value in again.items() if name not in ("lora_r", "lora_dropout")}
    train(QeRLConfig(**again | {"learning_rate": 0.0}), QUIET)
    warm, after = (load_file(tmp_path / run / "adapter_model.safetensors") for run in ("sft", "rl"))
    assert all(tensor.equal(after[name]) for name, tensor in warm.items())
