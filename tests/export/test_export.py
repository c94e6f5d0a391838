"""What is exported, read back by convert, by independent decoders and, where it is installed, by llama.cpp."""

import importlib.util
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.builder.calibrated.quantize import quantize
from ingot.builder.expressions import WeightReader
from ingot.builder.stored_codes import CheckpointWeights
from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import QuantizeOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.convert.gguf.blocks import TYPES
from ingot.convert.gguf.header import read_gguf_header
from ingot.dtypes import DType, from_float32
from ingot.errors import UnsupportedModelError, UsageError
from ingot.export.export import export
from ingot.export.gguf_tokenizer import gguf_tokenizer
from ingot.quickstart import SHIPPED
from ingot.runtime.tokenizer import Tokenizer
from ingot.tensor_file import read_header, read_rows
from tests import quantised as quantised_files
from tests.convert.gguf.test_blocks import VOCAB, write_llama
from tests.convert.quantised.test_formats import CASES as QUANTISED
from tests.convert.test_golden import TOLERANCE
from tests.e2e.same_bits import random_checkpoint
from tests.gguf_files import BLOCKS, Stored, write_gguf
from tests.graph_logits import logits_of_graph
from tests.handmade import TINY_GPT2, TINY_LLAMA, random_tensors, write_model
from tests.programs.gguf_tokens import llama_tokens
from tests.tiny import load_model

Q4_0, Q2_K, Q5_K, IQ2_XXS = 2, 10, 13, 16
TEXT = ["Once upon a time there was a fox, who lived in a wood; the fox was quick and brown. " * 6]
LLAMA: dict[str, object] = {
    **TINY_LLAMA,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "vocab_size": 2560,
}
IDS = np.arange(40).reshape(2, 20) * 7 % 2560


