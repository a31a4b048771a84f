"""The pass over the chunks of a gated delta rule on a GPU, as `qerl.kernels.delta_scan` defines it.

A program holds some columns of one value head's state of one sequence in registers from the first chunk to
the last; columns do not depend on each other. Value heads that share a key head find its keys and queries in
the L2 cache. Backward is a program of the same kind from the last chunk to the first. No program adds to
memory that another one writes, so the same inputs give the same bits.

Products accumulate in FP32. Each FP32 operand is split into two BF16 numbers, 16 binary digits, and three
products of them are added ("bf16x3"), with an error of about 1e-5. One TF32 number per operand would put
outputs off by 0.5e-3 of their norm, and by 1.5e-3 for similar keys, whose v and k H cancel, even if operands
were rounded; tensor cores truncate them to TF32, with four times the error. That is as much as rounding
outputs to BF16 once more, between a trainer and a sampler that goes token by token in FP32. Three products in
BF16 take 1.5 times as long as one in TF32, and no more registers. The state itself, and the terms added to
it, stay FP32.

Tiles that a product takes transposed are loaded transposed, a second time where necessary: they come from the
L1 or L2 cache. Triton from 3.4 on wrongly transposes the results of products on Hopper that become operands
of further products.

The inverse of a unit lower triangular matrix is computed row by row in FP32: row i is that of the identity
minus a weighted sum of the rows above. Multiplying powers of the matrix, (1 - A)(1 + A^2)(1 + A^4)..., would
run on tensor cores; but for similar keys, as in repeated text, those powers have numbers of 18 digits, which
must cancel.

Shapes: as in `qerl.kernels.delta_scan`.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.delta_scan import Chunks, Kept, Local, Pulls
from qerl.kernels.device import multiprocessors
from qerl.kernels.launch import pointers

_PART, _COLUMNS = 64, 32
"""Rows of a state in a product, and maximum columns of a program: both halves of an operand and the state are
held in registers."""


@triton.jit
def times(a, b):
    """The product of FP32 tiles, to about 16 binary digits."""
    return tl.dot(a, b, input_precision="bf16x3")


@triton.jit
def _delta_inverse(system_BII, inverse_BII, I: tl.constexpr):  # noqa: E741
    at = tl.program_id(0).to(tl.int64) * (I * I)
    row, column = tl.arange(0, I), tl.arange(0, I)
    found = tl.where(row[:, None] == column[None, :], 1.0, 0.0)
    for i in range(1, I):
        weight = tl.load(system_BII + at + i * I + row, mask=row < i, other=0.0)
        above = tl.sum(weight[:, None] * found, axis=0)
        found = tl.where(row[:, None] == i, found - above[None, :], found)
    tl.store(inverse_BII + at + row[:, None] * I + column[None, :], found)


@triton.jit
def _delta_scan(
    q_JUIK, k_JUIK, sums_JVI, mix_JVII, scores_JVII, v_JIVE, initial_NVKE, first_N,
    out_JIVE, final_NVKE, states_JVKE, missing_JVIE, written_JVIE,
    U: tl.constexpr, V: tl.constexpr, I: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,  # noqa: E741
    PARTS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    head, n = tl.program_id(1), tl.program_id(2)
    i, k = tl.arange(0, I), tl.arange(0, PART)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_e = (e < E)[None, :]
    square = i[:, None] * I + i[None, :]
    tokens = i[:, None] * (V * E) + head * E + e[None, :]
    ik, ki, ke = i[:, None] * K + k[None, :], k[:, None] + i[None, :] * K, k[:, None] * E + e[None, :]
    of_sequence = (n.to(tl.int64) * V + head) * (K * E) + ke
    state = ()
    for part in tl.static_range(PARTS):
        rows = tl.zeros((PART, BLOCK_E), tl.float32)
        if INITIAL:
            inside = (part * PART + k < K)[:, None] & in_e
            rows = tl.load(initial_NVKE + of_sequence + part * PART * E, mask=inside, other=0.0)
        state += (rows,)  # type: ignore[assignment]
    first, end = tl.load(first_N + n).to(tl.int64), tl.load(first_N + n + 1)
    for ahead in range((end - first).to(tl.int32)):
        j = first + ahead
        of_key, of_head = (j * U + head // (V // U)) * (I * K), j * V + head
        sums = tl.load(sums_JVI + of_head * I + i)
        last = tl.load(sums_JVI + of_head * I + I - 1)
        grown, left = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
        answer, out = tl.zeros((I, BLOCK_E), tl.float32), tl.zeros((I, BLOCK_E), tl.float32)
        for part in tl.static_range(PARTS):
            at, across = of_key + ik + part * PART, (part * PART + k < K)[None, :]
            answer += times(tl.load(k_JUIK + at, mask=across, other=0.0), state[part])
            out += times(tl.load(q_JUIK + at, mask=across, other=0.0), state[part])
            if KEEP:
                to = states_JVKE + of_head * (K * E) + part * PART * E + ke
                tl.store(to, state[part], mask=(part * PART + k < K)[:, None] & in_e)
        at = j * (I * V * E) + tokens
        missing = tl.load(v_JIVE + at, mask=in_e, other=0.0).to(tl.float32) - grown * answer
        written = times(tl.load(mix_JVII + of_head * (I * I) + square), missing)
        out = grown * out + times(tl.load(scores_JVII + of_head * (I * I) + square), written)
        tl.store(out_JIVE + at, out, mask=in_e)
        if KEEP:
            kept = of_head * (I * E) + i[:, None] * E + e[None, :]
            tl.store(missing_JVIE + kept, missing, mask=in_e)
            tl.store(written_JVIE + kept, written, mask=in_e)
        following = ()
        for part in tl.static_range(PARTS):
            at, down = of_key + ki + part * PART, (part * PART + k < K)[:, None]
            keys = tl.load(k_JUIK + at, mask=down, other=0.0)
            following += (tl.exp(last) * state[part] + times(keys, left * written),)  # type: ignore[assignment]
        state = following
    for part in tl.static_range(PARTS):
        inside = (part * PART + k < K)[:, None] & in_e
        tl.store(final_NVKE + of_sequence + part * PART * E, state[part], mask=inside)


@triton.jit
def _delta_scan_backward(
    q_JUIK, k_JUIK, sums_JVI, mix_JVII, scores_JVII, dout_JIVE, dfinal_NVKE, first_N,
    dbehind_JVKE, dmissing_JVIE, dwritten_JVIE, dinitial_NVKE,
    U: tl.constexpr, V: tl.constexpr, I: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,  # noqa: E741
    PARTS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    head, n = tl.program_id(1), tl.program_id(2)
    i, k = tl.arange(0, I), tl.arange(0, PART)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_e = (e < E)[None, :]
    transposed = i[:, None] + i[None, :] * I
    tokens = i[:, None] * (V * E) + head * E + e[None, :]
    ik, ki, ke = i[:, None] * K + k[None, :], k[:, None] + i[None, :] * K, k[:, None] * E + e[None, :]
    of_sequence = (n.to(tl.int64) * V + head) * (K * E) + ke
    behind = ()
    for part in tl.static_range(PARTS):
        rows = tl.zeros((PART, BLOCK_E), tl.float32)
        if FINAL:
            inside = (part * PART + k < K)[:, None] & in_e
            rows = tl.load(dfinal_NVKE + of_sequence + part * PART * E, mask=inside, other=0.0)
        behind += (rows,)  # type: ignore[assignment]
    first, end = tl.load(first_N + n), tl.load(first_N + n + 1).to(tl.int64)
    for back in range((end - first).to(tl.int32)):
        j = end - 1 - back
        of_key, of_head = (j * U + head // (V // U)) * (I * K), j * V + head
        sums = tl.load(sums_JVI + of_head * I + i)
        last = tl.load(sums_JVI + of_head * I + I - 1)
        grown, left = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
        written = tl.zeros((I, BLOCK_E), tl.float32)
        for part in tl.static_range(PARTS):
            to = dbehind_JVKE + of_head * (K * E) + part * PART * E + ke
            tl.store(to, behind[part], mask=(part * PART + k < K)[:, None] & in_e)
            at, across = of_key + ik + part * PART, (part * PART + k < K)[None, :]
            written += times(tl.load(k_JUIK + at, mask=across, other=0.0), behind[part])
        dout = tl.load(dout_JIVE + j * (I * V * E) + tokens, mask=in_e, other=0.0).to(tl.float32)
        scores = tl.load(scores_JVII + of_head * (I * I) + transposed)
        written = left * written + times(scores, dout)
        missing = times(tl.load(mix_JVII + of_head * (I * I) + transposed), written)
        kept = of_head * (I * E) + i[:, None] * E + e[None, :]
        tl.store(dmissing_JVIE + kept, missing, mask=in_e)
        tl.store(dwritten_JVIE + kept, written, mask=in_e)
        before = ()
        for part in tl.static_range(PARTS):
            at, down = of_key + ki + part * PART, (part * PART + k < K)[:, None]
            queries = tl.load(q_JUIK + at, mask=down, other=0.0)
            rows = tl.exp(last) * behind[part] + times(queries, grown * dout)
            keys = tl.load(k_JUIK + at, mask=down, other=0.0)
            before += (rows - times(keys, grown * missing),)  # type: ignore[assignment]
        behind = before
    for part in tl.static_range(PARTS):
        inside = (part * PART + k < K)[:, None] & in_e
        tl.store(dinitial_NVKE + of_sequence + part * PART * E, behind[part], mask=inside)


def inverse(system_JVII: torch.Tensor) -> torch.Tensor:
    """Compute `delta_scan.inverse` for contiguous FP32 matrices.

    Raises:
        QeRLError: The matrices are not contiguous.
    """
    (system,) = pointers("inverse", system_JVII, system_JVII=system_JVII)
    found = torch.empty_like(system)
    size = system.shape[-1]
    _delta_inverse[(system.numel() // size**2,)](system, found, I=size, num_warps=2)
    return found


def scan(
    local: Local, v_JIVE: torch.Tensor, initial_NVKE: torch.Tensor | None, chunks: Chunks, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """Compute `delta_scan.scan`; v is contiguous as well.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    new = local.k_JUIK.new_empty
    constants, grid = _launch(local, v_JIVE, chunks)
    (chunk_count, tokens, heads, size), key_size = v_JIVE.shape, local.k_JUIK.shape[-1]
    final_NVKE = new(grid[2], heads, key_size, size)
    kept = None
    if keep:
        each = (new(chunk_count, heads, tokens, size) for _ in range(2))
        kept = Kept(new(chunk_count, heads, key_size, size), *each)
    out_JIVE = torch.empty_like(v_JIVE)
    arguments = pointers(
        "scan", final_NVKE, **local._asdict(), v_JIVE=v_JIVE, initial_NVKE=initial_NVKE,
        first_N=chunks.first_N, out_JIVE=out_JIVE, final_NVKE=final_NVKE,
        **(dict.fromkeys(Kept._fields) if kept is None else kept._asdict()),
    )  # fmt: skip
    _delta_scan[grid](*arguments, INITIAL=initial_NVKE is not None, KEEP=keep, **constants)
    return out_JIVE, final_NVKE, kept


