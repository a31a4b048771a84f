"""E4M3 in Triton's interpreter."""

import numpy as np
import torch


def use_exact_e4m3(monkeypatch) -> None:
    """Has the interpreter round to E4M3 as torch and GPUs do; what it rounds up to a power of two by itself
    becomes half of that, and numbers below E4M3's normal ones are wrong."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(input, input_dtype, output_dtype, rounding_mode):
        if output_dtype != tl.float8e4nv or input_dtype != tl.float32:
            return convert(input, input_dtype, output_dtype, rounding_mode)
        numbers = torch.from_numpy(np.frombuffer(input.tobytes(), dtype=np.float32).copy())
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(input.shape)

    monkeypatch.setattr(interpreter, "_convert_float", exact)
