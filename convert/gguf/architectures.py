"""What llama.cpp calls a model's settings and tensors, and what Hugging Face calls them: an architecture a row.

llama.cpp's converter moves weights about. Rows of q and k that rotate in pairs of neighbours (`paired`) go back into
their order; what it has prepared once and for all (norms of Gemma plus 1, transposed products of GPT-2, q, k, v of
GPT-NeoX one behind the other) is taken as it is, and the model's configuration says so (`adapt`, `regrouped`).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.errors import UnsupportedModelError

Names = Collection[str]
Config = dict[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """model_type  the family; of a mixture of experts, which the number of experts tells: moe_type
    config      (settings, without the architecture's name in front; names of the tensors) → config.json
    tensors     llama.cpp's name → Hugging Face's, "{i}" the layer, "{e}" the expert of a stack or of a name
    paired      tensors whose rows rotate in pairs of neighbours
    regrouped   tensors that lie as the Graph wants them, where the family's files do not
    adapt       the configuration of what the converter has prepared
    """

    model_type: str
    moe_type: str = ""
    config: Callable[[Section, Names], Config]
    tensors: Mapping[str, str]
    paired: tuple[str, ...] = ()
    regrouped: bool = False
    adapt: Callable[[ModelConfig, Names], ModelConfig] = lambda model, names: model


def _whole(keys: Section, key: str, default: int | None = None) -> int:
    """A number that may be given layer by layer, if all layers agree."""
    value = keys.raw(key)
    if not isinstance(value, list):
        return keys.integer(key, default)
    if len(set(value)) != 1:
        raise UnsupportedModelError(
            f"{key} differs from layer to layer, which is not supported", where=keys.place(key), got=repr(value)[:200]
        )
    return Section({key: value[0]}, keys.where).integer(key)


def _sizes(keys: Section, names: Names) -> Config:
    """What all architectures have."""
    heads = _whole(keys, "attention.head_count")
    hidden = keys.integer("embedding_length", minimum=1)
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    _require(keys, "attention.value_length", head_dim)
    keys.integer("vocab_size", 0)  # the token table says it
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count", minimum=1),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(keys, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _whole(keys, "feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length", minimum=1),
        "tie_word_embeddings": "output.weight" not in names,
    }


def _require(keys: Section, key: str, *values: object) -> None:
    """Raise UnsupportedModelError unless a setting is absent or one of these."""
    if keys.has(key) and keys.raw(key) not in values:
        raise UnsupportedModelError(
            f"{key} has a value that is not supported",
            where=keys.place(key),
            expected=" or ".join(map(str, values)),
            got=repr(keys.raw(key))[:200],
        )


def _rope(keys: Section, head_dim: int) -> Config:
    """rope_theta, rope_scaling, and the part of a head that rotates."""
    rotary_dim = keys.integer("rope.dimension_count", head_dim)
    found: Config = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    if rotary_dim != head_dim:
        found["partial_rotary_factor"] = rotary_dim / head_dim
    kind = keys.text("rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.integer("rope.scaling.original_context_length", 0)
    keys.has("rope.scaling.finetuned")
    _require(keys, "rope.scaling.alpha", 0.0)
    for key in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        _require(keys, f"rope.scaling.{key}", 0.0 if key == "yarn_log_multiplier" else 1.0)
    if kind in ("none", "longrope"):
        return found
    scaling: Config = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or keys.integer("context_length")
        share = keys.number("rope.scaling.attn_factor", 1.0)
        if share != 1:
            scaling["attention_factor"] = share * (1 + 0.1 * math.log(factor) if factor > 1 else 1.0)
        for side in ("fast", "slow"):
            if keys.has(f"rope.scaling.yarn_beta_{side}"):
                scaling[f"beta_{side}"] = keys.number(f"rope.scaling.yarn_beta_{side}")
    if kind != "linear" or factor != 1:
        found["rope_scaling"] = scaling
    return found


def _llama(keys: Section, names: Names) -> Config:
    """What a llama and its twins share."""
    sizes = _sizes(keys, names)
    head_dim = sizes["head_dim"]
    assert isinstance(head_dim, int), "_sizes reads it"
    experts = keys.integer("expert_count", 0)
    _require(keys, "attention.causal", True)
    for key in ("expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"):
        _require(keys, key, 0.0, 1.0)
    _require(keys, "expert_shared_count", 0)
    _require(keys, "leading_dense_block_count", 0)
    keys.has("tensor_data_layout")
    taken = keys.integer("expert_used_count", 0)
    moe: Config = {"num_local_experts": experts, "num_experts_per_tok": taken} if experts else {}
    return {
        **sizes,
        **_rope(keys, head_dim),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", above=0),
        **moe,
    }


def _qwen3_moe(keys: Section, names: Names) -> Config:
    """llama.cpp makes the weights of the taken experts sum to 1 in this architecture."""
    found = _llama(keys, names)
    found["num_experts"] = found.pop("num_local_experts", 0)
    found["moe_intermediate_size"] = keys.integer("expert_feed_forward_length", minimum=1)
    return {**found, "norm_topk_prob": True, "decoder_sparse_step": 1}


def _gemma2(keys: Section, names: Names) -> Config:
    """The largest models scale scores by the hidden size; no setting says so, and llama.cpp goes by their layers."""
    found = _llama(keys, names)
    hidden, heads = int(str(found["hidden_size"])), int(str(found["num_attention_heads"]))
    by_hidden = found["num_hidden_layers"] in (46, 62) and hidden // heads != found["head_dim"]
    found["query_pre_attn_scalar"] = hidden / heads if by_hidden else found["head_dim"]
    found["sliding_window"] = keys.integer("attention.sliding_window", 4096)
    found["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    found["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    return found


def _gemma3(keys: Section, names: Names) -> Config:
    caps = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
    given = {key: keys.number(key) for key in caps if keys.has(key)}
    found = {**_gemma2(keys, names), "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6)}
    for key in caps:
        found[key] = given.get(key) or None
    _require(keys, "attn_logit_softcapping", 0.0)
    if not keys.has("attention.sliding_window"):
        found["sliding_window"] = 1024
    found["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    if not keys.has("rope.freq_base"):
        found["rope_theta"] = 1000000.0
    return found


def _phi3(keys: Section, names: Names) -> Config:
    window = keys.integer("attention.sliding_window", 0)
    return {**_llama(keys, names), "sliding_window": window or None}


def _starcoder2(keys: Section, names: Names) -> Config:
    sizes = _sizes(keys, names)
    _require(keys, "rope.dimension_count", sizes["head_dim"])
    return {
        **{key: value for key, value in sizes.items() if key != "head_dim"},
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "use_bias": "blk.0.attn_q.bias" in names,
    }


def _gpt2(keys: Section, names: Names) -> Config:
    sizes = _sizes(keys, names)
    _require(keys, "attention.head_count_kv", sizes["num_attention_heads"])
    return {
        "n_embd": sizes["hidden_size"],
        "n_head": sizes["num_attention_heads"],
        "n_layer": sizes["num_hidden_layers"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "tie_word_embeddings": sizes["tie_word_embeddings"],
    }


def _gpt_neox(keys: Section, names: Names) -> Config:
    sizes = _sizes(keys, names)
    head_dim = int(str(sizes["head_dim"]))
    shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "tie_word_embeddings")
    return {
        **{key: sizes[key] for key in shared},
        "max_position_embeddings": sizes["max_position_embeddings"],
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0),
        "rotary_pct": keys.integer("rope.dimension_count", head_dim) / head_dim,
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon", above=0),
        "use_parallel_residual": keys.boolean("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in names,
    }


def _biases(model: ModelConfig, names: Names) -> ModelConfig:
    """Those that the files have, which no setting says."""
    return dataclasses.replace(
        model,
        qkv_bias="blk.0.attn_q.bias" in names,
        attention_out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
    )


def _plain_norms(model: ModelConfig, names: Names) -> ModelConfig:
    return dataclasses.replace(model, norm_offset=0.0)


def _out_in(model: ModelConfig, names: Names) -> ModelConfig:
    return dataclasses.replace(model, linear_in_out=False)


_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}{each}": f"block_sparse_moe.experts.{{e}}.{name}"
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        for each in ("_exps", ".{e}")
    },
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
}


def _named(ends: Mapping[str, str], layer: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Weights and biases of modules."""
    modules = {**ends, **{f"blk.{{i}}.{ours}": f"{layer}.{theirs}" for ours, theirs in parts.items()}}
    return {f"{ours}.{x}": f"{theirs}.{x}" for ours, theirs in modules.items() for x in ("weight", "bias")}


def _twin(parts: Mapping[str, str]) -> dict[str, str]:
    """Tensors of a llama or one of its twins."""
    return _named(_ENDS, "model.layers.{i}", {**_ATTENTION, **parts})


_PHI = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj"}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_PLAIN = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        moe_type="mixtral",
        config=_llama,
        tensors=_twin({**_NORMS, **_MLP, **_MIXTRAL}),
        paired=("attn_q", "attn_k"),
        adapt=_biases,
    ),
    "qwen2": Architecture(model_type="qwen2", config=_llama, tensors=_twin({**_NORMS, **_MLP}), adapt=_biases),
    "qwen3": Architecture(model_type="qwen3", config=_llama, tensors=_twin({**_NORMS, **_MLP}), adapt=_biases),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", config=_qwen3_moe, tensors=_twin({**_NORMS, **_EXPERTS}), adapt=_biases
    ),
    "gemma": Architecture(model_type="gemma", config=_llama, tensors=_twin({**_NORMS, **_MLP}), adapt=_plain_norms),
    "gemma2": Architecture(model_type="gemma2", config=_gemma2, tensors=_twin({**_AROUND, **_MLP}), adapt=_plain_norms),
    "gemma3": Architecture(
        model_type="gemma3_text", config=_gemma3, tensors=_twin({**_AROUND, **_MLP}), adapt=_plain_norms
    ),
    "phi3": Architecture(model_type="phi3", config=_phi3, tensors=_twin({**_NORMS, **_MLP, **_PHI})),
    "olmo2": Architecture(model_type="olmo2", config=_llama, tensors=_twin({**_BEHIND, **_MLP}), adapt=_biases),
    "starcoder2": Architecture(model_type="starcoder2", config=_starcoder2, tensors=_twin({**_NORMS, **_PLAIN})),
    "gpt2": Architecture(
        model_type="gpt2",
        config=_gpt2,
        tensors=_named(
            {
                "token_embd": "transformer.wte",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            "transformer.h.{i}",
            {
                "attn_norm": "ln_1",
                "attn_qkv": "attn.c_attn",
                "attn_output": "attn.c_proj",
                "ffn_norm": "ln_2",
                "ffn_up": "mlp.c_fc",
                "ffn_down": "mlp.c_proj",
            },
        ),
        adapt=_out_in,
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        config=_gpt_neox,
        tensors=_named(
            {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
            "gpt_neox.layers.{i}",
            {
                "attn_norm": "input_layernorm",
                "attn_qkv": "attention.query_key_value",
                "attn_output": "attention.dense",
                "ffn_norm": "post_attention_layernorm",
                "ffn_up": "mlp.dense_h_to_4h",
                "ffn_down": "mlp.dense_4h_to_h",
            },
        ),
        regrouped=True,
    ),
}


def find_architecture(name: str, where: str) -> Architecture:
    """By general.architecture. Raises UnsupportedModelError."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {name!r} are not read",
            where=where,
            expected=", ".join(sorted(ARCHITECTURES)),
            got=name,
            hint="convert the model that the file was made from; a new architecture is a row of "
            "convert/gguf/architectures.py",
        )
    return ARCHITECTURES[name]
