"""What a target's kernels cannot take is refused when it is built, with the limit, and never when it is opened."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ingot.builder.build import build
from ingot.builder.graph import Graph
from ingot.builder.kernel_limits import check_graph, check_plan
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import open_engine
from ingot.errors import BuildError, EngineError, NoKernelError, PassError
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import open_native
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.registry import find_target
from ingot.plugins.target import KernelLimits, SessionOptions
from tests.handmade import TINY_LLAMA

CPUS = ("cpu/avx2", "cpu/avx512", "cpu/amx")
GPUS = ("cuda/sm80", "cuda/sm90", "tensorrt-rtx", "tensorrt/sm90")
OPTIONS = SessionOptions(num_blocks=(1,), threads=1)

needs_kernels = pytest.mark.skipif(not kernel_table(), reason="the compiled module is not here")


class Narrow(RefTarget):
    """ref with limits."""

    def __init__(self, **limits: Any) -> None:
        self._limits = KernelLimits(**limits)

    def limits(self) -> KernelLimits:
        return self._limits


def checkpoint_of(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    return folder / "c"


def dry(checkpoint: Path, target: str) -> object:
    return build(BuildConfig(target=target, dry_run=True, autotune=False), checkpoint, checkpoint.parent / "e")


@pytest.mark.daily(1)
@needs_kernels
@pytest.mark.parametrize("head_dim", [2, 6, 10, 514, 516])
def test_heads_that_no_plan_holds(tmp_path: Path, head_dim: int) -> None:
    checkpoint = checkpoint_of(tmp_path, {**TINY_LLAMA, "head_dim": head_dim})
    for target in (*CPUS, "ref"):
        with pytest.raises(BuildError, match=f"head(.|\n)*multiple of 4, at most 512(.|\n)*got: {head_dim}"):
            dry(checkpoint, target)


@needs_kernels
@pytest.mark.parametrize("head_dim", [4, 12, 512])
def test_heads_at_the_limits_are_built_and_opened(tmp_path: Path, head_dim: int) -> None:
    checkpoint = checkpoint_of(tmp_path, {**TINY_LLAMA, "head_dim": head_dim})
    build(BuildConfig(target="cpu/avx2", autotune=False), checkpoint, tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        open_native(engine.plan, engine.weights, OPTIONS, "avx2").close()


@pytest.mark.parametrize("key", ["linear_key_head_dim", "linear_conv_kernel_dim"])
def test_states_that_no_kernel_takes(tmp_path: Path, key: str) -> None:
    checkpoint = checkpoint_of(tmp_path, {**find_family("qwen3_5_text").tiny, key: 1025})
    for target in (*CPUS, "ref"):
        with pytest.raises(BuildError, match=r"layer that keeps a state(.|\n)*got: 1025"):
            dry(checkpoint, target)


@pytest.mark.parametrize("target", GPUS)
def test_heads_that_no_gpu_kernel_takes(tmp_path: Path, target: str) -> None:
    most = 512 if target.startswith("cuda") else 256
    checkpoint = checkpoint_of(tmp_path, {**TINY_LLAMA, "head_dim": most + 2})
    with pytest.raises(BuildError, match=rf"head(.|\n)*at most {most}(.|\n)*got: {most + 2}"):
        dry(checkpoint, target)


def test_groups_that_no_gpu_kernel_takes(tmp_path: Path) -> None:
    config = {**TINY_LLAMA, "num_attention_heads": 130, "num_key_value_heads": 2, "head_dim": 4}
    checkpoint = checkpoint_of(tmp_path, config)
    with pytest.raises(BuildError, match=r"one key head(.|\n)*at most 64(.|\n)*got: 65"):
        dry(checkpoint, "cuda/sm90")


@needs_kernels
def test_a_window_beyond_32_bits(tmp_path: Path) -> None:
    """convert leaves it alone: it is harmless in the graph."""
    config = {**find_family("mistral").tiny, "sliding_window": 1 << 31}
    with pytest.raises(BuildError, match=r"sliding window(.|\n)*at most 2,147,483,647"):
        dry(checkpoint_of(tmp_path, config), "cpu/avx2")


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"head_dim": 12, "head_dim_multiple": 16}, r"a multiple of 16, at most 12(.|\n)*got: 24"),
        ({"head_dim_multiple": 16}, r"a multiple of 16, at most(.|\n)*got: 24"),
        ({"heads": 3}, "query heads are beyond(.|\n)*at most 3(.|\n)*got: 4"),
        ({"heads": 1}, "heads are beyond(.|\n)*at most 1"),
        ({"group": 1}, "of one key head(.|\n)*at most 1(.|\n)*got: 2"),
        ({"layers": 1}, "layers are beyond(.|\n)*at most 1(.|\n)*got: 2"),
        ({"extent": 15}, "sliding window(.|\n)*at most 15(.|\n)*got: 16"),
        ({"extent": 40}, "rows or columns(.|\n)*at most 40"),
        ({"experts": 4}, "experts are beyond(.|\n)*at most 4(.|\n)*got: 5"),
        ({"taken_experts": 1000}, "take(.|\n)*at most 1,000(.|\n)*max_num_tokens is 2,048"),
    ],
)
def test_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], words: str) -> None:
    """Mixtral has everything that is limited: 192 columns of q, k and v, experts, a window."""
    checkpoint = checkpoint_of(tmp_path, dict(find_family("mixtral").tiny))
    dry(checkpoint, "ref")
    monkeypatch.setattr("ingot.builder.build.find_targets", lambda names: (Narrow(**limits),))
    with pytest.raises(BuildError, match=words):
        dry(checkpoint, "ref")


def test_a_token_table_that_is_smaller_than_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, TINY_LLAMA)
    model = onnx.load(checkpoint / "model.onnx", load_external_data=False)
    table = next(each for each in model.graph.initializer if each.name == "embed/weight")
    table.dims[0] -= 1
    next(each for each in table.external_data if each.key == "length").value = str(60 * 32 * 2)
    (checkpoint / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PassError, match=r"fewer rows than lm_head(.|\n)*at least 61(.|\n)*got: 60"):
        dry(checkpoint, "ref")


def test_the_limits_of_a_plan(tmp_path: Path) -> None:
    report = build(BuildConfig(target="ref", dry_run=True), checkpoint_of(tmp_path, TINY_LLAMA), tmp_path / "e")
    with pytest.raises(BuildError, match=r"columns of a buffer(.|\n)*at most 95"):
        check_plan(report.plan, Narrow(extent=95))
    check_plan(report.plan, Narrow(extent=96))


@needs_kernels
def test_sessions_have_the_limits_that_the_target_states(tmp_path: Path) -> None:
    """The native session, asked for each limit and for one more, refuses what the target says it does."""
    checkpoint = checkpoint_of(tmp_path, dict(find_family("mixtral").tiny))
    build(BuildConfig(target="cpu/avx2", autotune=False), checkpoint, tmp_path / "e")
    limits = find_target("cpu/avx2").limits()
    with open_engine(tmp_path / "e") as engine:
        plan, weights = engine.plan, engine.weights

    def words(changed: Any) -> str:
        try:
            open_native(changed, np.asarray(weights), OPTIONS, "avx2").close()
        except EngineError as error:
            return str(error)
        return ""

    def with_kv(**changes: Any) -> str:
        return words(dataclasses.replace(plan, caches=(dataclasses.replace(plan.caches[0], **changes),)))

    def with_attr(op: str, **changes: int) -> str:
        steps = [dataclasses.replace(s, attrs={**s.attrs, **changes}) if s.op == op else s for s in plan.steps]
        return words(dataclasses.replace(plan, steps=tuple(steps)))

    for dim in (*range(1, 21), *range(limits.head_dim - 8, limits.head_dim + 9)):
        fits = dim <= limits.head_dim and dim % limits.head_dim_multiple == 0
        assert ("head_dim must be a multiple" in with_kv(head_dim=dim)) is not fits, dim
    assert "kv_heads is out of range" in with_kv(kv_heads=limits.heads + 1)
    assert "kv_heads is out of range" not in with_kv(kv_heads=limits.heads)
    assert "KV layers is out of range" in with_kv(layers=tuple(range(limits.layers + 1)))
    assert "KV layers is out of range" not in with_kv(layers=tuple(range(limits.layers)))
    assert "attribute heads" in with_attr("paged_attention", heads=limits.heads + 1)
    assert "attribute heads" not in with_attr("paged_attention", heads=limits.heads)
    assert "attribute window" not in with_attr("paged_attention", window=limits.extent)
    assert "attribute window" in with_attr("paged_attention", window=limits.extent + 2)
    check_plan(plan, find_target("cpu/avx2"))


def test_activations_that_no_gpu_kernel_has(tmp_path: Path) -> None:
    """Those that it has pass; the refusal names another one."""
    checkpoint = checkpoint_of(tmp_path, {**TINY_LLAMA, "hidden_act": "relu2"})
    graph = Graph.load(checkpoint / "model.onnx")
    run_passes(graph, structure_passes())
    check_graph(graph, Narrow(activations=frozenset({"none", "silu", "relu2"})))
    with pytest.raises(NoKernelError, match="no kernel for the activation relu2"):
        check_graph(graph, Narrow(activations=frozenset({"none", "silu"})))
    assert find_target("cuda/sm90").limits().activations <= frozenset(ACTIVATIONS)


def test_what_tensorrt_refuses_names_the_gpu_targets_that_take_it(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, dict(find_family("bloom").tiny))
    with pytest.raises(NoKernelError, match=r"ALiBi(.|\n)*build for a cuda or CPU target"):
        dry(checkpoint, "tensorrt-rtx")
    dry(checkpoint, "cuda/sm90")
