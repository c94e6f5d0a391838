"""Which families GPU targets refuse."""

REFUSED_FAMILIES = (
    *("mixtral", "granitemoe", "olmoe", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "glm4_moe", "hy_v3", "minimax_m2"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),  # latent attention
    *("kimi_k2", "kimi_linear", "mistral4"),  # latent attention
    *("granite", "cohere", "cohere2"),  # op scale
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "granitemoehybrid"),  # states
    "falcon_h1",  # states beside keys and values
    "nemotron_h",  # states, experts
    "gemma3n_text",  # residual streams
    "ministral3",  # queries that grow
    *("bloom", "mpt"),  # scores that fall with the distance
    "gpt_oss",  # attention sinks
    "gemma4_text",  # two kinds of heads, values that are normed
)
