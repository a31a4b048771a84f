"""Comparison of a packed row with plain forward passes of the same model, before a run's first step.

The update is correct if a sample has the same log-probabilities in a packed row as alone. This depends on how
a model's code treats masks and positions, and there is no complete list of what may break it: attention that
masks on its own, biases by column, rotary embeddings that change with the longest sample of a row, kernels.
So it is measured, on random tokens: a row with two branches of one prompt and another prompt, against each of
the three samples alone, through the model's own logits. If the config names a length at which something
changes (a window, a chunk, the positions that a rotary embedding was trained on) and the run's samples reach
it, the longer prompt exceeds it.

The allowed mean difference over the scored tokens is a sum: 1e-4 nats, some ten times the effect of another
order of FP32 sums; the rounding of a logit to the model's dtype, half a unit in the last place; and four
times the model's own noise, measured between the same samples alone and padded in a batch, which take
different tile sizes to the same numbers. In 16 bits 0.1 nats come on top: the packed row goes through other
kernels than a plain pass (`qerl.update.fused`), and either differs from FP32 by rounding in each layer, by
0.017 nats for a random 7B and 0.032 for SmolLM2-135M on an H100 (docs/dev/log.md). Wrong masks were off by
0.1 to 4 nats. Given up: finding smaller errors in 16 bits, which FP32 on a CPU would show.

Legend: T tokens of a sample, N tokens of a completion, V vocabulary.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from qerl.errors import QeRLError
from qerl.families.parts import base_model, eval_mode
from qerl.seeding import generator
from qerl.update.packed_row import PackedRow, Sample, pack_row

_FP32_SUMS = 1e-4
_NOISE = 4
_SIXTEEN_BITS = 0.1
_MAX_NOISE = 0.3  # nats; more is no rounding
_COMPLETION = 6
_BEYOND = 8  # tokens of the long sample past a length at which something changes
_PADDING = 3
_LENGTH = re.compile("(window|chunk)(?!_layers)")
_ROPE_BY_LENGTH = ("dynamic", "longrope")


def check_packed_row(
    model: torch.nn.Module,
    score: Callable[[PackedRow], torch.Tensor],
    temperature: float = 1.0,
    longest: int | None = None,
) -> None:
    """Raise if a model's samples have other log-probabilities in a packed row than alone.

    The model does not change, and random numbers come from the check's own generator only.

    Args:
        model: The policy as it trains, PEFT-wrapped or not.
        score: Returns log-probabilities [S] of a row's labels, at the positions that predict a token,
            computed as the update computes them.
        temperature: Divisor of logits in `score`.
        longest: Tokens of the run's longest sample, prompt and completion; None where it is unknown.

    Raises:
        QeRLError: Log-probabilities differ by more than rounding, in a packed row or in a padded batch, or
            the model cannot run a packed row.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    length = _length(config, longest)
    samples = _samples(base.config, config.vocab_size, length)
    with torch.no_grad(), eval_mode(model):
        try:
            joined = _joined(base.device, score, samples)
            alone = [_plain(base, [sample])[0] for sample in samples]
            padded = _plain(base, samples[:2])
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            if not _is_of_the_model(error):
                raise
            reason = str(error).partition("\n")[0].rstrip(".")
            raise QeRLError(
                f"{type(base).__name__} cannot run packed rows, which updates need ({type(error).__name__}: "
                f"{reason}); use a model family of docs/families.md."
            ) from error
    wanted = torch.cat([_logps(*sample, temperature) for sample in alone])
    again = torch.cat([_logps(*sample, temperature) for sample in padded])
    noise = float((again - wanted[: len(again)]).abs().mean())
    found = float((torch.cat(joined) - wanted).abs().mean())
    label = torch.cat([logits_NV.gather(1, labels_N[:, None]) for logits_NV, labels_N in alone])
    eps = torch.finfo(base.dtype).eps
    rounding = float(label.abs().mean()) * eps / 2 / temperature
    if eps > torch.finfo(torch.float32).eps:
        rounding += _SIXTEEN_BITS
    _judge(type(base).__name__, config, length, found, noise, rounding)


def _is_of_the_model(error: Exception) -> bool:
    """Return True if an error comes from the model's code, or from an attribute that the model lacks.

    An error raised in the code around the model, which is this package's and TRL's, is a defect there.
    """
    if isinstance(error, AttributeError) and isinstance(
        error.obj, torch.nn.Module | PreTrainedConfig | ModelOutput
    ):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("qerl", "trl")


