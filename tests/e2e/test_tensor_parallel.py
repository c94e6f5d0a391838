"""Engines of several ranks: the bits of one rank, whatever is divided; rank files that are missing or damaged."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import open_engine, read_manifest, read_plan
from ingot.errors import BuildError, EngineError, UsageError
from ingot.inspect import inspect
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.runtime import ModelRunner
from tests import quantised as write
from tests.convert.gguf.test_blocks import VOCAB as GGUF_VOCAB
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.quantised.test_formats import CASES as FORMATS
from tests.e2e.command import ingot
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_quantised import bits
from tests.e2e.test_sum_parts import SHAPE
from tests.spanning import first

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "vocab_size": 67},  # of which no number of ranks has equal shares
    "qwen3": {"num_key_value_heads": 1},  # each rank has the one key head
    "qwen2": {"num_key_value_heads": 4, "tie_word_embeddings": True},  # biases
    "gemma3_text": {"num_key_value_heads": 4},  # two cache groups
    "mixtral": {"num_key_value_heads": 2},
    "gpt2": {"n_head": 4},
    "gpt_oss": {"num_key_value_heads": 2},  # sinks, experts with biases
    "smollm3": {"num_attention_heads": 6, "num_key_value_heads": 3},  # which ranks have unevenly
    "bloom": {"n_head": 4},  # slopes that layers share
    "cohere": {"num_key_value_heads": 4},  # attention and MLP side by side, whose sums are added
    "afmoe": {"num_key_value_heads": 2},  # gates of heads
    "gemma3n_text": {"num_key_value_heads": 2},  # keys of an earlier layer, a gate that needs all columns
    "gemma4_text": {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{name: {"num_key_value_heads": 2} for name in ("olmo2", "qwen3_5_text", "lfm2")},  # attention that stays whole
    "deepseek_v3": {},
    "bitnet": {"num_key_value_heads": 2, "head_dim": 16},  # norms of all heads, and inside the MLP
    "nanochat": {"num_key_value_heads": 2},  # ones that norms share
}
OWN_SIZES = ("gpt2", "bloom", "deepseek_v3")
CASES = [
    *((name, "f32", "auto") for name in ("llama", "gpt2", "gpt_oss")),
    pytest.param("qwen2", "f32", "auto", marks=pytest.mark.slow),
    ("llama", "bf16", "auto"),
    ("qwen3", "w8", "int8"),
    ("gemma3_text", "w4g32", "int8"),
    ("mixtral", "w4g32", "bf16"),
    pytest.param("mixtral", "w8", "int8", marks=pytest.mark.slow),
    ("bloom", "w8", "int8"),
    ("afmoe", "bf16", "auto"),
    ("gemma3n_text", "f32", "auto"),
    ("gemma4_text", "bf16", "auto"),
    ("olmo2", "w8", "int8"),
    ("qwen3_5_text", "bf16", "auto"),
    ("lfm2", "f32", "auto"),
    ("deepseek_v3", "w8", "int8"),
    ("bitnet", "w8", "int8"),
    ("bitnet", "bf16", "auto"),
    ("nanochat", "w8", "int8"),
]
Q4_K = 12  # as GGUF numbers it
PROMPTS = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in (1, 18)]


def made(folder: Path, name: str) -> Path:
    shape = {} if name in OWN_SIZES else SHAPE
    return random_checkpoint(folder, {**find_family(name).tiny, **shape, **MODELS[name]})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("ranks"), "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    build(BuildConfig(target="ref", tp_size=2), checkpoint, checkpoint.parent / "e")
    return checkpoint.parent / "e"


@pytest.mark.parametrize(("name", "precision", "activations"), first(CASES))
def test_any_number_of_ranks_gives_the_same_bits(name: str, precision: str, activations: str, tmp_path: Path) -> None:
    checkpoint = made(tmp_path, name)
    config = BuildConfig(target="ref", precision=precision, activations=activations, sum_parts=4, tokens_per_block=16)
    found = []
    for ranks in (1, 2, 4):
        build(dataclasses.replace(config, tp_size=ranks), checkpoint, tmp_path / f"e{ranks}")
        assert read_manifest(tmp_path / f"e{ranks}").ranks == ranks
        with ModelRunner.from_dir(tmp_path / f"e{ranks}") as runner:
            found.append(bits(runner, PROMPTS))
    assert found[1] == found[2] == found[0]
    with ModelRunner.from_dir(tmp_path / "e2", max_num_tokens=7) as runner:
        assert bits(runner, PROMPTS) == found[0]


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("name", "precision", "activations"),
    [
        ("awq g32", "w4tsg32", "int8"),
        ("ct nvfp4", "w4tg16", "bf16"),
        ("hqq 3 bits", "w4tsg32", "int8"),
        ("bnb int8", "w8", "bf16"),
        ("ct int8", "w8", "int8"),
        ("torchao int4", "w8tsg32", "int8"),
        ("gptq v1 asymmetric, desc_act", "w4tsg32", "int8"),  # q, k and v apart, each with its own order
        ("awq rows, without zero points", "w4tg128", "bf16"),  # one scale for a row, in smaller groups where it is cut
    ],
)
def test_quantised_checkpoints(name: str, precision: str, activations: str, tmp_path: Path) -> None:
    """Each rank keeps the codes of its rows and of its columns, which are whole groups. Two of four ranks have the same
    key head."""
    settings, packer, _ = FORMATS[name]
    write.write_model(tmp_path / "m", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    config = BuildConfig(target="ref", activations=activations, sum_parts=4, tokens_per_block=16, autotune=False)
    found = []
    for ranks in (1, 2, 4):
        build(dataclasses.replace(config, tp_size=ranks), tmp_path / "c", tmp_path / f"e{ranks}")
        manifest = read_manifest(tmp_path / f"e{ranks}")
        assert manifest.precision == precision
        with ModelRunner.from_dir(tmp_path / f"e{ranks}") as runner:
            found.append(bits(runner, [[token % write.VOCAB for token in prompt] for prompt in PROMPTS]))
    assert found[0] == found[1] == found[2]
    assert [read_plan(tmp_path / "e4", rank).caches[0].kv_heads for rank in range(4)] == [1] * 4


@pytest.mark.daily(1)
def test_units_that_no_part_cuts(tmp_path: Path) -> None:
    """A part of 256 columns of Q4_K has whole units; parts of 128 columns would cut them."""
    write_llama(tmp_path, Q4_K)
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "c"))
    config = BuildConfig(target="ref", activations="int8", sum_parts=2, tokens_per_block=16, autotune=False)
    found = []
    for ranks in (1, 2):
        build(dataclasses.replace(config, tp_size=ranks), tmp_path / "c", tmp_path / "e")
        dtypes = {each.name: each.dtype for rank in range(ranks) for each in read_plan(tmp_path / "e", rank).weights}
        down = {dtype for name, dtype in dtypes.items() if name.startswith("layers.0/down")}
        others = {dtype for name, dtype in dtypes.items() if name.startswith(("layers.0/q", "layers.0/gate"))}
        assert (down, others) == ({DType.W4KS}, {DType.W4TS})
        verified = ingot("verify", tmp_path / "e", "--against", tmp_path / "c", "--tokens", 8).succeeds()
        assert "every weight, kernel and layer is within its tolerance" in verified.out
        with ModelRunner.from_dir(tmp_path / "e") as runner:
            found.append(bits(runner, [[token % GGUF_VOCAB for token in prompt] for prompt in PROMPTS]))
    assert found[0] == found[1]


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["gptq v1 asymmetric, desc_act", "ct 4 bits asymmetric, actorder"])
def test_columns_in_an_order_of_their_own(kind: str, tmp_path: Path) -> None:
    """Ranks put the inputs of such a weight together, and each has some of its rows: nothing is summed in parts, so
    that these are the bits of an engine without any."""
    settings, packer, _ = FORMATS[kind]
    write.write_model(tmp_path / "m", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    config = BuildConfig(target="ref", activations="int8", tokens_per_block=16, autotune=False)
    found = []
    for parts, ranks in ((1, 1), (2, 1), (2, 2)):
        build(dataclasses.replace(config, sum_parts=parts, tp_size=ranks), tmp_path / "c", tmp_path / "e")
        assert read_manifest(tmp_path / "e").lost_codes == {}
        with ModelRunner.from_dir(tmp_path / "e") as runner:
            found.append(bits(runner, [[token % write.VOCAB for token in prompt] for prompt in PROMPTS]))
    assert found[0] == found[1] == found[2]
    for rank in range(2):
        plan = read_plan(tmp_path / "e", rank)
        assert [group.kv_heads for group in plan.caches] == [1]
        shapes = {each.name.removesuffix(".rows"): (each.shape, each.dtype) for each in plan.weights}
        for name, columns in (("attention_out", write.HEADS * write.HEAD_DIM), ("down", write.INNER)):
            assert shapes[f"layers.0/{name}.weight"] == ((write.HIDDEN // 2, columns), DType.W4TS)
    verified = ingot("verify", tmp_path / "e", "--against", tmp_path / "c", "--tokens", 8).succeeds()
    assert "every weight, kernel and layer is within its tolerance" in verified.out


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("heads", "precision", "activations", "of_two", "of_four"),
    [
        ((6, 3), "f32", "auto", [1, 2], [1, 1, 1, 1]),  # the first key head is two ranks'
        ((6, 2), "bf16", "auto", [1, 1], [1, 1, 1, 1]),  # of three query heads, ranks have two and one
        ((10, 5), "w4g32", "int8", [3, 2], [2, 1, 1, 1]),
        ((4, 1), "w8", "int8", [1, 1], [1, 1, 1, 1]),
    ],
)
def test_key_heads_that_ranks_cannot_share_evenly(
    heads: tuple[int, int], precision: str, activations: str, of_two: list[int], of_four: list[int], tmp_path: Path
) -> None:
    """Each rank holds those of its query heads, and has room for them alone. of_two, of_four: how many."""
    shape = {**SHAPE, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": 67}
    checkpoint = random_checkpoint(tmp_path, {**find_family("llama").tiny, **shape})
    config = BuildConfig(
        target="ref", precision=precision, activations=activations, sum_parts=4, tokens_per_block=16, autotune=False
    )
    found = []
    for ranks, held in ((1, [heads[1]]), (2, of_two), (4, of_four)):
        engine = tmp_path / f"e{ranks}"
        build(dataclasses.replace(config, tp_size=ranks), checkpoint, engine)
        groups = [read_plan(engine, rank).caches[0] for rank in range(ranks)]
        assert [group.kv_heads for group in groups] == held
        one = read_plan(tmp_path / "e1").caches[0].block_bytes // heads[1]
        assert [group.block_bytes for group in groups] == [one * each for each in held]
        with ModelRunner.from_dir(engine) as runner:
            found.append(bits(runner, PROMPTS))
    assert found[1] == found[2] == found[0]


@pytest.mark.slow
def test_columns_in_an_order_of_their_own_whose_key_heads_are_uneven(tmp_path: Path) -> None:
    """Three query heads each would be one key head and half of the next one: such a weight is stored in another way,
    for any number of ranks."""
    settings, packer, _ = FORMATS["gptq v1 asymmetric, desc_act"]
    sizes = {**write.PRODUCTS, "self_attn.q_proj": (96, 64), "self_attn.o_proj": (64, 96)}
    sizes |= {f"self_attn.{name}_proj": (48, 64) for name in "kv"}
    config = {"num_attention_heads": 6, "num_key_value_heads": 3}
    write.write_model(tmp_path / "m", settings, packer, config=config, products=sizes)
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c"))
    found = []
    for ranks in (1, 2):
        build(
            BuildConfig(target="ref", activations="int8", tokens_per_block=16, sum_parts=2, tp_size=ranks),
            tmp_path / "c",
            tmp_path / "e",
        )
        assert list(read_manifest(tmp_path / "e").lost_codes) == ["layers.0/attention_out"]
        with ModelRunner.from_dir(tmp_path / "e") as runner:
            found.append(bits(runner, [[token % write.VOCAB for token in prompt] for prompt in PROMPTS]))
    assert found[0] == found[1]
    assert [read_plan(tmp_path / "e", rank).caches[0].kv_heads for rank in range(2)] == [2, 1]


@pytest.mark.parametrize(("name", "count"), [("llama", 0), ("olmo2", 2), ("bitnet", 2), ("qwen3_5_text", 2)])
def test_layers_that_stay_whole_are_told(name: str, count: int, tmp_path: Path) -> None:
    """Their cache is every rank's; what is left of the layers is divided."""
    checkpoint = made(tmp_path, name)
    report = build(BuildConfig(target="ref", tp_size=2, pp_size=1), checkpoint, tmp_path / "e")
    told = [note for note in report.notes if "are not divided" in note]
    assert told == [
        f"attention or states of {count} layers are not divided: each of 2 ranks computes and holds them whole"
    ] * (count > 0)
    build(BuildConfig(target="ref", sum_parts=2), checkpoint, tmp_path / "whole")
    own, whole = ({each.name: each.shape for each in read_plan(tmp_path / at).weights} for at in ("e", "whole"))
    assert own["layers.0/gate_up.weight"][0] == whole["layers.0/gate_up.weight"][0] // 2


