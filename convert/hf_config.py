"""What several families spell alike in config.json: head size, key heads, windows, and what is so in every model."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ingot.configs.read import Section
from ingot.errors import ConfigError, UnsupportedModelError


def read_head_dim(section: Section, hidden: int, heads: int, *, hidden_key: str, heads_key: str) -> int:
    """hidden / heads, which must be whole."""
    if hidden % heads:
        raise ConfigError(
            "the hidden size is not a multiple of the number of heads",
            where=section.place(hidden_key),
            expected=f"a multiple of {heads_key} ({heads})",
            got=str(hidden),
        )
    return hidden // heads


def read_kv_heads(section: Section, heads: int, default: int | None = None) -> int:
    """num_key_value_heads; one per query head where the key is null, or absent and the family has no default."""
    if default is None or section.is_null("num_key_value_heads"):
        default = heads
    return section.integer("num_key_value_heads", default, minimum=1)


def read_window(section: Section, default: int = 0) -> int:
    """sliding_window; 0 where it is null, or absent and the family has no default."""
    if section.has("sliding_window"):
        return section.integer("sliding_window", minimum=1)
    return section.integer("sliding_window", 0 if section.is_null("sliding_window") else default)


def windows_by_type(section: Section, layers: int, window: int, usual: Sequence[bool]) -> tuple[int, ...]:
    """layer_types says which layers have the window; where it is absent or null, `usual` does. Empty: none has one."""
    kinds = section.words("layer_types") or tuple("sliding_attention" if each else "full_attention" for each in usual)
    if len(kinds) != layers:
        raise ConfigError(
            "layer_types has not one entry for each layer",
            where=section.place("layer_types"),
            expected=str(layers),
            got=str(len(kinds)),
        )
    for kind in set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layer type {kind!r} is not supported",
            where=section.place("layer_types"),
            expected="full_attention, sliding_attention",
            got=kind,
        )
    if "sliding_attention" in kinds and not window:
        raise ConfigError(
            "a layer has a sliding window, but the model has none",
            where=section.place("layer_types"),
            hint="give sliding_window (and use_sliding_window), or name these layers full_attention",
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def mixer_layers(
    section: Section,
    layers: int,
    kind: str,
    attention: Sequence[int],
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Layers of which layer_types says `kind`, the others being full_attention; where it is absent or null, all but
    `attention`. At least one layer has attention, as in transformers. other_names: name in some files → the usual one.
    """
    usual = tuple("full_attention" if layer in attention else kind for layer in range(layers))
    kinds = tuple(other_names.get(each, each) for each in section.words("layer_types")) or usual
    if len(kinds) != layers or set(kinds) - {kind, "full_attention"} or "full_attention" not in kinds:
        raise ConfigError(
            "layer_types does not fit the model",
            where=section.place("layer_types"),
            expected=f"{layers} entries, each {kind} or full_attention, and at least one full_attention",
            got=", ".join(kinds)[:200],
        )
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def is_called(section: Section, ours: str, theirs: str) -> bool:
    """Whether the file has a key by the family's own name. Raises ConfigError where it has both and they differ."""
    there = section.has(theirs) or section.is_null(theirs)
    if there and section.has(ours) and section.raw(ours) != section.raw(theirs):
        raise ConfigError(
            f"{ours} contradicts {theirs}",
            where=section.place(ours),
            expected=f"{section.raw(theirs)!r}, the value of {theirs}",
            got=repr(section.raw(ours))[:200],
        )
    return there


def require_values(section: Section, only: Mapping[str, object]) -> None:
    """Raise UnsupportedModelError where a key has another value than the only one that the family has; null is as good
    as absent."""
    for key, value in only.items():
        found = section.raw(key)
        if section.has(key) and (found != value or isinstance(found, bool) is not isinstance(value, bool)):
            raise UnsupportedModelError(
                f"{key} has a value that is not supported",
                where=section.place(key),
                expected="no such key" if value is None else f"{json.dumps(value)}, or no such key",
                got=json.dumps(found)[:200],
            )
