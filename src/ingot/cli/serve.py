"""`ingot serve`: OpenAI's protocol over HTTP."""

import importlib
import logging
from pathlib import Path
from typing import Any

import click

from ingot.cli.console import LEVELS, CliConsole, Level
from ingot.cli.values import LocalPath, byte_size, log_level, positive, ranks, speculative_config, target_isa, use_mmap
from ingot.configs.runtime import Policy, RuntimeConfig
from ingot.configs.serve import KV_TRANSPORTS, ROLES, ServeConfig
from ingot.configs.speculation import Speculation
from ingot.errors import UsageError, install
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import join_ranks, load_engine

_LOGGED = {
    Level.ERROR: logging.ERROR,
    Level.WARNING: logging.WARNING,
    Level.INFO: logging.INFO,
    Level.VERBOSE: logging.DEBUG,
}
_seconds = click.FloatRange(min=0)


@click.command()
@click.option("--engine_dir", type=LocalPath(path_type=Path), required=True, help="Serve this Engine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Listen on this port; 0 takes a free one.",
)
@click.option(
    "--api_key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Refuse clients that do not send this key. Give it again for more keys.",
)
@click.option(
    "--api_key_file",
    type=LocalPath(path_type=Path),
    help="Read keys from this file, one per line; lines that begin with # are comments. Keys in a file do not "
    "appear in process lists.",
)
@click.option(
    "--chat_template",
    metavar="F|chatml",
    help="Format chats with this jinja2 file, or as chatml. Default: the engine's own template.",
)
@click.option(
    "--tool_parser",
    metavar="NAME|none",
    help="Parse tool calls in this format. Default: the format that the chat template shows.",
)
@click.option(
    "--reasoning_parser",
    metavar="NAME|none",
    help="Parse the model's reasoning in this format. Default: the format that the chat template shows.",
)
@click.option(
    "--special_tokens_in_content",
    is_flag=True,
    help="Accept control tokens in chat messages. A message can then pretend to be from another role.",
)
@click.option(
    "--skip_unsupported_tools",
    is_flag=True,
    help="Ignore tools that are not functions of the client, such as those that Codex sends; a header of the "
    "answer names them. Default: refuse the request.",
)
@click.option(
    "--served_model_name",
    "model_names",
    multiple=True,
    metavar="NAME,...",
    help="Give the model these names in the API; * stands for any text. Default: the name of the directory.",
)
@click.option(
    "--max_queue",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Let at most this many sequences wait; answer 429 beyond that.",
)
@click.option(
    "--max_body_size",
    type=byte_size("--max_body_size"),
    default="1MiB",
    show_default=True,
    help="Refuse requests with a larger body.",
)
@click.option(
    "--request_timeout", type=_seconds, default=600, show_default=True, help="End a request after this many seconds."
)
@click.option(
    "--body_timeout",
    type=_seconds,
    default=30,
    show_default=True,
    help="Refuse a request whose body takes longer than this many seconds to arrive.",
)
@click.option(
    "--write_timeout",
    type=_seconds,
    default=60,
    show_default=True,
    help="Drop a client that leaves its answer unread for this many seconds.",
)
@click.option(
    "--stall_timeout",
    type=_seconds,
    default=4,
    show_default=True,
    help="Report not ready if there is work, but no step has ended for this many seconds.",
)
@click.option(
    "--drain_timeout",
    type=_seconds,
    default=30,
    show_default=True,
    help="Let running requests finish for this many seconds after SIGTERM.",
)
@click.option(
    "--cors_origin",
    "cors_origins",
    multiple=True,
    metavar="URL",
    help="Let pages of this origin call the server; * allows every origin.",
)
@click.option("--no_log_requests", is_flag=True, help="Do not log a line for each request.")
@click.option("--log_json", is_flag=True, help="Write the log as JSON, one object per line.")
@click.option(
    "--otlp_endpoint", metavar="URL", help="Send OpenTelemetry spans to this address, e.g. http://collector:4318."
)
@click.option(
    "--debug_hooks", is_flag=True, help="Offer POST /debug/stall, which delays the next step, for tests of monitoring."
)
@click.option(
    "--role",
    type=click.Choice(ROLES),
    default="both",
    show_default=True,
    help="Compute prompts for decode servers only (prefill), or let prefill servers compute the prompts of this server "
    "(decode).",
)
@click.option(
    "--prefill_url",
    "prefill_urls",
    multiple=True,
    metavar="URL",
    help="With --role decode: let this server compute prompts. Give it again for more servers, which take turns. This "
    "server sends its own first API key.",
)
@click.option(
    "--prefill_timeout",
    type=_seconds,
    default=30,
    show_default=True,
    help="With --role decode: compute a prompt here if its blocks have not come within this many seconds.",
)
@click.option(
    "--prefill_min_tokens",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="With --role decode: compute a prompt here if the cache lacks fewer tokens of it.",
)
@click.option(
    "--lease_timeout",
    type=_seconds,
    default=30,
    show_default=True,
    help="With --role prefill: drop computed blocks that no server has fetched for this many seconds.",
)
@click.option(
    "--lease_memory",
    type=byte_size("--lease_memory"),
    default="1GiB",
    show_default=True,
    help="With --role prefill: use at most this much memory for computed blocks that wait to be fetched.",
)
@click.option(
    "--kv_transport",
    type=click.Choice(KV_TRANSPORTS),
    default="auto",
    show_default=True,
    help="With --role: move blocks through shared memory on one machine and over HTTP between machines (auto), or by "
    "NIXL, which uses RDMA where it can (nixl). Give prefill and decode servers the same.",
)
@click.option(
    "--threads", type=positive, help="Use this many threads. Default: one for each core that the process may use."
)
@click.option(
    "--kv_cache_memory",
    type=byte_size("--kv_cache_memory"),
    metavar="SIZE",
    help="Use at most this much memory for the KV cache, e.g. 2GiB. Default: what the engine's limits need, at most "
    "40 % of the memory that is free after the weights were loaded.",
)
@click.option(
    "--max_batch_size",
    type=positive,
    help="Run at most this many sequences at once. Default and maximum: the engine's.",
)
@click.option(
    "--max_num_tokens",
    type=positive,
    help="Compute at most this many tokens per step. Default: the engine's limit. On CPUs, by default, prompts get "
    "at most 512 of these tokens while other requests decode.",
)
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in Policy]),
    default="max_utilization",
    show_default=True,
    help="Start requests early and preempt some if KV blocks run out, or start a request only if its blocks are "
    "sure to be free.",
)
@click.option(
    "--tpot_target",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    help="Aim at this time per output token (TPOT), in ms, by cutting prompts into smaller chunks.",
)
@speculative_config
@use_mmap
@ranks
@target_isa
@log_level
def command(
    engine_dir: Path,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    model_names: tuple[str, ...],
    no_log_requests: bool,
    max_body_size: int,
    threads: int | None,
    kv_cache_memory: int | None,
    max_batch_size: int | None,
    max_num_tokens: int | None,
    policy: str,
    tpot_target: float | None,
    speculative_config: Speculation | None,
    use_mmap: bool,
    rank_timeout: float,
    collectives: str,
    isa: str | None,
    target: str | None,
    log_level: str,
    **others: Any,
) -> int:
    """Serve an Engine over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models and more.

    SIGTERM, SIGINT or SIGHUP ends the server: it refuses new requests, gives running ones --drain_timeout
    seconds to finish, and exits with code 0.

    \b
    Example: ingot serve --engine_dir engine --port 8000
    """
    console = CliConsole(LEVELS[log_level])
    keys = (*api_keys, *(_read_keys(api_key_file) if api_key_file else ()))
    names = tuple(name.strip() for text in model_names for name in text.split(","))
    config = ServeConfig(
        api_keys=keys,
        model_names=names,
        max_body_bytes=max_body_size,
        log_level=_LOGGED[LEVELS[log_level]],
        log_requests=not no_log_requests,
        **others,
    )
    try:
        room = importlib.import_module("ingot.runtime.server.serve")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ingot"):
            raise
        raise UsageError(
            "ingot serve needs packages that are not installed", got=f"no module {error.name}", hint=install("serve")
        ) from error

    opening = RuntimeConfig(
        threads=threads,
        isa=isa,
        kv_cache_memory=kv_cache_memory,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        policy=Policy(policy),
        tpot_target=tpot_target,
        speculation=speculative_config,
        target=target,
        use_mmap=use_mmap,
        rank_timeout=rank_timeout,
        collectives=collectives,
    )
    join_ranks(engine_dir, opening, drains=True)

    def open_runner() -> ModelRunner:
        return ModelRunner(load_engine(engine_dir, opening), opening)

    def on_start(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        console.note(f"serving {engine_dir} at http://{shown}:{port}")

    code: int = room.serve(engine_dir, open_runner, config, console.warn, on_start)
    return code


def _read_keys(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the file of API keys cannot be read", where=str(path), got=str(error)) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(
            "the file of API keys holds no key",
            where=str(path),
            expected="one key on each line; lines that begin with # are comments",
            hint="write a key into the file, or leave --api_key_file out",
        )
    return keys
