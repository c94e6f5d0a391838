"""Every architecture: a tiny model of transformers, written as llama.cpp's converter lays it, has its logits."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.convert.gguf.architectures import ARCHITECTURES
from tests import gguf_files as write
from tests.convert.gguf import llama_cpp
from tests.convert.gguf.llama_cpp import Case, gguf_tensors
from tests.convert.gguf.related_cases import FREE, GRANITE, KINDS, RELATED, WINDOWS
from tests.convert.test_golden import TOLERANCE
from tests.graph_logits import logits_of_graph
from tests.tiny import LLAMA3, tiny_model

CASES = {
    "llama": Case(family="llama", change={"attention_bias": True, "mlp_bias": True}, lay=llama_cpp.pairs),
    "llama, tied": Case(family="llama", change={"tie_word_embeddings": True}, lay=llama_cpp.pairs),
    "llama, linear": Case(
        family="llama",
        change={"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
        settings={"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        lay=llama_cpp.pairs,
    ),
    "llama, mixtral": Case(
        family="mixtral", change={"sliding_window": None}, lay=llama_cpp.pairs, settings={"rope.freq_base": 1e6}
    ),
    "qwen2": Case(family="qwen2", change=FREE),
    "qwen2, yarn": Case(
        family="qwen2",
        change={
            **FREE,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        settings={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3": Case(family="qwen3", change=FREE),
    "qwen3moe": Case(family="qwen3_moe", change={**FREE, "mlp_only_layers": []}),
    "gemma": Case(family="gemma", lay=llama_cpp.plus_one),
    "gemma2": Case(family="gemma2", change={"query_pre_attn_scalar": 20}, lay=llama_cpp.plus_one),
    "gemma3": Case(
        family="gemma3_text",
        change={"query_pre_attn_scalar": 20},
        lay=llama_cpp.plus_one,
        settings={"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 2},
    ),
    "phi3": Case(
        family="phi3",
        settings={
            "attention.key_length": 16,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 128,
            "attention.sliding_window": 24,
        },
    ),
    "olmo2": Case(family="olmo2"),
    "starcoder2": Case(family="starcoder2", change={"sliding_window": None}),
    "gpt2": Case(family="gpt2", lay=llama_cpp.transposed, settings={"feed_forward_length": 192}),
    "gptneox": Case(
        family="gpt_neox", lay=llama_cpp.by_part, settings={"rope.dimension_count": 4, "use_parallel_residual": True}
    ),
}

NAMES_OF_BOTH = {"post_attention_layernorm": "post_attention_norm"}
GLM_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA4 = {"attention.sliding_window_pattern": [True, False, False], "rope.freq_base_swa": 1e4}
DELTA = {
    "rope.dimension_sections": [11, 11, 10, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": 12,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 80,
    "full_attention_interval": 2,
    "rope.dimension_count": 4,
}
DELTA_MOE = {"expert_shared_feed_forward_length": 28}
MAMBA = {"rope.scaling.finetuned": False}
MLA = {
    "attention.head_count_kv": 1,
    "attention.key_length": 28,
    "attention.value_length": 20,
    "rope.dimension_count": 8,
}
MLA_PARTS = {**MLA, "attention.key_length_mla": 20, "attention.value_length_mla": 10, "attention.kv_lora_rank": 20}
DEEP = {
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}
CASES |= RELATED | {
    "smollm3": Case(
        family="smollm3", change={"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, lay=llama_cpp.pairs
    ),
    "granite": Case(family="granite", settings=GRANITE, lay=llama_cpp.pairs),
    "seed_oss": Case(family="seed_oss", names=NAMES_OF_BOTH),
    "ernie4_5": Case(family="ernie4_5"),
    "glm4": Case(family="glm4", names=GLM_NAMES, settings={"rope.dimension_count": 8}),
    "olmo2, windows": Case(
        family="olmo3",
        change={
            "num_hidden_layers": 3,
            "layer_types": KINDS,
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        settings={
            **WINDOWS,
            "rope.freq_base_swa": 1e4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "exaone4": Case(
        family="exaone4",
        change={"layer_types": KINDS, "sliding_window_pattern": None},
        names=NAMES_OF_BOTH,
        settings=WINDOWS,
    ),
    "command-r": Case(family="cohere", settings={"logit_scale": 0.25, "rope.scaling.type": "none"}),
    "cohere2": Case(family="cohere2", change={"layer_types": KINDS}, settings={**WINDOWS, "logit_scale": 0.25}),
    "stablelm": Case(family="stablelm", settings={"rope.dimension_count": 4, "use_parallel_residual": False}),
    "phi2": Case(family="phi", settings={"rope.dimension_count": 8, "feed_forward_length": 192}, names=llama_cpp.PHI),
    "starcoder": Case(family="gpt_bigcode", settings={"attention.head_count_kv": 1, "feed_forward_length": 192}),
    "bloom": Case(
        family="bloom",
        lay=llama_cpp.by_part,
        settings={"context_length": 64, "feed_forward_length": 192},
        names=llama_cpp.BLOOM,
    ),
    "mistral3": Case(
        family="ministral3",
        change={"sliding_window": None},
        lay=llama_cpp.pairs,
        settings={
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 1.0},
            **{"rope.scaling.original_context_length": 64, "attention.temperature_scale": 0.3},
        },
    ),
    "mistral3, small": Case(family="llama", lay=llama_cpp.pairs),
    "qwen2moe": Case(
        family="qwen2_moe",
        change={**FREE, "mlp_only_layers": [], "norm_topk_prob": False},
        settings={"expert_shared_feed_forward_length": 28},
    ),
    "olmoe": Case(family="olmoe"),
    "granitemoe": Case(family="granitemoe", settings=GRANITE, lay=llama_cpp.pairs, names=llama_cpp.GRANITE_EXPERTS),
    "gpt-oss": Case(
        family="gpt_oss",
        change={"swiglu_limit": 7.0},
        lay=llama_cpp.gate_by_gate,
        names={**NAMES_OF_BOTH, "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks.weight"},
        settings={
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
            **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
            "expert_feed_forward_length": 20,
        },
    ),
    "glm4moe": Case(
        family="glm4_moe", names=NAMES_OF_BOTH, settings={"rope.dimension_count": 8, **DEEP, "expert_gating_func": 2}
    ),
    "deepseek2": Case(
        family="deepseek_v2",
        settings={
            **{**MLA, "attention.key_length": 20, "attention.value_length": 10, "attention.kv_lora_rank": 20, **DEEP},
            "expert_shared_count": 2,
            "expert_weights_norm": False,
        },
    ),
    "deepseek2, third": Case(
        family="deepseek_v3",
        change={
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
                **{"mscale": 0.8, "mscale_all_dim": 0.8},
            }
        },
        lay=llama_cpp.absorbed,
        settings={
            **{**MLA_PARTS, **DEEP, "attention.q_lora_rank": 24, "expert_gating_func": 2},
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            "rope.scaling.yarn_log_multiplier": 0.08,
        },
    ),
    "minimax-m2": Case(family="minimax_m2", settings={"rope.dimension_count": 8, "expert_feed_forward_length": 20}),
    "hy_v3": Case(
        family="hy_v3",
        names={"mlp.expert_bias": "exp_probs_b"},
        settings={
            "expert_shared_feed_forward_length": 40,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.826,
            "expert_gating_func": 2,
        },
    ),
    "ernie4_5-moe": Case(
        family="ernie4_5_moe",
        names={"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
        settings={"interleave_moe_layer_step": 1, "leading_dense_block_count": 1, "expert_shared_count": 2},
    ),
    "gemma4": Case(
        family="gemma4_text",
        names=llama_cpp.GEMMA4,
        settings={
            **{**GEMMA4, "feed_forward_length": [84, 84, 168], "attention.shared_kv_layers": 1},
            **{"embedding_length_per_layer_input": 8, **llama_cpp.GEMMA4_HEADS},
        },
        extra={"rope_freqs.weight": np.array([1.0, 1e30, 1e30, 1e30, 1e30, 1e30], np.float32)},
    ),
    "gemma4, experts": Case(
        family="gemma4_text",
        change={
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
            **{"use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
            **{"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
        },
        names=llama_cpp.GEMMA4,
        settings={
            **GEMMA4,
            **llama_cpp.GEMMA4_HEADS,
            "attention.head_count_kv": [2, 1, 1],
            "attention.shared_kv_layers": 0,
        },
        extra={"rope_freqs.weight": np.array([1.0, 1e30, 1e30, 1e30, 1e30, 1e30], np.float32)},
    ),
    "qwen3next": Case(
        family="qwen3_next",
        change={"mlp_only_layers": [], "norm_topk_prob": True},
        names={**llama_cpp.DELTA, **NAMES_OF_BOTH},
        lay=llama_cpp.next_delta,
        settings={**DELTA, **DELTA_MOE, "rope.dimension_sections": None},
    ),
    "qwen35": Case(
        family="qwen3_5_text", names={**llama_cpp.DELTA, **NAMES_OF_BOTH}, lay=llama_cpp.tiled_delta, settings=DELTA
    ),
    "qwen35moe": Case(
        family="qwen3_5_moe_text",
        names={**llama_cpp.DELTA, **NAMES_OF_BOTH},
        lay=llama_cpp.tiled_delta,
        settings={
            **DELTA,
            **DELTA_MOE,
            "full_attention_interval": None,
            "attention.recurrent_layers": [True, False, True],
        },
    ),
    "lfm2": Case(
        family="lfm2",
        names=llama_cpp.LFM2,
        lay=llama_cpp.flat,
        settings={"attention.head_count_kv": [0, 2, 0], "feed_forward_length": 64, "shortconv.l_cache": 3},
    ),
    "lfm2moe": Case(
        family="lfm2_moe",
        change={"routed_scaling_factor": 1.0},
        names=llama_cpp.LFM2,
        lay=llama_cpp.flat,
        settings={
            **{"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "leading_dense_block_count": 1},
            "expert_gating_func": 2,
        },
    ),
    "granitehybrid": Case(
        family="granitemoehybrid",
        change={"position_embedding_type": "nope"},
        names=llama_cpp.GRANITE_HYBRID,
        lay=llama_cpp.granite_hybrid,
        settings={
            **{**GRANITE, **MAMBA, "attention.head_count_kv": [0, 2, 0], "context_length": 1 << 20},
            **{"expert_shared_feed_forward_length": 44, "ssm.conv_kernel": 4, "ssm.state_size": 16},
            **{"ssm.group_count": 2, "ssm.inner_size": 96, "ssm.time_step_rank": 8},
        },
    ),
    "nemotron_h_moe": Case(
        family="nemotron_h",
        names=llama_cpp.NEMOTRON,
        lay=llama_cpp.nemotron,
        settings={
            **{**MAMBA, "block_count": 5, "attention.head_count_kv": [0, 0, 2, 0, 0], "context_length": 1 << 20},
            **{"feed_forward_length": [0, 20, 0, 44, 20], "expert_shared_feed_forward_length": 24},
            **{"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 2.5},
            **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.inner_size": 48},
            **{"ssm.time_step_rank": 6, "rope.dimension_count": 12},
        },
    ),
    "nemotron_h": Case(
        family="nemotron_h",
        change={"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        names=llama_cpp.NEMOTRON,
        lay=llama_cpp.nemotron,
        settings={
            **{**MAMBA, "block_count": 3, "attention.head_count_kv": [0, 0, 2], "context_length": 1 << 20},
            **{"feed_forward_length": [0, 44, 0], "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2},
            **{"ssm.inner_size": 48, "ssm.time_step_rank": 6, "expert_count": None, "expert_used_count": None},
            "expert_feed_forward_length": None,
        },
    ),
}


def _by_number(item: tuple[str, np.ndarray]) -> list[tuple[int, str]]:
    """Experts in their order."""
    return [(int(part) if part.isdecimal() else -1, part) for part in item[0].split(".")]


def write_case(
    folder: Path, name: str, case: Case, extra: Mapping[str, np.ndarray | write.Stored] | None = None
) -> tuple[Path, Any]:
    """(the GGUF file, the model). extra: tensors that are added, or come in place of those of the same name"""
    config = {**find_family(case.family).tiny, **case.change}
    absent = [key for key, value in case.change.items() if value is None and key != "sliding_window"]
    model = tiny_model(folder / "model", {key: value for key, value in config.items() if key not in absent})
    full = model.model.config.to_dict()
    architecture = name.split(",")[0]
    settings = {**llama_cpp.settings_of(full), **case.settings}
    document: dict[str, Any] = {"general.architecture": architecture}
    document |= {f"{architecture}.{key}": value for key, value in settings.items() if value is not None}
    tensors = {
        name: np.asarray(value)
        for name, value in sorted(load_file(folder / "model" / "model.safetensors").items(), key=_by_number)
    }
    made = {**gguf_tensors(full, tensors, case), **case.extra, **(extra or {})}
    stored = {key: value if isinstance(value, tuple) else write.floats(value) for key, value in made.items()}
    return write.write_gguf(folder / "m.gguf", document, stored), model


def assert_same(path: Path, model: Any, checkpoint: Path) -> None:
    convert(ConvertOptions(model_dir=path, output_dir=checkpoint))
    ids = np.random.default_rng(1).integers(0, 61, (2, 57))
    expected = model.exact_logits(ids)
    assert np.abs(logits_of_graph(checkpoint, ids) - expected).max() < TOLERANCE * np.ptp(expected)


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", CASES)
def test_an_architecture(tmp_path: Path, name: str) -> None:
    extra = {}
    if name == "phi3":
        rope = find_family("phi3").tiny["rope_parameters"]
        assert isinstance(rope, dict)
        for kind in ("short", "long"):
            extra[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    path, model = write_case(tmp_path, name, CASES[name], extra)
    assert_same(path, model, tmp_path / "checkpoint")


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    case = dataclasses.replace(CASES["qwen3"], settings={"block_count": 3, "nextn_predict_layers": 1})
    extra = {"blk.2.nextn.eh_proj.weight": np.ones((4, 4), np.float32)}
    path, model = write_case(tmp_path, "qwen3", case, extra)
    assert_same(path, model, tmp_path / "checkpoint")
    report = convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "again"))
    assert any("1 tensors that draft tokens" in each for each in report.warnings)


def test_factors_of_llama3(tmp_path: Path) -> None:
    """llama.cpp's files hold what the scaling makes of each frequency."""
    rope = dict(LLAMA3)
    case = Case(
        family="llama",
        change={"rope_parameters": rope},
        settings={"rope.freq_base": rope["rope_theta"]},
        lay=llama_cpp.pairs,
    )
    half = np.arange(0, 16, 2) / 16
    waves = 2 * np.pi * 500000.0**half
    smooth = np.clip((32 / waves - 1.0) / (4.0 - 1.0), 0, 1)
    factors = (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)
    path, model = write_case(tmp_path, "llama", case, {"rope_freqs.weight": factors})
    assert_same(path, model, tmp_path / "checkpoint")


def test_every_architecture_is_tried() -> None:
    assert {name.split(",")[0] for name in CASES} == set(ARCHITECTURES)
