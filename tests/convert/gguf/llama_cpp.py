"""What llama.cpp's converter makes of a Hugging Face model: names, orders of rows, what it computes beforehand.

Written after its sources, and compared with files that it wrote (version of October 2026).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.convert.gguf.test_blocks import paired

Tensors = dict[str, np.ndarray]
Settings = dict[str, Any]

# Keys of config.json → settings, where a model has them.
_KEYS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), "block_count"),
    **dict.fromkeys(("hidden_size", "n_embd"), "embedding_length"),
    **dict.fromkeys(("num_attention_heads", "n_head"), "attention.head_count"),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "context_length"),
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), "attention.layer_norm_rms_epsilon"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), "attention.layer_norm_epsilon"),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), "expert_count"),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k"), "expert_used_count"),
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GROUPED = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
_NO_HEAD_DIM = ("lfm2", "lfm2_moe", "granite", "granitemoe", "granitemoehybrid", "gemma4_text", "deepseek_v2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """family    whose tiny model
    change    of its config.json
    lay       what the converter does with the tensors
    names     modules that it calls otherwise than usual
    settings  that follow from no key of config.json, None: it writes none
    extra     tensors that it adds
    """

    family: str
    change: Settings = dataclasses.field(default_factory=dict)
    lay: Callable[[Settings, Tensors], Tensors] = lambda config, tensors: tensors
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Settings = dataclasses.field(default_factory=dict)
    extra: Tensors = dataclasses.field(default_factory=dict)


def settings_of(full: Settings) -> Settings:
    """What the base of all converters writes. full: config.json with the defaults of transformers."""
    found = {setting: full[key] for key, setting in _KEYS.items() if full.get(key) is not None}
    if (kind := full["model_type"]) in ("deepseek_v3", "glm4_moe"):
        found |= {setting: full[key] for key, setting in _GROUPED.items()}
    if full.get("head_dim") and kind not in _NO_HEAD_DIM:
        found |= {"attention.key_length": full["head_dim"], "attention.value_length": full["head_dim"]}
    rotation: Settings = full.get("rope_parameters") or {}
    rope: Settings = rotation.get("full_attention", rotation)
    if rope.get("rope_theta"):
        found["rope.freq_base"] = float(rope["rope_theta"])
    if kind in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss"):
        found["attention.sliding_window"] = full["sliding_window"]
    if kind in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"):
        found.pop("feed_forward_length", None)
    return {key: value for key, value in found.items() if not isinstance(value, list)}


_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    **{f"mlp.{x}.{name}_proj": f"ffn_{name}_shexp" for x in _SHARED for name in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **dict.fromkeys(("mlp.gate", "block_sparse_moe.gate", "mlp.router.gate"), "ffn_gate_inp"),
    **{f"{front}.e_score_correction_bias": "exp_probs_b.bias" for front in ("mlp.gate", "block_sparse_moe")},
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "embed_in": "token_embd",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_AROUND = ("gemma2", "gemma3_text", "gemma4_text", "olmo2", "olmo3", "exaone4")  # norms behind each branch too
PHI = {"final_layernorm": "output_norm", "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
BLOOM = {
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
}
GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "experts.gate_up_proj",
    "block_sparse_moe.output_linear": "experts.down_proj",
}
MAMBA = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "dt_bias": "ssm_dt.bias",
}
MAMBA |= {"A_log": "ssm_a", "D": "ssm_d"}
GRANITE_HYBRID = {
    **GRANITE_EXPERTS,
    **{f"mamba.{theirs}": ours for theirs, ours in MAMBA.items()},
    **{f"shared_mlp.{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "shared_mlp.output_linear": "ffn_down_shexp",
}
NEMOTRON = {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    **{f"mixer.{theirs}": ours for theirs, ours in MAMBA.items()},
    **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
    **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
}
LFM2 = {
    "embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
DELTA = {
    **{f"linear_attn.{name}": f"ssm_{part}" for name, part in (("in_proj_a", "alpha"), ("in_proj_b", "beta"))},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GEMMA4 = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
GEMMA4_HEADS = {
    **{"attention.key_length": 12, "attention.value_length": 12, "rope.dimension_count": 12},
    **{"attention.key_length_swa": 8, "attention.value_length_swa": 8, "rope.dimension_count_swa": 8},
}


def gguf_tensors(full: Settings, tensors: Tensors, case: Case) -> Tensors:
    """By llama.cpp's names."""
    names = {
        **_NAMES,
        **({"post_attention_layernorm": "post_attention_norm"} if case.family in _AROUND else {}),
        **case.names,
    }
    made: Tensors = {}
    for name, value in stacked(case.lay(full, tensors)).items():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        front = "" if at is None else f"blk.{parts[at]}."
        path = ".".join(parts[(at or 0) + 1 :] if at is not None else parts)
        made |= {f"{front}{ours}": each for ours, each in _renamed(path, value, names).items()}
    return made


