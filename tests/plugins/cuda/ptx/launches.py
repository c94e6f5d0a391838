"""In the place of the emulated GPU's own kernels: every launch of a session goes through the interpreter."""

import ctypes
import hashlib
import os
import subprocess
from collections import Counter

import numpy as np
import pytest

from ingot.plugins.cuda import compiler, gpu, target
from ingot.plugins.cuda.compiler import Compiler, MachineCode, Specialisation
from ingot.plugins.cuda.gpu import Arguments, Device
from ingot.plugins.target import Progress
from tests.plugins.cuda.emulated.units import seen_by, unit_of
from tests.plugins.cuda.emulation import KEPT
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.parse import Kernel, parse

ARCHITECTURE = "compute_90a"


def ptx_of(nvcc: Compiler, specialisation: Specialisation, unit: str) -> str:
    """What nvcc makes of a file of kernels; kept under the hash of all that it depends on."""
    sources = compiler.SOURCES
    macros, texts = seen_by(unit, sources, specialisation.macros)
    parts = [nvcc.version, ARCHITECTURE, "lines", unit, *macros, *(text.decode() for text in texts)]
    kept = KEPT / "ptx" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.ptx"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        command = [str(nvcc.path), "-ptx", "-lineinfo", "-O3", "-std=c++17", f"-arch={ARCHITECTURE}", *macros]
        subprocess.run([*command, str(sources / unit), "-o", str(fresh)], check=True, capture_output=True)
        fresh.replace(kept)
    return kept.read_text()


def kernel_of(nvcc: Compiler, specialisation: Specialisation, name: str) -> Kernel:
    """Its PTX, read."""
    return parse(ptx_of(nvcc, specialisation, unit_of(name)))[name]


def assert_waits(name: str, kernel: Kernel) -> None:
    """A kernel of a captured step waits for the one before it, which may still run, before it stores anything."""
    if name == "draw_tokens":  # no part of a captured step
        return
    ops = [".".join(each.op) for each in kernel.instructions]
    assert "griddepcontrol.wait" in ops, name
    stores = [index for index, op in enumerate(ops) if op.startswith("st.global")]
    assert stores, name
    assert ops.index("griddepcontrol.wait") < stores[0], name


class Interpreted:
    """Stands for the kernels of a session. counted: each launch's kernel, and what instructions its warps issued."""

    def __init__(self, nvcc: Compiler, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted: list[tuple[str, Counter[str]]] = []
        self.driver = driver
        self._nvcc, self._machine = nvcc, Machine()
        self._modules: list[Specialisation] = []
        self._allocate = Device.allocate
        monkeypatch.setattr(target, "compile_kernels", self._compiled)
        # prompts take the kernel of all other GPUs; test_ptx_prompts.py runs that of warpgroups
        monkeypatch.setattr(target, "takes_warpgroups", lambda *given: False)
        monkeypatch.setattr(Device, "load", lambda device, image: self._modules[int(image.tobytes())])
        monkeypatch.setattr(Device, "kernel", lambda device, types, name, shared_bytes: self._kernel(types, name))
        monkeypatch.setattr(Device, "allocate", lambda device, nbytes: self._allocated(device, nbytes))
        monkeypatch.setattr(Device, "launch", lambda device, *given: self._launch(device, *given))
        monkeypatch.setattr(Device, "capture", lambda device, launch, owned=None: launch)
        monkeypatch.setattr(Device, "replay", lambda device, graph: graph())

    def _compiled(self, specialisation: Specialisation, architecture: str, progress: Progress) -> MachineCode:
        self._modules.append(specialisation)
        return MachineCode(image=str(len(self._modules) - 1).encode(), kernels={})

    def _kernel(self, types: Specialisation, name: str) -> gpu.Kernel:
        kernel = kernel_of(self._nvcc, types, name)
        assert_waits(name, kernel)
        return gpu.Kernel(name, kernel)

    def _allocated(self, device: Device, nbytes: int) -> int:
        address, size = self._allocate(device, nbytes), max(nbytes, 256)
        self._machine.memory.add(address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        return address

    def _launch(
        self,
        device: Device,
        kernel: gpu.Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        given: Arguments,
    ) -> None:
        device.wait()  # for what was enqueued before
        entry = kernel.function
        block = parameter_block(entry, given)
        self.counted.append((kernel.name, self._machine.launch(entry, grid, threads, shared, block)))


def parameter_block(kernel: Kernel, given: Arguments) -> bytes:
    """The values where the kernel reads them."""
    pointers, block = (ctypes.c_void_p * len(kernel.parameters)).from_address(given.address), bytearray()
    for (begin, size), pointer in zip(kernel.parameters.values(), pointers, strict=True):
        assert pointer is not None
        block += bytes(begin - len(block)) + ctypes.string_at(pointer, size)
    return bytes(block)
