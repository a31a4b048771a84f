"""Tiny policies trained from scratch: their tokenizer, and their folders in the cache."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from qerl.models.cache import made_once

logger = logging.getLogger(__name__)

PAD, END, UNKNOWN = "<pad>", "<|end|>", "<unk>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL = (PAD, END, UNKNOWN, *ROLES.values())
"""The first tokens of every vocabulary."""

_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def word_tokenizer(vocabulary: Sequence[str], word: str) -> PreTrainedTokenizerFast:
    """Return a word tokenizer that ignores spaces between words when encoding and writes none when decoding.

    Args:
        vocabulary: All tokens in the order of their ids, beginning with `SPECIAL`.
        word: Regular expression for one word.
    """
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(word), behavior="isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN,
        extra_special_tokens=list(ROLES.values()), chat_template=_CHAT, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def policy_folder(
    name: str,
    sources: Sequence[ModuleType],
    train: Callable[[], PreTrainedModel],
    tokenizer: Callable[[], PreTrainedTokenizerFast],
) -> Path:
    """Return the folder of a policy, its config and its tokenizer; the first call trains the policy.

    Args:
        name: Name of the policy. The folder's name also has a hash of the sources, so that a policy of other
            sources is never taken for this one.
        sources: Modules that determine the policy.
        train: Trains the policy and returns it.
        tokenizer: Makes its tokenizer.
    """
    hashed = hashlib.blake2b(digest_size=6)
    for module in sources:
        hashed.update(Path(str(module.__file__)).read_bytes())

    def make(folder: Path) -> None:
        logger.warning("Training the policy of %s, once.", name)
        model = train()
        config = model.config
        model.generation_config = GenerationConfig(
            eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return made_once(f"{name}-{hashed.hexdigest()}", make)