def checkpoint_of(folder: Path, config: dict[str, object] = LLAMA, *, texts: bool = True) -> Path:
    model = write_model(folder / "m", config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json") if texts else ():
        shutil.copyfile(SHIPPED / name, model / name)
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    return folder / "c"


def quantised(folder: Path, precision: str, codes: str, config: dict[str, object] = LLAMA) -> Path:
    options = QuantizeOptions(output_dir=folder / "q", precision=precision, codes=codes)
    quantize(options, checkpoint_of(folder, config), TEXT)
    return folder / "q"


def assert_same(checkpoint: Path, exported: Path, folder: Path) -> None:
    """The same numbers, and the same tokens of a text."""
    convert(ConvertOptions(model_dir=exported, output_dir=folder))
    np.testing.assert_array_equal(logits_of_graph(folder, IDS), logits_of_graph(checkpoint, IDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "codes", "kind"), [("w4g32", "symmetric", "Q4_0"), ("w4g64", "auto", ""), ("w8", "auto", "Q8_0")]
)
def test_a_gguf_file_has_the_same_values(tmp_path: Path, precision: str, codes: str, kind: str) -> None:
    checkpoint = quantised(tmp_path, precision, codes)
    report = export(checkpoint, tmp_path / "x.gguf", "gguf", as_floats=precision == "w4g64")
    assert_same(checkpoint, tmp_path / "x.gguf", tmp_path / "back")
    header = read_gguf_header(tmp_path / "x.gguf")
    if kind:
        assert report.kinds[kind] == 7 * 2
        assert report.floats == ()
    # decoded number by number, after llama.cpp's order of heads
    tensor = header.tensors["blk.1.attn_q.weight"]
    number = {name: number for number, (name, *_) in BLOCKS.items()}[tensor.type.name]
    _, size, nbytes, _, decode = BLOCKS[number]
    raw = (tmp_path / "x.gguf").read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    values = [decode(raw[at : at + nbytes], i) for at in range(0, len(raw), nbytes) for i in range(size)]
    found = np.array(values, np.float32).reshape(tensor.shape)
    heads = int(str(LLAMA["num_attention_heads"]))
    found = found.reshape(heads, -1, 2, found.shape[1]).swapaxes(1, 2).reshape(found.shape)
    opened = Checkpoint.open(checkpoint)
    with WeightReader(opened) as reader:
        ours = CheckpointWeights(opened, reader).find("layers.1/attn/q/weight").read(0, len(found))
    np.testing.assert_array_equal(found, ours)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("precision", "codes"), [("w4g32", "symmetric"), ("w4g32", "asymmetric"), ("w8", "auto"), ("f8", "auto")]
)
def test_compressed_tensors_have_the_same_values(tmp_path: Path, precision: str, codes: str) -> None:
    checkpoint = quantised(tmp_path, precision, codes)
    report = export(checkpoint, tmp_path / "x", "compressed-tensors")
    assert report.floats == ()
    assert report.kinds[{"w8": "int8", "f8": "f8"}.get(precision, "int4")] == 7 * 2
    assert_same(checkpoint, tmp_path / "x", tmp_path / "back")
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert config["format"] == {"w8": "int-quantized", "f8": "float-quantized"}.get(precision, "pack-quantized")
    assert "lm_head" in config["ignore"]
    tensors = read_header(tmp_path / "x" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    scale = read_rows(tensors[f"{name}.weight_scale"])
    opened = Checkpoint.open(checkpoint)
    with WeightReader(opened) as reader:
        ours = CheckpointWeights(opened, reader).find("layers.0/mlp/up/weight").read(0, len(scale))
    if precision == "w8":
        numbers = read_rows(tensors[f"{name}.weight"]).view(np.int8).astype(np.float32)
    elif precision == "f8":
        numbers = read_rows(tensors[f"{name}.weight"]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        words = read_rows(tensors[f"{name}.weight_packed"]).view(np.uint32)
        fields = (words[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(len(words), -1)
        numbers = fields.astype(np.float32) - np.float32(8)
    if codes == "asymmetric":
        packed = read_rows(tensors[f"{name}.weight_zero_point"]).view(np.uint32)
        zero = (packed[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[None, :, None] & 15).reshape(-1, scale.shape[1])
        numbers = numbers - np.repeat(zero[: len(scale)].astype(np.float32) - np.float32(8), 32, axis=1)
    np.testing.assert_array_equal(numbers * np.repeat(scale, numbers.shape[1] // scale.shape[1], axis=1), ours)


@pytest.mark.daily(3)
@pytest.mark.parametrize("form", ["gguf", "compressed-tensors"])
@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_floats_stay_what_they_are(tmp_path: Path, form: str, config: dict[str, object]) -> None:
    checkpoint = checkpoint_of(tmp_path, {**LLAMA, "num_hidden_layers": 1, **config})
    target = tmp_path / ("x.gguf" if form == "gguf" else "x")
    export(checkpoint, target, form)
    convert(ConvertOptions(model_dir=target, output_dir=tmp_path / "back"))
    ours, theirs = logits_of_graph(checkpoint, IDS), logits_of_graph(tmp_path / "back", IDS)
    assert np.abs(ours - theirs).max() <= (1e-6 * np.ptp(ours) if "rope_scaling" in config else 0)


@pytest.mark.slow
def test_what_a_format_cannot_say_is_refused_by_layer(tmp_path: Path) -> None:
    checkpoint = quantised(tmp_path, "w4g32", "auto", {**LLAMA, "intermediate_size": 88})
    with pytest.raises(UnsupportedModelError, match=r"mlp/down/weight(.|\n)*32 columns") as refused:
        export(checkpoint, tmp_path / "x.gguf", "gguf")
    assert "--as_floats" in str(refused.value.hint)
    report = export(checkpoint, tmp_path / "x.gguf", "gguf", as_floats=True)
    assert set(report.floats) == {f"layers.{i}/mlp/down/weight" for i in range(2)}
    assert_same(checkpoint, tmp_path / "x.gguf", tmp_path / "back")
    assert not list(tmp_path.glob(".x*"))


@pytest.mark.parametrize("form", ["gguf", "compressed-tensors"])
def test_bytes_with_zero_points_are_refused_or_floats(tmp_path: Path, form: str) -> None:
    """No format has such codes, which are those of GPTQ in 8 bits."""
    settings, packer, _ = QUANTISED["gptq 8 bits"]
    quantised_files.write_model(tmp_path / "model", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    output = tmp_path / ("x.gguf" if form == "gguf" else "x")
    with pytest.raises(UnsupportedModelError, match=r"cannot hold the codes(.|\n)*of 8 bits without(.|\n)*gptq"):
        export(tmp_path / "checkpoint", output, form)
    assert len(export(tmp_path / "checkpoint", output, form, as_floats=True).floats) == 7
    convert(ConvertOptions(model_dir=output, output_dir=tmp_path / "back"))
    ids = IDS % quantised_files.VOCAB
    wanted, got = (logits_of_graph(tmp_path / each, ids) for each in ("checkpoint", "back"))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.ptp(wanted))


@pytest.mark.parametrize("kind", [Q2_K, Q5_K, IQ2_XXS], ids=["Q2_K", "Q5_K", "IQ2_XXS"])
def test_scales_in_units_as_floats(tmp_path: Path, kind: int) -> None:
    """As `--as_floats` says, of whatever codes."""
    values = write_llama(tmp_path, kind)
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    export(tmp_path / "checkpoint", tmp_path / "x", "compressed-tensors", as_floats=True)
    got = load_file(tmp_path / "x/model.safetensors")
    for name, wanted in values.items():
        np.testing.assert_array_equal(got[name], wanted, err_msg=name)


def test_zero_points_that_are_no_whole_numbers(tmp_path: Path) -> None:
    """HQQ has such, and compressed-tensors stores four bits of each."""
    quantised_files.write_model(tmp_path / "model", {"quant_method": "hqq"}, quantised_files.hqq(4, 32, 1))
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "c"))
    with pytest.raises(UnsupportedModelError, match=r"attn/q/weight(.|\n)*zero points are not all whole"):
        export(tmp_path / "c", tmp_path / "x", "compressed-tensors")
    assert not (tmp_path / "x").exists()
    report = export(tmp_path / "c", tmp_path / "x", "compressed-tensors", as_floats=True)
    assert len(report.floats) == 7
    convert(ConvertOptions(model_dir=tmp_path / "x", output_dir=tmp_path / "back"))
    ids = IDS % quantised_files.VOCAB
    np.testing.assert_array_equal(logits_of_graph(tmp_path / "back", ids), logits_of_graph(tmp_path / "c", ids))


def test_a_table_of_codes_and_an_lm_head_of_its_own(tmp_path: Path) -> None:
    """As in most GGUF files: codes of the token table lead to a lookup of rows, those of other weights to a matmul."""
    write_llama(tmp_path, Q4_0)
    path = tmp_path / "model.gguf"
    header, data = read_gguf_header(path), path.read_bytes()
    tensors: dict[str, Stored] = {}
    for name, each in header.tensors.items():
        number = next(number for number, kind in TYPES.items() if kind is each.type)
        tensors[name] = number, each.shape, data[each.offset : each.offset + each.nbytes]
    tensors["output.weight"] = tensors["token_embd.weight"]
    write_gguf(path, dict(header.settings), tensors)
    convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "c"))
    report = export(tmp_path / "c", tmp_path / "x", "compressed-tensors")
    assert report.kinds["int4"] == 8  # all but the output of attention
    convert(ConvertOptions(model_dir=tmp_path / "x", output_dir=tmp_path / "back"))
    ids = IDS % VOCAB
    np.testing.assert_array_equal(logits_of_graph(tmp_path / "back", ids), logits_of_graph(tmp_path / "c", ids))


def test_other_families_and_names_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    with pytest.raises(UsageError, match=r"not a \.gguf file"):
        export(checkpoint, tmp_path / "x", "gguf")
    with pytest.raises(UsageError, match="unknown format 'exl2'"):
        export(checkpoint, tmp_path / "x", "exl2")
    windowed = checkpoint_of(
        tmp_path / "w", {**LLAMA, "num_hidden_layers": 1, "model_type": "mistral", "sliding_window": 16}
    )
    with pytest.raises(UnsupportedModelError, match="windows"):
        export(windowed, tmp_path / "x.gguf", "gguf")
    other = checkpoint_of(tmp_path / "g", {**TINY_GPT2}, texts=False)
    for form in ("gguf", "compressed-tensors"):
        with pytest.raises(UnsupportedModelError, match="gpt2 cannot be exported: it stores its matrices"):
            export(other, tmp_path / "g.gguf", form)
    assert not (tmp_path / "x.gguf").exists()


def test_a_model_of_others_is_not_replaced(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(UsageError, match="holds something else"):
        export(checkpoint, tmp_path / "model", "compressed-tensors")
    (tmp_path / "x.gguf").write_bytes(b"GGUF of somebody else")
    with pytest.raises(UsageError, match="ingot export has not written it"):
        export(checkpoint, tmp_path / "x.gguf", "gguf")
    assert (tmp_path / "x.gguf").read_bytes() == b"GGUF of somebody else"


def test_an_export_that_is_interrupted_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    for form, name in (("gguf", "x.gguf"), ("compressed-tensors", "x")):
        export(checkpoint, tmp_path / name, form)
        before = {path: path.read_bytes() for path in tmp_path.rglob("x*") if path.is_file()}

        def stop(what: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export(checkpoint, tmp_path / name, form, progress=stop)
        assert {path: path.read_bytes() for path in tmp_path.rglob("x*") if path.is_file()} == before
        assert not list(tmp_path.glob(".x*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "gpt2"])
def test_tokenizers_of_others_cut_texts_alike(shared: Path, name: str) -> None:
    folder = shared / "tokenizers" / name
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    tokens = gguf_tokenizer(folder, size + 64)["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == size + 64


def test_llama_cpp_and_gguf_read_the_file(tmp_path: Path, shared: Path) -> None:
    """Also the tokenizer in it: llama.cpp gets text, the graph gets ids."""
    for name in ("gguf", "xllamacpp"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    convert(ConvertOptions(model_dir=shared / "models" / "stories260K", output_dir=tmp_path / "c"))
    quantize(QuantizeOptions(output_dir=tmp_path / "q", precision="w8"), tmp_path / "c", TEXT)
    export(tmp_path / "q", tmp_path / "x.gguf", "gguf", as_floats=True)
    assert len(importlib.import_module("gguf").GGUFReader(tmp_path / "x.gguf").tensors) == 47
    asked = "Once upon a time, there was"
    ids = Tokenizer.from_dir(tmp_path / "q").encode(asked)
    given = len(ids)
    for _ in range(16):
        ids = [*ids, int(logits_of_graph(tmp_path / "q", np.array([ids]))[0, -1].argmax())]
    assert llama_tokens(tmp_path / "x.gguf", [asked, ids[:given]], 16) == [ids[given:]] * 2


# GGUF has no key for the scale of scores, and its readers take that of head_dim for models that are not the 27B ones
GEMMA: dict[str, object] = {"query_pre_attn_scalar": 20}
FAMILIES: dict[str, dict[str, object]] = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": {"rope_parameters": None},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    **{name: {} for name in ("mixtral", "qwen3_moe", "gemma", "olmo2", "olmoe", "granite", "seed_oss", "ernie4_5")},
}
DIRECTORIES = ("gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "granite", "bitnet")


def family_config(name: str, more: dict[str, object] | None = None) -> dict[str, object]:
    without: dict[str, object] = {"sliding_window": None, "mlp_only_layers": []}
    switched_off = without if name in ("mixtral", "qwen3_moe") else {}
    config = {**find_family(name).tiny, **switched_off, **FAMILIES.get(name, {}), **(more or {})}
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_of_other_families(tmp_path: Path, name: str) -> None:
    checkpoint = random_checkpoint(tmp_path, family_config(name))
    export(checkpoint, tmp_path / "x.gguf", "gguf")
    convert(ConvertOptions(model_dir=tmp_path / "x.gguf", output_dir=tmp_path / "back"))
    ids = IDS % 50
    np.testing.assert_array_equal(logits_of_graph(tmp_path / "back", ids), logits_of_graph(checkpoint, ids))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_transformers_read_the_directory(tmp_path: Path, name: str) -> None:
    checkpoint = random_checkpoint(tmp_path, family_config(name))
    export(checkpoint, tmp_path / "x", "compressed-tensors")
    ids = IDS % 50
    ours = logits_of_graph(checkpoint, ids)
    assert np.abs(load_model(tmp_path / "x").logits(ids) - ours).max() < TOLERANCE * np.ptp(ours)


@pytest.mark.parametrize(("name", "dtype"), [("llama", DType.BF16), ("gemma2", DType.F32)])
def test_norms_that_took_a_fold(tmp_path: Path, name: str, dtype: DType) -> None:
    """Of a model whose norms are cast to float32, and of one that adds 1 to them."""
    head = {"head_dim": 32, "query_pre_attn_scalar": 32} if name == "gemma2" else {}
    config = {**LLAMA, **(family_config(name, {**LLAMA, **head, "model_type": name}) if head else {})}
    tensors = random_tensors(config, dtype=dtype)
    for key, (_, bits) in tensors.items():
        if "input_layernorm" in key:
            bits[::16] = from_float32(np.full(len(bits[::16]), 20, np.float32), dtype)
    model = write_model(tmp_path / "m", config, tensors=tensors)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(SHIPPED / file, model / file)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    report = quantize(QuantizeOptions(output_dir=tmp_path / "q", precision="w8"), tmp_path / "c", TEXT)
    assert "folded" in {each.name: each.method for each in report.products}["layers.0/qkv"]
    exact, found = (logits_of_graph(tmp_path / each, IDS) for each in "cq")
    assert np.sqrt(np.square(found - exact).mean()) < 0.2 * exact.std()
    export(tmp_path / "q", tmp_path / "x.gguf", "gguf", as_floats=True)
    assert_same(tmp_path / "q", tmp_path / "x.gguf", tmp_path / "from_gguf")
    export(tmp_path / "q", tmp_path / "x", "compressed-tensors")
    assert_same(tmp_path / "q", tmp_path / "x", tmp_path / "from_directory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        # whose folded norms add to 1
        ("gemma2", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "query_pre_attn_scalar": 32}),
        ("qwen3_moe", {"hidden_size": 64, "moe_intermediate_size": 32}),
    ],
)
@pytest.mark.parametrize(("precision", "codes"), [("w8", "auto"), ("w4g32", "symmetric")])
def test_quantised_weights_of_other_families(
    tmp_path: Path, name: str, more: dict[str, object], precision: str, codes: str
) -> None:
    config = {**family_config(name, more), "vocab_size": 2560}
    options = QuantizeOptions(output_dir=tmp_path / "q", precision=precision, codes=codes)
    quantize(options, checkpoint_of(tmp_path, config), TEXT)
    forms = ("gguf", "compressed-tensors") if name in DIRECTORIES else ("gguf",)
    for form in forms:
        target = tmp_path / ("x.gguf" if form == "gguf" else "x")
        report = export(tmp_path / "q", target, form, as_floats=form == "gguf")
        assert set(report.kinds) & {"Q8_0", "Q4_0", "int8", "int4"}
        convert(ConvertOptions(model_dir=target, output_dir=tmp_path / form))
        ours, theirs = logits_of_graph(tmp_path / "q", IDS), logits_of_graph(tmp_path / form, IDS)
        assert np.abs(theirs - ours).max() <= 1e-6 * np.ptp(ours)
