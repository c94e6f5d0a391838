"""`ingot run`: text in, text out. Completions go to stdout and nothing else does."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.exit_codes import DONE, FAILED
from ingot.cli.sampling_options import Prompt, Sampling, read_prompts
from ingot.cli.values import (
    LocalPath,
    as_json,
    byte_size,
    log_level,
    positive,
    ranks,
    speculative_config,
    target_isa,
    use_mmap,
)
from ingot.configs.generation import GenerationDefaults, read_generation_defaults
from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.configs.speculation import Speculation
from ingot.configs.structured_outputs import StructuredOutputs, read_json
from ingot.errors import ConfigError, IngotError, RequestError, UsageError
from ingot.runtime.generate_text import stream_text
from ingot.runtime.guided.guides import Guides
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import join_ranks, load_engine
from ingot.runtime.text_stream import TextEvent, TextRequest
from ingot.runtime.tokenizer import Tokenizer

_MOST_TOKENS = 128  # of an answer, unless the user says it
_FORMS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}  # option → field of StructuredOutputs


@click.command()
@click.option("--engine_dir", type=LocalPath(path_type=Path), required=True, help="Generate with this Engine.")
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT", help="Complete this text. Give it again for more prompts."
)
@click.option(
    "--input_file",
    metavar="FILE",
    help='Read prompts from JSON lines: "text" or {"prompt": ..., "max_output_len": ...}; - is stdin.',
)
@click.option(
    "--max_output_len",
    type=positive,
    help=f"Generate at most this many tokens. Default: {_MOST_TOKENS}, or what the engine's limits leave.",
)
@click.option(
    "--temperature",
    type=float,
    help="Divide the logits by this before sampling; 0 is greedy. Default: generation_config.json's, else greedy.",
)
@click.option("--top_k", type=int, help="Sample from the k most likely tokens; 0 keeps all.")
@click.option(
    "--top_p",
    type=float,
    help="Sample from the smallest set of likely tokens whose probability reaches this; 1 keeps all.",
)
@click.option(
    "--min_p", type=float, help="Drop tokens whose probability is less than this share of the most likely one's."
)
@click.option(
    "--repetition_penalty",
    type=float,
    help="Make tokens of prompt and output less likely: divide their positive logits by this, multiply "
    "their negative ones. 1 changes nothing.",
)
@click.option("--presence_penalty", type=float, help="Subtract this from the logits of tokens in the output.")
@click.option(
    "--frequency_penalty", type=float, help="Subtract this from a token's logit for each time that the output has it."
)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Give the option again for more."
)
@click.option("--bad_words", multiple=True, metavar="TEXT", help="Never generate these words. Give it again for more.")
@click.option("--min_tokens", type=int, help="Generate at least this many tokens.")
@click.option("--ignore_eos", is_flag=True, default=None, help="Continue after the model's end tokens.")
@click.option("--seed", type=int, help="Seed the random draws: the same seed gives the same text.")
@click.option(
    "--json_schema", type=click.File(), metavar="FILE", help="Answer with JSON that fits the JSON schema in this file."
)
@click.option("--regex", help="Answer with a text that this regular expression matches as a whole.")
@click.option(
    "--grammar", type=click.File(), metavar="FILE", help="Answer with a text of the grammar in this file, Lark or GBNF."
)
@click.option(
    "--stream", is_flag=True, help="Print text as it is generated; with --json, each object when its request ends."
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
@speculative_config
@use_mmap
@ranks
@target_isa
@as_json
@log_level
def command(
    engine_dir: Path,
    prompts: tuple[str, ...],
    input_file: str | None,
    stream: bool,
    threads: int | None,
    kv_cache_memory: int | None,
    speculative_config: Speculation | None,
    use_mmap: bool,
    rank_timeout: float,
    collectives: str,
    isa: str | None,
    target: str | None,
    as_json: bool,
    log_level: str,
    **sampling: Any,
) -> int:
    """Complete texts with an Engine. Without --prompt and --input_file the prompt is what is piped into stdin.

    \b
    Example: ingot run --engine_dir engine --prompt "Once upon a time" --stream
    """
    files = {name: file for name in ("json_schema", "grammar") if (file := sampling[name]) is not None}
    sampling |= {name: _text_of(file) for name, file in files.items()}
    if "json_schema" in files:
        _check_json(files["json_schema"].name, sampling["json_schema"])
    options = Sampling(**sampling)
    if prompts or input_file is None:  # a line of a file may yet say otherwise
        _check(options)
    config = RuntimeConfig(
        threads=threads,
        isa=isa,
        target=target,
        kv_cache_memory=kv_cache_memory,
        speculation=speculative_config,
        use_mmap=use_mmap,
        rank_timeout=rank_timeout,
        collectives=collectives,
    )
    join_ranks(engine_dir, config)
    entries = read_prompts(prompts, input_file, options)
    with ModelRunner(load_engine(engine_dir, config), config) as runner, CliConsole(LEVELS[log_level]) as console:
        for name in (each for each in _FORMS if sampling[each] is not None):
            _check_form(runner.guides, name, sampling[name], files[name].name if name in files else "")
        defaults = read_generation_defaults(engine_dir)
        for setting in defaults.not_followed:
            console.warn(f"generation_config.json: ingot does not apply {setting}; this setting is ignored")
        requests = [_request(index, *entry, defaults) for index, entry in enumerate(entries)]
        printer = _JsonPrinter(requests, stream) if as_json else _TextPrinter(len(requests), stream)
        with contextlib.closing(stream_text(runner, Tokenizer.from_dir(engine_dir), requests)) as events:
            return _print_all(events, printer, len(requests), console)


def _text_of(file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise UsageError("the file is not a text in UTF-8", where=file.name, got=str(error)) from error


def _check_json(path: str, text: str) -> None:
    """Raises ConfigError, with the file's name, before an engine is opened."""
    try:
        read_json("the JSON schema", text)
    except RequestError as error:
        raise ConfigError(error.what, where=path, got=error.got, hint="correct the file") from error


