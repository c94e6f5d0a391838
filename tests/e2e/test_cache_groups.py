"""A model of two kinds of layers: what its engine says of its KV cache, and what a long context takes of it."""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import read_plan
from ingot.errors import CapacityError
from ingot.inspect import inspect
from ingot.plugins.cuda import target
from ingot.plugins.cuda.compiler import MachineCode
from ingot.plugins.cuda.target import CudaTarget
from ingot.runtime.model_runner import ModelRunner
from tests.tiny import tiny_model

BLOCK, LONGEST = 16, 225
GEMMA = {**find_family("gemma3_text").tiny, "sliding_window": 16, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    model = tiny_model(folder / "m", GEMMA)
    convert(ConvertOptions(model_dir=model.folder, output_dir=folder / "c"))
    config = BuildConfig(
        target="cpu/avx2,cuda/sm90", precision="bf16", tokens_per_block=BLOCK, max_seq_len=LONGEST, max_num_tokens=BLOCK
    )
    with pytest.MonkeyPatch.context() as patch:  # machine code has no part in it, and takes seconds to compile
        patch.setattr(CudaTarget, "build_blocker", lambda self: None)
        patch.setattr(target, "compile_kernels", lambda *given: MachineCode(image=b"none", kernels={}))
        build(config, folder / "c", folder / "e")
    return folder / "e"


def test_layers_that_are_alike_share_a_group(engine: Path) -> None:
    for name in ("cpu/avx2", "cuda/sm90"):
        groups = read_plan(engine, target=name).caches
        assert [(group.window, group.layers) for group in groups] == [(16, (0, 2)), (0, (1,))]


def test_inspect_tells_what_each_group_takes(engine: Path) -> None:
    found = inspect(engine)
    document = found.document["targets"][0] if "targets" in found.document else found.document
    window, whole = document["caches"]
    assert (window["window"], whole["window"]) == (16, 0)
    assert window["bytes_per_token"] == 2 * whole["bytes_per_token"]
    of_all = -(-LONGEST // BLOCK) * BLOCK * (window["bytes_per_token"] + whole["bytes_per_token"])
    blocks_of_a_window = 3
    less = (14 - blocks_of_a_window) * BLOCK * window["bytes_per_token"]
    assert document["sequence_bytes"] == 14 * BLOCK * 3 * whole["bytes_per_token"] - less < of_all / 2
    assert "each of the last 16 tokens in 2 layers" in found.text
    assert f"for a sequence of {LONGEST} tokens" in found.text


def test_inspect_tells_the_least_memory(engine: Path) -> None:
    """More than a sequence takes in the end."""
    document = inspect(engine).document
    document = document["targets"][0] if "targets" in document else document
    least = document["least_kv_bytes"]
    assert least > document["sequence_bytes"]
    ModelRunner.from_dir(engine, target="cpu", kv_cache_memory=least).close()
    with pytest.raises(CapacityError, match="too small for one sequence"):
        ModelRunner.from_dir(engine, target="cpu", kv_cache_memory=least - 1)


def test_a_long_context_takes_blocks_of_one_group_alone(engine: Path) -> None:
    prompt = np.random.default_rng(0).integers(0, 61, 180).tolist()
    with ModelRunner.from_dir(engine, target="cpu", kv_cache_memory="1MiB") as runner:
        window, whole = runner.blocks.pools
        used: list[tuple[int, int]] = []
        runner.executor.report_to(lambda step: used.append((window.num_used, whole.num_used)))
        runner.generate([prompt], max_new_tokens=40, end_id=-1)
        assert max(count for _, count in used) >= -(-len(prompt) // BLOCK)
        assert max(count for count, _ in used) < 8, "some for tokens that the session decodes by itself"
        assert window.num_cached + whole.num_cached > 0