def scan_backward(
    local: Local, dout_JIVE: torch.Tensor, dfinal_NVKE: torch.Tensor | None, chunks: Chunks
) -> Pulls:
    """Compute `delta_scan.scan_backward`; the gradient of the outputs is contiguous as well.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    new = local.k_JUIK.new_empty
    constants, grid = _launch(local, dout_JIVE, chunks)
    (chunk_count, tokens, heads, size), key_size = dout_JIVE.shape, local.k_JUIK.shape[-1]
    missing_JVIE, written_JVIE = (new(chunk_count, heads, tokens, size) for _ in range(2))
    behind_JVKE, initial_NVKE = (new(n, heads, key_size, size) for n in (chunk_count, grid[2]))
    pulls = Pulls(behind_JVKE, missing_JVIE, written_JVIE, initial_NVKE)
    arguments = pointers(
        "scan_backward", local.k_JUIK, **local._asdict(), dout_JIVE=dout_JIVE, dfinal_NVKE=dfinal_NVKE,
        first_N=chunks.first_N, **pulls._asdict(),
    )  # fmt: skip
    _delta_scan_backward[grid](*arguments, FINAL=dfinal_NVKE is not None, **constants)
    return pulls


def block_e(programs: int, size: int, device: torch.device) -> int:
    """Return the columns of a state that a program holds, fewer if multiprocessors would otherwise be idle.

    Chunks are sequential however few columns a program has.

    Args:
        programs: Value heads of all sequences.
        size: Columns of a state.
        device: Device that runs the kernel.
    """
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(size)))
    while columns > 16 and programs * triton.cdiv(size, columns) < multiprocessors(device):
        columns //= 2
    return columns


def _launch(
    local: Local, x_JIVE: torch.Tensor, chunks: Chunks
) -> tuple[dict[str, int], tuple[int, int, int]]:
    key_heads, tokens, key_size = local.k_JUIK.shape[1:]
    heads, size = x_JIVE.shape[2:]
    sequences = len(chunks.first) - 1
    columns = block_e(sequences * heads, size, x_JIVE.device)
    part = min(_PART, max(16, triton.next_power_of_2(key_size)))
    constants = {
        "U": key_heads, "V": heads, "I": tokens, "K": key_size, "PART": part,
        "PARTS": triton.cdiv(key_size, part), "E": size, "BLOCK_E": columns,
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    return constants, (triton.cdiv(size, columns), heads, sequences)
