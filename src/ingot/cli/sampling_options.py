"""Where `ingot run` takes its prompts from: options, a file of JSON lines, stdin."""

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.configs.read import parse_json
from ingot.errors import ConfigError, RequestError, UsageError, spelled

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a user says about one request; None: nothing."""

    max_output_len: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None


_FIELDS = ("prompt", *(field.name for field in dataclasses.fields(Sampling)))


def read_prompts(prompts: Sequence[str], input_file: str | None, asked: Sampling) -> list[tuple[Prompt, Sampling]]:
    """Every prompt with its sampling; a line of the file overrides what the options say. Raises UsageError for none."""
    entries: list[tuple[Prompt, Sampling]] = [(prompt, asked) for prompt in prompts]
    if input_file is not None:
        entries += _from_lines(input_file, asked)
    elif not prompts:
        text = "" if sys.stdin.isatty() else _read("-").removesuffix("\n")
        if not text:
            raise UsageError(
                "there is no prompt", hint='give --prompt "Once upon a time", --input_file, or text on stdin'
            )
        entries.append((text, asked))
    if not entries:
        raise UsageError("there is no prompt", where=input_file, hint="every line is one request")
    return entries


def _from_lines(input_file: str, asked: Sampling) -> Iterator[tuple[Prompt, Sampling]]:
    for number, line in enumerate(_read(input_file).split("\n"), start=1):  # texts may hold U+2028 and the like
        if line.strip():
            yield _from_line(line, f"{input_file}:{number}", asked)


def _read(file: str) -> str:
    """The text of a file, or of stdin for "-"."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        hint = "give a file" if isinstance(error, IsADirectoryError) else spelled(Path(file))
        raise UsageError("the input file cannot be read", where=file, got=error.strerror, hint=hint) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError("the input is not UTF-8", where=file, got=str(error)) from error


def _from_line(line: str, where: str, asked: Sampling) -> tuple[Prompt, Sampling]:
    expected = 'a text, or an object like {"prompt": "Once", "max_output_len": 20}'
    try:
        value = parse_json(line.encode(), where)
    except ConfigError as error:
        raise RequestError("a line of the input is not JSON", where=where, expected=expected, got=error.got) from error
    if isinstance(value, str):
        return value, asked
    if not isinstance(value, dict) or "prompt" not in value:
        raise RequestError("a line of the input has no prompt", where=where, expected=expected, got=line[:80])
    for key in value:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1)
            raise RequestError(
                f"a line of the input has an unknown field {key!r}",
                where=where,
                expected=", ".join(_FIELDS),
                hint=f"did you mean {near[0]!r}?" if near else "leave it out",
            )
    prompt = value.pop("prompt")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(item) is int for item in prompt)):
        raise RequestError("a prompt is text or a list of token ids", where=where, got=json.dumps(prompt)[:80])
    given = {name: each for name, each in value.items() if each is not None}
    count = given.get("max_output_len", 1)
    if type(count) is not int or count < 1:
        raise RequestError("max_output_len must be a whole number, at least 1", where=where, got=json.dumps(count)[:80])
    return prompt, dataclasses.replace(asked, **given) if given else asked
