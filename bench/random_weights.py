"""Single random weights in the engine's layouts, for benchmarks and tests of products."""

import torch

from qerl.kernels.weights.nf4 import BLOCK, NF4Stack
from qerl.kernels.weights.tiles import Tiles


def random_tiles(rows: int, width: int, device: str = "cuda") -> Tiles:
    """Return random NVFP4 codes, scales from 1 to 1.875; ``rows`` must be a multiple of `ROW_MULTIPLE`."""
    groups, tiles = rows // 64, width // 64
    codes = torch.randint(0, 256, (groups, tiles, 128, 16), dtype=torch.uint8, device=device)
    one = 56  # E4M3 code of 1; the next 7 codes add eighths
    scales = torch.randint(one, one + 8, (groups, tiles, 32, 4, 2), dtype=torch.uint8, device=device)
    return Tiles(codes, scales)


def random_nf4(rows: int, width: int, device: str = "cuda") -> NF4Stack:
    """Return random NF4 codes, of mean square 0.268, scaled to weights of mean square 1 / ``width``."""
    codes = torch.randint(0, 256, (rows * width // 2, 1), dtype=torch.uint8, device=device)
    absmax = torch.full((rows * width // BLOCK,), (0.268 * width) ** -0.5, device=device)
    return NF4Stack(codes, absmax, (rows, width), torch.ones(1, device=device))
