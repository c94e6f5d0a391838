"""Every family, from a random Hugging Face model to tokens: the logits of transformers, the same greedy tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import family_names, find_family
from ingot.runtime.model_runner import ModelRunner
from tests.builder.engines import engine_logits
from tests.families import covering_families, covering_variants
from tests.tiny import tiny_model

TOLERANCE = 1e-4  # of the range of the logits
PROMPTS, NEW_TOKENS = (3, 21), 40

# Beside each family's own tiny model: what else its configuration can ask for.
VARIANTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None, "head_dim": 80, "num_key_value_heads": 1},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": True, "vocab_size": 517},
    "qwen3": {
        "attention_bias": True,
        "head_dim": 80,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "phi3": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_window": None,
        "num_key_value_heads": 4,
    },
    "starcoder2": {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    "gpt_neox": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_new",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "opt": {"word_embed_proj_dim": 20, "do_layer_norm_before": False, "tie_word_embeddings": True},  # as OPT 350M
    "ernie4_5": {"use_bias": True, "head_dim": 24},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 16, "attention_bias": True},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": False, "num_key_value_heads": 4},
    "nanochat": {"final_logit_softcapping": None, "attention_bias": True, "num_key_value_heads": None, "head_dim": 20},
    "olmo": {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    "olmo2": {"num_key_value_heads": 4, "attention_bias": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": None, "hidden_act": "gelu"},
    "qwen3_moe": {
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "num_experts": 17,
        "moe_intermediate_size": 33,
        "use_sliding_window": True,
        "sliding_window": 16,
        "attention_bias": True,
    },
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "glm4_moe": {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "use_qk_norm": False,
        "attention_bias": False,
    },
    "internlm2": {"bias": False, "num_key_value_heads": 1},
    "bamba": {"mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True, "attn_layer_indices": [0, 2]},
    "chatglm": {"add_qkv_bias": False, "multi_query_group_num": 1, "kv_channels": 24},
    "cohere2_moe": {
        **{"expert_selection_fn": "softmax", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5},
        **{"mlp_layer_types": ["sparse", "dense", "sparse"], "prefix_dense_sliding_window_pattern": 2},
        "prefix_dense_intermediate_size": None,
    },
    "deepseek": {"first_k_dense_replace": 0, "moe_layer_freq": 2, "norm_topk_prob": True, "n_shared_experts": 1},
    "nemotron_h": {
        "layers_block_type": ["full_attention", "linear_attention", "linear_attention", "moe", "moe"],
        "mlp_hidden_act": "gelu",
        "moe_latent_size": 28,
        "mlp_bias": True,
        "use_bias": True,
        "use_conv_bias": False,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "num_key_value_heads": 1,
    },
    "hy_v3": {"mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "mlp_bias": True},
    "ernie4_5_moe": {
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "use_bias": True,
        "moe_norm_min": 0.6,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "q_lora_rank": 24,
        "first_k_dense_replace": 0,
    },
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "falcon": {
        "alibi": True,
        "new_decoder_architecture": False,
        "multi_query": False,
        "parallel_attn": False,
        "num_kv_heads": None,
        "num_attention_heads": 12,
    },
    "gemma3n_text": {
        "altup_num_inputs": 4,
        "altup_correct_scale": False,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "num_kv_shared_layers": 0,
        "intermediate_size": [40, 40, 40, 40],
        "activation_sparsity_pattern": [0.5, 0.95, 0.3, 0.0],
        "laurel_rank": 7,
        "attention_bias": True,
    },
    "gemma4_text": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3_text": {
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in family_names()] + list(VARIANTS.items())


DAILY = covering_variants(VARIANTS)  # the others differ in how files are read: tests/convert/test_golden.py reads all


@pytest.mark.daily(5)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            name,
            more,
            id=f"{name}{'-variant' * bool(more)}",
            marks=() if (name, bool(more)) in DAILY else pytest.mark.slow,
        )
        for name, more in CASES
    ],
)
def test_logits_and_tokens_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """One pass of transformers over the finished texts: they are greedy if each token is the likeliest after those
    before it."""
    model = tiny_model(tmp_path / "m", {**find_family(name).tiny, **changes})
    convert(ConvertOptions(model_dir=model.folder, output_dir=tmp_path / "c"))
    targets = ("cpu", "ref") if changes or name in covering_families() else ("cpu",)
    for target in targets:
        build(BuildConfig(target=target, precision="f32", tokens_per_block=16), tmp_path / "c", tmp_path / target)
    prompts = [np.random.default_rng(length).integers(0, 61, length).tolist() for length in PROMPTS]
    with ModelRunner.from_dir(tmp_path / "cpu", threads=1) as runner:
        out = runner.generate(
            prompts,
            max_new_tokens=NEW_TOKENS,
            end_id=-1,
            return_dict=True,
            output_context_logits=True,
            output_generation_logits=True,
        )
    for index, prompt in enumerate(prompts):
        text = out["output_ids"][index][0][: len(prompt) + NEW_TOKENS]
        expected = model.logits([text[:-1]])[0]
        found = np.concatenate([out["context_logits"][index], out["generation_logits"][index][0][1:]])
        assert np.abs(found - expected).max() < TOLERANCE * np.ptp(expected)
        assert expected[len(prompt) - 1 :].argmax(axis=-1).tolist() == text[len(prompt) :].tolist()
    if "ref" in targets:
        by_ref = engine_logits(tmp_path / "ref", text[None, :-1].astype(np.int64))[0]
        assert np.abs(by_ref - expected).max() < TOLERANCE * np.ptp(expected)
