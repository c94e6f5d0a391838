"""LoRA adapters, merged while a model is converted: sums against numpy, spellings of names, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.convert.conversion import conversion_from_directory
from ingot.convert.convert import ConvertReport, convert
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import CheckpointError, ConfigError, IngotError, MissingModelError, UnsupportedModelError, UsageError
from ingot.tensor_file import read_rows
from tests import quantised
from tests.handmade import TINY_GPT2, TINY_LLAMA, Bits, random_tensors, write_model, write_safetensors

Array = npt.NDArray[Any]
Q, UP, K = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.k_proj"
SHAPES = {Q: (48, 32), UP: (44, 32), K: (24, 32)}  # [out, in] of TINY_LLAMA
PREFIX = "base_model.model."
SETTINGS: dict[str, object] = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "base_model_name_or_path": "o/base"}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


def factors(shapes: Mapping[str, tuple[int, int]] = SHAPES, rank: int = 3) -> dict[str, Array]:
    """A and B of modules, by PEFT's names without their prefix."""
    found = {}
    for seed, (module, (out, cols)) in enumerate(shapes.items()):
        found[f"{module}.lora_A.weight"] = numbers(seed, rank, cols)
        found[f"{module}.lora_B.weight"] = numbers(seed + 50, out, rank)
    return found


