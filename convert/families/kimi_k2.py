"""Kimi K2: a DeepSeek V3 in other sizes and under a name of its own."""

import dataclasses

from ingot.convert.families import deepseek_v3

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="kimi_k2",
    models="Kimi K2",
    tiny={
        **deepseek_v3.FAMILY.tiny,
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "v_head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