def _renamed(path: str, value: np.ndarray, names: Mapping[str, str]) -> Tensors:
    """One tensor, or those of a stack of experts that holds gates and ups."""
    if path in names:  # a tensor that is no module's
        return {names[path]: value}
    module, _, kind = path.rpartition(".")
    found = next((names[short] for short in _shorter(module) if short in names), None)
    found = found or next((names[short] for short in _shorter(path) if short in names), "")
    found = found or (module if kind in ("weight", "bias") else path)
    if found.endswith("experts.gate_up_proj"):
        gate, up = np.split(value, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    for name, other in _PARTS.items():
        if found.endswith((f"experts.{name}_proj", f"experts.{other}")):
            return {f"ffn_{name}_exps.{kind if kind in ('weight', 'bias') else 'weight'}": value}
    return {f"{found}.{kind}" if kind in ("weight", "bias") else found: value}


_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def stacked(tensors: Tensors) -> Tensors:
    """The matrices of all experts in one tensor."""
    found: Tensors = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, value in tensors.items():
        front, middle, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if middle and number.isdecimal():
            each = experts.setdefault(f"{front}.experts.{part}", [])
            assert len(each) == int(number), "experts come in order"
            each.append(value)
        else:
            found[name] = value
    return found | {name: np.stack(each) for name, each in experts.items()}


def _shorter(path: str) -> list[str]:
    """The path without its first parts: model.decoder.norm, decoder.norm, norm"""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def pairs(config: Settings, tensors: Tensors) -> Tensors:
    """Rows of q and k of a Llama: halves of a head become pairs of neighbours."""
    found = dict(tensors)
    for name, value in tensors.items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                found[name] = paired(value, config[heads])
    return found


def plus_one(config: Settings, tensors: Tensors) -> Tensors:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in tensors.items()}


def transposed(config: Settings, tensors: Tensors) -> Tensors:
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: value.T if name.endswith(matrices) else value for name, value in tensors.items()}


def by_part(config: Settings, tensors: Tensors) -> Tensors:
    """q, k, v of all heads, one behind the other."""
    heads, found = config.get("num_attention_heads") or config["n_head"], dict(tensors)
    for name, value in tensors.items():
        if ".query_key_value." in name:
            found[name] = value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)
    return found


def flat(config: Settings, tensors: Tensors) -> Tensors:
    """Convolutions as matrices."""
    return {
        name: value.reshape(len(value), -1) if ".conv" in name and value.ndim == 3 else value
        for name, value in tensors.items()
    }


def gate_by_gate(config: Settings, tensors: Tensors) -> Tensors:
    """gpt-oss: rows that alternate gate and up; stacks are stored [experts, in, out]."""
    found: Tensors = {}
    for name, value in tensors.items():
        if "gate_up_proj" in name:
            value = value.swapaxes(1, 2) if value.ndim == 3 else value
            kind = "bias" if name.endswith("_bias") else "weight"
            front = name.partition("gate_up_proj")[0]
            found |= {f"{front}gate_proj.{kind}": value[:, ::2], f"{front}up_proj.{kind}": value[:, 1::2]}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = value.swapaxes(1, 2)
        else:
            found[name.replace("down_proj_bias", "down_proj.bias")] = value
    return found


def absorbed(config: Settings, tensors: Tensors) -> Tensors:
    """DeepSeek: keys and values of the latent apart, the keys' matrix transposed."""
    found: Tensors = {}
    for name, value in tensors.items():
        if "kv_b_proj" in name:
            heads = value.reshape(config["num_attention_heads"], -1, value.shape[1])
            key, value = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = key.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = value
        else:
            found[name] = value
    return found


def _states(tensors: Tensors) -> Tensors:
    """A for its logarithm, convolutions as matrices."""
    found = flat({}, tensors)
    return {name: -np.exp(value) if name.endswith("A_log") else value for name, value in found.items()}


def _added(tensors: Tensors) -> Tensors:
    """Norms plus 1, but those behind the delta rule."""
    return {
        name: value + 1 if name.endswith("norm.weight") and "linear_attn.norm" not in name else value
        for name, value in tensors.items()
    }


def next_delta(config: Settings, tensors: Tensors) -> Tensors:
    """Qwen3-Next: queries, keys, values, gates of all key heads, one behind the other."""
    keys, found = config["linear_num_key_heads"], _added(_states(tensors))
    key = config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    for name in [name for name in found if "in_proj_qkvz" in name]:
        rows = found.pop(name).reshape(keys, 2 * (key + value), -1)
        parts = [part.reshape(-1, rows.shape[-1]) for part in np.split(rows, np.cumsum([key, key, value]), axis=1)]
        found[name.replace("qkvz", "qkv")] = np.concatenate(parts[:3])
        found[name.replace("qkvz", "z")] = parts[3]
    return found


def tiled_delta(config: Settings, tensors: Tensors) -> Tensors:
    """Qwen 3.5: the first value heads of all key heads, then the second."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    front, found = 2 * keys * config["linear_key_head_dim"], _added(_states(tensors))

    def tiled(value: np.ndarray) -> np.ndarray:
        return value.reshape(keys, heads // keys, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)

    for name, value in found.items():
        if any(part in name for part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias")):
            found[name] = tiled(value)
        elif "in_proj_qkv" in name or "conv1d" in name:
            found[name] = np.concatenate([value[:front], tiled(value[front:])])
        elif "linear_attn.out_proj" in name:
            found[name] = tiled(value.T).T
    return found


def mamba(config: Settings, tensors: Tensors, block: str, groups: int) -> Tensors:
    """A, D and the norm as matrices."""
    found = _states(tensors)
    for name, value in found.items():
        if name.endswith((".A_log", ".D")):
            found[name] = value.reshape(-1, 1)
        elif name.endswith(f".{block}.norm.weight"):
            found[name] = value.reshape(groups, -1)
    return found


def granite_hybrid(config: Settings, tensors: Tensors) -> Tensors:
    found = pairs(config, mamba(config, tensors, "mamba", config["mamba_n_groups"]))
    for name in [name for name in found if "shared_mlp.input_linear" in name]:
        gate, up = np.split(found.pop(name), 2)
        found |= {name.replace("input_linear", "gate"): gate, name.replace("input_linear", "up"): up}
    return found


def nemotron(config: Settings, tensors: Tensors) -> Tensors:
    """The one norm of a layer is called as attention's."""
    found = mamba(config, tensors, "mixer", config["n_groups"])
    return {
        name.replace(".norm.weight", ".input_layernorm.weight") if ".mixer." not in name else name: value
        for name, value in found.items()
    }
