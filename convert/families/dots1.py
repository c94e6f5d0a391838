"""dots.llm1: a Qwen 3 with experts scored by sigmoids, and experts that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import glm4_moe, llama
from ingot.convert.hf_config import read_window, windows_by_type

_EXPERTS = MoeConfig(experts=128, per_token=6, intermediate_size=1408, normalized=False)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Dots1ForCausalLM; defaults are those of transformers. Layers from max_window_layers on have the
    window, unless layer_types says otherwise."""
    for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"):  # transformers has no useful default
        section.integer(key, minimum=1)
    model = llama.read_llama(section, kv_heads=32)
    window, first = read_window(section, 4096), section.integer("max_window_layers", 62)
    usual = [bool(window) and layer >= first for layer in range(model.num_layers)]
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        windows=windows_by_type(section, model.num_layers, window, usual),
        moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, usual=_EXPERTS),
    )


FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    name="dots1",
    models="dots.llm1",
    read=read,
    drafts="",
    nullable=("num_key_value_heads", "sliding_window", "layer_types"),
    tiny={
        **{key: value for key, value in glm4_moe.FAMILY.tiny.items() if key != "use_qk_norm"},
        "model_type": "dots1",
        "attention_bias": False,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": 16,
        "max_window_layers": 2,
    },
)
