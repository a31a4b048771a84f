"""Log-probabilities of prompts under the model's present policy.

Log-probabilities of the prompts' own tokens come from a forward pass of the loss driver, which packs the
prompts of all requests. The most probable tokens need whole rows of logits, so they are computed for one
prompt and one piece of it at a time, with a KV cache between pieces.
"""

import math
from collections.abc import Sequence

import torch
from peft import PeftModel
from transformers import DynamicCache

from qerl.families.parts import base_model, cache_argument, eval_mode
from qerl.update.driver import LossDriver
from qerl.update.losses import Datum
from qerl_serve.sampling import Scores
from qerl_serve.types import SampleRequest

_PIECE = 512
"""Tokens whose logits are in memory at once: 0.3 GB in fp32 with a vocabulary of 150,000."""


def score_prompts(driver: LossDriver, model: PeftModel, requests: Sequence[SampleRequest]) -> list[Scores]:
    """Return the scores of the requests' prompts, in order."""
    asked = {
        request.prompt: None for request in requests if request.prompt_logprobs and len(request.prompt) > 1
    }
    data = [_datum(prompt) for prompt in asked]
    logprobs = driver.forward(data, "cross_entropy").logprobs if data else []
    by_prompt = {prompt: [math.nan, *found.tolist()] for prompt, found in zip(asked, logprobs, strict=True)}
    scores = []
    for request in requests:
        own = by_prompt.get(request.prompt, [math.nan]) if request.prompt_logprobs else None
        k = request.topk_prompt_logprobs
        scores.append(Scores(own, most_probable(model, request.prompt, k) if k > 0 else None))
    return scores


@torch.no_grad()
def most_probable(model: PeftModel, prompt: Sequence[int], k: int) -> list[list[tuple[int, float]]]:
    """Return the k most probable tokens at each position of a prompt with their log-probabilities, most
    probable first; none for the first position.

    Args:
        model: The policy.
        prompt: Token ids, at least one.
        k: At least 1.
    """
    found: list[list[tuple[int, float]]] = [[]]
    cache = {cache_argument(model): DynamicCache(config=base_model(model).config)}
    ids_1T = torch.tensor([prompt[:-1]], dtype=torch.int64, device=model.device)
    with eval_mode(model):
        for piece_1T in ids_1T.split(_PIECE, dim=1) if ids_1T.numel() else ():
            logits_1TV = model(input_ids=piece_1T, use_cache=True, **cache).logits
            best = logits_1TV[0].float().log_softmax(dim=-1).topk(min(k, logits_1TV.shape[-1]), dim=-1)
            for values, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append(list(zip(tokens, values, strict=True)))
    return found


def _datum(prompt: Sequence[int]) -> Datum:
    tokens_T = torch.tensor(prompt, dtype=torch.int64)
    inputs = {"target_tokens": tokens_T[1:], "weights": torch.ones(len(prompt) - 1)}
    return Datum(tokens_T[:-1], inputs)
