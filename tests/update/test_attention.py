"""Attention of a packed row: its segments, with a dense kernel, and what the kernels of a GPU are told."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.granite_swa.modeling_granite_swa import eager_attention_forward

from qerl.kernels import flash
from qerl.kernels.flash import deterministic, segments_in_backward
from qerl.kernels.limits import MAX_HEAD
from qerl.update import attention
from qerl.update.packed_row import RowBuilder
from tests.support.families import tiny
from tests.support.segments import use_dense_segments


def copies(segments: int, heads: int, cores: int = 132) -> int:
    """FP32 copies of the queries' gradient that FlashAttention's deterministic backward makes."""
    return -(-cores // (segments * heads))


@pytest.mark.parametrize("heads", [1, 8, 9, 28, 64])
@pytest.mark.parametrize("blocks", [1, 3, 6, 128])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_copies_that_nothing_is_written_to_are_left_out(count, heads, blocks):
    """As many blocks are computed side by side as before, in no more memory."""
    told = segments_in_backward(count, heads, blocks, 132)
    before, after = copies(count, heads), copies(told, heads)
    assert min(after, blocks) == min(before, blocks)
    most = next((n for n in range(200, 0, -1) if copies(n, heads) >= blocks), 1)
    assert after == min(before, copies(most, heads))
    rows = blocks * 128  # of queries; each segment is padded by 128
    assert after * (rows + 128 * told) <= before * (rows + 128 * count)


def test_threads_do_not_undo_each_others_switch():
    """A second backward pass begins while a first one runs, and ends after it."""
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def first():
        with deterministic():
            inside.set()
            go_on.wait(10)
            seen.append(torch.are_deterministic_algorithms_enabled())

    def second():
        with deterministic():
            inside.set()
            seen.append(torch.are_deterministic_algorithms_enabled())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    inside.clear()
    threads[1].start()
    assert not inside.wait(0.1)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert seen == [True, True] and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("sinks", [False, True])
def test_segments_against_the_dense_mask(monkeypatch, scale, window, sinks):
    """Windows that end within a branch, within its prompt, and that reach all; a sink is one more key."""
    use_dense_segments(monkeypatch)
    builder = RowBuilder()
    for shared, branches in ((5, [4, 1, 7]), (0, [3, 2]), (2, [6])):
        builder.begin_group(torch.ones(shared, dtype=torch.long))
        for sample, length in enumerate(branches):
            builder.add_branch(sample, *torch.ones(2, length, dtype=torch.long))
    row = builder.finish(torch.device("cpu"))
    length = row.input_ids_1L.shape[1]
    q, k, v = (
        torch.randn(1, heads, length, 16, dtype=torch.double, requires_grad=True) for heads in (6, 2, 2)
    )
    settings = {"sliding_window": window, "s_aux": torch.randn(6, dtype=torch.double) if sinks else None}
    out, _ = attention.branch_attention(
        torch.nn.Module(), q, k, v, None, branches=row.branches, scaling=scale, **settings
    )
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    index = torch.arange(length)
    of_sample = sliding_window_causal_mask_function(window or length)
    seen = row.mask_function(of_sample)(0, 0, index[:, None], index[None, :])
    scores = (q @ k.repeat_interleave(3, dim=1).mT * (16**-0.5 if scale is None else scale)).masked_fill(
        ~seen, -torch.inf
    )
    if sinks:
        scores = torch.cat((scores, settings["s_aux"][:, None, None].expand(1, 6, length, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    truth = (weights @ v.repeat_interleave(3, dim=1)).transpose(1, 2)
    torch.testing.assert_close(out, truth)
    for one, other in zip(found, torch.autograd.grad(truth, (q, k, v), dout), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)  # copies of a prompt meet in FP32


@pytest.mark.parametrize("tokens", [(7, 7), (1, 7), (3, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_sinks_without_a_packed_row(tokens, masked):
    """An evaluation or a padded batch, with keys of former tokens or without, against transformers' own."""
    model = tiny("granite_swa")
    module, (queries, keys) = model.model.layers[0].self_attn, tokens
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, queries), (2, keys), (2, keys)))
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    if masked:
        seen[1, ..., :2] = False
        seen[..., 0] |= ~seen.any(-1)  # a token of padding sees something
    settings = {"scaling": module.scaling, "s_aux": module.sinks}
    given = seen if masked or tokens == (3, 7) else None  # as transformers leaves masks out
    out, _ = attention.branch_attention(module, q, k, v, given, **settings)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    truth, _ = eager_attention_forward(module, q, k, v, bias, **settings)
    torch.testing.assert_close(out, truth)


@pytest.mark.parametrize(
    ("size", "settings", "sentence"),
    [
        (512, {"sliding_window": 8}, "512 columns, and windows or sinks"),
        (512, {"s_aux": torch.zeros(4)}, "512 columns, and windows or sinks"),
        (64, {"s_aux": torch.zeros(4, requires_grad=True)}, "its sinks train"),
    ],
)
def test_what_no_kernel_computes_is_declined(size, settings, sentence):
    q = torch.zeros(1, 4, 3, size)
    with pytest.raises(attention._Declined, match=sentence):
        attention.branch_attention(torch.nn.Module(), q, q, q, None, branches=object(), **settings)


class Called(TorchDispatchMode):
    """Arguments of each of torch's attention kernels, by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function._schema.name.removeprefix("aten::"), kwargs or {}
        if "attention" in name:
            names = (argument.name for argument in function._schema.arguments)
            self.calls[name] = dict(zip(names, args, strict=False)) | kwargs
        if name == "_efficient_attention_backward":  # its meta function leaves out an argument in torch 2.13
            return tuple(torch.empty_like(x) for x in (*args[1:4], args[1]))
        return function(*args, **kwargs)


@pytest.mark.parametrize("size", [64, 256, 264, 512])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_what_torchs_kernels_are_told(monkeypatch, size, window):
    """On the meta device, where their arguments and the shapes of their results are checked."""
    monkeypatch.setattr(flash, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(flash, "why_not_flash4", lambda device: "")
    wide = size > MAX_HEAD
    if wide and window:
        pytest.skip("declined")
    shapes = (9, 4, size), (13, 2, size), (13, 2, size)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    offsets = (torch.tensor(ends, dtype=torch.int32, device="meta") for ends in ([0, 5, 9], [0, 5, 13]))
    extents, scoring = flash.Extents(*offsets, 5, 8), flash.Scoring(0.3, window)
    with Called() as told:
        outputs = flash.forward(q, k, v, extents, scoring)
        gradients = flash.backward(torch.empty_like(q), (q, k, v), outputs, extents, scoring)
    assert [x.shape for x in (outputs[0], *gradients)] == [x.shape for x in (q, q, k, v)]
    assert wide or outputs[1].shape == (4, 9), "logarithms of sums, for sinks"
    kind = "efficient" if wide else "flash"
    assert list(told.calls) == [f"_{kind}_attention_{way}" for way in ("forward", "backward")]
    for told_of in told.calls.values():
        assert told_of["scale"] == 0.3
        if wide:
            assert told_of["custom_mask_type"] == 2, "causal, aligned at the ends"
        else:
            ends = (None, None) if window is None else (window - 1, 0)
            assert told_of["is_causal"] is True
            assert (told_of.get("window_size_left"), told_of.get("window_size_right")) == ends
    if wide:
        assert told.calls["_efficient_attention_forward"]["compute_log_sumexp"] is True
        assert told.calls["_efficient_attention_backward"]["num_splits_key"] == 1, "a fixed order"
