"""Flags of llama.cpp's programs (November 2026 and before), and ingot's way."""

from ingot.cli.other_flags import LORA, flag

_FILES = "no option: ingot downloads nothing. Download the file, then `ingot convert --model_dir FILE`"
_GPU = "no option: an engine runs on a CPU or on a GPU, as its `--target` says"
_SAMPLERS = (
    "not supported: ingot has temperature, top_k, top_p, min_p, and repetition, presence and frequency penalties"
)
_ROPE = "no option: the model's config.json decides. Change it before `ingot convert`"
_CHAT = "no option: `ingot run` completes texts. For chats use `ingot serve`, whose page at `/` is a chat"
_TUNED = "no option: `ingot build` times kernels, and every session uses the fastest"
_PLACES = "`taskset` or `numactl` around the command; ingot places weights near the cores that read them"
_PAGES = "no option: `/metrics` is always on, and `/health/ready` says whether the server works"
_EMBEDDINGS = "embeddings and scores are not supported"
_CACHE = "no option: the prefix cache is always on, within `--kv_cache_memory`"

LLAMA_CPP = (
    # the model
    flag(
        "-m FILE", "--model FILE", way="`--engine_dir DIR`, an engine that `ingot build` has made", where="run, serve"
    ),
    flag("-mu", "--model-url", "-hf", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "--offline", way=_FILES),
    flag(
        "-c N",
        "--ctx-size N",
        way="`--max_seq_len N --max_input_len N-1`, for one request and not for all slots together: a prompt may have "
        "only 2048 tokens by default",
        where="build",
        link="([long prompts](../how-to/limits.md#long-prompts-and-agents))",
    ),
    flag(
        "--override-kv",
        "--rope-scaling",
        "--rope-scale",
        "--rope-freq-base",
        "--rope-freq-scale",
        "--yarn-orig-ctx",
        "--yarn-ext-factor",
        "--yarn-attn-factor",
        "--yarn-beta-slow",
        "--yarn-beta-fast",
        way=_ROPE,
    ),
    flag("--outfile", way="`--output_dir DIR`", where="convert"),
    flag("--outtype", way="`--dtype` for the Checkpoint; `--precision` of `ingot build` quantises", where="convert"),
    flag("--imatrix", way="`--calibration FILE`, a text", where="quantize"),
    flag("--check-tensors", way="always on: every start checks all bytes"),
    # batching and threads
    flag("-np N", "--parallel N", way="`--max_batch_size N`", where="build, serve", link="(serve can only lower it)"),
    flag(
        "-b N",
        "--batch-size N",
        "-ub N",
        "--ubatch-size N",
        way="`--max_num_tokens N`",
        where="build, serve",
        link="(serve can only lower it)",
    ),
    flag("-t N", way="`--threads N`", where="run, serve"),
    flag(
        "-tb",
        "--threads-batch",
        "--threads-http",
        way="no option: `--threads` counts for every step; the server's own threads are few",
    ),
    flag(
        "-C",
        "--cpu-mask",
        "-Cr",
        "--cpu-range",
        "--cpu-strict",
        "--numa",
        way=_PLACES,
        link="([tune latency](../how-to/latency.md#6-cores-hyperthreads-and-pages))",
    ),
    flag("--prio", "--poll", "--no-repack", "--no-op-offload", way=_TUNED),
    flag("-fa", "--flash-attn", "-cb", "--cont-batching", way="always on"),
    flag("-nocb", "--no-cont-batching", way="no option: requests are always batched in flight"),
    flag("--warmup", "--no-warmup", "--no-perf", "--fit", way="no option: an engine needs no warm-up"),
    # memory
    flag("--no-mmap", way="the default: ingot copies weights into large pages"),
    flag("--mmap", way="`--use_mmap` maps the file instead of copying the weights", where="run, serve"),
    flag("--mlock", way="no option: turn off swap, or use the system's tools"),
    flag(
        "-ctk q8_0",
        "--cache-type-k q8_0",
        "-ctv q8_0",
        "--cache-type-v q8_0",
        way="`--kv_cache_dtype int8`",
        where="build",
    ),
    flag(
        "--cache-reuse", "--cache-ram", "--swa-full", "--ctx-checkpoints", "--kv-unified", "--prompt-cache", way=_CACHE
    ),
    flag("--context-shift", "--keep", way="no option: a request ends at `--max_seq_len`", where=""),
    flag("--slots", "--no-slots", "--props", "--slot-save-path", way=_PAGES),
    # GPUs
    flag("-ngl N", "--gpu-layers N", "--n-gpu-layers N", way=_GPU),
    flag("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", way=_GPU),
    flag("-dev", "--device", "-mg", "--main-gpu", way="`CUDA_VISIBLE_DEVICES` in the environment chooses the GPU"),
    flag(
        "-sm",
        "--split-mode",
        "-ts",
        "--tensor-split",
        way="no option: `--tp_size` and `--pp_size` divide an engine among GPUs when it is built",
        link="([ranks](../how-to/ranks.md))",
    ),
    flag("--list-devices", way="`ingot doctor` lists what the machine offers"),
    # generating
    flag("-p TEXT", way="`--prompt TEXT`", where="run"),
    flag("-f FILE", "--file FILE", way="`ingot run --engine_dir DIR < FILE`: the prompt comes from stdin"),
    flag("-n N", "--predict N", "--n-predict N", way="`--max_output_len N`", where="run"),
    flag(
        "--temp", "--top-k", "--top-p", "--min-p", way="`--temperature`, `--top_k`, `--top_p`, `--min_p`", where="run"
    ),
    flag("--repeat-penalty", way="`--repetition_penalty`, over prompt and output", where="run"),
    flag("--repeat-last-n", way="no option: penalties count every token of the request"),
    flag("-s N", way="`--seed N`", where="run"),
    flag("-l", "--logit-bias", way="the field `logit_bias`", where="request"),
    flag("-r", "--reverse-prompt", way="`--stop TEXT`", where="run"),
    flag(
        "--typical",
        "--mirostat",
        "--mirostat-lr",
        "--mirostat-ent",
        "--dynatemp-range",
        "--dynatemp-exp",
        "--xtc-probability",
        "--xtc-threshold",
        "--dry-multiplier",
        "--dry-base",
        "--dry-allowed-length",
        "--top-nsigma",
        "--samplers",
        "--sampling-seq",
        way=_SAMPLERS,
        link="([their order](../sampling.md#order-of-the-steps))",
    ),
    flag("--grammar-file F", way="`--grammar F`, Lark or GBNF", where="run"),
    flag("-j", "-jf F", "--json-schema-file F", way="`--json_schema F`", where="run"),
    flag("-cnv", "--conversation", "-no-cnv", "-i", "--interactive", "-sys", "--system-prompt", "-st", way=_CHAT),
    flag("-e", "--escape", "--no-escape", way="no option: the shell's `$'...'` writes line breaks"),
    # what does not exist
    flag("--lora", "--lora-scaled", "--lora-init-without-apply", way=LORA, link="([how](../how-to/lora.md))"),
    flag("--control-vector", "--control-vector-scaled", way="control vectors are not supported"),
    flag(
        "-md FILE",
        "--model-draft FILE",
        way="`--draft_dir CHECKPOINT`; then `--speculative_config` of `ingot run` and `ingot serve`",
        where="build",
        link="([speculative decoding](../how-to/speculation.md))",
    ),
    flag(
        "--draft N",
        "--draft-max N",
        "--draft-n N",
        "--spec-type NAME",
        way="`--speculative_config`: `num_speculative_tokens` and `method`",
        where="run, serve",
        link="([speculative decoding](../how-to/speculation.md))",
    ),
    flag("--draft-min", "--draft-p-min", way="no option: every step has as many drafts as pay"),
    flag("-ngld", "--gpu-layers-draft", way=_GPU),
    flag("-mm", "--mmproj", "--image", "--audio", way="images and audio are not supported"),
    flag("--embedding", "--embeddings", "--pooling", "--rerank", "--reranking", way=_EMBEDDINGS),
    # the server
    flag("--host", "--port", "--api-key", "--api-key-file", way="the same", where="serve"),
    flag("-a", "--alias", way="`--served_model_name`", where="serve"),
    flag("-to", "--timeout", way="`--request_timeout`", where="serve"),
    flag("--chat-template-file", way="`--chat_template FILE`", where="serve"),
    flag("--jinja", way="always on"),
    flag("--chat-template-kwargs", way="the field `chat_template_kwargs`", where="request"),
    flag(
        "--reasoning-format",
        way="`--reasoning_parser NAME`",
        where="serve",
        link="([names](../how-to/tools.md#reasoning))",
    ),
    flag("--reasoning-budget", way="the field `thinking_token_budget`", where="request"),
    flag("--metrics", way="always on: `/metrics`"),
    flag(
        "--ssl-key-file",
        "--ssl-cert-file",
        "--api-prefix",
        way="a proxy does this",
        link="([nginx](../how-to/serve.md#tls-and-nginx))",
    ),
    flag("--path", "--no-webui", way="no option: the page at `/` needs no files; a proxy can hide it"),
    flag("-v", "--verbose", "-lv", "--verbosity", way="`--log_level verbose`"),
    flag("--log-file", "--log-disable", way="no option: logs go to stderr; `--log_level` says how much", where=""),
)
