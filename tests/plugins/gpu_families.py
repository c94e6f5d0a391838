"""Which families TensorRT targets refuse; cuda targets take all."""

TENSORRT_REFUSES = (
    *("gemma4_text", "gemma4_unified_text"),  # two kinds of heads
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),  # latent attention
    *("kimi_k2", "kimi_linear", "minicpm3", "mistral4", "sarvam_mla", "youtu"),  # latent attention
    "afmoe",  # output gates
    "gemma3n_text",  # residual streams, values that are normed
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid"),  # states
    *("bamba", "falcon_h1", "nemotron_h"),  # states
    *("mixtral", "granitemoe", "olmoe", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "glm4_moe", "hy_v3", "minimax_m2"),
    *("dots1", "exaone_moe", "flex_olmo", "flint", "granitemoeshared", "mellum"),  # mixtures of experts, too
    *("cohere2_moe", "deepseek", "sarvam_moe", "solar_open"),
    "gpt_oss",  # experts, attention sinks
    "ministral3",  # queries that grow
    *("bloom", "mpt"),  # scores that fall with the distance
)
