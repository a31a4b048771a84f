"""A run that is stopped and resumed ends with the same bits as one that was not."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.run_folder import MANIFEST_FILE, UNFINISHED, checkpoints, last_checkpoint
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.run import train
from tests.support.arguments import ROWS, first_letter, run_settings
from tests.support.families import tiny

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
SHORT = {"max_steps": 2, "save_steps": 1, "noise_stages": 2, "eval_strategy": "no"}
# Two rollouts of four microbatches an epoch: steps of 3, 3 and 2.
LONGER = {"level": "wp1", "examples": 0, "train_size": 16, "test_size": 4}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="each rollout used once"),
        pytest.param(
            {"steps_per_generation": 2, "num_iterations": 2}, id="stopped while a rollout is half used"
        ),
        pytest.param(
            {"dynamic_sampling_batches": 1, "algorithm": "dapo", "signal": "reward"}, id="dynamic sampling"
        ),
        pytest.param(
            {"noise_scale": "relative", "steps_per_generation": 2}, id="noise relative to the weights"
        ),
        pytest.param(
            {
                "task": "mixture",
                "task_options": {
                    "words": {"task": "arithmetic", "task_options": {"train_size": 3, "test_size": 2}},
                    "arithmetic": {"weight": 2, "task_options": {"train_size": 3, "test_size": 2}},
                },
                "curriculum": True,
                "dynamic_sampling_batches": 1,
                "eval_strategy": "no",
            },
            id="several tasks and a curriculum",
        ),
        pytest.param(
            {
                "steps_per_generation": 4,
                "gradient_accumulation_steps": 3,
                "task_options": LONGER,
                "max_steps": 5,
            },
            id="an epoch that steps do not divide",
        ),
        pytest.param(
            {
                "max_staleness": 2,
                "noise": False,
                "stop_strings": [*"abcdefghijklmnopqrstuvwxyz"],
                "max_completion_length": 16,
                "eval_steps": 2,
                "task_options": {"level": "wp1", "examples": 0, "train_size": 9, "test_size": 4},
            },
            id="samples that are kept over updates",
        ),
    ],
)
def test_resume_is_bit_exact(tiny_run, tmp_path, changes):
    stop_and_resume(tiny_run, tmp_path, changes)


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "olmo3", "qwen3_5_moe_text"])
def test_resume_is_bit_exact_for_layers_of_each_kind(tiny_run, tiny_tokenizer, tmp_path, family):
    """Windows, which prompts exceed, sinks, experts, delta nets; and OLMo 3 takes no noise."""
    tiny(family, max_position_embeddings=512).save_pretrained(tmp_path / "family")
    tiny_tokenizer.save_pretrained(tmp_path / "family")
    noise = {"noise": False} if family == "olmo3" else {}
    changes = {"model": str(tmp_path / "family"), "eval_strategy": "no"} | noise
    stop_and_resume(tiny_run, tmp_path, changes)


def test_resume_of_an_adapter_that_went_on_training_is_bit_exact(tiny_run, tmp_path):
    """With a KL penalty its reference is the adapter as it was given, also after the resume."""
    train(QeRLConfig(**tiny_run(tmp_path / "first", **SHORT)), QUIET)
    adapter = str(tmp_path / "first")
    stop_and_resume(tiny_run, tmp_path, {"adapter": adapter, "beta": 0.1, "eval_strategy": "no"})
    reference = load_file(tmp_path / "resumed" / "checkpoint-6" / "ref" / "adapter_model.safetensors")
    given = load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert all(tensor.equal(reference[name]) for name, tensor in given.items())
    fields = tiny_run(tmp_path / "resumed", resume_from_checkpoint="true", beta=0.1, max_steps=8)
    with pytest.raises(QeRLError, match="cannot be resumed with another adapter"):
        train(QeRLConfig(**fields), QUIET)


def test_resume_is_bit_exact_where_texts_end_completions(tiny_run, tmp_path):
    """Stopped while a rollout is half used, of which some samples were ended and others masked."""
    changes = {"stop_strings": [*"abcdefghijkl", "no"], "mask_truncated_completions": True}
    changes |= {
        "signal": "reward",
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": 12,
        "eval_samples": 4,
        "num_generations_eval": 2,
    }
    stop_and_resume(tiny_run, tmp_path, changes)
    logs = [
        [
            {k: v for k, v in row.items() if "completions/" in k or "rewards/" in k}
            for row in steps_of(tmp_path / name)
        ]
        for name in ("whole", "resumed")
    ]
    assert logs[0][-len(logs[1]) :] == logs[1] and len(logs[1]) > 3
    assert any(0 < row.get("completions/clipped_ratio", 0) < 1 for row in logs[1])
    assert all(row.get("completions/clipped_ratio", 0) < 1 for row in logs[1])


EARLY = """
import asyncio

