"""GLM 4.5 to 4.7: a Llama with experts scored by sigmoids, an expert that all tokens share, and partial rotation."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig, QkNorm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3
from ingot.convert.hf_config import require_values
from ingot.convert.hf_moe import expert_rows, read_experts, read_groups, shared_rows
from ingot.errors import ConfigError

_KNOWN = ("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")
_USUAL = MoeConfig(experts=128, per_token=8, intermediate_size=1408, normalized=True, dense_layers=(0,))
_OF_ALL = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # some files say what is so in every model


def read_sigmoid_experts(
    section: Section, layers: int, dense_layers: tuple[int, ...] | None = None, *, usual: MoeConfig = _USUAL
) -> MoeConfig | None:
    """The experts as GLM and its relatives configure them; None where every layer has a plain MLP.

    dense_layers  where others than first_k_dense_replace says; usual: the family's defaults in transformers
    """
    require_values(section, _OF_ALL)
    inner = section.integer("moe_intermediate_size", usual.intermediate_size, minimum=1)
    if dense_layers is None:
        dense_layers = tuple(range(min(section.integer("first_k_dense_replace", len(usual.dense_layers)), layers)))
    moe = read_experts(
        section,
        experts=usual.experts,
        per_token=usual.per_token,
        intermediate_size=inner,
        normalized=section.boolean("norm_topk_prob", usual.normalized),
        dense_layers=dense_layers,
        known=(*_KNOWN, *_OF_ALL, "num_shared_experts"),
        count_key="n_routed_experts",
    )
    shared = section.integer("n_shared_experts", 1, minimum=1)
    if section.integer("num_shared_experts", shared) != shared:  # a second name, which transformers does not know
        raise ConfigError(
            "num_shared_experts contradicts n_shared_experts",
            where=section.place("num_shared_experts"),
            expected=f"as n_shared_experts: {shared}",
            got=str(section.raw("num_shared_experts")),
        )
    groups, group_top = read_groups(section, moe.experts, moe.per_token, (usual.groups, usual.group_top))
    moe = dataclasses.replace(
        moe,
        score=RouterScore.SIGMOID,
        select_bias=True,
        groups=groups,
        group_top=group_top,
        sum_offset=1e-20,
        scale=section.number("routed_scaling_factor", usual.scale, above=0),
        shared_size=inner * shared,
    )
    return None if len(dense_layers) == layers else moe


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Glm4MoeForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section, positions=131072, kv_heads=8, eps=1e-5, partial_rotary=0.5, has_attention_bias=False
    )
    section.has("num_nextn_predict_layers")  # how many layers the files hold for later tokens
    return dataclasses.replace(
        model,
        qkv_bias=section.boolean("attention_bias", False),
        qk_norm=QkNorm.HEAD if section.boolean("use_qk_norm", False) else None,
        moe=read_sigmoid_experts(section, model.num_layers),
    )


_BLOCK = "model.layers.{i}.mlp"
_EXPERTS = expert_rows(_BLOCK, gate="gate_proj", up="up_proj", down="down_proj", bias=("gate.e_score_correction_bias",))

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="glm4_moe",
    models="GLM-4.5 to 4.7, GLM-4.5-Air",
    read=read,
    rows=qwen3.FAMILY.rows + _EXPERTS + shared_rows(f"{_BLOCK}.shared_experts"),
    drafts="model.layers.{n}.",
    nullable=(),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
)
