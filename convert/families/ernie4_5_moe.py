"""ERNIE 4.5 with experts: chosen by the softmax and a bias, beside an expert that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_moe import expert_rows, read_experts, shared_rows
from ingot.convert.hf_rope import interleaved
from ingot.convert.weights import FirstRow, Row, Take
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an Ernie4_5_MoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=131072, kv_heads=4, eps=1e-5, theta=5e5, tied=True, has_attention_bias=False
    )
    both = [section.integer(key, minimum=1) for key in ("moe_k", "num_experts_per_tok") if section.has(key)]
    if len(set(both)) > 1:
        raise ConfigError(
            "num_experts_per_tok contradicts moe_k",
            where=section.place("num_experts_per_tok"),
            expected=f"{both[0]}, the value of moe_k",
            got=str(both[1]),
        )
    bias = section.boolean("use_bias", False)
    layers = range(model.num_layers)
    start, step = section.integer("moe_layer_start_index", 1), section.integer("moe_layer_interval", 1, minimum=1)
    end = model.num_layers - 1 if section.raw("moe_layer_end_index") == -1 else None
    end = section.integer("moe_layer_end_index", model.num_layers - 1) if end is None else end
    dense_layers = tuple(layer for layer in layers if (layer + 1) % step or not start <= layer <= end)
    inner = section.integer("moe_intermediate_size", 1536, minimum=1)
    moe = read_experts(
        section,
        experts=64,
        per_token=6,
        intermediate_size=inner,
        normalized=True,
        dense_layers=dense_layers,
        known=("moe_num_shared_experts",),
        count_key="moe_num_experts",
        taken_key="num_experts_per_tok" if section.has("num_experts_per_tok") else "moe_k",
    )
    moe = dataclasses.replace(
        moe,
        select_bias=True,
        least_sum=section.number("moe_norm_min", 1e-12, above=0),
        shared_size=inner * section.integer("moe_num_shared_experts", 2),
    )
    return dataclasses.replace(
        model,
        rope=interleaved(model.rope),
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        head_bias=bias,
        moe=None if len(dense_layers) == model.num_layers else moe,
    )


_BLOCK = "model.layers.{i}.mlp"
_EXPERTS = expert_rows(
    _BLOCK,
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    bias=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
)
_ROWS = tuple(Row(row.name, FirstRow(row.expr)) if row.name.endswith("/bias") else row for row in _EXPERTS)

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="ernie4_5_moe",
    models="ERNIE 4.5 21B-A3B and 300B-A47B",
    read=read,
    rows=llama.FAMILY.rows
    + _ROWS
    + shared_rows(f"{_BLOCK}.shared_experts")
    + (Row("lm_head/bias", Take("lm_head.bias")),),
    drafts="model.mtp_",
    nullable=(),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "moe_num_experts": 9,
        "moe_k": 3,
        "moe_intermediate_size": 20,
    },
)
