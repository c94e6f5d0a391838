"""What the known model types need that ingot does not have yet: the reason that a refusal names."""

_MLA = "multi-head latent attention (MLA)"
_EXPERTS = "another kind of mixture of experts"
_SPARSE = "sparse attention over selected tokens"
_IMAGES = "an image encoder"
_STATE = "layers with a recurrent state"
_ENCODER = "an encoder"

MISSING: dict[str, tuple[str, ...]] = {
    "bert": ("an encoder",),
    "deepseek": (_EXPERTS,),
    "deepseek_ref": (_MLA, _EXPERTS, _SPARSE),
    "deepseek_v4": ("several residual streams that mix (hyper-connections)", _SPARSE),
    "jamba": (_STATE,),
    "kimi_k3": ("experts that read a narrower row", "decays that are bounded from below"),
    "llama4": (_IMAGES, _EXPERTS),
    "llama4_text": ("attention in chunks", _EXPERTS),
    "mamba": (_STATE,),
    "mamba2": (_STATE,),
    "mimo_v2_flash": ("attention sinks", _EXPERTS),
    "minimax_m3": (_EXPERTS,),
    "mllama": (_IMAGES, "cross attention"),
    "modernbert": (_ENCODER,),
    "nemotron-nas": ("layers of different shapes",),
    "phi3_v": (_IMAGES,),
    "roberta": (_ENCODER,),
    "rwkv5": (_STATE,),
    "step3p7": (_IMAGES, _EXPERTS),
    "t5": (_ENCODER, "cross attention"),
    "whisper": (_ENCODER, "cross attention"),
    "xlm-roberta": (_ENCODER,),
}
