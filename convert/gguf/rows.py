"""Weights of the Graph → tensors of llama.cpp, which has one name for the same weight in nearly all architectures.

"{i}" stands for the layer, "{e}" for an expert: a stack of experts or of Gemma 3n's streams is read as one tensor for
each.
"""

import re
from collections.abc import Collection, Mapping

from ingot.configs.mixers import Mamba2Config
from ingot.configs.model import ModelConfig
from ingot.convert.family import filling_of
from ingot.convert.gguf.architecture import Architecture
from ingot.convert.weight_shapes import weight_shapes
from ingot.convert.weights import (
    Concat,
    Expr,
    KeyGroups,
    LogOfMinus,
    OneOf,
    PerExpert,
    Row,
    Shaped,
    Split,
    Take,
    Unpair,
    filled,
    rename,
)

_LAYER = "layers.{i}/"
_BLOCK = "blk.{i}."
# module of ours → llama.cpp's; those of a layer first without what stands in front
_ENDS = {
    "embed": "token_embd",
    "embed_norm": "token_embd_norm",
    "positions": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layer_input/table": "per_layer_token_embd",
    "layer_input/project": "per_layer_model_proj",
    "layer_input/norm": "per_layer_proj_norm",
}
_PARTS = {
    "attn_norm": "attn_norm",
    "attn_post_norm": "post_attention_norm",
    **{f"attn/{name}": f"attn_{name}" for name in ("q", "k", "v", "qkv", "q_norm", "k_norm", "sinks")},
    "attn/out": "attn_output",
    "attn/q_a": "attn_q_a",
    "attn/q_a_norm": "attn_q_a_norm",
    "attn/latent": "attn_kv_a_mqa",
    "attn/latent_norm": "attn_kv_a_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp/gate": "ffn_gate",
    "mlp/up": "ffn_up",
    "mlp/gate_up": "ffn_up",
    "mlp/down": "ffn_down",
    "moe/router": "ffn_gate_inp",
    "moe/router/select": "exp_probs_b",
    **{f"moe/shared/{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "moe/shared/scale": "ffn_gate_inp_shexp",
    "linear/norm": "ssm_norm",
    "linear/out": "ssm_out",
    "linear/dt": "ssm_dt",
    "mamba/out": "ssm_out",
    "mamba/dt": "ssm_dt",
    "mamba/conv": "ssm_conv1d",
    "conv/conv": "shortconv.conv",
    "conv/out": "shortconv.out_proj",
    "input/gate": "inp_gate",
    "input/out": "proj",
    "input/norm": "post_norm",
}
_STACKS = re.compile(r"(blk\.\d+\.ffn_(gate|up|down)_exps|altup_(unembd_)?proj)\.weight")


def is_stack(name: str) -> bool:
    """Whether a tensor is a stack whose matrices are read one by one."""
    return _STACKS.fullmatch(name) is not None


def expert_name(stack: str, index: int) -> str:
    """What one matrix of a stack is called here: blk.3.ffn_up_exps.7.weight"""
    return f"{stack.removesuffix('weight')}{index}.weight"


def gguf_rows(architecture: Architecture, model: ModelConfig, names: Collection[str]) -> list[Row]:
    """Where each weight of the model comes from, and an lm_head, of which files of tied models may hold a copy."""
    filling = filling_of(model, names)
    made = {**_experts(model), **_recurrent(model), **_pairs(architecture, model), **architecture.rows(model)}
    rows = []
    for name in dict.fromkeys((*weight_shapes(model), "lm_head/weight")):
        layer = match[1] if (match := re.match(r"layers\.(\d+)/", name)) else ""
        pattern = name.replace(f"layers.{layer}/", _LAYER) if layer else name
        expr = made.get(pattern) or Take(_usual(pattern, architecture.names))
        rows.append(Row(name, filled(rename(expr, "{i}", layer), filling)))
    return rows


def _usual(pattern: str, names: Mapping[str, str]) -> str:
    """layers.{i}/attn/q/weight → blk.{i}.attn_q.weight"""
    path, _, kind = pattern.removeprefix(_LAYER).rpartition("/")
    inner = pattern.startswith(_LAYER)
    known = {**(_PARTS if inner else _ENDS), **names}
    return f"{_BLOCK if inner else ''}{known.get(path, path)}.{kind}"


def _pairs(architecture: Architecture, model: ModelConfig) -> dict[str, Expr]:
    if not architecture.paired:
        return {}
    return {
        f"{_LAYER}attn/{part}/{kind}": Unpair(Take(f"{_BLOCK}attn_{part}.{kind}"), heads=heads)
        for part, heads in (("q", model.heads), ("k", model.kv_heads))
        for kind in ("weight", "bias")
    }


def _experts(model: ModelConfig) -> dict[str, Expr]:
    """Gates and ups in one stack, in two, or, in the oldest files, by themselves."""

    def each(*parts: str) -> Expr:
        of = [tuple(Take(f"{_BLOCK}ffn_{part}{form}.{{e}}.weight") for part in parts) for form in ("_exps", "")]
        return OneOf(tuple(PerExpert(form[0] if len(form) == 1 else Concat(form)) for form in of))

    if model.moe is None:
        return {}
    pair = ("gate", "up") if model.moe.gated else ("up",)
    biases: list[Expr] = [Take(f"{_BLOCK}ffn_{part}_exps.bias") for part in pair]
    fused = Take(f"{_BLOCK}ffn_gate_up_exps.weight")
    return {
        f"{_LAYER}moe/gate_up/weight": OneOf((fused, each(*pair))),
        f"{_LAYER}moe/down/weight": each("down"),
        f"{_LAYER}moe/gate_up/bias": Concat(tuple(biases), axis=1),
        f"{_LAYER}moe/down/bias": Take(f"{_BLOCK}ffn_down_exps.bias"),
        # a vector, or a matrix of one row
        f"{_LAYER}moe/router/select/bias": Shaped(
            OneOf((Take(f"{_BLOCK}exp_probs_b.bias"), Take(f"{_BLOCK}exp_probs_b"))), (model.moe.experts,)
        ),
        f"{_LAYER}moe/shared/scale/weight": Shaped(Take(f"{_BLOCK}ffn_gate_inp_shexp.weight"), (1, model.hidden_size)),
    }


def _recurrent(model: ModelConfig) -> dict[str, Expr]:
    """Convolutions are stored as matrices; A as what multiplies the steps, -exp(A_log)."""
    found: dict[str, Expr] = {}
    shapes = weight_shapes(model)
    for name, ours in (("ssm_conv1d", "mamba"), ("shortconv.conv", "conv")):
        shape = next((shape for key, shape in shapes.items() if key.endswith(f"/{ours}/conv/weight")), None)
        if shape is not None:
            found[f"{_LAYER}{ours}/conv/weight"] = Shaped(Take(f"{_BLOCK}{name}.weight"), shape)
    for index, part in enumerate(("b", "c", "x")):
        for kind in ("weight", "bias"):
            found[f"{_LAYER}conv/{part}/{kind}"] = Split(Take(f"{_BLOCK}shortconv.in_proj.{kind}"), 3, index)
    if isinstance(mamba := model.mixer, Mamba2Config):
        inner, parts = mamba.heads * mamba.head_dim, ("gate", "mixed", "head")
        found[f"{_LAYER}mamba/a_log/weight"] = LogOfMinus(Shaped(Take(f"{_BLOCK}ssm_a"), (mamba.heads,)))
        found[f"{_LAYER}mamba/d/weight"] = Shaped(Take(f"{_BLOCK}ssm_d"), (mamba.heads,))
        found[f"{_LAYER}mamba/norm/weight"] = Shaped(Take(f"{_BLOCK}ssm_norm.weight"), (inner,))
        for number, name in enumerate(("z", "xbc", "dt")):
            taken = KeyGroups(Take(f"{_BLOCK}ssm_in.weight"), parts, (number,))
            found[f"{_LAYER}mamba/{name}/weight"] = taken
    return found
