"""How the families read config.json: both spellings of transformers, its defaults, and what is refused."""

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ingot.configs.model import Llama3Scaling, ModelConfig, RopeConfig
from ingot.configs.read import Section
from ingot.convert.family import family_names, find_family, read_model
from ingot.convert.hf_rope import choose_factors
from ingot.convert.rope import inverse_frequencies
from ingot.convert.weight_shapes import weight_shapes
from ingot.convert.weights import Expr, KeyGroups, Split, sources
from ingot.errors import ConfigError, IngotError, UnsupportedModelError, UsageError
from tests.handmade import TINY_GPT2, TINY_LLAMA

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 32}


def read(config: dict[str, object], **changes: object) -> ModelConfig:
    return read_model(Section({**config, **changes}, "config.json"), None)[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig(theta=10000.0, rotary_dim=12)),
        ({"rope_theta": 500000, "rope_scaling": None}, RopeConfig(theta=500000.0, rotary_dim=12)),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeConfig(theta=7.0, rotary_dim=12)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, RopeConfig(theta=7.0, rotary_dim=12)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            RopeConfig(theta=10000.0, rotary_dim=12, linear_factor=4.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(
                theta=5e5,
                rotary_dim=12,
                llama3=Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_positions=8192),
            ),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(
                theta=5e5,
                rotary_dim=12,
                llama3=Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_positions=8192),
            ),
        ),
    ],
)
def test_spellings_of_rotary_positions(changes: dict[str, object], expected: RopeConfig) -> None:
    assert read(TINY_LLAMA, **changes).rope == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3, "factor": 32.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_theta": 1e6, **YARN},
        {"rope_theta": 1e6, **YARN, "factor": 32.0, "truncate": False, "attention_factor": 1.5},
        {"rope_theta": 1e4, **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"rope_theta": 1e4, **YARN, "factor": 0.5, "mscale": 0.7},
        {"rope_theta": 5e4, **YARN, "beta_fast": 1.0, "beta_slow": 1.0},
        {"rope_theta": 5e4, **YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ],
)
@pytest.mark.parametrize("head_dim", [12, 64, 128])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config = AutoConfig.for_model(
        "llama", head_dim=head_dim, rope_parameters=dict(rope), max_position_embeddings=131072
    )
    ours = read(TINY_LLAMA, head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072).rope
    assert ours is not None
    theirs = LlamaRotaryEmbedding(config)
    assert inverse_frequencies(ours) == pytest.approx(theirs.inv_freq.numpy(), rel=3e-7)
    assert ours.scale == pytest.approx(theirs.attention_scaling)


def test_yarn_counts_positions_from_the_original_ones() -> None:
    assert read(TINY_LLAMA, max_position_embeddings=5000, rope_scaling=YARN).max_positions == 4 * 4096
    assert read(TINY_LLAMA, max_position_embeddings=99999, rope_scaling=YARN).max_positions == 99999


def test_truncate_stands_beside_the_layer_types_not_in_them() -> None:
    """transformers reads it there alone: elsewhere it is a key without effect."""
    kinds = ("full_attention", "sliding_attention")
    inner = {kind: {"rope_theta": 1e6, **YARN, "truncate": False} for kind in kinds}
    tiny = dict(find_family("gemma3_text").tiny)
    for truncate in (True, False):
        values = {**tiny, "rope_parameters": {**inner, "truncate": truncate}}
        _, model, unknown = read_model(Section(values, "config.json"), None)
        assert [rope is not None and rope.yarn and rope.yarn.truncate for rope in (model.rope, model.local_rope)] == [
            truncate,
            truncate,
        ]
        assert unknown == tuple(f"rope_parameters.{kind}.truncate" for kind in kinds)


def test_longrope_is_for_the_short_factors_or_the_long() -> None:
    section = Section({**TINY_LLAMA, "rope_scaling": LONG}, "config.json")
    model = read_model(section, None)[1]
    short, (remark,) = choose_factors(model, section, None)
    assert short == choose_factors(model, section, "short")[0]
    long, remarks = choose_factors(model, section, "long")
    assert (short.max_positions, long.max_positions, remarks) == (32, 64, ())
    assert "32 of 64 positions" in remark
    assert short.rope is not None
    assert long.rope is not None
    assert (short.rope.factors, long.rope.factors) == ((1.0,) * 6, (3.0,) * 6)
    assert short.rope.scale == long.rope.scale > 1
    plain = Section(TINY_LLAMA, "config.json")
    with pytest.raises(UsageError, match="no longrope factors"):
        choose_factors(read_model(plain, None)[1], plain, "long")


def test_defaults_are_those_of_transformers() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    full = AutoConfig.for_model("llama", **sizes).to_dict()
    assert read({"model_type": "llama", **sizes}) == read(full)
    sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2}
    full = AutoConfig.for_model("gpt2", **sizes).to_dict()
    assert read({"model_type": "gpt2", **sizes}) == read(full)


