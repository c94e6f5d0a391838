"""What is exported, read by others: the packages `gguf` and `compressed-tensors`, and transformers with their help."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from ingot.builder.expressions import WeightReader
from ingot.builder.stored_codes import CheckpointWeights, StoredCodes
from ingot.checkpoint import Checkpoint
from ingot.convert.family import find_family
from ingot.convert.gguf.blocks import TYPES
from ingot.convert.weight_shapes import weight_shapes
from ingot.export.export import export
from ingot.export.gguf_blocks import block_kind, blocks_of, halves_problem
from ingot.export.hf_config import hf_names
from tests.export.test_export import IDS, LLAMA, TEXT, checkpoint_of, quantised
from tests.graph_logits import logits_of_graph

QWEN3: dict[str, object] = {**LLAMA, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
# transformers takes no size of heads from a Qwen 3's GGUF file
QWEN2: dict[str, object] = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
CLOSE = 1e-5  # of the range of the logits: sums of float32 in another order


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"needs the package {name}")


def values_of(checkpoint: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Hugging Face's name → values as ingot computes them."""
    opened = Checkpoint.open(checkpoint)
    model = opened.config.model
    assert model is not None
    names, found = hf_names(model), {}
    with WeightReader(opened) as reader:
        weights = CheckpointWeights(opened, reader)
        for name, shape in weight_shapes(model).items():
            found[names[name]] = weights.find(name).read(0, shape[0]).reshape(shape)
    return found


def assert_same_bits(theirs: Any, ours: Any, name: str) -> None:
    """A zero has no sign here: 0 * scale may have one, and a number minus itself has none."""
    bits = [(np.asarray(each, np.float32) + np.float32(0)).view(np.uint32) for each in (theirs, ours)]
    np.testing.assert_array_equal(bits[0], bits[1], err_msg=name)