def _judge(
    name: str, config: PreTrainedConfig, length: int, found: float, noise: float, rounding: float
) -> None:
    if not noise <= _MAX_NOISE:  # NaN is refused as well
        raise QeRLError(
            f"{name} gives samples other log-probabilities in a padded batch than alone ({noise:.2g} nats on "
            "average), so its rollouts would be wrong; use a model family of docs/families.md."
        )
    allowed = _FP32_SUMS + rounding + _NOISE * noise
    if not found <= allowed:
        turn = min((turn for turn in _turning_points(config.to_dict()) if turn < length), default=None)
        shorter = f", or keep prompt and completion within {turn} tokens (max_prompt_length)" if turn else ""
        raise QeRLError(
            f"{name} gives samples of up to {length} tokens other log-probabilities in a packed row than "
            f"alone, {found:.2g} nats apart on average where rounding explains {allowed:.2g}, so updates "
            f"would be wrong; use a model family of docs/families.md{shorter}."
        )


def _length(config: PreTrainedConfig, longest: int | None) -> int:
    """Return the tokens of the check's longest sample: beyond every turning point that the run reaches."""
    limit = min(x for x in (longest, getattr(config, "max_position_embeddings", None), 1 << 62) if x)
    reached = [length + _BEYOND for length in _turning_points(config.to_dict()) if length < limit]
    return max(min(max([2 * _COMPLETION, *reached]), limit), 2)


def _turning_points(config: dict[str, Any]) -> Iterator[int]:
    """Yield lengths at which a model's computation changes, wherever its decoder's config names one."""
    if config.get("rope_type") in _ROPE_BY_LENGTH and config.get("original_max_position_embeddings"):
        yield config["original_max_position_embeddings"]
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _turning_points(value)
        elif type(value) is int and value > 0 and _LENGTH.search(str(key)):
            yield value


def _samples(config: PreTrainedConfig, vocabulary: int, length: int) -> list[Sample]:
    """Two samples of one prompt and one of another; the first has `length` tokens."""
    rng = generator("packed row")
    taken = set(_special_tokens(config.to_dict()))
    plain = [token for token in range(min(vocabulary, 4096)) if token not in taken] or [0]

    def draw(tokens: int) -> list[int]:
        return [plain[i] for i in torch.randint(len(plain), (tokens,), generator=rng).tolist()]

    n = min(_COMPLETION, length // 2)
    prompt = draw(length - n)
    drawn = (prompt, draw(n)), (prompt, draw(max(n - 2, 1))), (draw(n), draw(n))
    return [Sample(*pair, [], [], group) for pair, group in zip(drawn, (0, 0, 1), strict=True)]


def _special_tokens(config: dict[str, Any]) -> Iterator[int]:
    """Yield ids of tokens that are not text, of an image for example."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _special_tokens(value)
        elif "token" in str(key):
            yield from (x for x in (value if isinstance(value, list) else [value]) if type(x) is int)


def _joined(
    device: torch.device, score: Callable[[PackedRow], torch.Tensor], samples: list[Sample]
) -> list[torch.Tensor]:
    """Log-probabilities [N] of each sample's completion, from one row."""
    row = pack_row(samples, range(len(samples)), device)
    logps_BN = row.scatter(score(row).float(), len(samples), max(len(s.tokens) for s in samples))
    return [logps_N[: len(s.tokens)] for logps_N, s in zip(logps_BN, samples, strict=True)]


def _plain(base: PreTrainedModel, samples: list[Sample]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [N, V] and labels [N] of each sample's completion; several are padded, one needs no mask."""
    padding = [] if len(samples) == 1 else [[0] * (max(_tokens(s) for s in samples) + _PADDING)]
    ids, mask = _padded([s.prompt + s.tokens for s in samples] + padding, base.device)
    ids, mask = ids[: len(samples)], mask[: len(samples)]
    settings: dict[str, Any] = {}
    if padding:
        settings = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits_BNV = base(input_ids=ids, use_cache=False, logits_to_keep=_COMPLETION + 1, **settings).logits
    return [
        (logits_NV[-1 - len(s.tokens) : -1].float(), torch.tensor(s.tokens, device=base.device))
        for logits_NV, s in zip(logits_BNV, samples, strict=True)
    ]


def _tokens(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.tokens)


def _logps(logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float) -> torch.Tensor:
    logps_NV = (logits_NV / temperature).log_softmax(-1)
    return logps_NV.gather(1, labels_N[:, None])[:, 0]


def _padded(rows: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, [B, T] each, padded on the left."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
