"""Every type of blocks, bit for bit, through convert, onnxruntime and a ref engine."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.blocks import TYPES
from ingot.dtypes import DType
from ingot.errors import IngotError
from ingot.inspect import inspect
from tests import gguf_files as write
from tests import quantised
from tests.builder.engines import engine_logits
from tests.convert.quantised.test_formats import product_weights
from tests.graph_logits import logits_of_graph
from tests.spanning import often

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 1, 20, 37
IDS = np.random.default_rng(3).integers(0, VOCAB, (2, 9))
PRODUCTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def paired(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter lays them: the halves of a head row by row in turn."""
    half = len(values) // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    return values[order]


def unpaired(values: np.ndarray, heads: int) -> np.ndarray:
    back = np.empty(len(values), int)
    back[paired(np.arange(len(values)), heads)] = np.arange(len(values))
    return values[back]


def write_llama(
    folder: Path,
    kind: int,
    *,
    vocab: int = VOCAB,
    tokenizer: Mapping[str, object] | None = None,
    kinds: Mapping[str, int] | None = None,
    more: Mapping[str, write.Stored] | None = None,
) -> dict[str, np.ndarray]:
    """model.gguf whose products and token table have this type; the values by Hugging Face's names. kinds: of some
    products others. more: further tensors."""
    rng = np.random.default_rng(kind)
    size = write.BLOCKS[kind][1]
    hidden, inner = size, 2 * size
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "ffn_gate": (inner, hidden)}
    shapes |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    tensors, values = {}, {}
    for name, shape in shapes.items():
        tensors[f"blk.0.{name}.weight"], values[f"model.layers.0.{PRODUCTS[name]}.weight"] = write.random_blocks(
            rng, (kinds or {}).get(name, kind), shape
        )
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        key = f"model.layers.0.self_attn.{name}_proj.weight"
        values[key] = unpaired(values[key], heads)
    out = (rng.standard_normal((hidden, query)) / 8).astype(np.float16).astype(np.float32)
    tensors["blk.0.attn_output.weight"] = write.floats(out, write.F16)  # of rows that are no whole blocks
    values["model.layers.0.self_attn.o_proj.weight"] = out
    tensors["token_embd.weight"], values["model.embed_tokens.weight"] = write.random_blocks(rng, kind, (vocab, hidden))
    for name, theirs in (
        ("blk.0.attn_norm", "model.layers.0.input_layernorm"),
        ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm"),
        ("output_norm", "model.norm"),
    ):
        values[f"{theirs}.weight"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
        tensors[f"{name}.weight"] = write.floats(values[f"{theirs}.weight"])
    tensors |= more or {}
    write.write_gguf(folder / "model.gguf", {**llama_settings(hidden, inner), **(tokenizer or {})}, tensors)
    return values


def llama_settings(hidden: int, inner: int) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
    }


@pytest.mark.parametrize("kind", often(write.BLOCKS, (2, 12)))  # one with a scale for each block, one of super-blocks
def test_a_type(tmp_path: Path, kind: int) -> None:
    """Every number of the Checkpoint is that of the file."""
    values = write_llama(tmp_path, kind)
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    made = product_weights(tmp_path / "checkpoint")
    wanted = [values[f"model.layers.0.{name}.weight"] for name in PRODUCTS.values()]
    for got, expected in zip(made, [*wanted, values["model.embed_tokens.weight"]], strict=True):
        np.testing.assert_array_equal(got, expected)
    assert f"gguf {write.BLOCKS[kind][0]}" in inspect(tmp_path / "checkpoint").text


@pytest.mark.parametrize("kind", [2, 40])
def test_scales_of_whole_tensors(tmp_path: Path, kind: int) -> None:
    """As files of NVFP4 have them, which say how inputs were calibrated too. llama.cpp takes them beside any type."""
    scales = {"attn_q": 0.75, "ffn_down": 1.7}
    more = {f"blk.0.{name}.scale": write.floats(np.array([value])) for name, value in scales.items()}
    values = write_llama(tmp_path, kind, more={**more, "blk.0.attn_q.input_scale": write.floats(np.array([0.3]))})
    for name, value in scales.items():
        values[f"model.layers.0.{PRODUCTS[name]}.weight"] *= np.float32(value)
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    for got, name in zip(product_weights(tmp_path / "checkpoint"), PRODUCTS.values(), strict=False):
        np.testing.assert_array_equal(got, values[f"model.layers.0.{name}.weight"])


@pytest.mark.parametrize(
    ("name", "scale", "words"),
    [
        ("attn_q", np.array([0.5, 0.5]), "F32, a finite number other than 0"),
        ("attn_q", np.array([0.0]), "not usable"),
        ("attn_q", np.array([np.inf]), "not usable"),
        ("attn_output", np.array([0.5]), "blk.0.attn_output.scale"),
    ],
)
def test_scales_of_whole_tensors_that_do_not_fit(tmp_path: Path, name: str, scale: np.ndarray, words: str) -> None:
    """Tensors of floats have none."""
    write_llama(tmp_path, 40, more={f"blk.0.{name}.scale": write.floats(scale)})
    with pytest.raises(IngotError, match=re.escape(words)):
        convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", often(write.BLOCKS, (2, 12)))
def test_a_model_of_a_type(tmp_path: Path, kind: int) -> None:
    """Logits of graph and engine are those of the same numbers in float32."""
    values = write_llama(tmp_path, kind)
    hidden = values["model.norm.weight"].size
    config = {
        **quantised.CONFIG,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    quantised.save(tmp_path / "float", config, {name: (DType.F32, each) for name, each in values.items()})
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    convert(ConvertOptions(model_dir=tmp_path / "float", output_dir=tmp_path / "expected"))
    expected = logits_of_graph(tmp_path / "expected", IDS)
    bound = 1e-5 * np.ptp(expected)
    np.testing.assert_allclose(logits_of_graph(tmp_path / "checkpoint", IDS), expected, rtol=0, atol=bound)
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "checkpoint", tmp_path / "engine")
    np.testing.assert_allclose(engine_logits(tmp_path / "engine", IDS), expected, rtol=0, atol=bound)


def test_types_are_those_of_the_format() -> None:
    for number, (name, size, nbytes, _, _) in write.BLOCKS.items():
        found = TYPES[number]
        assert (found.name, found.size, found.nbytes) == (name, size, nbytes)
    assert set(TYPES) == {*write.BLOCKS, write.F32, write.F16, write.BF16}
