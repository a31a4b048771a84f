"""The sampler's log-probabilities are the trainer's, on packed weights with an adapter, without noise."""

import pytest
import torch
from qerl.trainer.batch import padded
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
    trainer.model.train()
    rows = [row for row in trainer.train_dataset.select(range(4)) for _ in range(2)]
    batch = trainer._generate_and_score_completions(rows)
    trainer.model.eval()  # the adapters' dropout is for the loss, not for this comparison
    logps, _ = trainer._forward(trainer.model, padded(batch), list(range(len(rows))))
    difference = (logps - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()].abs()
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
