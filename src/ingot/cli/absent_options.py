"""Options of TensorRT-LLM's `trtllm-build`, `trtllm-serve` and `convert_checkpoint.py`, up to 1.2, that ingot does not
have.

Each has the reason or ingot's way, which the refusal says instead of "no such option".
"""

from ingot.cli.other_flags import LORA

_CALIBRATED = (
    "calibrated weights: ingot quantize --recipe w8a8, w4g128; ingot build --precision w8, w4g128 needs no text"
)
_FP8 = "FP8 weights: ingot quantize --recipe f8, then ingot build --precision auto; inputs stay floats"
_KV = "the type of the KV cache is the build's: ingot build --kv_cache_dtype int8"
_CONFIG = (
    "the model's config.json decides; a config.json without weights: ingot convert --config FILE --random_weights SEED"
)
_RANKS = "only --tp_size and --pp_size divide an engine among ranks"
_EXPERTS = "no whole experts on ranks: --tp_size divides every expert among them"
_REPLICAS = "no data parallel ranks: start one server for each replica, and put a proxy in front"
_DRAFT = "--draft_dir builds a draft model into the engine; --speculative_config of ingot run and ingot serve uses it"
_TENSORRT = "ingot's own compiler has no such setting; see `ingot build --help`"
_META = "convert the model to a Hugging Face directory first; --model_dir takes it"
_GROUPS = "--precision w4g128, w4g64 or w4g32 of ingot build sets the group size"

# of ingot build: what is to come, and what to do until then
NOT_YET = {"batch_invariant": "on CPUs all engines are batch-invariant; on cuda targets give --gemm_plugin disable"}
ABSENT = {
    # trtllm-build
    "model_config": "the Checkpoint holds the model's configuration; for a model without weights: ingot convert "
    "--config FILE --random_weights SEED",
    "build_config": "options can be given on the command line; --config FILE takes a recipe of precisions by layer",
    "model_cls_file": "a new model family is one file of ingot: convert/families/<model_type>.py",
    "model_cls_name": "a new model family is one file of ingot: convert/families/<model_type>.py",
    "max_decoder_seq_len": "--max_seq_len is its present name",
    "opt_num_tokens": "one plan serves any number of tokens up to --max_num_tokens; "
    "the build times kernels for 1, 8, 32 and 512 rows",
    "max_encoder_input_len": "encoder-decoder models are not supported",
    "max_prompt_embedding_table_size": "prompt tuning and images do not exist yet",
    "max_multimodal_len": "prompt tuning and images do not exist yet",
    "use_prompt_tuning": "prompt tuning does not exist yet",
    "weight_sparsity": "sparse weights do not exist; --precision w4g128 makes weights smaller",
    "fast_build": "--no_autotune builds without timing kernels",
    "enable_debug_output": "ingot verify ENGINE --against CHECKPOINT compares the output of every layer",
    "visualize_network": "the Checkpoint's model.onnx opens in any ONNX viewer; --dump_passes DIR writes the graph "
    "after every pass",
    "monitor_memory": "the build says first what it needs; --max_mem 8GiB refuses to start if that is more",
    "logits_dtype": "logits are always float32",
    "lora_dir": LORA,
    "lora_ckpt_source": LORA,
    "lora_target_modules": LORA,
    "max_lora_rank": LORA,
    "speculative_decoding_mode": _DRAFT,
    "auto_parallel": _RANKS,
    "gpus_per_node": _RANKS,
    "cluster_key": "--target names the kind of machine, e.g. cuda/sm90",
    "strongly_typed": "every kernel call has its types; --precision and --activations set them",
    "builder_opt": "the build times its kernels unless --no_autotune is given; there are no levels",
    "builder_force_num_profiles": "one plan serves any number of tokens up to the limits",
    "hardware_compatible": "--target takes a list: --target cpu/avx2,cpu/avx512 runs on both",
    "use_refit": "ingot build --refit makes an engine that ingot refit gives new weights",
    "use_strip_plan": "engines always hold their weights; ship the Checkpoint and build on the other machine",
    "weight_only_groupwise_quant_matmul_plugin": _GROUPS,
    "weight_only_quant_matmul_plugin": "--precision w8 or w4g128",
    "smooth_quant_gemm_plugin": _CALIBRATED,
    "rmsnorm_quantization_plugin": _CALIBRATED,
    "layernorm_quantization_plugin": _CALIBRATED,
    "quantize_per_token_plugin": "--activations int8 rounds inputs per token",
    "quantize_tensor_plugin": _CALIBRATED,
    "identity_plugin": _TENSORRT,
    # trtllm-serve
    "ep_size": _EXPERTS,
    "moe_cluster_size": _EXPERTS,
    "enable_attention_dp": _REPLICAS,
    # convert_checkpoint.py
    "meta_ckpt_dir": _META,
    "nemo_ckpt_path": _META,
    "ammo_quant_ckpt_path": "--model_dir takes the quantised checkpoint itself",
    "modelopt_quant_ckpt_path": "--model_dir takes the quantised checkpoint itself",
    "quant_ckpt_path": "--model_dir takes the quantised checkpoint itself",
    "moe_tp_size": _RANKS,
    "moe_ep_size": _EXPERTS,
    "cp_size": _RANKS,
    "world_size": _RANKS,
    **dict.fromkeys(
        (
            "vocab_size",
            "n_positions",
            "n_layer",
            "n_head",
            "n_kv_head",
            "n_embd",
            "inter_size",
            "multiple_of",
            "ffn_dim_multiplier",
            "rms_norm_eps",
            "hidden_act",
            "rotary_base",
            "rotary_dim",
            "moe_num_experts",
            "moe_top_k",
            "moe_renorm_mode",
            "gpt_variant",
            "multi_query_mode",
            "remove_duplicated_kv_heads",
        ),
        _CONFIG,
    ),
    "disable_weight_only_quant_plugin": "quantised weights always run as kernels that read them as they are stored",
    "calib_dataset": _CALIBRATED,
    "calib_size": _CALIBRATED,
    "calib_max_seq_length": _CALIBRATED,
    "calib_tp_size": _CALIBRATED,
    "calib_pp_size": _CALIBRATED,
    "calibrate_kv_cache": _KV,
    "smoothquant": _CALIBRATED,
    "per_channel": "quantised weights always have a scale per row",
    "per_token": "ingot build --activations int8 rounds inputs per token",
    "int8_kv_cache": _KV,
    "fp8_kv_cache": "the type of the KV cache is the build's: ingot build --kv_cache_dtype fp8",
    "use_fp8": _FP8,
    "enable_fp8": _FP8,
    "use_fp8_rowwise": _FP8,
    "use_meta_fp8_rowwise_recipe": _FP8,
    "use_nvfp4": "ingot does not quantise to FP4; it keeps the codes of NVFP4 and MXFP4 checkpoints",
    "per_group": _GROUPS,
    "group_size": _GROUPS,
    "load_by_shard": "weights are always streamed, a block at a time",
    "load_model_on_cpu": "ingot convert never uses a GPU",
    "use_parallel_embedding": _RANKS,
    "embedding_sharding_dim": _RANKS,
    "use_embedding_sharing": "GPU engines store a tied table once; CPU engines store it twice, packed for the "
    "lookup and for lm_head",
    "save_config_only": "ingot build --dry_run decides everything and writes nothing",
    "dense_context_fmha": "prefill attention is always fused and tiled",
    "only_multimodal": "images do not exist yet",
    "tokenizer_dir": "tokenizer files are taken from --model_dir",
    "storage_type": "--dtype sets the type of the stored weights",
}
"""Option of TensorRT-LLM → why not, or what to use here."""
