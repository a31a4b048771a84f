"""The pass over the chunks of a gated delta rule on a GPU: what `qerl.kernels.delta_scan` defines.

A program has some columns of one value head's state of one sequence, which columns go their way alone, and
holds them in registers from the first chunk to the last. Keys and queries are read of the key head, so value
heads that share one find them in the L2 cache. Backward is a program of the same kind from the last chunk to
the first. Nobody adds to what another one writes, so the same inputs give the same bits.

Products have FP32 totals. Tensor cores take FP32 operands as TF32, which has the digits of FP16 and all
exponents of FP32. Forward splits each operand into two such numbers and adds three products ("tf32x3"), which
is FP32 but for the last bit or two. One TF32 number per operand would put outputs off by 0.5e-3 of their
norm, and by 1.5e-3 for keys that are alike, whose v and k H cancel; that is as much as rounding them to BF16
once more, between a trainer and a sampler that goes in FP32. Of gradients nobody has a second version, and
they are rounded to BF16 behind this, so backward takes one TF32 number. Tensor cores cut off the digits that
TF32 lacks, which makes all products a little too small and errors about four times as large; so there
operands are rounded first (`rounded`). The state itself, and what is added to it, stays FP32.

Tiles that a product takes transposed are loaded transposed, a second time where necessary: they come out of
the L1 or L2 cache. Triton from 3.4 on transposes results of products on Hopper wrongly when they become
operands again.

The inverse of a unit lower triangular matrix goes row by row in FP32: row i of it is that of the identity
less the rows above, weighted. Multiplying powers of the matrix instead (1 - A)(1 + A^2)(1 + A^4)... would run
on tensor cores; but for keys that are alike, as in repeated text, those powers have numbers of 18 digits,
which must cancel.

Shapes: as in `qerl.kernels.delta_scan`.
"""

import torch
import triton
import triton.language as tl

from qerl.kernels.delta_scan import Chunks, Kept, Local, Pulls
from qerl.kernels.device import multiprocessors
from qerl.kernels.launch import pointers


@triton.jit
def rounded(x):
    """FP32 to the nearest TF32; infinities and NaN stay."""
    near = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, near.to(tl.float32, bitcast=True), x)


