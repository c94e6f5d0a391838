"""Operands of instructions: registers, constants, addresses, and where these lie."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.arithmetic import dtype_of
from tests.plugins.cuda.ptx.memory import SHARED_WINDOW, KernelError, Region
from tests.plugins.cuda.ptx.parse import Instruction

if TYPE_CHECKING:
    from tests.plugins.cuda.ptx.machine import _Run

Lanes = npt.NDArray[np.int64]
Values = npt.NDArray[Any]
Reader = Callable[[Lanes], Values]
Writer = Callable[[Lanes, Values], None]

ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_SPACES = ("global", "shared", "param", "local", "const")


class Operands:
    """Those of one run's instructions."""

    def __init__(self, run: "_Run") -> None:
        self._run = run

    def _reader(self, operand: str, kind: str) -> Reader:
        run, dtype = self._run, dtype_of(kind)
        if operand in run.special:
            values = run.special[operand].astype(dtype)
            return lambda lanes: values[lanes]
        if operand.startswith("%"):
            register = run.register(operand)
            if register.dtype.itemsize == dtype.itemsize:
                view = register.view(dtype)
                return lambda lanes: view[lanes]
            narrow = np.dtype(f"u{dtype.itemsize}")
            return lambda lanes: register[lanes].astype(narrow).view(dtype)
        bits = np.array(self._constant(operand) & (1 << 8 * dtype.itemsize) - 1, np.uint64)
        value = bits.astype(np.bool_ if kind == "pred" else f"u{dtype.itemsize}").reshape(1).view(dtype)
        return lambda lanes: value

    def _constant(self, operand: str) -> int:
        if operand in self._run.kernel.shared:
            return self._run.kernel.shared[operand]
        return int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)

    def _writer(self, operand: str, kind: str) -> Writer:
        if operand == "_":
            return lambda lanes, values: None
        register, dtype = self._run.register(operand), dtype_of(kind)
        if register.dtype.itemsize == dtype.itemsize:
            view = register.view(dtype)

            def write(lanes: Lanes, values: Values) -> None:
                view[lanes] = values

            return write
        wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{register.dtype.itemsize}")

        def extend(lanes: Lanes, values: Values) -> None:
            bits = np.asarray(values, dtype)
            bits = bits if dtype.kind in "iu" else bits.view(f"u{dtype.itemsize}")
            register.view(wide)[lanes] = bits.astype(wide)

        return extend

    def _address(self, operand: str) -> Reader:
        match = ADDRESS.fullmatch(operand)
        assert match is not None, f"an address, not {operand!r}"
        offset, base = int(match[2] or 0), match[1]
        if base.startswith("%"):
            register = self._run.register(base)
            wide = np.array(offset).astype(np.int64).view(np.uint64)
            most = np.uint64(np.iinfo(np.uint32).max if register.itemsize == 4 else np.iinfo(np.uint64).max)
            return lambda lanes: (register[lanes].astype(np.uint64) + wide) & most
        place = np.uint64(self._run.kernel.shared[base] + offset)
        return lambda lanes: np.full(len(lanes), place)

    def _places(
        self, each: Instruction, addresses: Values, width: int, lanes: Lanes
    ) -> list[tuple[Any, Region, Lanes]]:
        """(which threads, region, offsets). Raises KernelError."""
        if (addresses % np.uint64(width)).any():
            raise KernelError(f"an address that is no multiple of {width}")
        shared = "shared" in each.op
        if not shared and not any(space in each.op for space in _SPACES):
            window = addresses >= np.uint64(SHARED_WINDOW)
            if window.any():
                if not window.all():
                    raise KernelError("generic addresses in shared and in global memory at once")
                shared, addresses = True, addresses - np.uint64(SHARED_WINDOW)
        if not shared:
            return list(self._run.memory.find(addresses, width))
        return [(slice(None), self._run.shared, self._in_shared(addresses, width, lanes))]

    def _in_shared(self, addresses: Values, width: int, lanes: Lanes) -> Lanes:
        if (addresses + np.uint64(width) > np.uint64(self._run.used_bytes)).any():
            raise KernelError(f"an address {int(addresses.max())} in {self._run.used_bytes} bytes of shared memory")
        return addresses.astype(np.int64) + self._run.block[lanes] * self._run.shared_bytes


def names_of(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]
