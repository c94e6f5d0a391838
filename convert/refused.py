"""What the known model types need that ingot does not have yet: the reason that a refusal names."""

_MLA = "multi-head latent attention (MLA)"
_EXPERTS = "another kind of mixture of experts"
_SPARSE = "sparse attention over selected tokens"
_IMAGES = "an image encoder"
_LINEAR = "layers of linear attention"
_STATE = "layers with a recurrent state"

MISSING: dict[str, tuple[str, ...]] = {
    "bert": ("an encoder",),
    "deepseek": (_EXPERTS,),
    "deepseek_ref": (_MLA, _EXPERTS, _SPARSE),
    "deepseek_v2": (_MLA, _EXPERTS),
    "deepseek_v3": (_MLA, _EXPERTS),
    "deepseek_v32": (_MLA, _EXPERTS, _SPARSE),
    "deepseek_v4": (_MLA, _EXPERTS, _SPARSE),
    "gemma4": (_IMAGES, _EXPERTS),
    "glm_moe_dsa": (_MLA, _EXPERTS, _SPARSE),
    "gpt_oss": ("attention sinks", _EXPERTS, "MXFP4 weights"),
    "kimi_k2": (_MLA, _EXPERTS),
    "kimi_k25": (_IMAGES, _MLA, _EXPERTS),
    "kimi_k3": (_IMAGES, _EXPERTS, _LINEAR),
    "llama4": (_IMAGES, _EXPERTS),
    "minimax_m2": (_EXPERTS,),
    "minimax_m3": (_EXPERTS,),
    "mimo_v2_flash": ("attention sinks", _EXPERTS),
    "nemotron-nas": ("layers of different shapes",),
    "nemotron_h": (_STATE,),
    "phi3_v": (_IMAGES,),
    "qwen2_moe": ("an expert that all tokens share",),
    "qwen3_5": (_LINEAR, _IMAGES),
    "qwen3_5_moe": (_LINEAR, _IMAGES, _EXPERTS),
    "qwen3_next": (_LINEAR, _EXPERTS),
    "rwkv5": (_STATE,),
    "step3p7": (_IMAGES, _EXPERTS),
}
