"""`bench ways`: what a way sets and for how long, and in which order ways are timed."""

import pytest

from bench.ways import main, over_first, setting, turns, value_of
from qerl.errors import QeRLError
from qerl.kernels.decode import attend
from qerl.kernels.weights import nvfp4, packed_gemm
from qerl.kernels.weights.packed_gemm import Tiling


def test_a_way_lasts_as_long_as_its_turn():
    before = attend.FEW_TOKENS, dict(packed_gemm.MAX_TOKENS)
    with (
        setting("qerl.kernels.decode.attend:FEW_TOKENS=0"),
        setting("qerl.kernels.weights.packed_gemm:MAX_TOKENS['wgmma']=128"),
    ):
        assert attend.FEW_TOKENS == 0
        assert nvfp4.MAX_TOKENS["wgmma"] == 128
    assert before == (attend.FEW_TOKENS, packed_gemm.MAX_TOKENS)


def test_tilings_are_values():
    assert value_of("Tiling(2, 2, 1, 1, 226_000, cluster=2)") == Tiling(2, 2, 1, 1, 226_000, cluster=2)


@pytest.mark.parametrize(
    "text",
    [
        "MANY=2",
        "qerl.kernels.decode.attend:NOTHING=2",
        "qerl.kernels.decode.attend:FEW_TOKENS[0]=2",
        "qerl.kernels.weights.packed_gemm:_TOKENS[9]=2",
        "qerl.kernels.weights.packed_gemm:MAX_TOKENS['tcgen05']=2",
        "qerl.nothing:A=1",
        "math:pi=print(3)",
    ],
)
def test_what_sets_nothing_is_refused(text):
    with pytest.raises(QeRLError, match="--way"), setting(text):
        pass


def test_ways_have_names_of_their_own():
    with pytest.raises(QeRLError, match="the same name"):
        main(["--way", "a", "math:pi=3", "--way", "a"])


def test_every_second_round_is_in_reverse():
    assert turns(["a", "b"], 2) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    rows = [
        {"batch": 8, "round": r, "way": way, "decode_tok_s": speed}
        for (r, way), speed in zip(turns(["a", "b"], 2), (100.0, 110.0, 60.0, 50.0), strict=True)
    ]
    assert over_first(rows, 8, "b", "a") == [1.1, 1.2]
