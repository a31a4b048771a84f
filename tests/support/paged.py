"""Random models that the paged engine runs on a GPU, and what the trainer's pass says of tokens."""

import torch

from qerl.lora.adapter import add_lora
from qerl.rollout.engine import uniform_streams
from tests.support.models import FAMILIES, move_adapter, pack


def random_model(family, packed, lora=True, device="cuda", **sizes):
    """bf16, 3 layers, vocabulary 1000; always the same numbers.

    Args:
        family: Of `FAMILIES`.
        packed: Four-bit format of the projections; "" leaves them as they are.
        lora: Whether there is an adapter, whose B is not zero.
        device: Where it is.
        sizes: Other settings of its config.
    """
    config_class, model_class = FAMILIES[family]
    settings = {
        "vocab_size": 1000, "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = config_class(**(settings | sizes))
    if family == "qwen2":
        config.hidden_size, config.num_attention_heads = 384, 6
    torch.manual_seed(0)
    model = model_class(config).to(torch.bfloat16).to(device).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.05 if parameter.ndim == 2 else 0.2)
    if packed:
        pack(model, packed)
    if lora:
        model = move_adapter(add_lora(model, rank=8, alpha=16, dropout=0.0), 0.05)
    return model.eval()


def score(model, prompt, token_ids, temperature=1.0):
    """Log-probability of each token behind a prompt."""
    ids = torch.tensor([prompt + token_ids], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@torch.no_grad()
def from_uniforms(model, prompt, token_ids, key, places):
    """How far each drawn token lies from the one that its uniform number asks for, in probability.

    The number lies between two values of the cumulative distribution, those of the token drawn; 0 where it
    does by this pass of the model too. Passes differ in the last bit, which moves such a value by some
    thousandths; a number of another place or sequence lies a third away on average.

    Args:
        model: Its forward pass is compared.
        prompt, token_ids: What it read, and all of the completion.
        key: (seed, prompt number, sample) of the sequence.
        places: Where in the completion the policy drew.

    Returns:
        fp64 [places].
    """
    ids = torch.tensor([prompt + token_ids], device=model.device)
    logits_TV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().cpu()
    cdf_TV = logits_TV.softmax(-1).cumsum(-1)[places]
    drawn_T1 = torch.tensor(token_ids)[places, None]
    above_T = cdf_TV.gather(-1, drawn_T1)[:, 0]
    below_T = torch.where(drawn_T1 > 0, cdf_TV.gather(-1, (drawn_T1 - 1).clamp(min=0)), 0.0)[:, 0]
    uniform_T = uniform_streams([key], len(token_ids))[0, places]
    return (below_T - uniform_T).clamp(min=0) + (uniform_T - above_T).clamp(min=0)
