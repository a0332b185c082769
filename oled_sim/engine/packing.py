"""Arguments of a kernel taken apart once, for kernels that are called again and again.

At every call numba takes the arguments apart: four cache lines for each array in them, of which
the state of a simulation and a policy's own data have more than sixty. On a host that did other
work since the last call all of them come from memory, which takes longer than the decision. A
:class:`Packed` keeps what numba found, side by side; a kernel that is given one reads from there
what it needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, typeof
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numpy.typing import NDArray

from oled_sim.engine.jit import compiled_for, lean

# ruff: noqa: ANN001, ANN202

WORD = 8
"""Bytes of an entry of the memory that holds values, and their alignment."""


class PackedType(types.Type):
    """The type of a :class:`Packed` of values of type ``values``."""

    def __init__(self, values: types.Type) -> None:
        self.values = values
        super().__init__(name=f"Packed({values})")


class Packed(int):
    """Values that a kernel gets back by :func:`unpacked`; made by a :class:`Packer`.

    Arrays are those of now: what is written to them is seen, that another takes an array's place
    is not. They live at least as long as this.

    As a number it is the address of the values, which a compiled kernel needs nothing else of.

    Attributes:
        values: the values.
    """

    values: Any
    _memory: NDArray[np.int64]

    def __new__(cls, values: Any, memory: NDArray[np.int64]) -> Packed:
        """Keep values, and the memory for what numba makes of them."""
        self = super().__new__(cls, memory.ctypes.data)
        self.values, self._memory = values, memory
        return self


class Packer:
    """Packs values of the same types again and again; it trusts its caller that they are."""

    def __init__(self) -> None:
        self._words = 0
        self._store: Any = None

    def pack(self, values: Any) -> Packed:
        """Return values for kernels."""
        if config.DISABLE_JIT:  # type: ignore[attr-defined]
            return Packed(values, np.zeros(1, np.int64))
        if self._store is None:
            self._store = compiled_for(_store, 0, values)
            self._words = _words_of(values)
        packed = Packed(values, np.zeros(self._words, np.int64))
        self._store(int(packed), values)
        return packed


def _words_of(values: Any) -> int:
    """Return how much memory values take."""
    context: Any = cpu_target.target_context
    return -(-context.get_abi_sizeof(context.get_data_type(typeof(values))) // WORD)


@typeof_impl.register(Packed)
def _type_of_packed(packed: Packed, context: Any) -> PackedType:
    return PackedType(typeof(packed.values))


@register_model(PackedType)
class _PackedModel(models.PrimitiveModel):  # type: ignore[misc]
    """An address."""

    def __init__(self, manager: Any, kind: PackedType) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@unbox(PackedType)
def _unbox_packed(kind: PackedType, packed: Any, c: Any) -> NativeValue:
    return NativeValue(c.pyapi.long_as_longlong(packed))


def _pointer(context, builder, address, values):
    return builder.inttoptr(address, context.get_data_type(values).as_pointer())


@intrinsic
def _write(typing, address, values):
    """Write values to memory, in the form that they have there."""

    def codegen(context, builder, signature, args):
        place = _pointer(context, builder, args[0], signature.args[1])
        context.pack_value(builder, signature.args[1], args[1], place)
        return context.get_dummy_value()

    return types.none(types.int64, values), codegen


@lean
def _store(address, values):
    _write(address, values)  # type: ignore[call-arg]


@intrinsic
def _read(typing, packed):
    """Read the values of a :class:`Packed`."""

    def codegen(context, builder, signature, args):
        values = signature.return_type
        return context.unpack_value(builder, values, _pointer(context, builder, args[0], values))

    return packed.values(packed), codegen


def _values_of(packed: Packed) -> Any:
    return packed.values


unpacked: Any = _values_of if config.DISABLE_JIT else _read  # type: ignore[attr-defined]
"""Inside a kernel: the values of a :class:`Packed`."""
