"""What a GGUF file says of a model: its settings, and how its tensors are called and ordered.

The file is read back by `convert/gguf`: a model that would not be the same is refused, with the first thing that
differs.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ingot.configs.model import ModelConfig, RopeConfig
from ingot.convert.gguf.architecture import Architecture
from ingot.convert.gguf.architectures import ARCHITECTURES
from ingot.convert.gguf.rows import gguf_rows
from ingot.convert.rope import inverse_frequencies
from ingot.convert.weights import sources
from ingot.errors import UnsupportedModelError
from ingot.export.gguf_file import Setting

# family → architecture
_NAMES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
FACTORS = "rope_freqs.weight"
_CLOSE = 1e-6  # relative, of numbers that a file holds in float32


def architecture_of(model: ModelConfig, where: Path) -> tuple[str, Architecture]:
    """Raises UnsupportedModelError for a family that is not exported."""
    if model.family not in _NAMES:
        raise UnsupportedModelError(
            f"models of type {model.family!r} are not exported as GGUF",
            where=str(where),
            expected=", ".join(_NAMES),
            got=model.family,
        )
    return _NAMES[model.family], ARCHITECTURES[_NAMES[model.family]]


def gguf_settings(model: ModelConfig, name: str) -> dict[str, Setting]:
    """The settings of the architecture."""
    found: dict[str, Setting] = {
        "block_count": model.num_layers,
        "context_length": model.max_positions,
        "embedding_length": model.hidden_size,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": float(model.norm_eps),
        "vocab_size": model.vocab_size,
    }
    if model.rope is not None:
        found |= {"rope.freq_base": float(model.rope.theta), "rope.dimension_count": model.rope.rotary_dim}
        if model.rope.linear_factor != 1:
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(model.rope.linear_factor)}
    return {f"{name}.{key}": value for key, value in found.items()}


def rope_factors(model: ModelConfig) -> "np.ndarray[tuple[int], np.dtype[np.float32]] | None":
    """Divisors of the frequencies, where a scaling is more than one number."""
    rope = model.rope
    if rope is None or not (rope.llama3 or rope.factors):
        return None
    plain = RopeConfig(theta=rope.theta, rotary_dim=rope.rotary_dim)
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = inverse_frequencies(plain) / inverse_frequencies(rope)
    return found


def their_names(architecture: Architecture, model: ModelConfig) -> dict[str, str]:
    """Weight of the model → llama.cpp's name."""
    return {row.name: sources(row.expr)[0] for row in gguf_rows(architecture, model, ())}


def paired_rows(heads: int, rows: int) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Where row i of a file's q or k lies in ours: halves of a head become pairs of neighbours."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def require_same(model: ModelConfig, read_back: ModelConfig, form: str, where: Path) -> None:
    """Raise UnsupportedModelError where a file of this form stands for another model."""
    ours, theirs = _numbers(model), _numbers(read_back)
    for key, value in ours.items():
        if not _alike(value, theirs.get(key)):
            raise UnsupportedModelError(
                f"{form} cannot say what this model computes: {key}",
                where=str(where),
                expected=repr(value)[:200],
                got=repr(theirs.get(key))[:200],
            )


def _numbers(model: ModelConfig) -> Mapping[str, object]:
    """What a model computes, by field; its name does not count, and of rotations their frequencies do."""
    found = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    for key in ("rope", "local_rope"):
        rope = found.pop(key)
        found[f"{key}.frequencies"] = None if rope is None else tuple(inverse_frequencies(rope).tolist())
        found[f"{key}.scale"] = None if rope is None else rope.scale
        found[f"{key}.interleaved"] = rope is not None and rope.interleaved
    del found["family"]
    if not any(model.windows):
        found["windows"] = ()
    return found


def _alike(ours: object, theirs: object) -> bool:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(_alike(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return abs(ours - theirs) <= _CLOSE * abs(ours)
    if isinstance(ours, enum.Enum):
        return ours is theirs
    return ours == theirs
