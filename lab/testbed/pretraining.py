"""Train the testbed's model from scratch: cross-entropy of the answers in generated text, nothing else.

The model is a Llama of 31.5M parameters, with shapes that every packed format and kernel takes: hidden 512,
eight layers, heads of 64. The text holds each strategy as often as its prior says, so the model learns a
distribution, and is as sure of a habit as the prior says. Only answers are learned, since prompts are noise.
The learning rate falls to 0; meanwhile the priors settle.

Weights are in FP32 and products in bfloat16 on a GPU. Everything is drawn by (seed, step) on the device, and
torch is asked for deterministic sums, so the same command on the same GPU with the same versions should give
the same weights; their hash is published.

A run that reaches its time limit is saved, and the same command resumes it.
"""

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lab.scratch import END, PAD
from lab.testbed.language import CELLS, make_tokenizer
from lab.testbed.problems import ID, LONGEST, UNSEEN, rows_of, stream
from qerl.atomic import write_whole
from qerl.errors import QeRLError

VOCABULARY_SIZE = 128
"""Rows of the embedding; those after the last token are never drawn."""

CHECKPOINT = "checkpoint.pt"
SAVE_EVERY, SAY_EVERY = 120.0, 20.0
"""Seconds between two checkpoints, and between two lines about the run."""


@dataclass(frozen=True)
class Pretraining:
    """A model and how it is trained.

    Attributes:
        hidden_size, intermediate_size, layers, heads, kv_heads: Its shape.
        steps: Optimizer steps.
        batch: Rows per step.
        learning_rate: Reached after `warmup` steps, from where it falls linearly to 0 at the last one.
        weight_decay: Weight decay of matrices; norms have none.
        seed: Seed of weights and text.
    """

    hidden_size: int = 512
    intermediate_size: int = 2048
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    steps: int = 6000
    batch: int = 2048
    learning_rate: float = 1e-3
    warmup: int = 300
    weight_decay: float = 0.1
    seed: int = 0

    def make(self) -> LlamaForCausalLM:
        """The untrained model, in FP32; torch's own random numbers are left as they were."""
        config = LlamaConfig(
            vocab_size=VOCABULARY_SIZE, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.hidden_size // self.heads, max_position_embeddings=256, tie_word_embeddings=True,
            initializer_range=self.hidden_size**-0.5,
            pad_token_id=ID[PAD], bos_token_id=None, eos_token_id=ID[END],
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return LlamaForCausalLM(config).float()

    def rate(self, step: int) -> float:
        """Learning rate of a 0-based step."""
        rising, falling = (step + 1) / self.warmup, (self.steps - step) / max(1, self.steps - self.warmup)
        return self.learning_rate * min(1.0, rising, falling)

    @property
    def flops(self) -> float:
        """FLOP of the matrix products of all steps, forward and backward."""
        weights = sum(p.numel() for p in self.make().parameters())
        return 6.0 * weights * self.steps * self.batch * LONGEST


@dataclass
class Run:
    """A run in progress.

    Attributes:
        of: Its model and training.
        model: The model, trained so far.
        done: Steps done.
        seconds: Time that these steps took, over all calls.
        losses: Step and loss in nats per answer token, at intervals.
    """

    of: Pretraining
    model: LlamaForCausalLM
    done: int
    seconds: float
    losses: list[tuple[int, float]]


def train(
    of: Pretraining,
    folder: Path,
    device: torch.device,
    limit_s: float,
    compiled: bool,
    say: Callable[[str], None],
) -> Run:
    """Train until all steps are done or time is up, from the folder's checkpoint if there is one.

    Args:
        of: What to train.
        folder: Holds the checkpoint.
        device: Device to train on.
        limit_s: Seconds of this call, after which the run is saved and returned.
        compiled: Train with `torch.compile`, which is faster and may give other last bits.
        say: Shows a line.

    Raises:
        QeRLError: The folder's checkpoint is of another run, or the loss is not finite.
    """
    began = time.monotonic()
    run, optimizer = _start(of, folder, device)
    forward: Any = torch.compile(run.model) if compiled else run.model
    before, saved, said = run.seconds, began, (began, run.done)
    with _same_sums(device):
        while run.done < of.steps and time.monotonic() - began < limit_s:
            looks = time.monotonic() - said[0] > SAY_EVERY or run.done == of.steps - 1
            loss = _step(run, forward, optimizer, looks)
            run.done += 1
            if loss is not None:
                now = time.monotonic()
                run.losses.append((run.done, loss))
                pace = (run.done - said[1]) * of.batch * LONGEST / (now - said[0])
                say(f"step {run.done} of {of.steps}: loss {loss:.4f}, {pace / 1e6:.3f}M tokens/s")
                said = (now, run.done)
            if time.monotonic() - saved > SAVE_EVERY:
                run.seconds = before + time.monotonic() - began
                _save(run, optimizer, folder)
                saved = time.monotonic()
    run.seconds = before + time.monotonic() - began
    _save(run, optimizer, folder)
    return run


def _start(of: Pretraining, folder: Path, device: torch.device) -> tuple[Run, torch.optim.AdamW]:
    model = of.make().to(device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": of.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=of.learning_rate, betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    run = Run(of, model, 0, 0.0, [])
    if (path := folder / CHECKPOINT).is_file():
        kept = torch.load(path, map_location=device, weights_only=True)
        if kept["of"] != asdict(of):
            raise QeRLError(f"{path} is of another run, {kept['of']}; choose another --output_dir.")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        run.done, run.seconds, run.losses = kept["done"], kept["seconds"], kept["losses"]
    return run, optimizer


def _step(run: Run, forward: Any, optimizer: torch.optim.AdamW, looks: bool) -> float | None:
    """One optimizer step; returns its loss if `looks`, for which the host waits for the GPU.

    Raises:
        QeRLError: The returned loss is not finite.
    """
    of, device = run.of, run.model.device
    draw = stream(device, of.seed, run.done)
    cells = torch.arange(of.batch, device=device) % len(CELLS)
    rows = rows_of(cells, draw)
    for group in optimizer.param_groups:
        group["lr"] = of.rate(run.done)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits_BTV = forward(input_ids=rows.ids_BT[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), rows.labels_BT[:, 1:].flatten(), ignore_index=UNSEEN
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    optimizer.step()
    if not looks:
        return None
    if not torch.isfinite(loss):
        raise QeRLError(f"The loss of step {run.done + 1} is {loss.item()}; lower --learning_rate.")
    return loss.item()


def _save(run: Run, optimizer: torch.optim.AdamW, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        "of": asdict(run.of), "model": run.model.state_dict(), "optimizer": optimizer.state_dict(),
        "done": run.done, "seconds": run.seconds, "losses": run.losses,
    }  # fmt: skip
    content = io.BytesIO()
    torch.save(kept, content)
    write_whole(folder / CHECKPOINT, content.getvalue())


@contextmanager
def _same_sums(device: torch.device) -> Iterator[None]:
    """Inside the block torch uses deterministic algorithms where it has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # filling costs time, and changes no sum
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = filled


def write_model(model: LlamaForCausalLM, folder: Path, shard: str) -> None:
    """Write a trained model in bfloat16 and its tokenizer; the model itself is not changed.

    Args:
        model: The model.
        folder: Folder to write to.
        shard: Largest size of a file, as `15MB`.
    """
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(eos_token_id=ID[END], pad_token_id=ID[PAD])
    copy.save_pretrained(folder, max_shard_size=shard)
    make_tokenizer().save_pretrained(folder)
