"""The needle policy as a checkpoint in the cache, made by the first who asks for it.

python -m lab needle        # prints the folder
"""

import argparse
import hashlib
import logging
from pathlib import Path

from transformers import GenerationConfig

from lab.needle import language, training
from qerl.models.cache import made_once

logger = logging.getLogger(__name__)

NEEDLE = "needle"
"""Name by which studies know the model and its task."""

SOURCES = (language, training)
"""Modules that decide what the policy is."""


def needle_folder() -> Path:
    """Folder with the policy in bfloat16, its config and its tokenizer; trained on the first call.

    Its name has a hash of the language and the training, so that another policy is never taken for this one.

    Raises:
        QeRLError: The policy does not have the priors that it should have.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in SOURCES)
    return made_once(f"{NEEDLE}-{hashlib.blake2b(sources, digest_size=6).hexdigest()}", _make)


def _make(folder: Path) -> None:
    logger.warning("Training the needle policy, once; it takes half a minute.")
    model = training.train_policy()
    config = model.config
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    language.make_tokenizer().save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Runs `python -m lab needle` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m lab needle", description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    print(needle_folder())
