"""``python -m tests.fuzz NAME ...`` runs the fuzzer ``tests/fuzz/NAME.py``; exit status 1 means a finding."""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("TQDM_DISABLE", "1")
FILES = Path(__file__).parent.glob("[a-z]*.py")
NAMES = sorted(path.stem for path in FILES if not path.stem.startswith("test_"))

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(NAMES)}}} ...")
    sys.exit(import_module(f"tests.fuzz.{name}").main(sys.argv[2:]))
