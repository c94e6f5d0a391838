"""The texts that calibrate a quantisation: the built-in one, a text file, or JSONL of texts and chats.

A line of JSONL is {"text": ...}, or {"messages": [...]}, which the model's chat template writes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.builder.calibrated.text import BUILTIN
from ingot.errors import IngotError, UsageError
from ingot.runtime.chat_template import ChatTemplates

_EXPECTED = '{"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def read_calibration(name: str, model: Path) -> list[str]:
    """name: "builtin" or a file; model: a directory with the model's chat template.

    Raises UsageError for a file that cannot be read, is empty, or has a line of another form.
    """
    path = BUILTIN if name == "builtin" else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the calibration text cannot be read",
            where=name,
            expected="builtin, a text file in UTF-8, or a .jsonl file",
            got=str(error),
        ) from error
    texts = list(_lines(text, path, model)) if path.suffix == ".jsonl" else [text]
    if not any(each.strip() for each in texts):
        raise UsageError("the calibration text is empty", where=name, hint="the built-in one is --calibration builtin")
    return texts


def _lines(text: str, path: Path, model: Path) -> Iterator[str]:
    templates: ChatTemplates | None = None
    for number, line in enumerate(text.split("\n"), 1):  # a JSON text may hold other ends of lines
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                "a line of the calibration text is not JSON", where=where, expected=_EXPECTED, got=str(error)
            ) from error
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield entry["text"]
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            templates = templates or ChatTemplates.from_dir(model)
            try:
                yield str(templates.render(entry["messages"], add_generation_prompt=False))
            except IngotError as error:
                raise UsageError(
                    "the chat template refuses a line of the calibration text", where=where, got=str(error)
                ) from error
        else:
            raise UsageError(
                "a line of the calibration text is neither a text nor a chat",
                where=where,
                expected=_EXPECTED,
                got=line[:100],
            )
