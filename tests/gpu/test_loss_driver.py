"""The loss driver on packed NVFP4 weights on a GPU is as near to FP32 on dense masks as bf16 itself is."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.update.driver import LossDriver
from tests.update.test_loss_driver import VOCABULARY, samples

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPS = ((70, (50, 31, 9, 64)), (33, (20, 41)), (1, (8,)))


def run(driver: LossDriver, model: torch.nn.Module, loss: str) -> tuple:
    model.zero_grad()
    output = driver.forward_backward(samples(loss, GROUPS), loss)
    return output, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "dro"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_weights_on_kernels_equal_the_portable_path(nvfp4_llama, loss, checkpointing):
    exact_model = nvfp4_llama(tiles=False, **SIZES).float()
    exact = LossDriver(exact_model)
    assert not exact.update_path.by_segment
    wanted, truth = run(exact, exact_model, loss)
    model = nvfp4_llama(**SIZES)
    if checkpointing:
        model.gradient_checkpointing_enable()
    driver = LossDriver(model)
    assert driver.update_path.by_segment and not driver.update_path.is_slow, driver.update_path.sentence()
    output, found = run(driver, model, loss)
    gaps = {name: distance(found[name], truth[name]) for name in truth}
    worst = max(gaps, key=gaps.get)
    total = wanted.metrics["loss:sum"]
    apart = float((torch.cat(output.logprobs) - torch.cat(wanted.logprobs)).abs().mean())
    print(
        f"{loss}: {output.metrics['loss:sum']:.4f} against {total:.4f}, log-probabilities "
        f"{apart:.1e} apart on average, gradients {gaps[worst]:.1e} at most ({worst})"
    )
    assert apart < 2e-2
    assert gaps[worst] < 5e-2
    again, same = run(driver, model, loss)
    assert again.metrics == output.metrics and all(torch.equal(same[name], found[name]) for name in found)


def test_chunks_and_tiles_give_the_gradient_of_the_whole(nvfp4_llama, monkeypatch):
    from qerl.update import head

    model = nvfp4_llama(**SIZES)
    driver = LossDriver(model)
    _, whole = run(driver, model, "importance_sampling")
    monkeypatch.setattr(head, "TILE", 37 * VOCABULARY)
    _, found = run(LossDriver(model, tokens_per_forward=150), model, "importance_sampling")
    worst = max(distance(found[name], whole[name]) for name in whole)
    print(f"gradients {worst:.1e} apart")
    assert worst < 2e-2
