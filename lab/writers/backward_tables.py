"""Table and numbers of gradients through frozen weights in 16 bits and in FP8: times and errors."""

from collections.abc import Callable

from bench.result import Row
from lab.writers.captions import files, row, rows, source, table

_PRODUCTS, _STEPS, _FIRST = "backward-7b-h200", "step-7b-backward-h200", "parity-backward-smollm2-h200"


def products() -> str:
    """Return the table of milliseconds and errors of a layer's products, with the sums of the times."""
    found = rows(_PRODUCTS)
    keys = ("bf16_ms", "fp8_ms", "quantize_rows_ms", "transpose_e4m3_ms")
    lines = [
        (
            f"{each['product']}, {each['outputs']} x {each['inputs']}",
            *(f"{each[key]:.2f}" for key in keys),
            *(f"{100 * each[key]:.2f}" for key in ("bf16_error", "fp8_error")),
        )
        for each in found
    ]
    lines.append(("together", *(f"{sum(each[key] for each in found):.2f}" for key in keys), "", ""))
    (tokens,) = {each["tokens"] for each in found}
    head = (
        "gradient of the input, 7B", "bf16, ms", "FP8, ms", "of it rounding of dy", "of it writing W",
        "error of bf16, %", "error of FP8, %",
    )  # fmt: skip
    caption = (
        f"{tokens} tokens, the two by turns, each with the weight that it writes. Errors are relative, in "
        f"the Frobenius norm, against FP64. {source(_PRODUCTS)} {files(_PRODUCTS)}"
    )
    return table(head, lines, caption)


def _seconds(dtype: str | None, phase: str) -> str:
    """Format the seconds of a phase of a 7B step; rows name ``dtype`` unless it is the default (None)."""
    return f"{row(_STEPS, backward_dtype=dtype)[f'{phase}_s']:.2f} s"


def _norm(dtype: str | None) -> str:
    """Format the gradient norm of that step."""
    return f"{row(_STEPS, backward_dtype=dtype)['grad_norm']:.3f}"


def _first(dtype: str) -> Row:
    return row(_FIRST, backward_dtype=dtype)


NUMBERS: dict[str, Callable[[], str]] = {
    "backward-auto-update": lambda: _seconds(None, "update"),
    "backward-fp8-update": lambda: _seconds("fp8", "update"),
    "backward-auto-step": lambda: _seconds(None, "total"),
    "backward-fp8-step": lambda: _seconds("fp8", "total"),
    "backward-auto-norm": lambda: _norm(None),
    "backward-fp8-norm": lambda: _norm("fp8"),
    "backward-auto-error": lambda: f"{100 * _first('auto')['gradient_error']:.0f} %",
    "backward-fp8-error": lambda: f"{100 * _first('fp8')['gradient_error']:.0f} %",
    "backward-auto-cosine": lambda: f"{_first('auto')['gradient_cosine']:.4f}",
    "backward-fp8-cosine": lambda: f"{_first('fp8')['gradient_cosine']:.4f}",
}
