"""Model directories made to break the conversion: each is refused in words, at once, and leaves nothing behind."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.source import INDEX_FILE, SINGLE_FILE
from ingot.errors import IngotError
from tests.handmade import TINY_LLAMA, edit_header, random_tensors, write_model, write_safetensors

NORM, UP, DOWN = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")

Break = Callable[[Path], object]
"""Takes the directory of a sound model of two shards and spoils it."""


def config(**changes: object) -> Break:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))


def text(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def grown(name: str) -> Break:
    """A file of 1 GiB, most of it a hole."""

    def spoil(folder: Path) -> None:
        (folder / name).open("a").close()
        os.truncate(folder / name, 1 << 30)

    return spoil


def index(**edits: object) -> Break:
    """Tensor → file; "__" stands for a dot."""

    def spoil(folder: Path) -> None:
        document: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text())
        document["weight_map"] |= {name.replace("__", "."): file for name, file in edits.items()}
        (folder / INDEX_FILE).write_text(json.dumps(document))

    return spoil


def header(edit: Mapping[str, Mapping[str, object]]) -> Break:
    return lambda folder: edit_header(folder / "model-00002-of-00002.safetensors", edit)


def raw_header(length: int, data: bytes) -> Break:
    return lambda folder: (folder / SINGLE_FILE).write_bytes(struct.pack("<Q", length) + data)


def link(name: str, target: str) -> Break:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def swapped(folder: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    tensors[UP], tensors[DOWN] = tensors[DOWN], tensors[UP]
    write_safetensors(folder / SINGLE_FILE, tensors)


def twice(folder: Path) -> None:
    """A shard holds a tensor that the index places in the other one."""
    tensors = random_tensors(TINY_LLAMA)
    places: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    first, second = sorted(set(places.values()))
    name = next(name for name, file in places.items() if file == first)
    names = [name, *(each for each, file in places.items() if file == second)]
    write_safetensors(folder / second, {each: tensors[each] for each in names})


def huge_header(folder: Path) -> None:
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 100_000_000))
        file.truncate(100_000_008)


NESTED, YARN = "[" * 100_000, {"rope_type": "yarn", "original_max_position_embeddings": 16}

CASES: dict[str, tuple[Break, str]] = {
    "1 GB config.json": (grown("config.json"), r"too large(.|\n)*config.json(.|\n)*1,073,741,824 bytes"),
    "1 GB index": (grown(INDEX_FILE), r"too large(.|\n)*index.json"),
    "1 GB generation_config.json": (grown("generation_config.json"), "too large"),
    "1 GB tokenizer.model": (grown("tokenizer.model"), "too large for a sentencepiece model"),
    "nested config": (text("config.json", NESTED), "not valid JSON"),
    "nested value": (text("config.json", f'{{"model_type": "llama", "vocab_size": {NESTED}'), "not valid JSON"),
    "nested index": (text(INDEX_FILE, '{"weight_map":' * 100_000), "not valid JSON"),
    "nested header": (raw_header(100_000, NESTED.encode()), "not valid JSON"),
    "header of 100 MB": (huge_header, r"header of the safetensors file is too large(.|\n)*100,000,000 bytes"),
    "header of 2^63": (raw_header(1 << 63, b"{}"), "shorter than its header says"),
    "negative offsets": (header({NORM: {"data_offsets": [-8, 120]}}), "malformed"),
    "offsets beyond": (header({NORM: {"data_offsets": [1 << 60, (1 << 60) + 128]}}), "leaves a hole|beyond the end"),
    "overlap": (header({NORM: {"data_offsets": [0, 128]}}), "overlaps"),
    "unknown dtype": (header({NORM: {"dtype": "Q4"}}), "type Q4 are not supported"),
    "integers": (header({NORM: {"dtype": "I64", "shape": [16]}}), "type I64 are not supported"),
    "8-bit floats": (header({NORM: {"dtype": "F8_E4M3", "shape": [128]}}), "type F8_E4M3 are not supported"),
    "shape of other bytes": (header({NORM: {"shape": [1 << 62, 1 << 62]}}), "do not fit its shape"),
    "shapes swapped": (swapped, rf"other shapes(.|\n)*{DOWN}: expected \[32, 44\], got \[44, 32\]"),
    "tensor twice": (twice, "does not place there"),
    "absolute path": (index(model__norm__weight="/etc/passwd"), "points outside"),
    "path upwards": (index(model__norm__weight="../../x.safetensors"), "points outside"),
    "null byte": (index(model__norm__weight="a\0b/x.safetensors"), "points outside"),
    "other kind": (index(model__norm__weight="config.json"), "file of another kind"),
    "absent file": (index(model__norm__weight="absent.safetensors"), "1 missing: absent.safetensors"),
    "no file name": (index(model__norm__weight=5), "weight_map.model.norm.weight"),
    "endless name": (index(model__norm__weight="a" * 5000 + ".safetensors"), "points outside"),
    "link to itself": (link("config.json", "config.json"), r"no config\.json"),
    "links in a circle": (link(SINGLE_FILE, SINGLE_FILE), r"model\.safetensors(.|\n)*leads nowhere, or in circles"),
    "tokenizer in a circle": (link("tokenizer.json", "tokenizer.json"), r"tokenizer\.json(.|\n)*leads nowhere"),
    "a device": (link("tokenizer.json", "/dev/zero"), "a directory or device"),
    "billion layers": (config(num_hidden_layers=10**9), r"is too large(.|\n)*num_hidden_layers"),
    "billion dimensions": (config(head_dim=10**9), "heads of the model are too large"),
    "no vocabulary": (config(vocab_size=0), "config.json:vocab_size"),
    "endless vocabulary": (config(vocab_size=10**30), "config.json:vocab_size"),
    "other vocabulary": (config(vocab_size=10**15), r"embed_tokens.weight: expected \[1000000000000000, 32\]"),
    "uneven heads": (config(num_attention_heads=5, head_dim=None), "not a multiple of the number of heads"),
    "NaN": (config(rms_norm_eps=float("nan")), "config.json:rms_norm_eps"),
    "too large for float32": (config(rms_norm_eps=1e300), "norm_eps, which ingot reads"),
    "still rotation": (config(rope_theta=1e300), "infinite or zero"),
    "endless rotation": (config(rope_theta=1e-300), "infinite or zero"),
    "factor 0": (config(rope_scaling={"rope_type": "linear", "factor": 0}), "rope_scaling.factor"),
    "factor true": (config(rope_scaling={"rope_type": "linear", "factor": True}), "rope_scaling.factor"),
    "endless yarn": (config(rope_scaling={**YARN, "factor": 1e300}), "too many positions"),
    "a token that is none": (config(eos_token_id="x"), "config.json:eos_token_id"),
    "an endless token": (config(bos_token_id=10**30), "config.json:bos_token_id"),
    "several first tokens": (config(bos_token_id=[1, 2]), "config.json:bos_token_id"),
    "generation of another kind": (text("generation_config.json", "[1]"), "holds no JSON object"),
}


@pytest.mark.daily(31)
@pytest.mark.parametrize("name", CASES)
def test_is_refused_in_words(tmp_path: Path, name: str) -> None:
    spoil, words = CASES[name]
    folder = write_model(tmp_path / "m", shards=2)
    spoil(folder)
    tracemalloc.start()
    try:
        with pytest.raises(IngotError, match=words):
            convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_no_token_is_minus_one(tmp_path: Path) -> None:
    """Old files say so."""
    folder = write_model(tmp_path / "m", {**TINY_LLAMA, "pad_token_id": -1})
    convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c"))
    assert "pad_token_id" not in json.loads((tmp_path / "c" / "generation_config.json").read_text())


def test_a_cache_of_links_is_followed(tmp_path: Path) -> None:
    """Blobs with hashes as names and a snapshot of relative links to them, as the Hugging Face cache has them."""
    model = write_model(tmp_path / "m", shards=2)
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1a2b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    convert(ConvertOptions(model_dir=snapshot, output_dir=tmp_path / "c"))
    assert not any(file.is_symlink() for file in (tmp_path / "c").iterdir())
