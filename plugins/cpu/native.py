"""The only door to the compiled module `ingot._cpu`: whether it is here, what the machine offers, how fast it is."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ingot.configs.runtime import ISA_BASES
from ingot.errors import CapacityError, RequestError, TargetError, UsageError


class _Missing(ModuleType):
    """Stands for the compiled module in a clone where it was not compiled: `ref` and whatever computes nothing work."""

    def __getattr__(self, name: str) -> NoReturn:
        require_native()
        raise AttributeError(name)


try:
    from ingot import _cpu as _cpu  # session and target import it from here
except ImportError as error:
    why_not: str | None = str(error)
    _cpu = _Missing("ingot._cpu")
else:
    why_not = None

ROUNDING_LEVELS = ("amx", "avx512bf16")  # their own products of bf16 and of quantised weights round x to bf16
_PEAK_SECONDS = 0.03


def require_native() -> None:
    if why_not is not None:
        raise TargetError(
            "the compiled module of ingot is missing: CPU targets need it",
            got=why_not,
            hint="in a clone run `make native`; elsewhere install ingot again",
        )


@contextlib.contextmanager
def enough_threads() -> Iterator[None]:
    """Raises TargetError without the module, CapacityError where the system starts no more threads. Threads
    that run already are used again.
    """
    require_native()
    try:
        yield
    except _cpu.ThreadStartError as error:
        raise CapacityError(
            "the system refuses to start more threads",
            got=str(error),
            hint="give a smaller --threads, or raise the limit on processes (ulimit -u, pids.max of the control group)",
        ) from error


@contextlib.contextmanager
def contract(problem: str) -> Iterator[None]:
    """Raises RequestError where the native session refuses its arguments, CapacityError for want of threads."""
    try:
        with enough_threads():
            yield
    except (ValueError, TypeError) as error:
        raise RequestError(problem, got=str(error)) from error


def detect_isa() -> str:
    """The preferred level that this machine offers, or "none"."""
    return next(iter(offered_isas()), "none")


def offered_isas() -> tuple[str, ...]:
    """Every level that this machine offers, the preferred one first."""
    return () if why_not is not None else tuple(name for name, _, here in _cpu.isa_levels() if here)


def preferred_isas() -> tuple[str, ...]:
    """Every level, in the order in which this machine prefers them, whether it offers them or not."""
    return tuple(ISA_BASES) if why_not is not None else tuple(name for name, _, _ in _cpu.isa_levels())


def kernel_table() -> tuple[str, ...]:
    """Every compiled kernel, those of other machines and the emulated ones of test builds included."""
    return () if why_not is not None else tuple(_cpu.kernel_names())


def core_count() -> int:
    """Cores that this process may use (affinity, SMT and the control group's quota counted)."""
    require_native()
    return len(_cpu.cores())


def crc32(data: npt.NDArray[np.uint8], crc: int = 0) -> int:
    """zlib's CRC-32 at memory speed; other Python threads run meanwhile."""
    require_native()
    return _cpu.crc32(data, crc)


@enough_threads()
def read_bandwidth(nbytes: int, threads: int | None = None) -> float:
    """Bytes per second that `threads` (default: all cores) read from a buffer of nbytes."""
    return _cpu.read_bandwidth(nbytes, core_count() if threads is None else threads)


def peak_name(kernel: str) -> str:
    """The arithmetic that a kernel of this name is made of, for `peak_flops`: "f32.avx2", "int8.amx", ..."""
    _, dtype, isa = kernel.split(".")
    kind = "int8" if dtype.endswith("a8") else "bf16" if isa in ROUNDING_LEVELS else "f32"
    return f"{kind}.{isa}"


@enough_threads()
def barrier_seconds(threads: int | None = None) -> float:
    """What it takes `threads` (default: all cores) to wait for each other, one time after another."""
    return _cpu.barrier_seconds(core_count() if threads is None else threads)


@enough_threads()
def peak_flops(name: str, threads: int | None = None) -> float:
    """Operations per second that `threads` (default: all cores) reach on random operands in L1; takes 30 ms."""
    return _cpu.peak_flops(name, core_count() if threads is None else threads, _PEAK_SECONDS)


def num_threads(threads: int | None) -> int:
    """None: one per core."""
    if threads is not None and not 1 <= threads <= 256:
        raise UsageError(f"threads {threads} is out of range", expected="1 to 256", got=str(threads))
    return core_count() if threads is None else threads
