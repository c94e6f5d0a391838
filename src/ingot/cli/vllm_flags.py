"""Flags of `vllm serve` (0.11 and before), and ingot's way."""

from ingot.cli.other_flags import LORA, flag

_LONG = "([long prompts](../how-to/limits.md#long-prompts-and-agents))"
_IMAGES = "images, audio and video are not supported"
_REPLICAS = "no option: start one server for each replica, and put a proxy in front"
_ONE_NODE = "no option: MPI starts the ranks of an engine, also on several machines"
_FILES = "no option: ingot downloads nothing and reads the files of `--model_dir`"
_COMPILED = "no option: `ingot build` has compiled the engine before"
_CONFIG = "no option: change the model's config.json before `ingot convert`"
_DEFAULTS = (
    "no option: ingot always reads the model's `generation_config.json`. Change that file before `ingot convert`, or "
    "send the settings with each request"
)
_CORS = "no option: every method and header is allowed for the origins of `--cors_origin`"
_GRAMMARS = "no option: llguidance enforces every grammar"
_NO_SWAP = "no option: ingot computes a preempted request again"
_ALWAYS = "always on"

VLLM = (
    # the model
    flag("--model", way="`--engine_dir DIR`, an engine that `ingot build` has made", where="serve, run"),
    flag(
        "--max-model-len N",
        way="`--max_seq_len N --max_input_len N-1`: a prompt may have only 2048 tokens by default",
        where="build",
        link=_LONG,
    ),
    flag("--dtype bfloat16", way="`--precision bf16`", where="build"),
    flag(
        "--quantization awq|gptq|fp8",
        "-q",
        way="no option: `ingot convert` recognises the format, and `ingot build` keeps integer codes of "
        "up to 8 bits, and FP8; TensorRT targets store floats",
        link="([which codes build keeps](../quantised_checkpoints.md#what-build-keeps))",
    ),
    flag("--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init", way="no option: the engine holds the model's own"),
    flag("--trust-remote-code", way="no option: ingot runs no code of a model"),
    flag("--hf-config-path", "--hf-overrides", "--rope-scaling", "--rope-theta", "--config-format", way=_CONFIG),
    flag(
        "--revision",
        "--code-revision",
        "--tokenizer-revision",
        "--hf-token",
        "--download-dir",
        "--load-format",
        "--model-loader-extra-config",
        way=_FILES,
    ),
    flag("--model-impl", "--runner", "--task", way="no option: ingot has one implementation of a model, for text"),
    flag("--generation-config", "--override-generation-config", way=_DEFAULTS),
    flag("--seed", way="the field `seed`", where="request"),
    flag("--max-logprobs", way="no option: a request to the server may ask for at most 20"),
    flag("--disable-sliding-window", way="no option: the model decides its windows"),
    flag("--enforce-eager", "--compilation-config", "-O", "--cuda-graph-sizes", way=_COMPILED),
    flag("--max-seq-len-to-capture", "--attention-backend", way=_COMPILED),
    flag(
        "--enable-sleep-mode",
        way="no option: stop the server, and start it again when it is needed",
        link="([how long a start takes](../speed.md#from-the-start-of-a-process))",
    ),
    # batching
    flag("--max-num-seqs N", way="`--max_batch_size N`", where="build, serve", link="(serve can only lower it)"),
    flag(
        "--max-num-batched-tokens N", way="`--max_num_tokens N`", where="build, serve", link="(serve can only lower it)"
    ),
    flag("--scheduling-policy priority", way="always on: the field `priority`", where="request"),
    flag("--enable-chunked-prefill", way=_ALWAYS),
    flag("--no-enable-chunked-prefill", way="no option: prefill is always chunked; `--max_num_tokens` sets the size"),
    flag(
        "--max-num-partial-prefills",
        "--long-prefill-token-threshold",
        "--async-scheduling",
        "--num-scheduler-steps",
        "--scheduler-delay-factor",
        way="no option: `--tpot_target MS` shortens the chunks of prompts",
        where="serve",
    ),
    # the KV cache
    flag("--kv-cache-dtype", way="`--kv_cache_dtype bf16`, `int8` or `fp8`", where="build"),
    flag("--calculate-kv-scales", way="no option: int8 and fp8 keys and values get a scale for each vector"),
    flag("--block-size N", way="`--tokens_per_block N`", where="build"),
    flag("--gpu-memory-utilization 0.9", way="`--kv_cache_memory 8GiB`: bytes, not a share", where="serve, run"),
    flag(
        "--kv-cache-memory-bytes N",
        "--num-gpu-blocks-override",
        "VLLM_CPU_KVCACHE_SPACE=8",
        way="`--kv_cache_memory 8GiB`",
        where="serve, run",
    ),
    flag("--swap-space", "--cpu-offload-gb", "--preemption-mode", way=_NO_SWAP),
    flag("--enable-prefix-caching", "--prefix-caching-hash-algo", way=_ALWAYS),
    flag(
        "--no-enable-prefix-caching",
        way="no option: the prefix cache costs no memory beyond `--kv_cache_memory`; `cache_salt` of a request keeps "
        "users apart",
    ),
    flag(
        "--kv-transfer-config",
        way="`--role prefill`, and `--role decode --prefill_url URL`",
        where="serve",
        link="([prefill apart](../how-to/prefill_apart.md))",
    ),
    flag("--kv-events-config", way="always on: `GET /kv/events`", link="([routers](../server.md#routers))"),
    # devices and ranks
    flag("--device", way="`--target`: an engine is built for its targets", where="build"),
    flag(
        "--tensor-parallel-size N",
        "-tp N",
        way="`--tp_size N`; TensorRT targets refuse it",
        where="build",
        link="([ranks](../how-to/ranks.md))",
    ),
    flag(
        "--pipeline-parallel-size N",
        "-pp N",
        way="`--pp_size N`; TensorRT targets refuse it",
        where="build",
        link="([ranks](../how-to/ranks.md))",
    ),
    flag("--data-parallel-size", "-dp", "--api-server-count", way=_REPLICAS),
    flag("--enable-expert-parallel", way="no option: `--tp_size` divides every expert among the ranks", where="build"),
    flag("--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr", "--headless", way=_ONE_NODE),
    flag("--disable-custom-all-reduce", way="`--collectives mpi`", where="serve, run"),
    flag("VLLM_CPU_OMP_THREADS_BIND", way="`--threads N`, and `taskset` around the command", where="serve, run"),
    # what does not exist
    flag(
        "--enable-lora",
        "--lora-modules",
        "--max-loras",
        "--max-lora-rank",
        "--max-cpu-loras",
        "--lora-dtype",
        "--fully-sharded-loras",
        way=LORA,
        link="([how](../how-to/lora.md))",
    ),
    flag(
        "--speculative-config",
        way="`--speculative_config`, with the methods ngram and draft_model",
        where="serve, run",
        link="([speculative decoding](../how-to/speculation.md))",
    ),
    flag(
        "--speculative-model",
        "--num-speculative-tokens",
        way='`--speculative_config \'{"method": "ngram", "num_speculative_tokens": 7}\'`; a draft model is an Engine',
        where="serve, run",
        link="([speculative decoding](../how-to/speculation.md))",
    ),
    flag("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path", way=_IMAGES),
    flag("--pooler-config", "--override-pooler-config", way="embeddings and scores are not supported"),
    flag("--logits-processors", way="no option: `LLM` and `ModelRunner` take them in Python"),
    # the server
    flag("--host", "--port", "--api-key", way="the same", where="serve"),
    flag("--uds", way="no option: the server listens on `--host` and `--port`"),
    flag("--served-model-name", way="`--served_model_name`", where="serve"),
    flag("--chat-template", way="`--chat_template`", where="serve"),
    flag(
        "--chat-template-content-format",
        "--trust-request-chat-template",
        "--response-role",
        way="no option: the server joins text parts, takes no template from requests, and answers as assistant",
    ),
    flag(
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--root-path",
        way="a proxy does this",
        link="([nginx](../how-to/serve.md#tls-and-nginx))",
    ),
    flag("--allowed-origins", way="`--cors_origin`", where="serve"),
    flag("--allowed-methods", "--allowed-headers", way=_CORS),
    flag("--allow-credentials", way="no option: the server uses no cookies"),
    flag("--middleware", way="no option: the server loads no code of yours; use a proxy"),
    flag("--enable-auto-tool-choice", way=_ALWAYS),
    flag(
        "--tool-call-parser",
        "--tool-parser-plugin",
        way="`--tool_parser NAME`; in Python `LLM(..., tool_parser=NAME)`",
        where="serve",
        link="([names](../how-to/tools.md#call-formats))",
    ),
    flag(
        "--reasoning-parser",
        way="`--reasoning_parser NAME`; in Python `LLM(..., reasoning_parser=NAME)`",
        where="serve",
        link="([names](../how-to/tools.md#reasoning))",
    ),
    flag("--guided-decoding-backend", "--structured-outputs-config", way=_GRAMMARS),
    flag("--return-tokens-as-token-ids", way="the field `return_token_ids`", where="request"),
    flag(
        "--enable-prompt-tokens-details",
        "--enable-force-include-usage",
        "--enable-request-id-headers",
        way="always on; a stream has `usage` if the request sets `stream_options.include_usage`",
    ),
    # logs and metrics
    flag(
        "--disable-log-requests",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        way="`--no_log_requests`",
        where="serve",
    ),
    flag("--enable-log-requests", way="always on: a line for each request, without its text"),
    flag("--max-log-len", "--enable-log-outputs", way="no option: prompts and answers are never logged"),
    flag("--uvicorn-log-level", "--log-config-file", way="`--log_level`, `--log_json`", where="serve"),
    flag("--disable-log-stats", way="no option: `/metrics` has all figures, the log has none"),
    flag("--otlp-traces-endpoint", "--collect-detailed-traces", way="`--otlp_endpoint`", where="serve"),
    flag(
        "--disable-fastapi-docs", "--enable-server-load-tracking", way="no option: see `/openapi.json` and `/metrics`"
    ),
)
