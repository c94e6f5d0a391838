"""Targets of TensorRT on the emulated GPU: an emulated library, whose networks numpy runs."""

import ctypes
import json
import struct
import sys
from pathlib import Path

import onnx
import pytest

from ingot.engine import open_engine
from ingot.plan import Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import File, Progress
from ingot.plugins.tensorrt import full_target
from ingot.plugins.tensorrt import target as target_module
from ingot.plugins.tensorrt.full_target import TensorRtTarget
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.lowering import lower
from ingot.plugins.tensorrt.target import TensorRtRtxTarget
from tests.plugins.tensorrt.emulated_runtime import EmulatedTensorRt

LIBRARY = Library(name="TensorRT-RTX", version="1.7.1.116", module="emulated_tensorrt", folder=Path("nowhere"))


def header(version: tuple[int, ...] = (1, 7, 1, 116)) -> bytes:
    """That of a compiled network."""
    return struct.pack("<4s12xQ4B4sI28x", b"vtrt", 69, *version, b"vtrt", 8)


class EmulatedLibrary:
    """While a test runs, builds of TensorRT's targets keep their networks here instead of compiling them.

    networks  of the builds so far
    """

    def __init__(self, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu, self._monkeypatch = gpu, monkeypatch
        self.networks: list[onnx.ModelProto] = []
        description = json.dumps({"version": LIBRARY.version}).encode()
        files = (File(suffix=".plan", data=header() + b"whole"), File(suffix=".plan.json", data=description))

        def compile_graph(
            target: TensorRtRtxTarget, graph: OpGraph, plan: Plan, progress: Progress, **options: object
        ) -> tuple[File, ...]:
            self.networks.append(lower(graph, plan))
            return files

        monkeypatch.setattr(target_module, "find_rtx", lambda: LIBRARY)
        monkeypatch.setattr(full_target, "find_tensorrt", lambda: LIBRARY)
        monkeypatch.setattr(TensorRtRtxTarget, "compile", compile_graph)
        monkeypatch.setattr(TensorRtTarget, "compile_timed", compile_graph)

    def load(self, engine: Path, network: onnx.ModelProto) -> None:
        """The library now runs this network for sessions of the engine."""
        module = EmulatedTensorRt(self._gpu, open_engine(engine).plan, network)
        self._monkeypatch.setitem(sys.modules, LIBRARY.module, module)
