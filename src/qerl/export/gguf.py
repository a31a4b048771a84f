"""GGUF by llama.cpp's own converter, a script of its repository that is in no package.

The converter knows each family's names, tokenizer and metadata, and changes with llama.cpp; a copy here would
be out of date. So the user's script is called: the one named, or the one on the path, where Homebrew's
llama.cpp puts it. It reads a transformers folder, so a merged model is written for it first.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from qerl.errors import QeRLError

CONVERTER = "convert_hf_to_gguf.py"
"""Name of llama.cpp's script."""

OUTTYPES = ("bf16", "f16", "f32", "q8_0")
"""Types of weights that the converter writes; ``llama-quantize`` makes smaller ones from its result."""


def find_converter(given: Path | None) -> Path:
    """Return the converter that the user named, else the one on the path.

    Raises:
        QeRLError: There is no converter.
    """
    if given is not None:
        script = given.expanduser()
        script = script / CONVERTER if script.is_dir() else script
        if not script.is_file():
            raise QeRLError(
                f"--converter is {given}, but there is no {CONVERTER}; give its path in a clone of llama.cpp."
            )
        return script
    found = shutil.which(CONVERTER)
    if found is None:
        raise QeRLError(
            f"--format gguf needs llama.cpp's {CONVERTER}, which is not on PATH; clone "
            "https://github.com/ggml-org/llama.cpp and give the script's path with --converter."
        )
    return Path(found)


def convert(converter: Path, model: Path, out: Path, outtype: str) -> None:
    """Convert a transformers folder to a GGUF file.

    Args:
        converter: Script from :func:`find_converter`; runs in this Python, which has torch, transformers and
            gguf, and may also need sentencepiece.
        model: Folder in 16 bits.
        out: File to write.
        outtype: One of `OUTTYPES`.

    Raises:
        QeRLError: The converter failed; the message has its last line of output.
    """
    words = [sys.executable, str(converter), str(model), "--outfile", str(out), "--outtype", outtype]
    words += ["--model-name", out.stem]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    if done.returncode or not out.is_file():
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = lines[-1].rstrip(".") if lines else f"exit status {done.returncode}"
        lacking = re.search(r"No module named '(\w+)", last)
        advice = (
            f"install the package that has the Python module {lacking[1]}"
            if lacking
            else "try a newer llama.cpp, or export --format merged and convert that"
        )
        raise QeRLError(f"{converter} did not convert the merged model ({last}); {advice}.")
