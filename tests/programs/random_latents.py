"""config.json of random tiny models with latent attention and experts."""

from tests.programs.random_draw import Config, Draw


def deepseek_v3(draw: Draw) -> Config:
    scales = draw.choice((0.707, 1.0))
    rope = draw.yarn(mscale=draw.choice((scales, 1.0)), mscale_all_dim=scales) if draw.yes() else draw.rope()
    return {
        **draw.dense(),
        **draw.latent(),
        **draw.groups(),
        "num_hidden_layers": 3,
        "first_k_dense_replace": draw.choice((0, 1, 2)),
        "rope_parameters": rope,
        "rope_interleave": draw.yes(),
        "attention_bias": draw.yes(),
    }


def deepseek_v2(draw: Draw) -> Config:
    config = {**deepseek_v3(draw), "norm_topk_prob": False, "topk_method": "greedy"}
    del config["rope_interleave"]
    if config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    return config


def glm4_moe_lite(draw: Draw) -> Config:
    config = {**deepseek_v3(draw), "rope_parameters": draw.rope(), "q_lora_rank": draw.choice((16, 27))}
    del config["first_k_dense_replace"]
    return {**config, "mlp_layer_types": ["dense", "sparse", "sparse"]}


def glm_moe_dsa(draw: Draw) -> Config:
    rope_dim = draw.choice((8, 16))
    return {
        **glm4_moe_lite(draw),
        "qk_rope_head_dim": rope_dim,
        "rope_interleave": True,
        "index_topk": draw.choice((128, 200)),
        "index_head_dim": rope_dim + 8,
        "index_n_heads": draw.choice((2, 16)),
    }


def mistral4(draw: Draw) -> Config:
    rope = draw.yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=draw.choice((0.1, 0.3)))
    config = {**deepseek_v3(draw), "rope_parameters": rope}
    return {**config, "n_group": 1, "topk_group": 1, "attention_bias": False}
