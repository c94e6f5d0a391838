"""The library as found: what is missing in words, and the bindings as the session's types say."""

import importlib.metadata
import inspect
import re
import struct
from pathlib import Path

import pytest

from ingot.errors import EngineError, install
from ingot.plugins.registry import find_target
from ingot.plugins.tensorrt import bindings
from ingot.plugins.tensorrt import library as library_module
from ingot.plugins.tensorrt.library import INSTALL, Library, find_rtx
from ingot.plugins.tensorrt.plan_file import read_header
from ingot.plugins.tensorrt.plugin import AttentionPlugin
from ingot.plugins.tensorrt.target import TARGETS, network_file
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.ops.states import GPU_OPS

NAMES = ["tensorrt-rtx", "tensorrt-rtx/sm120", "tensorrt-rtx/sm89", "tensorrt-rtx/sm86", "tensorrt-rtx/sm80"]
WHEEL_CLASSES = {
    "Context": "IExecutionContext",
    "TensorRtEngine": "ICudaEngine",
    "Runtime": "Runtime",
    "ChecksEngines": "Runtime",
    "JudgesStreams": "IExecutionContext",
    "RuntimeConfig": "IRuntimeConfig",
    "SpecializesKernels": "IRuntimeConfig",
}


def test_every_target_has_kernels_of_the_same_ops() -> None:
    assert [target.name for target in TARGETS] == NAMES
    for target in TARGETS:
        ops = {kernel.split(".")[0] for kernel in target.kernels()}
        assert ops == {*GPU_OPS, "sample"}


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_module, "_MODULES", ("tensorrt_rtx_libs_not_here", "json"))
    found = find_rtx()
    assert isinstance(found, str)
    assert found.startswith("TensorRT-RTX is not installed (no tensorrt-rtx-cu13-libs); pip install")
    for wheel in ("tensorrt-rtx-cu13-libs==1.7.1.*", "tensorrt-rtx-cu13-bindings==1.7.1.*", install("tensorrt-rtx")):
        assert wheel in INSTALL
    assert find_target("tensorrt-rtx/sm89").build_blocker() == found


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "_MODULES", ("json", "json"))
    versions = {"tensorrt-rtx-cu13-libs": "1.8.0.3", "tensorrt-rtx-cu13-bindings": "1.7.1.116"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    found = find_rtx()
    assert isinstance(found, str)
    assert "must be 1.7.1" in found
    assert "tensorrt-rtx-cu13-libs 1.8.0.3" in found
    assert "pip install" in found


@pytest.mark.tensorrt
@pytest.mark.parametrize("name", sorted(WHEEL_CLASSES))
def test_the_bindings_have_what_a_session_uses(library: Library, name: str) -> None:
    """Each method by its name, with parameters of the same names in the same order."""
    real = getattr(bindings.load(library), WHEEL_CLASSES[name])
    declared = getattr(bindings, name)
    for attribute in declared.__annotations__:
        assert hasattr(real, attribute)
    methods = {each: method for each, method in vars(declared).items() if inspect.isfunction(method) and each[0] != "_"}
    assert methods or declared.__annotations__
    for each, method in methods.items():
        wanted = list(inspect.signature(method).parameters)[1:]
        overloads = re.findall(rf"{each}\(self: [^,)]*(?:, )?(.*?)\) ->", getattr(real, each).__doc__ or "")
        assert wanted in [re.findall(r"(?:^|, )(\w+): ", overload) for overload in overloads], (each, overloads)


@pytest.mark.tensorrt
def test_the_plugin_overrides_what_the_bindings_call(library: Library) -> None:
    trt = bindings.load(library)
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)
    known = {name for base in bases for name in dir(base)}
    ours = {name for name, member in vars(AttentionPlugin).items() if inspect.isfunction(member)}
    assert ours <= known
    for name in ("EngineValidity", "ExecutionContextAllocationStrategy", "PluginFieldType", "PluginFieldCollection"):
        assert hasattr(trt, name)
    assert trt.EngineValidity.INVALID != trt.EngineValidity.VALID
    assert trt.ExecutionContextAllocationStrategy.USER_MANAGED.name == "USER_MANAGED"
    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER.name == "EAGER"


def test_the_header_is_read() -> None:
    data = struct.pack("<4s12xQ4B4sI28x", b"vtrt", 1234, 1, 7, 1, 116, b"vtrt", 0x18 | 0x100)
    header = read_header(data, "a file")
    assert (header.nbytes, header.version, header.capabilities) == (1234, "1.7.1.116", ("8.9", "12.0", "0x100"))
    for damaged, word in ((data[:63], "cut short"), (b"x" + data[1:], "not a TensorRT-RTX engine")):
        with pytest.raises(EngineError, match=word):
            read_header(damaged, "a file")


def test_the_network_of_a_target_is_found(tmp_path: Path) -> None:
    assert network_file(tmp_path, NAMES[0]).name == "rank0.plan"
    (tmp_path / "rank0.tensorrt-rtx-sm89.plan").touch()
    assert network_file(tmp_path, "tensorrt-rtx/sm89").name == "rank0.tensorrt-rtx-sm89.plan"
    assert network_file(tmp_path, "tensorrt-rtx/sm86").name == "rank0.plan"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    model = write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16})
    ingot("convert", "--model_dir", model, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


def test_a_build_says_what_to_install(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "_MODULES", ("json", "tensorrt_rtx_bindings_not_here"))
    out = tmp_path / "engine"
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", out, "--target", "tensorrt-rtx/sm89").fails(
        "cannot build for tensorrt-rtx/sm89", "no tensorrt-rtx-cu13-bindings", install("tensorrt-rtx")
    )
    assert not out.exists()


@pytest.mark.parametrize("options", [("--precision", "w8"), ("--precision", "w4g32"), ("--kv_cache_dtype", "int8")])
def test_quantised_weights_and_caches_are_refused(checkpoint: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    """Also where the wheels are: nothing is built."""
    out = tmp_path / "engine"
    done = ingot(
        "build",
        "--checkpoint_dir",
        checkpoint,
        "--output_dir",
        out,
        "--target",
        "tensorrt-rtx/sm89",
        "--dry_run",
        *options,
    )
    assert done.code == 1
    refused = "has no kernel for op" if "int8" in options else "cannot compute with w"
    assert f"target tensorrt-rtx/sm89 {refused}" in done.err
    assert "on the sample text" not in done.err
    assert not out.exists()
