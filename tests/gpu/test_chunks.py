"""An update in chunks on the GPU path: the gradients of the undivided one, and the memory of a chunk."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from datasets import Dataset

from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import ScriptedEngine, sum_reward

GROUP, PROMPTS, LONGEST = 8, 4, 384
DATA = Dataset.from_dict({"prompt": ["one two three four " * n for n in (20, 5, 1, 10)]})


SIZES = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": 4}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_memory(nvfp4_llama, tiny_tokenizer, tmp_path, checkpointing: bool) -> None:
    args = QeRLConfig(
        output_dir=str(tmp_path), num_generations=GROUP,
        per_device_train_batch_size=GROUP * PROMPTS, max_completion_length=LONGEST, noise=False,
        gradient_checkpointing=False, report_to="none",
    )  # fmt: skip
    policy = nvfp4_llama(num_attention_heads=8, **SIZES)
    trainer = QeRLTrainer(
        policy,
        [sum_reward],
        args,
        DATA,
        engine=ScriptedEngine(90, shortest=8),
        processing_class=tiny_tokenizer,
    )
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
        trainer.model.enable_input_require_grads()
    trainer.model.train()
    microbatches = trainer._rollout(trainer.model, [row for row in DATA for _ in range(GROUP)])
    tokens = microbatches[0].rollout_tokens
    found = {}
    for budget in (None, None, tokens // 4, 1):  # the first run is for workspaces and compilation
        trainer.updates.retry.max_tokens = budget
        trainer.model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = trainer.updates.run(trainer.model, microbatches, 1)
        memory = torch.cuda.max_memory_allocated() - before
        gradients = {n: p.grad.double() for n, p in trainer.model.named_parameters() if p.grad is not None}
        found[budget] = (loss.item(), memory, gradients)
    loss, memory, truth = found[None]
    assert all(gradient.norm() > 0 for gradient in truth.values())
    for budget in (tokens // 4, 1):
        cut_loss, cut_memory, cut = found[budget]
        gap = max(float((cut[name] - truth[name]).norm() / truth[name].norm()) for name in truth)
        print(
            f"{tokens} tokens in chunks of {budget}: loss {cut_loss:.6f} against {loss:.6f}, gradients off "
            f"by {gap:.1e} at most, {cut_memory / 1e6:.1f} MB against {memory / 1e6:.1f}"
        )
        assert cut_loss == pytest.approx(loss, abs=2e-3)
        assert gap < 5e-2  # the bound of test_training for 16-bit activations
    assert found[tokens // 4][1] < 0.5 * memory
    assert found[1][1] < 0.25 * memory
