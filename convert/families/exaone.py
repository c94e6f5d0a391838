"""EXAONE 3, 3.5 and Deep: a Llama under other names."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import is_called
from ingot.convert.weights import Row, rename

_NAMES = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
_TENSORS = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
    "model.norm": "transformer.ln_f",
}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an ExaoneForCausalLM; defaults are those of transformers."""
    usual = section.called({ours: theirs for ours, theirs in _NAMES.items() if is_called(section, ours, theirs)})
    model = llama.read_llama(usual, positions=4096, kv_heads=8, eps=1e-5, theta=5e5)
    return dataclasses.replace(model, mlp_bias=section.boolean("mlp_bias", False))


def _renamed(row: Row) -> Row:
    expr = row.expr
    for usual, theirs in _TENSORS.items():
        expr = rename(expr, usual, theirs)
    return Row(row.name, expr)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="exaone",
    models="EXAONE 3.0, 3.5 and Deep, 2.4B to 32B",
    read=read,
    rows=tuple(_renamed(row) for row in llama.FAMILY.rows),
    drops=(),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "exaone",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
