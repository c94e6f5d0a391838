"""Figures by name, in a file that is whole after each of them: the next run takes what is there, and goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.errors import UsageError

FORMAT = 1


class Measured:
    """made_of: what the figures are of; those of anything else are thrown away. path: None keeps them in memory."""

    def __init__(self, path: Path | None, made_of: str) -> None:
        """Raises UsageError for a file that is something else, rather than overwrite it."""
        self._path, self._made_of = path, made_of
        self._figures: dict[str, Any] = {}
        if path is not None and path.exists():
            self._figures = _read(path, made_of)

    def get_or_measure(self, name: str, measure: Callable[[], Any]) -> Any:
        """What is known, or what is measured now: anything that JSON holds."""
        if name not in self._figures:
            self._figures[name] = measure()
            self._save()
        return self._figures[name]

    def _save(self) -> None:
        if self._path is None:
            return
        text = json.dumps({"advise": FORMAT, "made_of": self._made_of, "figures": self._figures}, indent=1) + "\n"
        write_whole(self._path, text)


def write_whole(path: Path, text: str) -> None:
    """All of a file or nothing. Raises UsageError where that cannot be done."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(
            "the file of --measured cannot be written", where=str(path), got=error.strerror, hint="name another file"
        ) from error


def _read(path: Path, made_of: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["advise"] != FORMAT:
            raise ValueError(f"format {document['advise']}")
        figures, same = dict(document["figures"]), document["made_of"] == made_of
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "--measured names a file that ingot advise has not written",
            where=str(path),
            got=repr(error)[:200],
            hint="name another file, or delete it: a new one is written",
        ) from error
    return figures if same else {}
