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
_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "granite": "granite",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
}
FAMILIES = tuple(_NAMES)
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
    found |= {**_experts(model), **_of_gemma(model), **_of_granite(model)}
    if model.family == "phi3" and any(model.windows):
        found["attention.sliding_window"] = max(model.windows)
    return {f"{name}.{key}": value for key, value in found.items()}


def _experts(model: ModelConfig) -> dict[str, Setting]:
    if model.moe is None:
        return {}
    return {
        "expert_count": model.moe.experts,
        "expert_used_count": model.moe.per_token,
        "expert_feed_forward_length": model.moe.intermediate_size,
    }


def _of_gemma(model: ModelConfig) -> dict[str, Setting]:
    """Windows and caps of Gemma 2 and 3; which layers have a window is told by the first that has none."""
    if model.family not in ("gemma2", "gemma3_text"):
        return {}
    found: dict[str, Setting] = {"attention.sliding_window": max(model.windows, default=0)}
    for key, cap in (("attn", model.score_cap), ("final", model.logit_cap)):
        if cap:
            found[f"{key}_logit_softcapping"] = float(cap)
    if model.family == "gemma3_text":
        whole = [layer for layer, window in enumerate(model.windows) if not window]
        found["attention.sliding_window_pattern"] = (whole[0] if whole else model.num_layers) + 1
    if model.local_rope is not None:
        found["rope.freq_base_swa"] = float(model.local_rope.theta)
    return found


def _of_granite(model: ModelConfig) -> dict[str, Setting]:
    if model.family != "granite":
        return {}
    return {
        "embedding_scale": float(model.embedding_scale),
        "attention.scale": float(model.attention_scale),
        "residual_scale": float(model.residual_scale),
        "logit_scale": 1 / float(model.logit_scale),
    }


def rope_factors(model: ModelConfig) -> "np.ndarray[tuple[int], np.dtype[np.float32]] | None":
    """Divisors of the frequencies, where a scaling is more than one number."""
    rope = model.rope
    if rope is None or not (rope.llama3 or rope.factors):
        return None
    plain = RopeConfig(theta=rope.theta, rotary_dim=rope.rotary_dim)
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = inverse_frequencies(plain) / inverse_frequencies(rope)
    return found


def their_names(architecture: Architecture, model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Weight of the model → llama.cpp's name; two names where gates and ups of all experts are two tensors."""
    made = {row.name: (sources(row.expr)[0],) for row in gguf_rows(architecture, model, _stacks(model))}
    return {name: _without_experts(theirs) if "/moe/" in name else theirs for name, theirs in made.items()}


def _stacks(model: ModelConfig) -> list[str]:
    """Tensors of experts one by one, as `gguf_rows` knows them."""
    if model.moe is None:
        return []
    layers = [layer for layer in range(model.num_layers) if model.moe_of(layer) is not None]
    return [f"blk.{layer}.ffn_{part}_exps.0.weight" for layer in layers for part in ("gate", "up", "down")]


def _without_experts(theirs: tuple[str, ...]) -> tuple[str, ...]:
    """blk.0.ffn_gate_exps.0.weight → the stacks of gates and of ups; others as they are."""
    stack = theirs[0].replace("_exps.0.weight", "_exps.weight")
    return (stack, stack.replace("ffn_gate_", "ffn_up_")) if "ffn_gate_exps" in stack else (stack,)


def as_written(model: ModelConfig) -> ModelConfig:
    """What the file says: norms hold the sum of their factor and what the model adds to it."""
    return dataclasses.replace(model, norm_offset=0.0)


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
