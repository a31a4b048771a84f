"""Triton's interpreter without what takes most of its time.

While a kernel is interpreted, the functions of `triton.language` are replaced by ones that compute with
NumPy. The interpreter replaces them anew for every device function that a kernel calls; once for a launch
is enough. It also computes each sum and product of integers a second time in 64 bits, to find overflows
of 32: compiled kernels are not checked so either, and no test here has sizes that come near. Each takes a
third of the time. Its products are those of the operands' own dtype whatever precision is asked for, so here
it takes one more of those that compilers know.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hurry() -> None:
    """Let a launch replace each of the language's modules once, and let integers overflow as on a GPU."""
    builder = interpreter.interpreter_builder
    precisions = (*builder.options.allowed_dot_input_precisions, "bf16x3")
    builder.options = dataclasses.replace(
        builder.options, sanitize_overflow=False, allowed_dot_input_precisions=precisions
    )
    whole, scope_class = interpreter._patch_lang, interpreter._LangPatchScope
    modules: dict[Callable, frozenset] = {}
    launch: Any = scope_class()
    replaced: set = set()

    def patch(function: Callable) -> Any:
        nonlocal launch
        if function not in modules:
            found = (value for value in function.__globals__.values() if inspect.ismodule(value))
            modules[function] = frozenset(value for value in found if value is tl or value is tl.core)
        in_launch = bool(launch._changes)  # they are undone when it ends
        if in_launch and modules[function] <= replaced:
            return scope_class()
        scope = whole(function)
        if not in_launch:
            launch = scope
            replaced.clear()
        replaced.update(modules[function])
        return scope

    interpreter._patch_lang = patch
