"""The file of --timing_cache: how long matrix products took, by machine, so that the next build need not time them.

{"timing_cache": 1, "machines": {"<machine, kernels>": {"<product>": [seconds of each tactic]}}}
"""

import json
import math
from pathlib import Path

from ingot.errors import UsageError

FORMAT = 1

Times = tuple[float, ...]


class TimingCache:
    """Times of one machine; those of others in the file are kept as they are."""

    def __init__(self, machine: str, path: Path | None) -> None:
        """Raises UsageError for a file that is not a timing cache, rather than overwrite it."""
        self._machine, self._path = machine, path
        self._all = _read(path) if path is not None and path.exists() else {}
        self.times: dict[str, Times] = self._all.setdefault(machine, {})

    def other_machines(self) -> list[str]:
        """Other machines of the file, where it holds nothing of this one."""
        return [] if self.times else [name for name in self._all if name != self._machine]

    def save(self) -> None:
        """Write the file, all of it or nothing. Raises UsageError where that cannot be done."""
        if self._path is None:
            return
        text = json.dumps({"timing_cache": FORMAT, "machines": self._all}, indent=1, sort_keys=True) + "\n"
        part = self._path.with_name(self._path.name + ".part")
        try:
            part.write_text(text)
            part.replace(self._path)
        except OSError as error:
            raise UsageError(
                "the timing cache cannot be written",
                where=str(self._path),
                got=error.strerror,
                hint="name another file",
            ) from error


def _read(path: Path) -> dict[str, dict[str, Times]]:
    try:
        document = json.loads(path.read_text())
        if document["timing_cache"] != FORMAT:
            raise ValueError(f"format {document['timing_cache']}")
        return {str(name): _times(entries) for name, entries in document["machines"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            "--timing_cache names a file that is not a timing cache of this version",
            where=str(path),
            got=repr(error),
            hint="name another file, or delete it: a new one is written",
        ) from error


def _times(entries: dict[str, list[float]]) -> dict[str, Times]:
    times = {str(product): tuple(float(each) for each in found) for product, found in entries.items()}
    if not all(found and all(math.isfinite(each) and each > 0 for each in found) for found in times.values()):
        raise ValueError("a time that is not above zero")
    return times
