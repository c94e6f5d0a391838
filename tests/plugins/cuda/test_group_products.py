"""The matrix instructions of warpgroups (wgmma.cuh), and that of warps in FP8 (matrix_units.cuh), against numpy, on the
emulated device and in PTX: every layout, and what a kernel must not do with them."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from ingot.dtypes import DType, from_float32, round_to_bf16
from ingot.plugins.cuda import compiler
from ingot.plugins.cuda.compiler import find_compiler
from tests.plugins.cuda.emulation import SOURCES
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.parse import parse

Floats = npt.NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)
# y, a [64, 64] and b as bits, keep, the kernel's name: raises KernelError
Run = Callable[[Floats, npt.NDArray[np.uint16], npt.NDArray[np.uint16], bool, str], None]

KERNELS = Path(__file__).with_name("group_kernels.cuh")
ROWS = {
    "rows_16": "bf16",
    "rows_32": "f16",
    "rows_64": "bf16",
    "rows_128": "bf16",
    "rows_192": "bf16",
    "rows_256": "f16",
}
NAMES = ROWS | {"registers_80": "bf16", "registers_96": "f16", "columns_64": "f16", "columns_112": "bf16"}
NAMES |= {"columns_128": "bf16", "fp8_16": "fp8", "fp8_64": "fp8", "fp8_128": "fp8"}
NAMES |= {"warps_8": "fp8"}
THREADS, SHARED = 128, 5 * 64 * 128
MACROS = ("-DINGOT_WEIGHT=BF16", "-DINGOT_KV=BF16", "-DINGOT_HEAD_DIM=16", "-DINGOT_TOKENS_PER_BLOCK=16")
DOORS = """
#include "group_kernels.cuh"
template <>
float half_to_float<BF16>(uint32_t word, unsigned) { return to_float(BF16{static_cast<uint16_t>(word)}); }
template <>
float half_to_float<F16>(uint32_t word, unsigned) { return to_float(F16{static_cast<uint16_t>(word)}); }
#define DOOR(name) \\
  extern "C" void open_##name(void** a) { name((float*)a[0], (const Piece*)a[1], (const Piece*)a[2], *(int*)a[3]); }
