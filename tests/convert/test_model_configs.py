"""The configurations of models that people run: accepted in both spellings, or refused with a reason."""

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.family import family_names, find_family, read_model
from ingot.convert.refused import MISSING, ONLY_TABLES
from ingot.convert.wrapped import WRAPPERS
from ingot.errors import ConfigError, IngotError, UnsupportedModelError
from tests.tiny_foreign import twin

SIZES: dict[str, Any] = {
    "vocab_size": 9,
    "hidden_size": 512,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
MORE: dict[str, dict[str, Any]] = {  # without which the defaults are refused
    "granitemoehybrid": {"layer_types": ["full_attention"] * 3},
    **{name: {"layer_types": ["full_attention"] * 3} for name in ("kimi_linear", "lfm2_moe")},
    "bamba": {"attn_layer_indices": [1]},
    "bitnet": {"hidden_size": 320, "num_attention_heads": 20},  # of which 5 key heads, the default, are a divisor
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "helium": {"head_dim": 16, "num_key_value_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
    **{
        name: {"num_key_value_heads": 32}
        for name in ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minicpm3", "youtu")
    },
    "gemma3n_text": {"num_hidden_layers": 20},  # the last 15 share
    **{name: {"num_hidden_layers": 4} for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
}
LIKE_GPT2 = ("codegen", "gpt2", "gpt_bigcode", "gptj")
OWN_SIZES: dict[str, dict[str, Any]] = {  # whose keys have names of their own
    "bloom": {"vocab_size": 9, "hidden_size": 8, "n_layer": 1, "n_head": 2},
    "chatglm": {
        **{"padded_vocab_size": 9, "hidden_size": 8, "ffn_hidden_size": 8, "num_layers": 1, "num_attention_heads": 2},
        "multi_query_attention": True,
    },
    "gpt_neo": {"vocab_size": 9, "hidden_size": 8, "num_layers": 24, "num_heads": 2},
    "mpt": {"vocab_size": 9, "d_model": 8, "n_layers": 1, "n_heads": 2},
}
GPT2_SIZES = {"vocab_size": 9, "n_embd": 256, "n_layer": 1, "n_head": 4}
OF_THEIR_OWN_CODE = ("chatglm", "deepseek", "mimo", "minicpm", "orion")  # whose keys no model of transformers has
REFUSED_FILES = {"mlc--minicpm-moe-8x2b.json": "num_experts is not supported"}


def read(config: dict[str, Any]) -> object:
    return read_model(Section(config, "config.json"), None)[1]


def spelled_anew(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as transformers 5 writes it: every default, rope_parameters, dtype, layer_types."""
    values = twin(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of older spellings
        full: dict[str, Any] = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    full = {**full, "model_type": config["model_type"]}
    if config["model_type"] in OF_THEIR_OWN_CODE:
        kept = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
        return {**kept, "rope_parameters": full["rope_parameters"]}
    return full if config["model_type"] not in ("internlm", "internlm2") else {**full, "bias": config.get("bias", True)}


@pytest.mark.daily(79)
@pytest.mark.parametrize("name", family_names())
def test_defaults_are_those_of_transformers(name: str) -> None:
    own = GPT2_SIZES if name in LIKE_GPT2 else OWN_SIZES.get(name)
    config = {"model_type": name, **(own or {**SIZES, **MORE.get(name, {})})}
    if name not in (
        *LIKE_GPT2,
        *OWN_SIZES,
        "opt",
        "kimi_linear",
        "nemotron_h",
    ):  # the others have learned positions, or none
        assert "rope_parameters" in spelled_anew(config)
    assert read(config) == read(spelled_anew(config))


@pytest.mark.parametrize("name", family_names())
def test_both_spellings_of_a_tiny_model(name: str) -> None:
    config = dict(find_family(name).tiny)
    assert read(config) == read(spelled_anew(config))


@pytest.mark.parametrize("name", MISSING)
def test_refusals_name_what_is_missing(name: str) -> None:
    assert name not in family_names()
    with pytest.raises(
        UnsupportedModelError, match=re.escape(f"{name}' are not supported: they need {MISSING[name][0]}")
    ):
        read({"model_type": name})


@pytest.mark.parametrize("name", ONLY_TABLES)
def test_refusals_say_where_only_a_table_is_missing(name: str) -> None:
    assert name not in (*family_names(), *MISSING)
    with pytest.raises(UnsupportedModelError, match="ingot has every op that they need, but no table"):
        read({"model_type": name, "num_experts": 4})


def test_refusals_of_unknown_types_name_what_their_configurations_speak_of() -> None:
    with pytest.raises(UnsupportedModelError, match="type 'fancy' are not supported: ingot does not know the type\n"):
        read({"model_type": "fancy", **SIZES, "num_experts": None})
    words = r"speaks of experts \(num_experts\), latent attention \(kv_lora_rank\) and windows \(sliding_window\)"
    with pytest.raises(UnsupportedModelError, match=words):
        read({"model_type": "fancy", **SIZES, "kv_lora_rank": 8, "sliding_window": 9, "num_experts": 4})


def test_every_causal_model_of_transformers_is_taken_or_refused_with_a_reason() -> None:
    known = {*family_names(), *WRAPPERS, *MISSING, *ONLY_TABLES}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known == {"lara_mini"}  # whose parts its config.json names


@pytest.mark.shared
def test_every_configuration_is_accepted_or_refused_with_a_reason(shared: Path) -> None:
    accepted = 0
    for file in sorted((shared / "data" / "model_configs").glob("*.json")):
        config = json.loads(file.read_text())
        kind = config.get("model_type")
        if kind in WRAPPERS or (kind in family_names() and "text_config" in config):
            read(config)
            accepted += 1
        elif kind not in family_names():
            with pytest.raises((ConfigError, UnsupportedModelError), match=f"{kind}' are not supported|what model"):
                read(config)
        elif file.name in REFUSED_FILES:
            with pytest.raises(UnsupportedModelError, match=REFUSED_FILES[file.name]):
                read(config)
        else:
            assert read(config) == read(spelled_anew(config)), file.name
            accepted += 1
    assert accepted >= 50


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """The same structure with two layers of four small heads, and few tokens."""
    small = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    if config["model_type"] in LIKE_GPT2:
        return {
            **small,
            "n_layer": 2,
            "n_embd": 4 * (config["n_embd"] // config["n_head"]),
            "n_head": 4,
            "vocab_size": 97,
        }
    if config["model_type"] == "chatglm":
        sizes = {"padded_vocab_size": 97, "ffn_hidden_size": 96, "num_layers": 2, "num_attention_heads": 4}
        return {**small, **sizes, "hidden_size": 4 * (config["hidden_size"] // config["num_attention_heads"])}
    if config["model_type"] in OWN_SIZES:
        return {**small, "vocab_size": 97}
    heads = config.get("num_attention_heads", 8)
    kv_heads = config.get("num_key_value_heads") or heads
    small |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 97,
        "hidden_size": 4 * (config["hidden_size"] // heads),
    }
    if "moe_intermediate_size" in config:
        count = next((key for key in ("moe_num_experts", "n_routed_experts") if key in config), "num_experts")
        taken = next((key for key in ("moe_k", "num_experts_per_token") if key in config), "num_experts_per_tok")
        small |= {count: 5, taken: 2, "moe_intermediate_size": 24}
        small |= {key: 1 for key in ("n_group", "num_expert_group", "topk_group") if key in config}
    if "full_attention_interval" in config:
        small["full_attention_interval"] = 2
    if "num_kv_shared_layers" in config:
        small["num_kv_shared_layers"] = 0  # two layers are one of each kind
    if "num_key_value_heads" in config:
        small["num_key_value_heads"] = max(1, 4 * kv_heads // heads)
    by_layer = ("layer_types", "no_rope_layers", "mlp_layer_types", "activation_sparsity_pattern")
    small |= {key: config[key][:2] for key in by_layer if config.get(key)}
    return small


@functools.cache
def shared_configs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.name not in REFUSED_FILES]


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", family_names())
def test_a_model_of_each_type_in_small(shared: Path, tmp_path: Path, name: str) -> None:
    """Random weights in the shape of one file of each type, as the command makes them: bf16, every weight there."""
    plain = (
        each
        for each in shared_configs(shared / "data" / "model_configs")
        if each.get("model_type") == name and not each.get("quantization_config") and "text_config" not in each
    )
    config = next(plain, dict(find_family(name).tiny))
    (tmp_path / "config.json").write_text(json.dumps(shrunken(config)))
    report = convert(
        ConvertOptions(config=tmp_path / "config.json", random_weights=7, output_dir=tmp_path / "checkpoint")
    )
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    assert checkpoint.config.model == report.model
    assert {tensor.dtype.value for tensor in checkpoint.tensors().values()} == {"bf16"}


def test_a_caps_null_is_not_its_default() -> None:
    """Absent keys take the family's default; for a window or a cap, null means that there is none."""
    mistral: Any = read({"model_type": "mistral", **SIZES})
    without: Any = read({"model_type": "mistral", **SIZES, "sliding_window": None})
    assert (mistral.windows, without.windows) == ((4096,) * 3, ())
    gemma: Any = read({"model_type": "gemma2", **SIZES})
    uncapped: Any = read({"model_type": "gemma2", **SIZES, "attn_logit_softcapping": None})
    assert (gemma.score_cap, uncapped.score_cap, uncapped.logit_cap) == (50, 0, 30)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"layer_types": ["full_attention"]}, "not one entry for each layer"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer type .* is not supported(.|\n)*chunked_attention"),
        ("llama", {"sliding_window": 7}, "config.json:sliding_window"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "config.json:layer_types"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct is above 1(.|\n)*config.json:rotary_pct"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "8 numbers"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": "x"}}, "list of finite numbers"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(IngotError, match=words):
        read({"model_type": name, **SIZES, **changes})