@triton.jit
def times(a, b):
    """The product, FP32 but for its last bits."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def times_rounded(a, b):
    """The product of operands rounded to TF32."""
    return tl.dot(rounded(a), rounded(b), input_precision="tf32")


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
    U: tl.constexpr, V: tl.constexpr, I: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,  # noqa: E741
    E: tl.constexpr, BLOCK_E: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    head, n = tl.program_id(1), tl.program_id(2)
    i, k = tl.arange(0, I), tl.arange(0, K_PADDED)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_k, in_e = k < K, e < E
    square = i[:, None] * I + i[None, :]
    ik, ki = i[:, None] * K + k[None, :], k[:, None] + i[None, :] * K
    of_state, in_state = k[:, None] * E + e[None, :], in_k[:, None] & in_e[None, :]
    tokens = i[:, None] * (V * E) + head * E + e[None, :]
    of_sequence = (n.to(tl.int64) * V + head) * (K * E) + of_state
    state = tl.zeros((K_PADDED, BLOCK_E), tl.float32)
    if INITIAL:
        state = tl.load(initial_NVKE + of_sequence, mask=in_state, other=0.0)
    first, end = tl.load(first_N + n).to(tl.int64), tl.load(first_N + n + 1)
    for ahead in range((end - first).to(tl.int32)):
        j = first + ahead
        of_key, of_head = (j * U + head // (V // U)) * (I * K), j * V + head
        sums = tl.load(sums_JVI + of_head * I + i)
        last = tl.load(sums_JVI + of_head * I + I - 1)
        grown, left = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
        at = j * (I * V * E) + tokens
        k_IK = tl.load(k_JUIK + of_key + ik, mask=in_k[None, :], other=0.0)
        answer = grown * times(k_IK, state)
        missing = tl.load(v_JIVE + at, mask=in_e[None, :], other=0.0).to(tl.float32) - answer
        q_IK = tl.load(q_JUIK + of_key + ik, mask=in_k[None, :], other=0.0)
        out = grown * times(q_IK, state)
        written = times(tl.load(mix_JVII + of_head * (I * I) + square), missing)
        out += times(tl.load(scores_JVII + of_head * (I * I) + square), written)
        tl.store(out_JIVE + at, out, mask=in_e[None, :])
        if KEEP:
            kept = of_head * (I * E) + i[:, None] * E + e[None, :]
            tl.store(missing_JVIE + kept, missing, mask=in_e[None, :])
            tl.store(written_JVIE + kept, written, mask=in_e[None, :])
            tl.store(states_JVKE + of_head * (K * E) + of_state, state, mask=in_state)
        k_KI = tl.load(k_JUIK + of_key + ki, mask=in_k[:, None], other=0.0)
        state = tl.exp(last) * state + times(k_KI, left * written)
    tl.store(final_NVKE + of_sequence, state, mask=in_state)


@triton.jit
def _delta_scan_backward(
    q_JUIK, k_JUIK, sums_JVI, mix_JVII, scores_JVII, dout_JIVE, dfinal_NVKE, first_N,
    dbehind_JVKE, dmissing_JVIE, dwritten_JVIE, dinitial_NVKE,
    U: tl.constexpr, V: tl.constexpr, I: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,  # noqa: E741
    E: tl.constexpr, BLOCK_E: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    head, n = tl.program_id(1), tl.program_id(2)
    i, k = tl.arange(0, I), tl.arange(0, K_PADDED)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_k, in_e = k < K, e < E
    transposed = i[:, None] + i[None, :] * I
    ik, ki = i[:, None] * K + k[None, :], k[:, None] + i[None, :] * K
    of_state, in_state = k[:, None] * E + e[None, :], in_k[:, None] & in_e[None, :]
    tokens = i[:, None] * (V * E) + head * E + e[None, :]
    of_sequence = (n.to(tl.int64) * V + head) * (K * E) + of_state
    behind = tl.zeros((K_PADDED, BLOCK_E), tl.float32)
    if FINAL:
        behind = tl.load(dfinal_NVKE + of_sequence, mask=in_state, other=0.0)
    first, end = tl.load(first_N + n), tl.load(first_N + n + 1).to(tl.int64)
    for back in range((end - first).to(tl.int32)):
        j = end - 1 - back
        of_key, of_head = (j * U + head // (V // U)) * (I * K), j * V + head
        sums = tl.load(sums_JVI + of_head * I + i)
        last = tl.load(sums_JVI + of_head * I + I - 1)
        grown, left = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
        tl.store(dbehind_JVKE + of_head * (K * E) + of_state, behind, mask=in_state)
        k_IK = tl.load(k_JUIK + of_key + ik, mask=in_k[None, :], other=0.0)
        written = left * times_rounded(k_IK, behind)
        dout = tl.load(dout_JIVE + j * (I * V * E) + tokens, mask=in_e[None, :], other=0.0).to(tl.float32)
        written += times_rounded(tl.load(scores_JVII + of_head * (I * I) + transposed), dout)
        missing = times_rounded(tl.load(mix_JVII + of_head * (I * I) + transposed), written)
        kept = of_head * (I * E) + i[:, None] * E + e[None, :]
        tl.store(dmissing_JVIE + kept, missing, mask=in_e[None, :])
        tl.store(dwritten_JVIE + kept, written, mask=in_e[None, :])
        q_KI = tl.load(q_JUIK + of_key + ki, mask=in_k[:, None], other=0.0)
        behind = tl.exp(last) * behind + times_rounded(q_KI, grown * dout)
        k_KI = tl.load(k_JUIK + of_key + ki, mask=in_k[:, None], other=0.0)
        behind -= times_rounded(k_KI, grown * missing)
    tl.store(dinitial_NVKE + of_sequence, behind, mask=in_state)


def inverse(system_JVII: torch.Tensor) -> torch.Tensor:
    """As `delta_scan.inverse`, FP32 and contiguous.

    Raises:
        QeRLError: The matrices are not contiguous.
    """
    (system,) = pointers("inverse", system_JVII, system_JVII=system_JVII)
    found = torch.empty_like(system)
    size = system.shape[-1]
    # One warp: a sum over rows then waits for no other one.
    _delta_inverse[(system.numel() // size**2,)](system, found, I=size, num_warps=1)
    return found


def scan(
    local: Local, v_JIVE: torch.Tensor, initial_NVKE: torch.Tensor | None, chunks: Chunks, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, Kept | None]:
    """As `delta_scan.scan`, with v contiguous as well.

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
    """As `delta_scan.scan_backward`, with the gradient of the outputs contiguous as well.

    Raises:
        QeRLError: A tensor is not contiguous.
    """
    new = local.k_JUIK.new_empty
    constants, grid = _launch(local, dout_JIVE, chunks)
    (chunk_count, tokens, heads, size), key_size = dout_JIVE.shape, local.k_JUIK.shape[-1]
    each = (new(chunk_count, heads, tokens, size) for _ in range(2))
    pulls = Pulls(
        new(chunk_count, heads, key_size, size), *each, new(grid[2], heads, key_size, size)
    )
    arguments = pointers(
        "scan_backward", local.k_JUIK, **local._asdict(), dout_JIVE=dout_JIVE, dfinal_NVKE=dfinal_NVKE,
        first_N=chunks.first_N, **pulls._asdict(),
    )  # fmt: skip
    _delta_scan_backward[grid](*arguments, FINAL=dfinal_NVKE is not None, **constants)
    return pulls


def block_e(programs: int, size: int, device: torch.device) -> int:
    """Columns of a state that a program holds, of so many sequences' heads: fewer where programs of as many
    would leave multiprocessors without work, since a chunk follows the other however few columns there are."""
    columns = min(64, max(16, triton.next_power_of_2(size)))
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
    constants = {
        "U": key_heads, "V": heads, "I": tokens, "K": key_size,
        "K_PADDED": max(16, triton.next_power_of_2(key_size)), "E": size, "BLOCK_E": columns,
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    return constants, (triton.cdiv(size, columns), heads, sequences)
