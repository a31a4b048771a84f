"""Train the needle policy from scratch, by supervised learning on the distribution itself.

The policy is a Llama of four layers and 156,000 parameters, with widths that are multiples of 16 so that
every weight format packs it. Its targets are the whole distribution at each decision, not samples of it. The
cross-entropy of a door of probability 0.003 says little about that door, so the squared error of the doors'
log-probabilities is added. Training walks open every door often, so that the content behind rare doors is
learned too. 150 steps take 20 seconds on one core, and give the same weights on the same machine with the
same version of torch.

A policy is measured without sampling: the success of a prompt is one completion, so its probability is one
forward pass (:func:`success_probability`).

Legend: B walks, T tokens, V vocabulary, D doors.
"""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lab.needle.language import (
    COUNTS,
    DOORS,
    KEYS,
    NOTHING,
    PLACES,
    PRIORS,
    RIGHT,
    VOCABULARY,
    door_probabilities,
)
from lab.scratch import END, PAD, ROLES
from qerl.errors import QeRLError

STEPS, LEARNING_RATE = 150, 8e-3
BATCH = 10
"""Walks of each prior and number of decisions in a step."""

LOG_WEIGHT = 0.3
"""Weight of the doors' squared error in log-probability beside the cross-entropy in nats."""

RIGHT_SHARE = 0.4
"""Share of the decisions of training walks that open the right door; the others open any door."""

TOLERANCE = 0.1
"""Largest relative error of a prior of the finished policy."""

MOST = len(COUNTS)
VOCABULARY_SIZE = 64
"""Rows of the embedding; those after the last token are never drawn."""

ID = {token: i for i, token in enumerate(VOCABULARY)}
_CONFIG = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "pad_token_id": ID[PAD],
    "bos_token_id": None,
    "eos_token_id": ID[END],
}


def _ids(tokens: tuple[str, ...] | str) -> torch.Tensor:
    return torch.tensor([ID[token] for token in tokens])


def right_doors(decisions: int) -> torch.Tensor:
    """The right doors [M], indices into `language.DOORS`."""
    return torch.tensor([DOORS.index(door) for door in RIGHT[:decisions]])


def prompts(prior: float, decisions: int, keys_B: torch.Tensor, places_B3: torch.Tensor) -> torch.Tensor:
    """Token ids [B, T] of prompts as the chat template writes them, the assistant's turn opened.

    Args:
        prior: One of the values of `language.PRIORS`.
        decisions: From 1 to 3.
        keys_B: Indices into `language.KEYS`.
        places_B3: Indices into `language.PLACES`.
    """
    word = next(word for word, value in PRIORS.items() if value == prior)
    start = _ids((ROLES["user"], word, COUNTS[decisions - 1])).expand(len(keys_B), -1)
    end = _ids((END, ROLES["assistant"])).expand(len(keys_B), -1)
    return torch.cat([start, _ids(KEYS)[keys_B, None], _ids(PLACES)[places_B3], end], dim=1)


def walks(keys_B: torch.Tensor, doors_BM: torch.Tensor) -> torch.Tensor:
    """Token ids [B, 2 M + 1] of completions of M decisions, the end included.

    Args:
        keys_B: Indices into `language.KEYS`.
        doors_BM: Indices into `language.DOORS`.
    """
    right_M = right_doors(doors_BM.size(1))
    found_BM = torch.where(doors_BM == right_M, _ids(KEYS)[keys_B, None], ID[NOTHING])
    steps = torch.stack([_ids(DOORS)[doors_BM], found_BM], dim=2).flatten(1)
    return torch.cat([steps, torch.full((len(keys_B), 1), ID[END])], dim=1)


