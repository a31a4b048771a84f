"""Triton's interpreter without what takes most of its time.

While a kernel is interpreted, the functions of `triton.language` are replaced by ones that compute with
NumPy. The interpreter replaces them anew for every launch and every device function that a kernel calls, and
puts them back behind each; here each module's are replaced once and stay. It also computes each sum and
product of integers a second time in 64 bits, to find overflows of 32: compiled kernels are not checked so
either, and no test here has sizes that come near. What remains is mostly the description of values: types,
shapes and their names are made for every value of every operation, a few hundred kinds of them millions of
times. They do not change once they are made, so each kind is made once. And each operand is looked at for how
it is promoted and broadcast, which most are not.

Its products are those of the operands' own dtype whatever precision is asked for, so here it takes one more
of those that compilers know.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hurry() -> None:
    """Replace the language's functions once, let integers overflow as on a GPU, make each type once."""
    builder = interpreter.interpreter_builder
    precisions = (*builder.options.allowed_dot_input_precisions, "bf16x3")
    builder.options = dataclasses.replace(
        builder.options, sanitize_overflow=False, allowed_dot_input_precisions=precisions
    )
    _replace_once()
    _describe_once()
    _compare_quickly()
    _take_operands_as_they_are()


def _replace_once() -> None:
    whole, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    replaced: set[Any] = set()
    seen: set[Callable] = set()

    def patch(function: Callable) -> Any:
        if function not in seen:
            found = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            modules = {value for value in found if value is tl or value is core}
            if not modules <= replaced:
                whole(function)
                replaced.update(modules)
            seen.add(function)
        return nothing

    def replace(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        """The member with the interpreter's semantic; without the check that it has one, where it is that."""
        plain = getattr(member, "__code__", None) is core.arange.__code__
        call, semantic = member.__wrapped__ if plain else member, interpreter.interpreter_semantic

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return call(*args, **kwargs)

        scope.set_attr(owner, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = patch, replace


def _describe_once() -> None:
    block, tensor, constant = core.block_type.__init__, core.tensor.__init__, core.constexpr
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    numpys: dict[str, Any] = {}
    of_numpy = interpreter._get_np_dtype

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([s.value if type(s) is constant else s for s in shape])
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype, self.sizes = handle, type, type.scalar, key
        self.shape, self.numel = shapes[key]

    def numpy_type(type: Any) -> Any:
        if type.name not in numpys:
            numpys[type.name] = of_numpy(type)
        return numpys[type.name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter.TensorHandle.__post_init__ = lambda self: (
        None
    )  # whether NumPy's numbers are as wide as the type's
    interpreter._get_np_dtype = numpy_type


def _compare_quickly() -> None:
    unwrap, constant, several = core._unwrap_if_constexpr, core.constexpr, (list, tuple, core.tuple)
    broadcast = TritonSemantic.broadcast_impl_value

    def unwrapped(value: Any) -> Any:
        if type(value) is constant:
            return value.value
        return unwrap(value) if isinstance(value, several) else value

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.sizes, rhs.sizes
        if left == right:
            return lhs, rhs
        if len(left) != len(right):
            return broadcast(self, lhs, rhs)
        shape = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        return self.broadcast_impl_shape(lhs, shape), self.broadcast_impl_shape(rhs, shape)

    core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value = unwrapped, broadcasted


def _take_operands_as_they_are() -> None:
    """Of one dtype, of a pointer and integers, or of a tensor and a number: nearly all there is, and nothing
    is promoted. NumPy broadcasts them as it computes, so only their types are made alike."""
    tensor, block, check = core.tensor, core.block_type, TritonSemantic.binary_op_type_checking_impl
    integers, plain = ("int32", "int64"), ("int1", "int32", "int64", "fp32")
    numbers: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}

    def of_number(self: Any, value: Any, other: Any) -> Any:
        """A number as it takes part beside a tensor of a dtype; None where that has to be found out."""
        dtype, kind = core.int32 if other.is_ptr() else other, type(value)
        if kind is int and dtype.name in integers:
            taken = -(2**31) <= value < 2**31
        else:
            taken = dtype.name == "fp32" and (kind is float or kind is int)
        if not taken:
            return None
        key = str(value), dtype.name  # tells 0.0 from -0.0
        if key not in numbers:
            numbers[key] = self.scalar_constant(value, dtype)
        return numbers[key]

    def alike(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape that both are broadcast to; None where an axis is missing or they differ."""
        if left and right and len(left) != len(right):
            return None
        sizes = zip(left, right, strict=True) if left and right else ()
        if any(1 not in pair and pair[0] != pair[1] for pair in sizes):
            return None
        return tuple(map(max, left, right)) if left and right else left or right

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        lhs_pointer: bool = False,
        rhs_pointer: bool = False,
        *how: Any,
        **more: Any,
    ) -> tuple[Any, Any]:
        one, other = lhs, rhs
        if type(one) is not tensor and type(other) is tensor:
            one = of_number(self, one, other.dtype)
        elif type(other) is not tensor and type(one) is tensor:
            other = of_number(self, other, one.dtype)
        if type(one) is tensor and type(other) is tensor:
            left, right = one.dtype, other.dtype
            if (
                (left.name == right.name and left.name in plain)
                or (lhs_pointer and right.name in integers and left.is_ptr())
                or (rhs_pointer and left.name in integers and right.is_ptr())
            ):
                if one.sizes == other.sizes:
                    return one, other
                key = one.sizes, other.sizes
                if key not in shapes:
                    shapes[key] = alike(*key)
                if (shape := shapes[key]) is not None:
                    if one.sizes != shape:
                        one = tensor(one.handle, block(left, list(shape)))
                    if other.sizes != shape:
                        other = tensor(other.handle, block(right, list(shape)))
                    return one, other
        return check(self, lhs, rhs, lhs_pointer, rhs_pointer, *how, **more)

    TritonSemantic.binary_op_type_checking_impl = checked
