"""Hugging Face directories without torch: hand-written safetensors with random bits, whole or broken on purpose."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.checkpoint import Checkpoint, CheckpointConfig
from ingot.chunks import Summer
from ingot.configs.read import Section
from ingot.convert.family import read_model
from ingot.convert.weight_shapes import weight_shapes
from ingot.convert.weights import Concat, Expr, FirstRow, KeyGroups, Skip, Split, Stack, Transpose, Unpair, sources
from ingot.dtypes import DType, from_float32

Bits = npt.NDArray[np.generic]

TINY_LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_GPT2: dict[str, object] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[DType, Bits]], *, padding: int = 0) -> None:
    """One file; `padding` spaces after the header shift the bits to unaligned offsets."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, bits) in tensors.items():
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": list(bits.shape),
            "data_offsets": [position, position + bits.nbytes],
        }
        position += bits.nbytes
    text = json.dumps(header).encode() + b" " * padding
    data = b"".join(bits.tobytes() for _, bits in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def checked(folder: Path, *names: str) -> Checkpoint:
    """A folder as an opened Checkpoint whose weights lie in the files `names`, as these are now."""
    weights = {}
    for name in names:
        summer = Summer()
        summer.update(memoryview((folder / name).read_bytes()))
        weights[name] = summer.finish()
    return Checkpoint(path=folder, config=CheckpointConfig(weights=weights))


def edit_header(path: Path, edit: Mapping[str, Mapping[str, object]]) -> None:
    """Replace entries of a header; the bits stay."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    for name, entry in edit.items():
        header[name] = {**header.get(name, {}), **entry}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def random_tensors(
    config: Mapping[str, object], *, seed: int = 0, dtype: DType = DType.F32
) -> dict[str, tuple[DType, Bits]]:
    """The tensors a model of this configuration consists of, under their Hugging Face names."""
    family, model, _ = read_model(Section(config, "config.json"), None)
    rows, _ = family.table(model, [family.optional_prefix])
    generator = np.random.default_rng(seed)
    exprs = {row.name: row.expr for row in rows}
    tensors: dict[str, tuple[DType, Bits]] = {}
    for name, shape in weight_shapes(model).items():
        bits = from_float32(generator.normal(0, 0.2, shape).astype(np.float32), dtype)
        tensors |= {source: (dtype, part) for source, part in _taken_apart(exprs[name], bits)}
    return tensors


def _taken_apart(expr: Expr, bits: Bits) -> Iterator[tuple[str, Bits]]:
    """The tensors that a weight is stacked and concatenated from; of one that is made otherwise, the first alone. What
    several weights are parts of has the same numbers in each part."""
    if isinstance(expr, Transpose | Unpair):  # rows in some order: any will do
        yield from _taken_apart(expr.of, bits.swapaxes(-1, -2) if isinstance(expr, Transpose) else bits)
        return
    if isinstance(expr, KeyGroups):
        yield from _taken_apart(expr.of, np.resize(bits, (expr.groups * sum(expr.sizes), *bits.shape[1:])))
        return
    if isinstance(expr, Skip):
        yield from _taken_apart(expr.of, np.concatenate([bits[: expr.rows], bits]))
        return
    if isinstance(expr, Split):
        yield from _taken_apart(expr.of, np.concatenate([bits] * expr.parts, expr.axis))
        return
    if not isinstance(expr, Stack | Concat):
        yield sources(expr)[0], bits[None] if isinstance(expr, FirstRow) else bits
        return
    for part, each in zip(expr.of, bits if isinstance(expr, Stack) else np.split(bits, len(expr.of)), strict=True):
        yield from _taken_apart(part, each)


def write_model(
    folder: Path,
    config: Mapping[str, object] = TINY_LLAMA,
    *,
    tensors: Mapping[str, tuple[DType, Bits]] | None = None,
    shards: int = 1,
    padding: int = 0,
    dtype: DType = DType.F32,
) -> Path:
    """A complete model directory; returns it. More than one shard brings an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, dtype=dtype) if tensors is None else tensors
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, padding=padding)
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {}
    for file, part in zip(names, _parts(list(tensors), shards), strict=True):
        write_safetensors(folder / file, {name: tensors[name] for name in part}, padding=padding)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(bits.nbytes for _, bits in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _parts(names: Sequence[str], count: int) -> list[list[str]]:
    return [list(part) for part in np.array_split(np.array(names, dtype=object), count)]