@pytest.mark.daily(51)
@pytest.mark.parametrize("name", family_names())
def test_every_family_names_every_weight_once(name: str) -> None:
    family = find_family(name)
    model = read(dict(family.tiny))
    for config in (dict(family.tiny), {**family.tiny, "attention_bias": True, "mlp_bias": True}):
        model = read(config)
        rows, _ = family.table(model, [])
        names = [row.name for row in rows]
        assert len(names) == len(set(names))
        assert set(weight_shapes(model)) <= set(names)
        parts = [(source, row.expr) for row in rows for source in sources(row.expr)]
        taken = [f"{source}{_part(expr)}" for source, expr in parts]
        assert len(taken) == len(set(taken))
        assert not any("{" in text for text in (*names, *taken))


def _part(expr: Expr) -> str:
    """Which part of a tensor a weight is."""
    return str(expr.index if isinstance(expr, Split) else expr.take if isinstance(expr, KeyGroups) else "")


def test_gpt2_without_qkv_bias_is_told_by_its_files() -> None:
    section = Section(TINY_GPT2, "config.json")
    assert read_model(section, ["transformer.h.0.attn.c_attn.bias"])[1].qkv_bias
    assert not read_model(section, ["transformer.h.0.attn.c_attn.weight"])[1].qkv_bias


def test_gpt2_score_scales() -> None:
    assert read(TINY_GPT2).attention_scale == 8**-0.5
    assert read(TINY_GPT2, scale_attn_weights=False).attention_scale == 1
    assert read(TINY_GPT2, scale_attn_by_inverse_layer_idx=True).scale_by_inverse_layer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
    ],
)
def test_activations(name: str, expected: str) -> None:
    assert read(TINY_LLAMA, hidden_act=name).activation == expected
    assert read(TINY_GPT2, activation_function=name).activation == expected


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"model_type": "mamba"},
            UnsupportedModelError,
            "not supported(.|\n)*gpt2, gpt_bigcode, gpt_neo, gpt_neox, (.|\n)*families/<model",
        ),
        ({"model_type": "lama"}, UnsupportedModelError, "did you mean 'llama'"),
        ({"model_type": "../llama"}, UnsupportedModelError, "not supported"),
        ({"model_type": None}, ConfigError, "what model it is(.|\n)*config.json:model_type"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, "activation(.|\n)*config.json:hidden_act(.|\n)*relu6"),
        ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedModelError, "rope_scaling.rope_type(.|\n)*spiral"),
        ({"rope_scaling": {"type": "dynamic"}}, ConfigError, "config.json:rope_scaling.factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, ConfigError, "beta_fast(.|\n)*at least beta_slow"),
        ({"rope_scaling": {**YARN, "factor": 0}}, ConfigError, "config.json:rope_scaling.factor"),
        ({"rope_theta": 1, "rope_scaling": YARN}, ConfigError, "too small for rope_type yarn"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, ConfigError, "rope_scaling.truncate"),
        ({"rope_scaling": {**LONG, "long_factor": [1] * 5}}, ConfigError, "rope_scaling.long_factor(.|\n)*6 numbers"),
        (
            {"rope_scaling": {k: LONG[k] for k in ("type", "short_factor", "long_factor")}},
            ConfigError,
            "which rope_type longrope needs",
        ),
        ({"rope_scaling": {"type": "linear"}}, ConfigError, "config.json:rope_scaling.factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ConfigError,
            "high_freq_factor is not more|beta_fast is less",
        ),
        ({"rope_scaling": {}, "rope_parameters": {}}, ConfigError, "both given"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor other than 1"),
        ({"sliding_window": 4096}, UnsupportedModelError, "config.json:sliding_window"),
        ({"hidden_size": 33, "head_dim": None}, ConfigError, "config.json:hidden_size(.|\n)*multiple of num_attention"),
        ({"num_key_value_heads": 3}, ConfigError, "4 query heads, 3 key"),
        ({"head_dim": 11}, ConfigError, "dimensions is odd"),
        ({"num_hidden_layers": 0}, ConfigError, "at least 1"),
        ({"vocab_size": None}, ConfigError, "missing(.|\n)*config.json:vocab_size"),
        ({"rms_norm_eps": "1e-5"}, ConfigError, "config.json:rms_norm_eps"),
    ],
)
def test_what_is_refused(changes: dict[str, object], error: type[IngotError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(TINY_LLAMA, **changes)


def test_keys_without_effect_are_told_apart() -> None:
    values = {
        **TINY_LLAMA,
        "transformers_version": "5.0",
        "use_cache": True,
        "soft_cap": 3.0,
        "rope_scaling": {"rope_type": "default", "attention_factor": 2.0},
        "spare": None,
    }
    assert read_model(Section(values, "config.json"), None)[2] == ("rope_scaling.attention_factor", "soft_cap")