from qerl.tasks.guard import judges_alone, judges_outside

@judges_outside
async def late(completions, **kwargs):
    text = completions[0][0]["content"]
    await asyncio.sleep(len(text) % 4 / 100)  # calls end in another order than they begin
    return [sum(map(ord, text)) % 5 / 4 if len(text) % 3 else None]

@judges_alone
async def behind(**columns):
    return await late(**columns)
"""


def test_resume_is_bit_exact_where_rewards_begin_early(tiny_run, tmp_path):
    """Stopped while a rollout is half used; and the adapter is that of a run whose rewards begin late."""
    (tmp_path / "early.py").write_text(EARLY)
    changes = {
        "reward_files": [f"{tmp_path}/early.py:late"],
        "signal": "reward",
        "steps_per_generation": 2,
        "num_iterations": 2,
        "stop_strings": [*"abcde"],
        "max_completion_length": 12,
    }
    stop_and_resume(tiny_run, tmp_path, changes)
    changes["reward_files"] = [f"{tmp_path}/early.py:behind"]
    train(QeRLConfig(**tiny_run(tmp_path / "late", **changes)), QUIET)
    late, early = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("late", "resumed"))
    assert all(tensor.equal(early[name]) for name, tensor in late.items())


def steps_of(run):
    """What a run has logged behind step 3, with its evaluations."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 3 and "train_runtime" not in row]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("changes", [{"num_iterations": 2}, {"max_staleness": 2, "noise": False}])
def test_resume_is_bit_exact_on_a_gpu(tiny_run, tmp_path, tiny_model, tiny_tokenizer, changes):
    """The paged engine, NVFP4 weights, fused kernels; large enough for all of them."""
    model = tmp_path / "larger"
    tiny_model(
        "llama", hidden_size=256, intermediate_size=448, head_dim=64, initializer_range=0.05
    ).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    stop_and_resume(tiny_run, tmp_path, {"model": str(model), "use_cpu": False} | changes)


def stop_and_resume(tiny_run, tmp_path, changes):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(QeRLConfig(**tiny_run(whole, **changes)), QUIET)
    resumed.mkdir()
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    train(QeRLConfig(**tiny_run(resumed, resume_from_checkpoint="true", **changes)), QUIET)
    expected, actual, at_stop = (
        load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed, whole / "checkpoint-3")
    )
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.equal(actual[name]), name
    assert any(not tensor.equal(at_stop[name]) for name, tensor in expected.items()), "training went on"
    # Weight decay alone moves an adapter too.
    assert any(row.get("grad_norm", 0) > 0 for row in steps_of(resumed)), "it learned behind the stop"


def test_a_checkpoint_cut_off_while_it_was_written_is_not_resumed_from(tmp_path):
    for step, complete in (
        (10, True),
        (3, True),
        (12, False),
    ):  # the last one that was made is not the newest
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / MANIFEST_FILE).write_text("{}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_checkpoint_that_cannot_be_written_costs_only_itself(tiny_run, tmp_path, monkeypatch):
    """The disk fills while step 4 is saved: one sentence, and the checkpoint of step 2 is whole."""
    from transformers import Trainer

    run = tmp_path / "run"
    save = Trainer._save_optimizer_and_scheduler

    def full_disk(self, output_dir):
        if Path(output_dir).name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        save(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full_disk)
    with pytest.raises(QeRLError, match=r"checkpoint-4 could not be saved \(.*No space left"):
        train(QeRLConfig(**tiny_run(run, save_steps=2)), QUIET)
    assert last_checkpoint(run) == run / "checkpoint-2"
    assert not (run / "checkpoint-4").exists() and not (run / UNFINISHED).exists()


def test_a_disk_that_is_full_at_the_end_costs_no_checkpoint(tiny_run, tmp_path):
    """Files may not grow beyond 100 bytes when the final adapter is written."""
    run = tmp_path / "run"
    config = QeRLConfig(**tiny_run(run, **SHORT))
    save = QeRLTrainer.save_final

    def with_a_full_disk(self, folder):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            save(self, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QeRLTrainer, "save_final", with_a_full_disk)
        with pytest.raises(QeRLError, match=r"could not be saved .*go on from .*checkpoint-2, which is unt"):
            train(config, QUIET)
    assert not (run / "adapter_model.safetensors").exists()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]
    train(QeRLConfig(**tiny_run(run, resume_from_checkpoint="true", **SHORT)), QUIET)
    assert (run / "adapter_model.safetensors").exists() and not (run / UNFINISHED).exists()


