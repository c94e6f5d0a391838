"""What config.json of a Hugging Face directory says of a model; `convert` reads it back, and must find the same."""

from collections.abc import Mapping
from pathlib import Path

from ingot.configs.model import ModelConfig, RopeConfig
from ingot.configs.read import Section
from ingot.convert.family import find_family, read_model
from ingot.convert.weights import Take
from ingot.errors import UnsupportedModelError
from ingot.export.gguf_model import require_same

# model_type → the class that transformers has for it
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "granite": "GraniteForCausalLM",
}
_GEMMAS = ("gemma2", "gemma3_text")
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # ours → the name in transformers


def hf_config(model: ModelConfig, where: Path) -> dict[str, object]:
    """Raises UnsupportedModelError for a family that is not exported, or a model that config.json cannot say."""
    if model.family not in _CLASSES:
        raise UnsupportedModelError(
            f"models of type {model.family!r} are not exported as a Hugging Face directory",
            where=str(where),
            expected=", ".join(_CLASSES),
            got=model.family,
        )
    activation = _ACTIVATIONS.get(model.activation, model.activation)
    config: dict[str, object] = {
        "architectures": [_CLASSES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "hidden_activation" if model.family in _GEMMAS else "hidden_act": activation,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        **_rope(model.rope),
    }
    if model.family in ("llama", "qwen3", "olmo", "olmo2", "granite", "bitnet", *_GEMMAS):
        config["attention_bias"] = model.attention_out_bias
    if model.family in ("llama", "granite"):
        config["mlp_bias"] = model.mlp_bias
    if model.family in ("mistral", "phi3"):
        config["sliding_window"] = max(model.windows, default=0) or None
    kinds = ["sliding_attention" if window else "full_attention" for window in model.windows]
    if model.family in ("qwen2", "qwen3") and any(model.windows):
        config |= {"use_sliding_window": True, "sliding_window": max(model.windows), "layer_types": kinds}
    if model.family in _GEMMAS:
        config |= _of_gemma(model, kinds)
    if model.family == "granite":
        config |= {
            "embedding_multiplier": model.embedding_scale,
            "attention_multiplier": model.attention_scale,
            "residual_multiplier": model.residual_scale,
            "logits_scaling": 1 / model.logit_scale,
        }
    if model.family == "phi3":
        config |= {"original_max_position_embeddings": model.max_positions, "pad_token_id": None}
        if model.rope is not None and model.rope.rotary_dim != model.head_dim:
            config["partial_rotary_factor"] = model.rope.rotary_dim / model.head_dim
    _, back, _ = read_model(Section(dict(config), str(where)), None)
    require_same(model, back, "config.json", where)
    return config


def _of_gemma(model: ModelConfig, kinds: list[str]) -> dict[str, object]:
    """What Gemma 2 and 3 have beside others: the scale of scores, windows, caps, and rotations by kind of layer."""
    scalar = round(model.attention_scale**-2, 6)
    found: dict[str, object] = {
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,  # transformers takes whole ones
        "sliding_window": max(model.windows, default=0) or None,
        "layer_types": kinds or ["full_attention"] * model.num_layers,
        "attn_logit_softcapping": model.score_cap or None,
        "final_logit_softcapping": model.logit_cap or None,
    }
    if model.local_rope is not None:
        found["rope_local_base_freq"] = model.local_rope.theta
    return found


def hf_names(model: ModelConfig) -> dict[str, str]:
    """Name in the Checkpoint → name in the files."""
    rows, _ = find_family(model.family).table(model, ())
    return {row.name: row.expr.name for row in rows if isinstance(row.expr, Take)}


def _rope(rope: RopeConfig | None) -> Mapping[str, object]:
    if rope is None:
        return {}
    found: dict[str, object] = {"rope_theta": rope.theta}
    scaling: dict[str, object] = {}
    if rope.linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": rope.linear_factor}
    if rope.llama3 is not None:
        each = rope.llama3
        scaling = {
            "rope_type": "llama3",
            "factor": each.factor,
            "low_freq_factor": each.low_freq_factor,
            "high_freq_factor": each.high_freq_factor,
            "original_max_position_embeddings": each.original_positions,
        }
    if rope.yarn is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_positions,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
            "attention_factor": rope.scale,
        }
    return {**found, "rope_scaling": scaling} if scaling else found
