"""The sampler's log-probabilities are the trainer's, on packed weights with an adapter, without noise."""

import pytest
import torch
from rich.console import Console

from qerl.settings.config import QeRLConfig
from qerl.trainer.run import build
from tests.support.models import move_adapter

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-3)])
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "bf16"])
def test_decode_equals_the_loss_forward(tiny_run, tmp_path, weights, dtype, bound, capsys):
    changes = {
        "weights": weights,
        "dtype": dtype,
        "noise": False,
        "max_completion_length": 64,
        "save_strategy": "no",
    }
    trainer, _ = build(QeRLConfig(**tiny_run(tmp_path / "run", **changes)), Console(quiet=True))
    soften(trainer.model)
    rows = [row for row in trainer.train_dataset.select(range(4)) for _ in range(2)]
    samples = trainer.rollouts.train(rows, 0).samples
    trainer.model.eval()  # the adapters' dropout is for the loss, not for this comparison
    found = trainer.updates.logprobs(trainer.model, samples)
    difference = torch.tensor([
        abs(ours - sampled)
        for sample, values in zip(samples, found, strict=True)
        for ours, sampled in zip(values, sample.logprobs, strict=True)
    ])  # fmt: skip
    mean, most = difference.mean(), difference.max()
    with capsys.disabled():
        print(f"\n{weights} {dtype}: mean {mean:.1e}, max {most:.1e}, bound {bound:.0e}")
    assert difference.numel() > 100
    assert mean <= bound


def soften(model: torch.nn.Module) -> None:
    """Adapters that are not zero, and logits no wider than a language model's."""
    torch.manual_seed(0)
    move_adapter(model, 0.02)
    model.get_output_embeddings().weight.data.mul_(0.1)
