"""Sizes of the models that tests of the benchmarks' peers are given."""

from qerl.families.sizes import Sizes

TINY = Sizes.uniform(
    hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_size=16, vocabulary=1003, qkv_bias=True
)
LLAMA = Sizes.uniform(
    hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_size=32, vocabulary=1003
)
