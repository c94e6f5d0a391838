"""What the model types that are refused need and ingot lacks: the reason that a refusal names."""

from collections.abc import Collection

_SPARSE = "sparse attention over selected tokens"
_IMAGES = "an encoder of images"
_AUDIO = "an encoder or codebooks of sound"
_ENCODER = "an encoder, whose tokens see all others"
_CROSS = "cross attention"
_STREAMS = "several residual streams that mix (hyper-connections)"
_MAMBA1 = "Mamba 1"
_DYNAMIC = "scores that grow with the length of a text (logn attention)"
_AFTER_ROTATION = "norms of queries and keys behind the rotation"
_LAYER_NORMS_OF_HEADS = "layer norms of queries and keys"
_HEAD_GATES = "a gate for each head behind attention"
_LATENT_NORMS = "norms of the key that all heads share"
_BOUNDED_DECAYS = "decays of a delta rule that are bounded from below"
_RELATIVE = "biases of scores that are learned for each distance"

MISSING: dict[str, tuple[str, ...]] = {
    "apertus": ("the activation xIELU",),
    "apertus1p5_text": ("the activation xIELU",),
    "axk1": ("a norm behind experts where plain MLPs have none",),
    "axk2": ("norms with a gate", _SPARSE),
    "bailing_hybrid": (_BOUNDED_DECAYS,),
    "beam": ("residual sums that are weighted by the number of layers below",),
    "blt": ("bytes in patches of varying length",),
    "clvp": (_AUDIO,),
    "cpmant": (_RELATIVE,),
    "ctrl": ("positions of fixed sines",),
    "dbrx": ("queries, keys and values that are clipped",),
    "deepseek_ref": (_STREAMS, _SPARSE),
    "deepseek_v4": (_STREAMS, _SPARSE),
    "diffllama": ("differential attention",),
    "doge": ("attention masks that follow from the values", "experts by product keys"),
    "dory": ("scales of queries and gates that are learned",),
    "dots3_note": (_LATENT_NORMS, _HEAD_GATES, _AUDIO),
    "dots3_note_text": (_LATENT_NORMS, _HEAD_GATES),
    "emu3": (_IMAGES,),
    "falcon_mamba": (_MAMBA1,),
    "fuyu": (_IMAGES, _LAYER_NORMS_OF_HEADS),
    "gpt_neox_japanese": ("a bias that only the last attention has",),
    "granite_swa": ("a rotation of its own in each layer",),
    "granitemoe_swa": ("a rotation of its own in each layer",),
    "hrm_text": ("layers that run several times for a token",),
    "hunyuan_v1_dense": (_AFTER_ROTATION,),
    "hunyuan_v1_moe": (_AFTER_ROTATION,),
    "hy_v4": (_STREAMS, _SPARSE),
    "inkling2_loop_text": (_RELATIVE, "short convolutions of queries, keys and values beside attention"),
    "inkling2_text": (_RELATIVE, "short convolutions of queries, keys and values beside attention"),
    "inkling_text": (_RELATIVE, "short convolutions of queries, keys and values beside attention"),
    "jamba": (_MAMBA1,),
    "jetmoe": ("experts of attention",),
    "kimi_k3": ("experts that read a narrower row", _BOUNDED_DECAYS),
    "kolibri1": ("experts that are chosen by their logits and a bias",),
    "laguna": ("numbers of heads that differ by layer", _HEAD_GATES),
    "lfm3": (_HEAD_GATES,),
    "llama4": (_IMAGES, "attention in chunks", "experts whose shares multiply their input"),
    "llama4_text": ("attention in chunks", "experts whose shares multiply their input"),
    "longcat_flash": ("experts that return their input", "two attentions in each layer"),
    "mamba": (_MAMBA1,),
    "mamba2": ("models in which no layer has attention",),
    "mimo_v2_flash": ("keys and values of different sizes", "attention sinks that only some layers have"),
    "minimax": ("lightning attention",),
    "minimax_m3": (_SPARSE,),
    "minimax_m3_vl": (_IMAGES, _SPARSE),
    "minimax_m3_vl_text": (_SPARSE,),
    "mllama": (_IMAGES, _CROSS),
    "modernbert-decoder": ("a first layer that has no norm",),
    "nemotron-nas": ("layers of different shapes",),
    "olmo_hybrid": ("a delta rule whose steps reach 2",),
    "persimmon": (_LAYER_NORMS_OF_HEADS,),
    "phi3_v": (_IMAGES,),
    "phi3small": ("block sparse attention", "a gated GELU whose inputs are clamped"),
    "phi4_multimodal": (_IMAGES, _AUDIO),
    "phimoe": ("experts that are chosen one after the other (SparseMixer)",),
    "qwen": (_DYNAMIC,),
    "qwen4_exp": (_IMAGES, _SPARSE, "embeddings of n-grams"),
    "qwen4_exp_text": (_SPARSE, "embeddings of n-grams"),
    "recurrent_gemma": ("real gated linear recurrent units (RG-LRU)",),
    "rwkv": ("the recurrence of RWKV",),
    "rwkv5": ("the recurrence of RWKV",),
    "xglm": ("positions of fixed sines",),
    "xlstm": ("the recurrence of xLSTM",),
    "zamba": (_MAMBA1, "attention whose weights layers share"),
    "zamba2": ("attention whose weights layers share",),
    "zaya": ("convolutions that make queries and keys", "routers of several layers"),
    **dict.fromkeys(("aria", "cohere_compass_text", "got_ocr2", "step3p7"), (_IMAGES,)),
    **dict.fromkeys(("git", "trocr"), (_IMAGES, _ENCODER)),
    **dict.fromkeys(("moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"), (_AUDIO,)),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), ("keys and values of another model",)),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"),
            *("plbart", "prophetnet", "t5", "whisper"),
        ),
        (_ENCODER, _CROSS),
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "modernbert", "nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "reformer"),
        ),
        (_ENCODER,),
    ),
}

# Every op that these need is there: only a table of a family is missing.
ONLY_TABLES = (*("aria_text", "baichuan", "biogpt", "gpt-sw3", "openai-gpt", "phi-msft"),)

# Keys of config.json by which an unknown type tells what it is made of.
_CLUES: dict[str, tuple[str, ...]] = {
    "an encoder": ("encoder_layers", "is_encoder_decoder"),
    "images": ("vision_config", "vision_tower", "image_token_id", "image_token_index"),
    "sound": ("audio_config", "audio_token_id", "codebook_size"),
    "a recurrent state": ("ssm_state_size", "state_size", "mamba_d_state", "ssm_cfg", "linear_num_key_heads"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "latent attention": ("kv_lora_rank",),
    "sparse attention": ("index_topk", "sparse_attention_config", "sparse_config"),
    "windows": ("sliding_window",),
}


def reason(model_type: str, keys: Collection[str]) -> str:
    """Why models of this type are refused. keys: those of config.json that are not null."""
    if model_type in MISSING:
        return f"they need {_listed(MISSING[model_type])}, which ingot does not have"
    if model_type in ONLY_TABLES:
        return "ingot has every op that they need, but no table of their weights yet"
    found = [f"{what} ({key})" for what, names in _CLUES.items() for key in names if key in keys]
    return "ingot does not know the type" + (f"; its config.json speaks of {_listed(found)}" if found else "")


def _listed(words: Collection[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
