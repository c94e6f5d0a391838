"""Nemotron H, 3 and 3.5: layers of one branch each, which is Mamba 2, attention without positions, an MLP or experts,
both with the square of ReLU and without gates."""

import dataclasses
from collections.abc import Collection, Sequence

from ingot.configs.mixers import Mamba2Config
from ingot.configs.model import ModelConfig, MoeConfig, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_mamba import mamba_rows, read_step_bounds
from ingot.convert.hf_moe import read_experts, read_groups
from ingot.convert.weights import OneOf, PerExpert, Row, Take
from ingot.errors import ConfigError, UnsupportedModelError

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_USUAL = ("linear_attention", "moe", "full_attention", "mlp")
_KNOWN = ("n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")
# What says how a model is trained, or how transformers runs it; positions that no layer reads.
_WITHOUT_EFFECT = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "num_logits_to_keep", "rescale_prenorm_residual"),
    *("residual_in_fp32", "use_mamba_kernels", "time_step_floor", "time_step_min", "time_step_max"),
    *("moe_shared_expert_overlap", "n_shared_experts", "num_nextn_predict_layers", "mtp_layers_block_type"),
    *("mtp_hybrid_override_pattern", "num_hidden_layers", "norm_eps", "partial_rotary_factor", "attention_bias"),
    "mamba_proj_bias",
)
_NULLABLE = (
    *("moe_latent_size", "sliding_window", "layers_block_type", "layer_types"),
    *("num_hidden_layers", "mtp_layers_block_type"),
)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a NemotronHForCausalLM; defaults are those of transformers."""
    kinds = _kinds(section)
    for key in _WITHOUT_EFFECT:
        if section.is_null(key) and key not in _NULLABLE:
            raise ConfigError(
                f"{key} is null",
                where=section.place(key),
                hint="write what the model was trained with, or leave the key out to get the family's default",
            )
        section.has(key)
    for key, found, usual in (
        ("mamba_hidden_act", section.text("mamba_hidden_act", "silu"), "silu"),
        ("sliding_window", section.raw("sliding_window"), None),
    ):
        if found != usual:
            raise UnsupportedModelError(
                f"{key} has a value that is not supported",
                where=section.place(key),
                expected="null" if usual is None else usual,
                got=repr(found)[:200],
            )
    model = llama.read_llama(
        section,
        layers=len(kinds),
        positions=4096,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        activation_key="mlp_hidden_act",
        activation="relu2",
        intermediate=21504,
        has_attention_bias=False,
    )
    return dataclasses.replace(
        model,
        gated_mlp=False,
        mlp_bias=section.boolean("mlp_bias", False),
        moe=_read_moe(section, kinds) if "moe" in kinds else None,
        still_layers=tuple(range(len(kinds))),
        mixer=_read_mamba(section, model.hidden_size) if "linear_attention" in kinds else None,
        mixer_layers=_layers(kinds, "linear_attention"),
        mlp_layers=_layers(kinds, "mlp", "moe"),
    )


def _kinds(section: Section) -> tuple[str, ...]:
    """What each layer is, by words or, in older files, by letters."""
    named = {key: section.words(key) for key in ("layers_block_type", "layer_types")}
    letters = section.text("hybrid_override_pattern", "")
    key = next((key for key, words in named.items() if words), "hybrid_override_pattern")
    kinds = tuple(_OLDER.get(each, each) for each in named.get(key, ()))
    kinds = kinds or tuple(_LETTERS.get(each, each) for each in letters) or _USUAL
    if strange := sorted(set(kinds) - set(_LETTERS.values())):
        raise UnsupportedModelError(
            "layers of this type are not supported",
            where=section.place(key),
            expected=", ".join(_LETTERS.values()),
            got=", ".join(strange)[:200],
        )
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            "a model without attention is not supported", where=section.place(key), got=", ".join(kinds)[:200]
        )
    return kinds


def _layers(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def _read_mamba(section: Section, hidden: int) -> Mamba2Config:
    heads, groups = section.integer("mamba_num_heads", 128, minimum=1), section.integer("n_groups", 8, minimum=1)
    if heads % groups:
        raise ConfigError(
            "mamba_num_heads is not a multiple of n_groups",
            where=section.place("mamba_num_heads"),
            expected=f"a multiple of n_groups ({groups})",
            got=str(heads),
        )
    least, most = read_step_bounds(section)
    bias = section.boolean("use_bias", False)
    return Mamba2Config(
        heads=heads,
        head_dim=section.integer("mamba_head_dim", 64, minimum=1),
        groups=groups,
        state_dim=section.integer("ssm_state_size", 128, minimum=1),
        conv_width=section.integer("conv_kernel", 4, minimum=2),
        conv_bias=section.boolean("use_conv_bias", True),
        bias=bias,
        out_bias=bias,
        norm_groups=groups,
        least_step=least,
        most_step=most,
    )


def _read_moe(section: Section, kinds: Sequence[str]) -> MoeConfig:
    moe = read_experts(
        section,
        experts=8,
        per_token=2,
        intermediate_size=section.integer("moe_intermediate_size", 7688, minimum=1),
        normalized=section.boolean("norm_topk_prob", True),
        dense_layers=_layers(kinds, "mlp"),
        known=_KNOWN,
        count_key="n_routed_experts",
    )
    groups, group_top = read_groups(section, moe.experts, moe.per_token)
    return dataclasses.replace(
        moe,
        gated=False,
        latent_size=0 if section.is_null("moe_latent_size") else section.integer("moe_latent_size", 0),
        score=RouterScore.SIGMOID,
        select_bias=True,
        groups=groups,
        group_top=group_top,
        sum_offset=1e-20,
        scale=float(section.number("routed_scaling_factor", 1.0, above=0)),
        shared_size=section.integer("moe_shared_expert_intermediate_size", 7688, minimum=1),
    )


_MODEL = "backbone"
_MIXER = f"{_MODEL}.layers.{{i}}.mixer"
_NAMES = {
    **{f"attn/{name}": f"{name}_proj" for name in "qkv"},
    "attn/out": "o_proj",
    "mlp/up": "up_proj",
    "mlp/down": "down_proj",
    "moe/shared/up": "shared_experts.up_proj",
    "moe/shared/down": "shared_experts.down_proj",
    "moe/latent/in": "fc1_latent_proj",
    "moe/latent/out": "fc2_latent_proj",
}
_EXPERTS = {"gate_up": "up_proj", "down": "down_proj"}

FAMILY = Family(
    name="nemotron_h",
    models="Nemotron H, Nemotron 3 Nano, Super and Ultra",
    read=read,
    rows=(
        *takes(
            {
                "embed/weight": f"{_MODEL}.embeddings.weight",
                **{
                    f"layers.{{i}}/{name}_norm/weight": f"{_MODEL}.layers.{{i}}.norm.weight" for name in ("attn", "mlp")
                },
                **weights_and_biases({f"layers.{{i}}/{ours}": f"{_MIXER}.{name}" for ours, name in _NAMES.items()}),
                "layers.{i}/moe/router/weight": f"{_MIXER}.gate.weight",
                "layers.{i}/moe/router/select/bias": f"{_MIXER}.gate.e_score_correction_bias",
                "norm/weight": f"{_MODEL}.norm_f.weight",
                "lm_head/weight": "lm_head.weight",
            }
        ),
        *(
            Row(
                f"layers.{{i}}/moe/{ours}/weight",
                OneOf((PerExpert(Take(f"{_MIXER}.experts.{{e}}.{name}.weight")), Take(f"{_MIXER}.experts.{name}"))),
            )
            for ours, name in _EXPERTS.items()
        ),
        *mamba_rows(_MIXER),
    ),
    drafts="mtp.",
    nullable=_NULLABLE,
    tiny={
        "model_type": "nemotron_h",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 44,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 1e-8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    },
)