def write_adapter(
    folder: Path, tensors: Mapping[str, Array], *, prefix: str = PREFIX, dtype: DType = DType.F32, **settings: object
) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    stored = {prefix + name: (dtype, from_float32(value, dtype)) for name, value in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", stored)
    return folder


def converted(model: Path, adapter: Path | None, target: Path) -> tuple[dict[str, Array], ConvertReport]:
    report = convert(ConvertOptions(model_dir=model, lora=adapter, output_dir=target))
    tensors = Checkpoint.open(target).tensors()
    return {name: to_float32(read_rows(each), each.dtype) for name, each in tensors.items()}, report


def check(
    tmp_path: Path, adapter: Path, merged: Mapping[str, Array], config: Mapping[str, object] = TINY_LLAMA
) -> None:
    """A conversion with the adapter has the weights of one of the merged model, and others than the base model.
    merged: the weights that change, by Hugging Face's names"""
    base = random_tensors(config)
    whole: dict[str, tuple[DType, Bits]] = {**base, **{name: (DType.F32, each) for name, each in merged.items()}}
    found, _ = converted(write_model(tmp_path / "base", config), adapter, tmp_path / "found")
    wanted, _ = converted(write_model(tmp_path / "merged", config, tensors=whole), None, tmp_path / "wanted")
    before, _ = converted(tmp_path / "base", None, tmp_path / "before")
    for name, each in found.items():
        np.testing.assert_allclose(each, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
    changed = [name for name in found if not np.array_equal(found[name], before[name])]
    assert changed == [name for name in found if not np.array_equal(wanted[name], before[name])]
    assert len(changed) == len(merged)


def summed(tensors: Mapping[str, Array], scales: Mapping[str, float]) -> dict[str, Array]:
    """W + scale * B A of modules of TINY_LLAMA."""
    base = {name: bits.astype(np.float64) for name, (_, bits) in random_tensors(TINY_LLAMA).items()}
    return {
        f"{module}.weight": (
            base[f"{module}.weight"]
            + scale * tensors[f"{module}.lora_B.weight"].astype(np.float64) @ tensors[f"{module}.lora_A.weight"]
        ).astype(np.float32)
        for module, scale in scales.items()
    }


@pytest.mark.parametrize("block", [7, 100, 1 << 20])
def test_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Blocks may begin and end inside a row."""
    for place in ("conversion.BLOCK", "adapter._BLOCK"):
        monkeypatch.setattr(f"ingot.convert.{place}", block)
    check(tmp_path, write_adapter(tmp_path / "a", factors()), summed(factors(), dict.fromkeys(SHAPES, 4.0)))


def test_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", factors(), use_rslora=True)
    check(tmp_path, adapter, summed(factors(), dict.fromkeys(SHAPES, 12 / 3**0.5)))


def test_ranks_and_scales_of_some_modules(tmp_path: Path) -> None:
    """A pattern is the end of a name, from a dot on; one that begins with ^ its begin."""
    tensors = {**factors(), **factors({UP: SHAPES[UP]}, rank=5)}
    adapter = write_adapter(
        tmp_path / "a",
        tensors,
        rank_pattern={"up_proj": 5},
        alpha_pattern={"_proj": 1, "mlp.up_proj": 10, r"^model\.layers\.1\..*k_proj": 6},
    )
    check(tmp_path, adapter, summed(tensors, {Q: 4.0, UP: 2.0, K: 2.0}))


def test_rows_have_the_norms_that_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.convert.conversion.BLOCK", 50)
    magnitudes = {f"{module}.lora_magnitude_vector": 1 + numbers(9, rows) for module, (rows, _) in SHAPES.items()}
    adapter = write_adapter(tmp_path / "a", {**factors(), **magnitudes}, use_dora=True)
    merged = {
        name: each
        / np.linalg.norm(each, axis=1, keepdims=True)
        * magnitudes[name.replace("weight", "lora_magnitude_vector")][:, None]
        for name, each in summed(factors(), dict.fromkeys(SHAPES, 4.0)).items()
    }
    check(tmp_path, adapter, merged)


def test_whole_weights_stand_in_the_place_of_the_model_s(tmp_path: Path) -> None:
    """Also under another matrix, whose module PEFT calls the base layer."""
    whole = {
        "lm_head.weight": numbers(1, 61, 32),
        "model.norm.weight": numbers(2, 32),
        f"{Q}.weight": numbers(3, 48, 32),
    }
    names = ("lm_head.weight", "model.norm.modules_to_save.weight", f"{Q}.base_layer.weight")
    stored = dict(zip(names, whole.values(), strict=True))
    adapter = write_adapter(tmp_path / "a", {**factors({Q: SHAPES[Q]}), **stored})
    change = summed(factors(), {Q: 4.0})[f"{Q}.weight"] - random_tensors(TINY_LLAMA)[f"{Q}.weight"][1].astype(
        np.float32
    )
    check(tmp_path, adapter, {**whole, f"{Q}.weight": whole[f"{Q}.weight"] + change})


@pytest.mark.parametrize("tied", [False, True])
def test_the_token_table(tmp_path: Path, tied: bool) -> None:
    """Its A has a column for each token. Of a tied model a copy may lie in the file, which says nothing of its own."""
    config = {**TINY_LLAMA, "tie_word_embeddings": tied}
    a, b = numbers(1, 3, 61), numbers(2, 32, 3)
    tensors = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b}
    adapter = write_adapter(tmp_path / "a", tensors)
    table = random_tensors(config)["model.embed_tokens.weight"][1].astype(np.float32)
    check(tmp_path, adapter, {"model.embed_tokens.weight": table + 4 * (b @ a).T}, config)
    if tied:
        copied = random_tensors(config)
        copied["lm_head.weight"] = copied["model.embed_tokens.weight"]
        found, _ = converted(write_model(tmp_path / "copy", config, tensors=copied), adapter, tmp_path / "copied")
        assert "lm_head/weight" not in found


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["named", "bare"])
def test_weights_that_are_stored_turned_around(tmp_path: Path, said: bool, prefix: str) -> None:
    """GPT-2's are [in, out]. Its first files lack the prefix that PEFT's names have."""
    module, own = "transformer.h.1.mlp.c_fc", f"{prefix}h.1.mlp.c_fc.weight"
    tensors = factors({module: (128, 32)})
    adapter = write_adapter(tmp_path / "a", tensors, fan_in_fan_out=said)
    base = {prefix + name.removeprefix("transformer."): each for name, each in random_tensors(TINY_GPT2).items()}
    added = 4 * (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]).T
    merged = {**base, own: (DType.F32, (base[own][1] + added).astype(np.float32))}
    found, _ = converted(write_model(tmp_path / "base", TINY_GPT2, tensors=base), adapter, tmp_path / "found")
    wanted, _ = converted(write_model(tmp_path / "merged", TINY_GPT2, tensors=merged), None, tmp_path / "wanted")
    for name, each in found.items():
        np.testing.assert_allclose(each, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_names_of_a_wrapper_for_images(tmp_path: Path) -> None:
    """Files and adapters call the text model by different names."""
    text = {**TINY_LLAMA, "model_type": "mistral"}
    tensors = {f"language_model.{name}": each for name, each in random_tensors(text).items()}
    model = write_model(tmp_path / "m", {"model_type": "mistral3", "text_config": text}, tensors=tensors)
    named = {name.replace("model.", "model.language_model.", 1): each for name, each in factors().items()}
    found, _ = converted(model, write_adapter(tmp_path / "a", named), tmp_path / "found")
    wanted = summed(factors(), dict.fromkeys(SHAPES, 4.0))
    np.testing.assert_allclose(found["layers.1/mlp/up/weight"], wanted[f"{UP}.weight"], rtol=1e-6, atol=1e-7)


def test_changes_that_are_left_out_are_noticed(tmp_path: Path) -> None:
    """Of a tower for images, whose layers have the names of those of texts."""
    text = {**TINY_LLAMA, "model_type": "mistral"}
    tower = {"vision_tower.layers.0.self_attn.q_proj": (8, 8)}
    tensors = {f"language_model.{name}": each for name, each in random_tensors(text).items()}
    tensors |= {f"{module}.weight": (DType.F32, numbers(0, *shape)) for module, shape in tower.items()}
    model = write_model(tmp_path / "m", {"model_type": "mistral3", "text_config": text}, tensors=tensors)
    _, report = converted(model, write_adapter(tmp_path / "a", factors({**SHAPES, **tower})), tmp_path / "c")
    (changed,) = [each for each in report.warnings if "leaves out weights that the adapter changes" in each]
    assert changed.endswith("vision_tower.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("table", [False, True])
def test_memory_is_that_of_one_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: bool) -> None:
    """Whole, and of a block of the other one. Of a token table, A has a column for each token."""
    monkeypatch.setattr("ingot.convert.adapter._BLOCK", 320)  # ten rows, and two in part
    module, (rows, cols) = ("model.embed_tokens", (61, 32)) if table else (UP, SHAPES[UP])
    a, b = numbers(1, 3, rows if table else cols), numbers(2, cols if table else rows, 3)
    names = ("lora_embedding_A", "lora_embedding_B") if table else ("lora_A.weight", "lora_B.weight")
    tensors = {f"{module}.{name}": each for name, each in zip(names, (a, b), strict=True)}
    model, adapter = write_model(tmp_path / "m"), write_adapter(tmp_path / "a", tensors)
    options = ConvertOptions(model_dir=model, lora=adapter, output_dir=tmp_path / "c")
    weights = [each for file in conversion_from_directory(model, options).files.values() for each in file]
    assert [each.memory for each in weights if each.memory] == [16 * 3 * (cols + 12)]


def test_rounding_is_to_the_type_of_the_model(tmp_path: Path) -> None:
    """Once, from the exact sum. An adapter may have another type than its model."""
    adapter = write_adapter(tmp_path / "a", factors(), dtype=DType.F16)
    model = write_model(tmp_path / "m", dtype=DType.BF16)
    found, report = converted(model, adapter, tmp_path / "c")
    base = to_float32(random_tensors(TINY_LLAMA, dtype=DType.BF16)[f"{UP}.weight"][1], DType.BF16)
    a, b = (factors()[f"{UP}.lora_{each}.weight"].astype(np.float16).astype(np.float64) for each in "AB")
    exact = (base + 4 * b @ a).astype(np.float32)
    np.testing.assert_array_equal(
        found["layers.1/mlp/up/weight"], to_float32(from_float32(exact, DType.BF16), DType.BF16)
    )
    config = Checkpoint.open(tmp_path / "c").config
    assert {"adapter_config.json", "adapter_model.safetensors", "model.safetensors"} <= set(config.sources)
    assert report.warnings == ()


def test_an_adapter_without_effect_is_noticed(tmp_path: Path) -> None:
    tensors = {name: each * (".lora_A." in name) for name, each in factors().items()}
    _, report = converted(write_model(tmp_path / "m"), write_adapter(tmp_path / "a", tensors), tmp_path / "c")
    (warning,) = report.warnings
    assert "changes nothing: all its matrices B are zeros" in warning


LM = {"lm_head.lora_A.weight": numbers(0, 3, 32), "lm_head.lora_B.weight": numbers(1, 61, 3)}
REFUSED: dict[str, tuple[dict[str, Array], dict[str, Any], type[IngotError], str]] = {
    "kind": (factors(), {"peft_type": "LOHA"}, UnsupportedModelError, "no adapters of this kind(.|\n)*got: LOHA"),
    "layers": (factors(), {"layer_replication": [[0, 2]]}, UnsupportedModelError, "repeats layers"),
    "active": (factors(), {"alora_invocation_tokens": [1]}, UnsupportedModelError, "aLoRA"),
    "base": (factors(), {"init_lora_weights": "pissa_niter_16"}, UnsupportedModelError, "began with another base"),
    "others": (
        factors({"model.layers.7.mlp.up_proj": (44, 32), Q: SHAPES[Q]}),
        {},
        CheckpointError,
        r"weights that the model does not have(.|\n)*1: model\.layers\.7\.mlp\.up_proj\.weight",
    ),
    "shape": (factors({Q: (44, 32)}), {}, CheckpointError, r"does not fit(.|\n)*\[48, 32\](.|\n)*got: \[44, 32\]"),
    "rows": ({"lm_head.weight": numbers(0, 62, 32)}, {}, CheckpointError, r"does not fit(.|\n)*got: \[62, 32\]"),
    "rank": (factors(rank=2), {}, CheckpointError, "another rank(.|\n)*expected: rank 3(.|\n)*got: rank 2"),
    "half": ({f"{Q}.lora_A.weight": numbers(0, 3, 32)}, {}, CheckpointError, r"do not belong together(.|\n)*none"),
    "magnitudes": (factors(), {"use_dora": True}, CheckpointError, "magnitudes of a module(.|\n)*got: none"),
    "twice": (
        {**factors({Q: SHAPES[Q]}), **factors({Q.removeprefix("model."): SHAPES[Q]})},
        {},
        CheckpointError,
        "a weight twice",
    ),
    "alpha": (factors(), {"lora_alpha": 0}, ConfigError, "lora_alpha"),
    "patterns": (factors(), {"alpha_pattern": [1]}, ConfigError, "not an object"),
    "long": (factors(), {"alpha_pattern": {"(a+)+b": 1}}, ConfigError, "may take too long"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, settings, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        converted(write_model(tmp_path / "m"), write_adapter(tmp_path / "a", tensors, **settings), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_names_and_types_of_others_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"not named as PEFT(.|\n)*base_model\.model\."):
        converted(model, write_adapter(tmp_path / "a", factors(), prefix="diffusion."), tmp_path / "c")
    bytes_ = {PREFIX + name: (DType.I8, np.zeros(each.shape, np.int8)) for name, each in factors().items()}
    write_safetensors(tmp_path / "a" / "adapter_model.safetensors", bytes_)
    with pytest.raises(CheckpointError, match=r"a type that weights do not have(.|\n)*got: int8"):
        converted(model, tmp_path / "a", tmp_path / "c")


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    """Its sum would be another table than that of the tokens."""
    config = {**TINY_LLAMA, "tie_word_embeddings": True}
    adapter = write_adapter(tmp_path / "a", LM)
    with pytest.raises(CheckpointError, match="lm_head is its token table"):
        converted(write_model(tmp_path / "m", config), adapter, tmp_path / "c")
    copied = random_tensors(config)
    copied["lm_head.weight"] = copied["model.embed_tokens.weight"]
    with pytest.raises(UnsupportedModelError, match="changes lm_head, which the configuration ties"):
        converted(write_model(tmp_path / "copy", config, tensors=copied), adapter, tmp_path / "c")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "fbgemm_fp8"}
    quantised.write_model(tmp_path / "m", settings, quantised.bytes_with_scale(DType.F8, "weight_scale", (1, 0)))
    adapter = write_adapter(tmp_path / "a", factors({Q: (64, 64)}))
    with pytest.raises(UnsupportedModelError, match=r"weights that are quantised(.|\n)*1 quantised weights: .*q_proj"):
        converted(tmp_path / "m", adapter, tmp_path / "c")


def test_directories_that_are_no_adapters(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    with pytest.raises(MissingModelError, match="no such adapter directory"):
        converted(model, tmp_path / "a", tmp_path / "c")
    with pytest.raises(CheckpointError, match="lacks the weights of an adapter"):
        converted(model, model, tmp_path / "c")
    (write_adapter(tmp_path / "a", factors()) / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks adapter_config\.json"):
        converted(model, tmp_path / "a", tmp_path / "c")
    with pytest.raises(UsageError, match="--lora needs --model_dir"):
        ConvertOptions(config=tmp_path, random_weights=0, lora=tmp_path, output_dir=tmp_path)
