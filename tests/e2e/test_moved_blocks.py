"""KV blocks that move between engines whose ranks divide a model in other ways: their bytes, and the tokens after them,
are those of one rank."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.runtime import RuntimeConfig
from ingot.engine import open_engine
from ingot.runtime import ModelRunner
from ingot.runtime.block_table import BlockTable
from ingot.runtime.kv_transfer import BlockRange, Bytes
from ingot.runtime.server.prefill_client import engine_digest
from tests.e2e import test_pipeline_parallel, test_tensor_parallel
from tests.e2e.test_quantised import bits
from tests.runtime.rank_processes import RankProcesses

SIZE = 16  # tokens of a block
PROMPTS = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (33, 49)]
Layout = tuple[int, int]  # tp, pp
Moved = list[tuple[BlockRange, Bytes]]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    made = RankProcesses(3)
    yield made
    made.close()


def offered(runner: ModelRunner) -> Moved:
    """The blocks of the prompts, which it computes as a prefill server does: what a prompt has beside whole blocks is
    left out."""
    transfer, found = runner.block_transfer(), []
    for prompt in PROMPTS:
        tokens = np.array(prompt[: (len(prompt) - 1) // SIZE * SIZE], np.int32)
        runner.generate([tokens], max_new_tokens=1, end_id=-1)
        blocks = transfer.found(BlockTable(), tokens, 0)
        assert blocks.count == len(tokens) // SIZE
        data = np.zeros(transfer.nbytes(blocks), np.uint8)
        assert transfer.read(blocks, data)
        found.append((blocks, data))
    return found


def check_takes(runner: ModelRunner, moved: Moved, expected: Sequence[Sequence[int]]) -> None:
    """Requests begin with the blocks, as if this engine had computed them."""
    transfer = runner.block_transfer()
    assert all(transfer.write(blocks, data) > 0 for blocks, data in moved)
    for blocks, data in moved:
        again = np.zeros_like(data)
        assert transfer.read(blocks, again)
        assert (again == data).all()
    before = runner.stats()["prefix_hit_tokens"]
    assert continued(runner) == expected
    hits = runner.stats()["prefix_hit_tokens"] - before
    assert hits == sum(blocks.count * SIZE for blocks, _ in moved)


def continued(runner: ModelRunner) -> list[list[int]]:
    found = runner.generate(PROMPTS, max_new_tokens=12, end_id=-1, temperature=0.9, random_seed=5)
    return [found[place, 0, len(prompt) :].tolist() for place, prompt in enumerate(PROMPTS)]


def digest(engine: Path) -> str:
    with open_engine(engine) as opened:
        return engine_digest(opened)


def built(config: BuildConfig, checkpoint: Path, folder: Path, layouts: Sequence[Layout]) -> Iterator[tuple[int, Path]]:
    """(ranks, engine) of each layout, whose digest is that of the engine of one rank."""
    for tp, pp in layouts:
        engine = folder / f"{tp}x{pp}"
        build(dataclasses.replace(config, tp_size=tp, pp_size=pp), checkpoint, engine)
        assert digest(engine) == digest(folder / "whole")
        yield tp * pp, engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layouts"), [("llama", ((2, 2),)), ("llama", ((2, 1), (1, 2), (4, 1))), ("smollm3", ((2, 1), (4, 1)))]
)
def test_the_reference(name: str, layouts: Sequence[Layout], tmp_path: Path) -> None:
    """Of 2 key heads, which 4 ranks have twice, and of 3, of which 2 ranks have one and two."""
    checkpoint = test_tensor_parallel.made(tmp_path, name)
    config = BuildConfig(target="ref", sum_parts=4, tokens_per_block=SIZE)
    build(config, checkpoint, tmp_path / "whole")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected, moved = continued(runner), offered(runner)
    for _, engine in built(config, checkpoint, tmp_path, layouts):
        with ModelRunner.from_dir(engine) as runner:
            assert [data.tobytes() for _, data in offered(runner)] == [data.tobytes() for _, data in moved]
        with ModelRunner.from_dir(engine) as runner:
            check_takes(runner, moved, expected)


CASES = [
    ("llama", "f32", "auto", "auto", ((2, 1), (1, 2), (2, 2), (4, 1))),
    ("llama", "bf16", "auto", "auto", ((2, 1), (1, 4))),
    ("qwen3", "w8", "int8", "int8", ((2, 1), (4, 1))),  # one key head, int8 keys with scales
    ("gemma3_text", "bf16", "auto", "auto", ((2, 2),)),  # two cache groups, one with a window
    ("qwen3_5_text", "f32", "auto", "auto", ((1, 2), (2, 1))),  # states, which all ranks of a stage have
    ("deepseek_v3", "f32", "auto", "auto", ((1, 2), (2, 2))),  # latents, which all ranks of a stage have
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "activations", "kv", "layouts"), CASES)
def test_processes(
    name: str,
    precision: str,
    activations: str,
    kv: str,
    layouts: Sequence[Layout],
    tmp_path: Path,
    processes: RankProcesses,
) -> None:
    source = test_tensor_parallel if name == "qwen3" else test_pipeline_parallel
    checkpoint = source.made(tmp_path, name)
    config = BuildConfig(
        target="cpu",
        precision=precision,
        activations=activations,
        kv_cache_dtype=kv,
        sum_parts=4 if any(tp > 1 for tp, _ in layouts) else None,
        tokens_per_block=SIZE,
        autotune=False,
    )
    build(config, checkpoint, tmp_path / "whole")
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected, moved = continued(runner), offered(runner)
    for ranks, engine in built(config, checkpoint, tmp_path, layouts):
        with processes.runner(engine, ranks) as runner:
            found = offered(runner)
            assert [data.tobytes() for _, data in found] == [data.tobytes() for _, data in moved]
        with processes.runner(engine, ranks) as runner:
            check_takes(runner, moved, expected)
        assert processes.said == [None] * (ranks - 1)
        with ModelRunner.from_dir(tmp_path / "whole") as runner:
            check_takes(runner, found, expected)


@pytest.mark.slow
def test_blocks_move_while_stages_compute(tmp_path: Path, processes: RankProcesses) -> None:
    """What is under way ends first, so that no earlier step writes over a block that has come; streams keep their bits,
    also beside requests that leave in the middle."""
    checkpoint = test_pipeline_parallel.made(tmp_path, "llama")
    config = BuildConfig(target="cpu", precision="f32", tokens_per_block=SIZE, autotune=False)
    build(config, checkpoint, tmp_path / "whole")
    build(dataclasses.replace(config, pp_size=2), checkpoint, tmp_path / "e")
    random = np.random.default_rng(4)
    others = [random.integers(0, 61, length).tolist() for length in (1, 20, 17, 5)]
    with ModelRunner.from_dir(tmp_path / "whole") as runner:
        expected, moved, beside = continued(runner), offered(runner), bits(runner, others, 40)
        streamed = runner.generate(others, max_new_tokens=40, end_id=-1).tolist()
    with processes.runner(tmp_path / "e", 2, RuntimeConfig(rank_timeout=20)) as runner:
        transfer = runner.block_transfer()
        stream = runner.generate(others, max_new_tokens=40, end_id=-1, streaming=True)
        leaving = runner.generate([others[1], others[2]], max_new_tokens=40, end_id=-1, streaming=True)
        next(stream), next(leaving)
        leaving.close()
        for blocks, data in moved:
            assert transfer.write(blocks, data) > 0
            next(stream)
        assert runner.executor.work().overlapped > 0
        assert continued(runner) == expected
        for blocks, data in moved:
            again = np.zeros_like(data)
            assert transfer.read(blocks, again)
            assert (again == data).all()
        *_, last = stream
        assert last.tolist() == streamed
        assert bits(runner, others, 40) == beside
    assert processes.said == [None]


@pytest.mark.slow
def test_engines_that_compute_other_bits(tmp_path: Path) -> None:
    checkpoint = test_tensor_parallel.made(tmp_path, "llama")
    other = test_tensor_parallel.made(_folder(tmp_path / "other"), "qwen2")
    config = BuildConfig(target="ref", tokens_per_block=SIZE)
    changed = {
        "sums": dataclasses.replace(config, sum_parts=2),
        "precision": dataclasses.replace(config, precision="w8"),
        "cache": dataclasses.replace(config, kv_cache_dtype="f32"),
        "blocks": dataclasses.replace(config, tokens_per_block=32),
        "target": dataclasses.replace(config, target="cpu", autotune=False),
    }
    build(config, checkpoint, tmp_path / "e")
    build(config, other, tmp_path / "model")
    for name, each in changed.items():
        build(each, checkpoint, tmp_path / name)
    build(dataclasses.replace(config, max_batch_size=3, max_num_tokens=50), checkpoint, tmp_path / "limits")
    found = [digest(tmp_path / name) for name in ("e", "model", *changed)]
    assert len(set(found)) == len(found)
    assert digest(tmp_path / "limits") == found[0]


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