"""


def emulated(folder: Path, names: Sequence[str]) -> Run:
    """group_kernels.cuh of the folder, compiled for the emulated device; both orders of threads give the same bits."""
    source, library = folder / "doors.cpp", folder / "doors.so"
    source.write_text(DOORS + "".join(f"DOOR({name})\n" for name in names))
    files = [source, *(SOURCES / f"{name}.cpp" for name in ("emulated_device", "group_products", "access_check"))]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", f"-I{folder}", f"-I{SOURCES}"]
    command = ["g++", *flags, f"-I{compiler.SOURCES}", *MACROS, *map(str, files), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    loaded = ctypes.CDLL(str(library))
    loaded.emulated_launch.restype = ctypes.c_char_p

    def run(y: Floats, a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16], keep: bool, name: str) -> None:
        kept = ctypes.c_int(keep)
        given = (ctypes.c_void_p * 4)(y.ctypes.data, a.ctypes.data, b.ctypes.data, ctypes.addressof(kept))
        found = []
        for backwards in (0, 1):
            grid = (ctypes.c_uint * 3)(1, 1, 1)
            wrong = loaded.emulated_launch(getattr(loaded, f"open_{name}"), given, grid, THREADS, SHARED, backwards)
            if wrong:
                raise KernelError(wrong.decode())
            found.append(y.tobytes())
        if found[0] != found[1]:
            raise KernelError("the order of threads makes a difference")

    return run


def interpreted(folder: Path, names: Sequence[str]) -> Run:
    """The same in PTX."""
    nvcc = find_compiler()
    if nvcc is None:
        pytest.skip("this machine lacks nvcc (pip install nvidia-cuda-nvcc)")
    source, out = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text('#include "group_kernels.cuh"\n')
    includes = [f"-I{folder}", f"-I{compiler.SOURCES}"]
    command = [str(nvcc.path), "-ptx", "-O3", "-std=c++17", "-arch=compute_90a", *MACROS, *includes, str(source)]
    subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
    kernels = parse(out.read_text())

    def run(y: Floats, a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16], keep: bool, name: str) -> None:
        machine = Machine()
        for each in (y, a, b):
            machine.memory.add(each.ctypes.data, each.reshape(-1).view(np.uint8))
        given = b"".join(int(each.ctypes.data).to_bytes(8, "little") for each in (y, a, b))
        machine.launch(kernels[name], (1, 1, 1), THREADS, SHARED, given + int(keep).to_bytes(4, "little"))

    return run


WAYS = {"emulated": emulated, "interpreted": interpreted}


def check(run: Run, name: str, keep: bool) -> None:
    """Small whole numbers: sums are exact."""
    kind, columns = NAMES[name], int(name.partition("_")[2])
    random, k = np.random.default_rng(columns), 128 if kind == "fp8" else 64
    a, b = (random.integers(-8, 9, shape).astype(np.float32) for shape in ((64, k), (columns, k)))
    right = np.pad(b.T, ((0, 0), (0, 128 - columns))) if name.startswith("columns") else b
    y = aligned(np.zeros((64, columns), np.float32))
    run(y, aligned(bits_of(a, kind)), aligned(bits_of(right, kind)), keep, name)
    np.testing.assert_array_equal(y, a @ b.T + np.float32(keep))


def bits_of(values: Floats, kind: str) -> npt.NDArray[np.uint16]:
    if kind == "fp8":
        return from_float32(values, DType.F8).view(np.uint16)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (round_to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)


def aligned(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """A copy that lies on 256 bytes."""
    room = np.zeros(values.nbytes + 256, np.uint8)
    found = room[-room.ctypes.data % 256 :][: values.nbytes].view(values.dtype).reshape(values.shape)
    found[:] = values
    return found


def changed(folder: Path, right: str, wrong: str) -> Path:
    """A folder with the kernels, where `wrong` stands in the place of `right`."""
    text = KERNELS.read_text()
    assert text.count(right) == 1, right
    others = re.sub(rf"INGOT_GROUP_KERNEL\((?!name|{FAULTY},).*", "", text)  # which are not compiled
    (folder / KERNELS.name).write_text(others.replace(right, wrong))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_layout(tmp_path: Path, way: str) -> None:
    run = WAYS[way](Path(shutil.copy(KERNELS, tmp_path)).parent, [*NAMES])
    for index, name in enumerate(NAMES):
        check(run, name, keep=bool(index % 2))
    check(run, "warps_8", keep=True)


FAULTY = "rows_64"
# what → (the right text, the wrong one, what the emulated device says, what the interpreter says)
FAULTS: dict[str, tuple[str, str, str | None, str | None]] = {
    "no wait": ("group_wait<0>(sum);", "", "nobody waits for", "nobody waits for"),
    "no commit": ("group_commit();", "", "nobody waits for", "nobody waits for"),
    "no beginning": ("group_begin();", "", "without group_begin", "without wgmma.fence"),
    "sums that are read too early": (
        "group_wait<0>(sum);",
        "const float early = sum[0];\n  group_wait<0>(sum);\n  sum[0] = early;",
        "",
        None,
    ),
    "copies that the units do not see": ("let_units_see();", "", None, "no fence.proxy.async has shown"),
    "a tile on 128 bytes": ("tiles + kPanel;", "tiles + kPanel + 128;", "lie on 1024 bytes", "lie on 1024 bytes"),
    "a tile behind the end": (
        "describe_rows(right, step);",
        "describe_rows(right + 8 * kPanel, step);",
        "end",
        "bytes of shared memory",
    ),
    "a warp that is not there": ("group_begin();", "if (warp == 2) return;\n  group_begin();", "the same", "the same"),
    "what another thread still copies": ("  __syncthreads();", "", "", "a race|still being copied|nobody wrote"),
}


def says(fault: str, way: str) -> str | None:
    """None: it cannot see the fault. nvcc moves the early read behind the wait; what is emulated has one view of
    memory."""
    _, _, emulated_says, interpreter_says = FAULTS[fault]
    return interpreter_says if way == "interpreted" else emulated_says


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "way"), [(f, w) for f in FAULTS for w in WAYS if says(f, w) is not None])
def test_faults_are_seen(tmp_path: Path, fault: str, way: str) -> None:
    """Where nothing is said, the values are wrong."""
    right, wrong, *_ = FAULTS[fault]
    words = says(fault, way)
    run = WAYS[way](changed(tmp_path, right, wrong), [FAULTY])
    if words:
        with pytest.raises(KernelError, match=words):
            check(run, FAULTY, keep=False)
    else:
        with pytest.raises((AssertionError, KernelError)):
            check(run, FAULTY, keep=False)
