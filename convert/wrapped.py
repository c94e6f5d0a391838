"""Text models inside a wrapper for images or sound: the text is a known family under another prefix.

config.json holds the family's configuration in `text_config` (or, in older files, flat beside `vision_config`). Towers
and projectors are left out, and the conversion says so.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ingot.configs.read import Section
from ingot.convert.weights import Row, Shape, Take, Tensor, Transpose
from ingot.errors import ConfigError, UnsupportedModelError

Kind = TypeVar("Kind")

_TEXT = ("language_model.model.", "model.language_model.")  # → "model."
_HEAD = "language_model.lm_head."  # → "lm_head."
_PARTS = (
    *("vision_tower.", "visual.", "multi_modal_projector.", "mm_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.", "image_newline"),
)
TOWERS = (*_PARTS, *(f"model.{part}" for part in _PARTS))

# Keys of the wrapper that speak of images and sounds, of training, or of what is read elsewhere.
_OF_IMAGES = (
    *("downsample_factor", "downsample_ratio", "image_grid_pinpoints"),
    *("projector_bias", "projector_hidden_size", "projector_use_layernorm", "video_token_index"),
    *("use_image_newline_parameter", "vision_aspect_ratio"),
    "audio_config",
    "audio_soft_tokens_per_image",
    "audio_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "vision_soft_tokens_per_image",
    "ignore_index",
    "image_seq_length",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_start_token_id",
    "vision_token_id",
    "boi_token_index",
    "eoi_token_index",
    "boi_token_id",
    "eoi_token_id",
)
_ELSEWHERE = ("model_type", "quantization_config", "text_config", "tie_word_embeddings", "vocab_size")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MROPE = ("mrope_section", "mrope_interleaved")  # three equal positions, as texts have them, rotate like one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """text            model_type of text_config → family; the first where it does not say
    defaults           of text_config in transformers, where they are not the family's
    always             keys of text_config that transformers does not look at, and what it does
    flat               old files have no text_config: its keys lie beside vision_config
    tied               whether lm_head is the token table where neither configuration nor files say
    experts_in_out     stacked experts may be stored [experts, in, out]
    models             what people call them
    """

    text: Mapping[str, str]
    models: str
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    always: Mapping[str, object] = dataclasses.field(default_factory=dict)
    flat: bool = False
    tied: bool = False
    experts_in_out: bool = False


_SIZES_OF_GEMMA = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_SIZES_OF_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN2 = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
_QWEN3 = {"max_position_embeddings": 128000, "rope_theta": 5e5}

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        text={"gemma3_text": "gemma3_text"}, models="Gemma 3 4B to 27B", defaults=_SIZES_OF_GEMMA, tied=True
    ),
    "gemma3n": Wrapper(text={"gemma3n_text": "gemma3n_text"}, models="Gemma 3n E2B and E4B", tied=True),
    "gemma4": Wrapper(text={"gemma4_text": "gemma4_text"}, models="Gemma 4 E2B, E4B, 26B-A4B and 31B", tied=True),
    "gemma4_unified": Wrapper(text={"gemma4_unified_text": "gemma4_unified_text"}, models="Gemma 4 12B", tied=True),
    "internvl": Wrapper(
        text={each: each for each in ("qwen2", "qwen3", "qwen3_moe", "llama")},
        models="InternVL 2.5 to 3.5 in the form of transformers",
    ),
    "kimi_k25": Wrapper(text={"kimi_k2": "kimi_k2", "deepseek_v3": "kimi_k2"}, models="Kimi K2.5 to K2.7"),
    "lfm2_vl": Wrapper(text={"lfm2": "lfm2"}, models="LFM2-VL and LFM2.5-VL", tied=True),
    "llava": Wrapper(
        text={"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, models="LLaVA 1.5", defaults=_SIZES_OF_LLAMA
    ),
    "llava_next": Wrapper(
        text={"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, models="LLaVA 1.6", defaults=_SIZES_OF_LLAMA
    ),
    "llava_onevision": Wrapper(text={"qwen2": "qwen2"}, models="LLaVA-OneVision"),
    "mistral3": Wrapper(
        text={each: each for each in ("mistral", "ministral3", "mistral4")},
        models="Mistral Small 3.1, 3.2 and 4, Ministral 3",
    ),
    "qwen2_vl": Wrapper(
        text={"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}, models="Qwen2-VL", defaults=_QWEN2, flat=True
    ),
    "qwen2_5_vl": Wrapper(
        text={"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}, models="Qwen2.5-VL", defaults=_QWEN2, flat=True
    ),
    "qwen3_5": Wrapper(text={"qwen3_5_text": "qwen3_5_text"}, models="Qwen 3.5, 3.6 and 3.8, 0.8B to 27B"),
    "qwen3_5_moe": Wrapper(
        text={"qwen3_5_moe_text": "qwen3_5_moe_text"}, models="Qwen 3.5 and 3.6, 35B-A3B to 397B-A17B"
    ),
    "qwen3_vl": Wrapper(text={"qwen3_vl_text": "qwen3"}, models="Qwen3-VL", defaults=_QWEN3),
    "qwen3_vl_moe": Wrapper(
        text={"qwen3_vl_moe_text": "qwen3_moe"},
        models="Qwen3-VL 30B-A3B and 235B-A22B",
        defaults={
            **_QWEN3,
            "num_key_value_heads": 16,
            "head_dim": None,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        always={"norm_topk_prob": True, "tie_word_embeddings": False},
        experts_in_out=True,
    ),
}

_ALSO: Mapping[object, str] = {"ministral3": "mistral3"}  # some files give a wrapper the type of its text model


def wrapper_of(section: Section) -> Wrapper | None:
    """What wraps the text model of a config.json, None where nothing does."""
    kind = section.raw("model_type")
    if kind in _ALSO and section.has("text_config"):
        return WRAPPERS[_ALSO[kind]]
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def text_section(section: Section, names: Collection[str] | None) -> tuple[Section, tuple[str, ...]]:
    """(the configuration of the text model as its family reads it, keys of the wrapper that nobody understands).

    names: the tensors of the text model, None for random weights. A plain config.json is returned as it is.
    """
    wrapper = wrapper_of(section)
    if wrapper is None:
        return section, ()
    outer = section.values()
    flat = wrapper.flat and outer.get("text_config") is None
    if not flat and not section.has("text_config"):
        raise ConfigError("text_config is missing, which describes the text model", where=section.place("text_config"))
    inner = section if flat else section.section("text_config")
    values = {key: each for key, each in inner.values().items() if not flat or key not in _OF_IMAGES}
    kind = values.get("model_type", next(iter(wrapper.text)))
    if not isinstance(kind, str) or kind not in wrapper.text:
        raise UnsupportedModelError(
            "the text model inside this model is not supported",
            where=inner.place("model_type"),
            expected=", ".join(wrapper.text),
            got=repr(kind)[:200],
        )
    if any("scaling" in key or "parameters" in key for key in values):
        values |= {key: _plain_rope(values[key]) for key in ("rope_scaling", "rope_parameters") if key in values}
    defaults = {key: each for key, each in wrapper.defaults.items() if key not in values}
    for key, said in (("rope_theta", _says_theta(values)), ("num_experts", "num_local_experts" in values)):
        if said:  # under another name
            defaults.pop(key, None)
    values |= {key: each for key, each in defaults.items() if each is not None}
    values |= {**wrapper.always, "model_type": wrapper.text[kind]}
    values["tie_word_embeddings"] = _tied(outer, values, wrapper, names)
    values |= {key: outer[key] for key in _TOKENS if outer.get(key) is not None}
    values.pop("quantization_config", None)  # read from there
    known = () if flat else (*_OF_IMAGES, *_ELSEWHERE, *_TOKENS)
    return Section(values, inner.where), tuple(sorted(key for key in outer if not flat and key not in known))


def _says_theta(values: Mapping[str, object]) -> bool:
    """Whether the object of the rotation says how fast it rotates."""
    inner = values.get("rope_parameters")
    return isinstance(inner, dict) and inner.get("rope_theta") is not None


def _plain_rope(rope: object) -> object:
    """The rotation of three positions that are equal."""
    if not isinstance(rope, dict):
        return rope
    plain = {key: each for key, each in rope.items() if key not in _MROPE}
    return {key: "default" if key in ("type", "rope_type") and each == "mrope" else each for key, each in plain.items()}


def _tied(
    outer: Mapping[str, object], inner: Mapping[str, object], wrapper: Wrapper, names: Collection[str] | None
) -> object:
    """tie_word_embeddings of the wrapper or of the text model; where neither says, what the files show."""
    said = [each["tie_word_embeddings"] for each in (outer, inner) if each.get("tie_word_embeddings") is not None]
    strange = next((each for each in said if not isinstance(each, bool)), None)
    if strange is not None:
        return strange  # the family's reader refuses it by name
    if said:
        return any(said)
    return wrapper.tied if names is None else not any(name.startswith("lm_head.") for name in names)


def text_tensors(wrapper: Wrapper | None, tensors: Mapping[str, Kind]) -> dict[str, Kind]:
    """The tensors of the text model, named as its family does."""
    if wrapper is None:
        return dict(tensors)
    return {text_name(name): each for name, each in tensors.items() if not name.startswith(TOWERS)}


def text_name(name: str) -> str:
    """What a wrapper's tensor is called by the family of the text model."""
    if name.startswith(_HEAD):
        return name.replace("language_model.", "", 1)
    prefix = next((each for each in _TEXT if name.startswith(each)), None)
    return name if prefix is None else f"model.{name.removeprefix(prefix)}"


def left_out(wrapper: Wrapper | None, tensors: Mapping[str, object]) -> tuple[str, ...]:
    """A sentence about the tensors that nothing here reads."""
    dropped = [name for name in tensors if name.startswith(TOWERS)] if wrapper is not None else []
    if not dropped:
        return ()
    first = sorted({name.removeprefix("model.").split(".")[0] for name in dropped})
    return (f"the text model alone is converted: {len(dropped):,} tensors of {', '.join(first)} are left out",)


def as_stored(
    wrapper: Wrapper | None, rows: Sequence[Row], tensors: Mapping[str, Tensor], wanted: Mapping[str, Shape]
) -> list[Row]:
    """A family's rows, transposed where files store stacked experts [experts, in, out]: those of the Hub do, those that
    transformers writes do not. One of the two shapes tells, since not both can be square."""
    if wrapper is None or not wrapper.experts_in_out:
        return list(rows)
    stacks = {row.name: row.expr.name for row in rows if isinstance(row.expr, Take) and ".experts." in row.expr.name}
    if all(tensors[theirs].shape == wanted.get(ours) for ours, theirs in stacks.items() if theirs in tensors):
        return list(rows)
    return [Row(row.name, Transpose(row.expr)) if row.name in stacks else row for row in rows]