def test_a_tokenizer_that_cannot_be_written_is_a_sentence(tiny_run, tmp_path, monkeypatch):
    def on_a_full_disk(*_args, **_kwargs):
        Tokenizer(models.WordLevel({"a": 0}, "a")).save("/dev/full")

    config = QeRLConfig(**tiny_run(tmp_path / "run", **SHORT))
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", on_a_full_disk)
    with pytest.raises(QeRLError, match=r"checkpoint-1 could not be saved \(No space left on device"):
        train(config, QUIET)
    assert not (tmp_path / "run" / UNFINISHED).exists()


def test_a_trainer_made_in_python_resumes_as_a_run_does(llama_folder, tmp_path, caplog):
    def trainer(lora=(), **fields):
        fields = {"max_steps": 2, "save_steps": 1, "learning_rate": 1e-3} | fields
        peft_config = LoraConfig(r=4, target_modules=["v_proj", "q_proj"], **dict(lora))
        args = run_settings(tmp_path / "run", **fields)
        return QeRLTrainer(str(llama_folder), first_letter, args, ROWS, peft_config=peft_config)

    with pytest.raises(
        QeRLError, match=r"run has no checkpoint to resume from; leave resume_from_checkpoint"
    ):
        trainer().train(resume_from_checkpoint=True)
    trainer().train()
    with pytest.raises(
        QeRLError, match=r"resumed with another learning_rate \(learning_rate 0.001 -> 0.01\)"
    ):
        trainer(learning_rate=1e-2).train(resume_from_checkpoint=True)
    with pytest.raises(QeRLError, match="resumed with another lora_alpha "):
        trainer({"lora_alpha": 2}).train(resume_from_checkpoint=True)
    caplog.clear()
    same = trainer(max_steps=3, temperature=0.5, save_only_model=True)
    same.train(resume_from_checkpoint=True)
    assert same.state.global_step == 3
    assert "differ from those of checkpoint-2 and apply from here on: max_steps 2 -> 3 (" in caplog.text
    assert "temperature 1.0 -> 0.5" in caplog.text
    with pytest.raises(QeRLError, match=r"checkpoint-3 has no state of the optimizer \(save_only_model\)"):
        trainer(max_steps=4).train(resume_from_checkpoint=True)


def test_a_run_that_is_made_longer_follows_the_new_schedule_from_its_first_step(llama_folder, tmp_path):
    def rates(steps, **fields):
        args = run_settings(
            tmp_path / "run", max_steps=steps, save_steps=1, learning_rate=1e-3, lr_scheduler_type="linear",
            **fields,
        )  # fmt: skip
        trainer = QeRLTrainer(str(llama_folder), first_letter, args, ROWS)
        trainer.train(resume_from_checkpoint=bool(fields))
        return [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]

    assert rates(2) == pytest.approx([1e-3, 5e-4])
    assert rates(4, save_only_model=False) == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])


def test_a_model_in_hand_resumes_what_a_named_one_saved(llama_folder, tiny_tokenizer, tmp_path, caplog):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")

    def trainer(model, steps, weights):
        args = run_settings(tmp_path / "run", max_steps=steps, save_steps=1, weights=weights)
        return QeRLTrainer(model, first_letter, args, ROWS, processing_class=tiny_tokenizer, peft_config=lora)

    trainer(str(llama_folder), 1, "bf16").train()
    again = trainer(AutoModelForCausalLM.from_pretrained(llama_folder), 2, None)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert "lora_target_modules" not in caplog.text
