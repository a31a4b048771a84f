"""The sampler's log-probabilities are the trainer's, on packed weights with an adapter, without noise."""

import pytest
import torch
from rich.console import Console

from qerl.settings.config import QeRLConfig
from qerl.trainer.run import build
from tests.support.models import move_adapter
from tests.support.trainer import rollout_of, samples_of

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
    samples = samples_of(rollout_of(trainer, rows))
    trainer.model.eval()  # the adapters' dropout is for the loss, not for this comparison
    found = trainer.updates.logprobs(trainer.model, samples)
    pairs = zip(found, samples, strict=True)
    difference = torch.cat([torch.tensor(logps) - torch.tensor(s.logprobs) for logps, s in pairs]).abs()
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
