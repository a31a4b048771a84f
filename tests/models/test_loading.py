"""A checkpoint streams into the packed layout: beside the result memory holds about one shard.

What is measured, in a process of its own, is anonymous memory (RssAnon). Pages of the mapped checkpoint are
not counted: the kernel takes them back when it needs them. Nor is what malloc keeps of freed tensors, up to
30 MB that differ from run to run: it is told to keep none.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.fp4.checkpoint import open_checkpoint
from qerl.fp4.quantize import quantize_checkpoint

pytestmark = pytest.mark.slow

SHARD = 20_000_000

LOAD = """
import sys, threading, time, torch
import transformers.models.llama.modeling_llama
from qerl.models.load import load_model
from qerl.fp4 import rounding

peak, done = 0, threading.Event()

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

rounding._CHUNK_ELEMENTS = 2**17  # its temporaries are of a fixed size, which is large beside a small model
folder, warm = sys.argv[1:]
load_model(warm, "nvfp4", torch.bfloat16, "cpu", "rtn")  # imports, lookup tables
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
model = load_model(folder, "nvfp4", torch.bfloat16, "cpu", "rtn")
done.set()
thread.join()
print(sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]), peak - before)
"""


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> dict[str, Path]:
    """A plain checkpoint of 190 MB in ten shards, the same packed, and a tiny one."""
    folder = tmp_path_factory.mktemp("loading")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "vocab_size": 4096}
    model = tiny_model("llama", head_dim=128, **sizes).bfloat16()
    model.save_pretrained(folder / "plain", max_shard_size=SHARD)
    tiny_model("llama").save_pretrained(folder / "tiny")
    quantize_checkpoint(folder / "plain", folder / "packed", rounding="rtn")
    return {name: folder / name for name in ("plain", "packed", "tiny")}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["plain", "packed"])
def test_one_shard_beside_the_result(folders, name):
    assert len(open_checkpoint(folders[name]).shards) >= 10
    command = [sys.executable, "-c", LOAD, folders[name], folders["tiny"]]
    keep_nothing = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=keep_nothing)
    assert done.returncode == 0, done.stderr[-2000:]
    result, peak = map(int, done.stdout.split())
    assert result < 0.4 * open_checkpoint(folders["plain"]).size()
    if name == "plain":  # a packed checkpoint is not even copied: on the CPU the file is the buffer
        assert peak > result / 2, "nothing was measured"
    assert peak < result + SHARD