def test_ranks_hold_shares_of_weights_and_cache(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", sum_parts=2), checkpoint, tmp_path / "whole")
    whole = read_plan(tmp_path / "whole")
    for rank in range(2):
        plan = read_plan(engine, rank)
        assert [group.kv_heads for group in plan.caches] == [1]
        products = [sum(w.nbytes for w in each.weights if len(w.shape) == 2) for each in (plan, whole)]
        assert products[0] < 0.7 * products[1], "the token table is in each"
    assert read_manifest(engine).model == read_manifest(tmp_path / "whole").model
    document = json.loads(inspect(engine).to_json())
    assert [each["file"] for each in document["ranks"]] == ["rank0.engine", "rank1.engine"]
    assert "rank1.engine: " in inspect(engine).summary


def test_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    args = ("--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "e")
    ingot("build", *args, "--target", "ref", "--tp_size", 2).succeeds()
    assert "all hashes match" in ingot("verify", tmp_path / "e").succeeds().out
    verified = ingot("verify", tmp_path / "e", "--against", checkpoint, "--tokens", 8).succeeds()
    assert "every weight, kernel and layer is within its tolerance" in verified.out
    ingot("build", *args, "--target", "tensorrt/sm90", "--tp_size", 2).fails(
        "--tp_size 2 is not supported on tensorrt/sm90", code=2
    )


@pytest.mark.parametrize("workers", [None, 1, 5])
def test_the_same_bytes_every_time(workers: int | None, engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", tp_size=2, workers=workers), checkpoint, tmp_path / "e")
    for path in engine.iterdir():
        assert path.read_bytes() == (tmp_path / "e" / path.name).read_bytes()


def test_damage(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "missing")
    (tmp_path / "missing" / "rank1.engine").unlink()
    with pytest.raises(EngineError, match=r"missing(.|\n)*rank1\.engine"):
        ModelRunner.from_dir(tmp_path / "missing")
    shutil.copytree(engine, tmp_path / "flipped")
    path = tmp_path / "flipped" / "rank1.engine"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(EngineError, match=r"rank1\.engine"):
        ModelRunner.from_dir(tmp_path / "flipped")
    build(BuildConfig(target="ref", tp_size=2, precision="w8"), checkpoint, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "rank1.engine", tmp_path / "missing" / "rank1.engine")
    with pytest.raises(EngineError, match=r"rank1\.engine"):
        ModelRunner.from_dir(tmp_path / "missing")


def test_one_rank_alone_computes_nothing(engine: Path) -> None:
    with open_engine(engine, rank=1) as opened, pytest.raises(EngineError, match=r"2 ranks compute it together, and 1"):
        RefSession(opened.plan, opened.weights, SessionOptions(num_blocks=(4,)))
    with pytest.raises(UsageError, match="computes all 2 ranks"):
        ModelRunner.from_dir(engine, rank=1)


def test_ranks_that_do_not_go_together(engine: Path) -> None:
    target: Any = find_target("ref")
    with open_engine(engine) as first, open_engine(engine, rank=1) as second:
        short = dataclasses.replace(second.plan, steps=second.plan.steps[1:])
        with pytest.raises(EngineError, match=r"do not belong together(.|\n)*rank 1"):
            target.open_ranks([first.plan, short], [first.weights, second.weights], SessionOptions(num_blocks=(4,)))


@pytest.mark.parametrize(
    ("heads", "parts", "ranks", "precision"),
    [((6, 2), 2, 2, "w4g64"), ((12, 3), 8, 4, "f32")],  # a group has two heads; a rank has parts of two key heads
)
def test_key_heads_that_cannot_be_divided(
    heads: tuple[int, int], parts: int, ranks: int, precision: str, tmp_path: Path
) -> None:
    shape = {**SHAPE, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    checkpoint = random_checkpoint(tmp_path, {**find_family("llama").tiny, **shape})
    config = BuildConfig(target="ref", precision=precision, sum_parts=parts, tp_size=ranks, dry_run=True)
    words = r"share their 2 key heads unevenly(.|\n)*leave --sum_parts out, or give a smaller quantisation group"
    with pytest.raises(BuildError, match=words):
        build(config, checkpoint, tmp_path / "e")


def test_refused_options() -> None:
    with pytest.raises(UsageError, match=r"--sum_parts 2 is not a multiple of --tp_size(.|\n)*a multiple of 4"):
        BuildConfig(tp_size=4, sum_parts=2)
    with pytest.raises(UsageError, match="tp_size must be a power of two"):
        BuildConfig(tp_size=3)
    with pytest.raises(UsageError, match="cannot be combined with --tp_size"):
        BuildConfig(tp_size=2, screen_lm_head=True)