def success_probability(
    model: PreTrainedModel, prompts_BT: torch.Tensor, keys_B: torch.Tensor
) -> torch.Tensor:
    """Probability [B], fp64, that the policy answers prompts with all doors right.

    Args:
        model: The policy, adapted or not.
        prompts_BT: Prompts from :func:`prompts`, all of one number of decisions.
        keys_B: Their keys, indices into `language.KEYS`.
    """
    decisions = int(prompts_BT[0, 2]) - ID[COUNTS[0]] + 1
    walk_BC = walks(keys_B, right_doors(decisions).expand(len(keys_B), -1))
    ids_BT = torch.cat([prompts_BT, walk_BC], dim=1).to(model.device)
    with torch.no_grad():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.double()
    logps_BCV = logits_BTV[:, prompts_BT.size(1) - 1 : -1].log_softmax(-1).cpu()
    return logps_BCV.gather(2, walk_BC[..., None])[..., 0].sum(dim=1).exp()


def measured_priors(model: PreTrainedModel, count: int = 64) -> dict[tuple[float, int], float]:
    """Mean probability of success by prior and number of decisions, over `count` prompts of each."""
    draw = torch.Generator().manual_seed(0)
    keys_B = torch.randint(len(KEYS), (count,), generator=draw)
    places_B3 = torch.randint(len(PLACES), (count, 3), generator=draw)
    return {
        (prior, decisions): success_probability(
            model, prompts(prior, decisions, keys_B, places_B3), keys_B
        ).mean().item()
        for prior in PRIORS.values()
        for decisions in range(1, MOST + 1)
    }  # fmt: skip


def train_policy(seed: int = 0) -> LlamaForCausalLM:
    """Train the policy; returned in bfloat16 and eval mode. The state of torch's random numbers is kept.

    Raises:
        QeRLError: A prior of what was trained is off by more than the tolerance.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**_CONFIG)).float()
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (STEPS - step) / (0.6 * STEPS))
    )
    for _ in range(STEPS):
        loss = _loss(model, draw)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model = model.to(torch.bfloat16).eval()
    for (prior, decisions), measured in measured_priors(model).items():
        if abs(measured / prior - 1) > TOLERANCE:
            raise QeRLError(
                f"The needle policy of seed {seed} has a prior of {measured:.4f} in place of {prior} with "
                f"{decisions} decisions; this version of torch needs other settings of its training."
            )
    return model


def _loss(model: LlamaForCausalLM, draw: torch.Generator) -> torch.Tensor:
    """Mean cross-entropy of the tokens of a batch of walks, and the doors' error in log-probability."""
    cells = [_walks(prior, decisions, draw) for prior in PRIORS.values() for decisions in range(1, MOST + 1)]
    ids_BT, target_BCV = (torch.cat(parts) for parts in zip(*cells, strict=True))
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    logps_BCV = logits_BTV[:, -target_BCV.size(1) :].log_softmax(-1)
    doors = (target_BCV > 0) & (target_BCV < 1)
    error = (logps_BCV[doors] - target_BCV[doors].log()).square().mean()
    return -(target_BCV * logps_BCV).sum() / target_BCV.sum() + LOG_WEIGHT * error


def _walks(prior: float, decisions: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] of prompts with walks, and the distribution [B, C, V] of the token after each of the
    last C; after the end of a walk it is 0."""
    keys_B = torch.randint(len(KEYS), (BATCH,), generator=draw)
    places_B3 = torch.randint(len(PLACES), (BATCH, 3), generator=draw)
    any_BM = torch.randint(len(DOORS), (BATCH, decisions), generator=draw)
    opens_right_BM = torch.rand(BATCH, decisions, generator=draw) < RIGHT_SHARE
    walk_BC = walks(keys_B, torch.where(opens_right_BM, right_doors(decisions), any_BM))
    target_BCV = F.one_hot(walk_BC, VOCABULARY_SIZE).float()
    doors_MD = torch.tensor([door_probabilities(prior, decisions, place) for place in range(decisions)])
    target_BCV[:, 0:-1:2] = 0.0
    target_BCV[:, 0:-1:2, _ids(DOORS)] = doors_MD
    ids_BT = torch.cat([prompts(prior, decisions, keys_B, places_B3), walk_BC[:, :-1]], dim=1)
    short = 2 * (MOST - decisions)
    return F.pad(ids_BT, (0, short), value=ID[PAD]), F.pad(target_BCV, (0, 0, 0, short))