def as_pairs(values: Any, heads: int) -> Any:
    """Rows of q or k in the order that llama.cpp wants of a Llama."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def assert_gguf_reads(file: Path, checkpoint: Path, config: dict[str, object]) -> set[str]:
    """The types of its tensors."""
    gguf = package("gguf")
    quants = importlib.import_module("gguf.quants")
    reader = gguf.GGUFReader(file)
    name = str(config["model_type"])
    layers = int(str(config["num_hidden_layers"]))
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    ours = values_of(checkpoint)
    assert len(tensors) == len(ours)
    for theirs, values in ours.items():
        tensor = tensors[names.get_name(theirs, try_suffixes=(".weight", ".bias"))]
        read = quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        if name == "llama" and "q_proj" in theirs:
            values = as_pairs(values, int(str(config["num_attention_heads"])))
        if name == "llama" and "k_proj" in theirs:
            values = as_pairs(values, int(str(config["num_key_value_heads"])))
        assert_same_bits(read, values, theirs)
    settings = {key: field.contents() for key, field in reader.fields.items()}
    assert settings["general.architecture"] == name
    for key, wanted in (
        ("block_count", layers),
        ("embedding_length", config["hidden_size"]),
        ("feed_forward_length", config["intermediate_size"]),
        ("attention.head_count", config["num_attention_heads"]),
        ("attention.head_count_kv", config["num_key_value_heads"]),
        ("attention.key_length", config["head_dim"]),
    ):
        assert settings[f"{name}.{key}"] == wanted
    tokens = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(settings["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert set(tokens) <= set(settings["tokenizer.ggml.tokens"])
    return {tensor.tensor_type.name for tensor in reader.tensors}


@pytest.mark.slow
def test_the_gguf_package_reads_floats(tmp_path: Path) -> None:
    config = {**LLAMA, "num_hidden_layers": 1}
    checkpoint = checkpoint_of(tmp_path, config)
    export(checkpoint, tmp_path / "x.gguf", "gguf")
    assert assert_gguf_reads(tmp_path / "x.gguf", checkpoint, config) <= {"F32", "F16", "BF16"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    ("precision", "codes", "kind"),
    [
        ("w4g32", "symmetric", "Q4_0"),
        ("w4g64", "symmetric", "Q4_0"),
        ("w4g32", "auto", "IQ4_NL"),
        ("w8", "auto", "Q8_0"),
    ],
)
def test_the_gguf_package_decodes_the_same_weights(
    tmp_path: Path, precision: str, codes: str, kind: str, config: dict[str, object]
) -> None:
    checkpoint = quantised(tmp_path, precision, codes, config)
    export(checkpoint, tmp_path / "x.gguf", "gguf", as_floats=True)
    assert kind in assert_gguf_reads(tmp_path / "x.gguf", checkpoint, config)


@pytest.mark.parametrize(("kind", "group"), [("Q4_0", 32), ("Q4_1", 32), ("Q4_1", 96), ("IQ4_NL", 64), ("Q8_0", 192)])
def test_the_gguf_package_decodes_blocks(kind: str, group: int) -> None:
    """Scales have few bits, so that float16 holds zero point * scale."""
    gguf, quants = package("gguf"), importlib.import_module("gguf.quants")
    random = np.random.default_rng(group)
    rows, columns = 7, 192
    wide = kind == "Q8_0"
    codes = random.integers(-127 if wide else 0, 128 if wide else 16, (rows, columns)).astype(np.int8)
    signed = kind in ("Q4_0", "Q8_0")
    codes = codes - np.int8(8) if kind == "Q4_0" else codes
    scale = random.integers(-31, 32, (rows, columns // group)).astype(np.float32) * np.float32(2**-9)
    zero = random.integers(0, 16, scale.shape).astype(np.float32) if kind == "Q4_1" else np.zeros_like(scale)
    table = TYPES[20].packing.table if kind == "IQ4_NL" and TYPES[20].packing is not None else ()
    stored = StoredCodes(
        bits=8 if wide else 4,
        signed=signed,
        group=group,
        table=table,
        codes=lambda begin, end: codes[begin:end],
        scale=lambda begin, end: scale[begin:end],
        zero=(lambda begin, end: zero[begin:end]) if kind == "Q4_1" else None,
    )
    assert block_kind(stored, columns) == (kind, "")
    assert halves_problem(stored, rows) == ""
    order = random.permutation(rows)
    blocks = np.concatenate(list(blocks_of(stored, kind, order)))
    values = (np.array(table, np.float32)[codes] if table else codes.astype(np.float32)).reshape(*scale.shape, group)
    values = ((values - zero[..., None]) * scale[..., None]).reshape(rows, columns)
    assert_same_bits(quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]), values[order], kind)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize(("precision", "codes"), [("w4g32", "symmetric"), ("w4g32", "auto"), ("w8", "auto")])
def test_transformers_read_the_gguf_file(tmp_path: Path, precision: str, codes: str, config: dict[str, object]) -> None:
    package("gguf")
    package("accelerate")
    checkpoint = quantised(tmp_path, precision, codes, config)
    export(checkpoint, tmp_path / "x.gguf", "gguf", as_floats=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    theirs = model.state_dict()
    for name, values in values_of(checkpoint).items():
        assert_same_bits(theirs[name].numpy(), values, name)
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS)).logits.numpy()
    ours = logits_of_graph(checkpoint, IDS)
    assert np.abs(logits - ours).max() <= CLOSE * np.ptp(ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    mine = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(TEXT[0], add_special_tokens=False)
    assert ids == mine.encode(TEXT[0], add_special_tokens=False).ids


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    ("precision", "codes"),
    [("w4g32", "symmetric"), ("w4g128", "symmetric"), ("w4g32", "asymmetric"), ("w8", "auto"), ("f8", "auto")],
)
def test_compressed_tensors_decompress_the_same_weights(
    tmp_path: Path, precision: str, codes: str, config: dict[str, object]
) -> None:
    package("compressed_tensors")
    checkpoint = quantised(tmp_path, precision, codes, config)
    export(checkpoint, tmp_path / "x", "compressed-tensors")
    assert_compressed_tensors_read(tmp_path / "x", checkpoint)
    if codes == "asymmetric":
        return  # transformers expects zero points that are not packed, unlike the package itself
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS)).logits.numpy()
    ours = logits_of_graph(checkpoint, IDS)
    assert np.abs(logits - ours).max() <= CLOSE * np.ptp(ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo", "bitnet"])
@pytest.mark.parametrize(("precision", "codes"), [("w4g32", "symmetric"), ("w8", "auto")])
def test_transformers_read_quantised_weights_of_other_families(
    tmp_path: Path, name: str, precision: str, codes: str
) -> None:
    """OLMo has no norms to fold scales into, BitNet has norms before the last products of attention and MLP."""
    package("compressed_tensors")
    sizes = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    checkpoint = quantised(tmp_path, precision, codes, {**find_family(name).tiny, **sizes})
    report = export(checkpoint, tmp_path / "x", "compressed-tensors")
    assert report.kinds["int8" if precision == "w8" else "int4"] == 7 * 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(IDS)).logits.numpy()
    ours = logits_of_graph(checkpoint, IDS)
    assert np.abs(logits - ours).max() <= CLOSE * np.ptp(ours)


def assert_compressed_tensors_read(folder: Path, checkpoint: Path) -> None:
    """Every weight, by the package's own decoder, as the file's own configuration says."""
    compressors, schemes = (
        importlib.import_module(f"compressed_tensors.{each}") for each in ("compressors", "quantization")
    )
    safetensors = importlib.import_module("safetensors.torch")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = schemes.QuantizationConfig.model_validate({key: said[key] for key in said if key != "quant_method"})
    (scheme,) = config.config_groups.values()
    decoder = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    tensors, decoded = safetensors.load_file(folder / "model.safetensors"), 0
    for name, values in values_of(checkpoint).items():
        module = name.removesuffix(".weight")
        parts = {key[len(module) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{module}.")}
        if "weight_scale" in parts:
            assert module not in config.ignore
            parts = decoder.decompress(parts, scheme)
            decoded += 1
        assert_same_bits(parts["weight"].float().numpy(), values, name)
    assert decoded == 7 * 2