def _check(options: Sampling) -> None:
    """Raises UsageError for options that mean nothing, before an engine is opened."""
    try:
        _params(options, GenerationDefaults())
    except RequestError as error:
        raise UsageError(error.what, expected=error.expected, got=error.got, hint=error.hint) from error


def _check_form(guides: Guides, option: str, text: str, file: str) -> None:
    """Raises UsageError for what the engine's grammars cannot be made of, ConfigError where a file says it."""
    guides.wire("")  # what this machine lacks for grammars is an error of its own, and no fault of the option
    form: dict[str, Any] = {_FORMS[option]: text}
    try:
        guides.matcher(StructuredOutputs(**form))
    except RequestError as error:
        if file:
            where = ": ".join(filter(None, (file, error.where)))
            raise ConfigError(
                error.what, where=where, expected=error.expected, got=error.got, hint=error.hint
            ) from error
        what = f"--{option} is not a pattern that an answer can keep to"
        hint = error.hint or "correct the pattern; its syntax is that of Rust's regex"
        raise UsageError(what, where=f"--{option}", expected=error.expected, got=error.got, hint=hint) from error


def _request(index: int, prompt: Prompt, asked: Sampling, defaults: GenerationDefaults) -> TextRequest:
    """What was asked for, completed by generation_config.json."""
    try:
        params = _params(asked, defaults)
    except RequestError as error:
        error.where = f"request {index}"
        raise
    return TextRequest(prompt=prompt, params=params, default_max_tokens=max(_MOST_TOKENS, params.min_tokens))


def _params(asked: Sampling, defaults: GenerationDefaults) -> SamplingParams:
    values: dict[str, Any] = {
        name: value for name, value in dataclasses.asdict(asked).items() if value not in (None, ())
    }
    values["max_tokens"] = values.pop("max_output_len", None)
    forms = {new: values.pop(old) for old, new in _FORMS.items() if old in values}
    if forms:
        values["structured_outputs"] = StructuredOutputs(**forms)
    temperature, top_k, top_p = defaults.resolve(asked.temperature, asked.top_k, asked.top_p)
    values.update(temperature=temperature, top_k=top_k, top_p=top_p)
    return SamplingParams(**{**defaults.others, **values})


def _print_all(
    events: Iterator[TextEvent], printer: "_JsonPrinter | _TextPrinter", total: int, console: CliConsole
) -> int:
    """The exit code: FAILED if any request failed, whose words go to stderr; the others are not touched. The bar goes
    away before anything is printed."""
    code, finished = DONE, 0
    for event in events:
        ends = event.finish_reason is not None
        if ends or printer.streams:
            console.hide()
        if event.error is not None:
            print(f"error: request {event.index}: {event.error}", file=sys.stderr)
            code = FAILED
        printer.add(event)
        finished += ends
        if total > 1 and not printer.streams:
            console.progress_requests("generating", finished, total)
    console.hide()
    printer.end()
    return code


class _TextPrinter:
    """Completions in the order of the prompts, one after the other; streaming, the first unfinished one as it grows."""

    def __init__(self, count: int, stream: bool) -> None:
        self._waiting: list[list[str]] = [[] for _ in range(count)]
        self._done = [False] * count
        self._silent = [False] * count
        self.streams = stream
        self._current = 0

    def add(self, event: TextEvent) -> None:
        self._waiting[event.index].append(event.text)
        self._done[event.index] |= event.finish_reason is not None
        self._silent[event.index] |= event.error is not None  # no line for what has no completion
        while self._current < len(self._done):
            if self.streams or self._done[self._current]:
                print("".join(self._waiting[self._current]), end="", flush=True)
                self._waiting[self._current].clear()
            if not self._done[self._current]:
                return
            if not self._silent[self._current]:
                print(flush=True)
            self._current += 1

    def end(self) -> None:
        assert all(self._done), "every request ends in an event"


class _JsonPrinter:
    """One JSON object per request, in the order of the prompts; streaming, in the order in which they end."""

    def __init__(self, requests: Sequence[TextRequest], stream: bool) -> None:
        self._requests, self.streams = requests, stream
        self._events: list[list[TextEvent]] = [[] for _ in requests]

    def add(self, event: TextEvent) -> None:
        self._events[event.index].append(event)
        if self.streams and event.finish_reason is not None:
            self._print(event.index)

    def end(self) -> None:
        for index in range(len(self._requests)) if not self.streams else ():
            self._print(index)

    def _print(self, index: int) -> None:
        events = self._events[index]
        last: IngotError | None = events[-1].error
        reason = events[-1].finish_reason
        document = {
            "index": index,
            "prompt": self._requests[index].prompt,
            "text": "".join(event.text for event in events),
            "token_ids": [token for event in events for token in event.token_ids],
            "finish_reason": reason.value if reason else None,
            "error": None if last is None else str(last),
        }
        text = json.dumps(document, ensure_ascii=False)
        # half a surrogate pair, which JSON may ask for, has no UTF-8 form; escaped it has a JSON form
        whole = text.encode(errors="ignore").decode() == text
        print(text if whole else json.dumps(document), flush=True)
