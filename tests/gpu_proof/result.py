"""What a check found, and the file that keeps it."""

import contextlib
import dataclasses
import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import ingot
from ingot.plugins.cuda.gpu import Found

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one check found.

    command  does the same by hand
    ok       whether it is as it should be; None where nothing was wanted, or it could not be done
    missing  why it could not be done
    figures  what was measured
    """

    name: str
    command: str
    ok: bool | None = None
    missing: str | None = None
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """For people."""
        state = {True: "yes", False: "NO", None: "-"}[self.ok] if self.missing is None else "not done"
        said = self.missing or ", ".join(f"{key} {_short(value)}" for key, value in self.figures.items())
        return f"{self.name}: {state}{': ' + said if said else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A piece of a part that ends within minutes, and need not be done again."""

    name: str
    run: Callable[[], Iterable[Result]]

    @classmethod
    def of(cls, name: str, make: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> "Check":
        """A check with one result, which `make` gives of the arguments."""
        return cls(name, lambda: [make(*args, **kwargs)])


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ResultFile:
    """The file of a part; its name tells GPU and time. It is written anew with every result."""

    def __init__(self, folder: Path, part: str, what: str, command: str, found: Found) -> None:
        gpu, now = found.gpus[0], datetime.datetime.now(datetime.UTC)
        self._document: dict[str, Any] = {
            "part": part,
            "what": what,
            "command": command,
            "date": f"{now:%Y-%m-%d %H:%M}",
            "gpu": gpu.name,
            "sm": gpu.sm,
            "memory_bytes": gpu.memory_bytes,
            "cuda_driver": found.driver,
            "ingot_version": ingot.__version__,
            "results": [],
        }
        self.path = folder / f"{'-'.join([f'gpu-{part}', *gpu.name.lower().split(), f'{now:%Y%m%d-%H%M%S}'])}.json"
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, result: Result) -> None:
        """On disk when it returns."""
        self._document["results"].append(_finite(dataclasses.asdict(result)))
        write_whole(self.path, self._document)


class Kept:
    """Checks that an earlier run with the same arguments ended, in the folder of work."""

    def __init__(self, path: Path, arguments: Mapping[str, Any]) -> None:
        self._path = path
        self._document: dict[str, Any] = {"arguments": dict(arguments), "checks": {}}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what is damaged is done again
            before = json.loads(path.read_text())
            if before["arguments"] == self._document["arguments"]:
                self._document["checks"] = dict(before["checks"])

    def find(self, name: str) -> list[Result] | None:
        """None where the check has to be done. What was missing then may be here now, so it is asked again."""
        results = [Result(**each) for each in self._document["checks"].get(name, [])]
        return None if name not in self._document["checks"] or any(each.missing for each in results) else results

    def add(self, name: str, results: Iterable[Result]) -> None:
        self._document["checks"][name] = [_finite(dataclasses.asdict(each)) for each in results]
        write_whole(self._path, self._document)


def write_whole(path: Path, document: Mapping[str, Any]) -> None:
    """The old file or the new one, whenever the process ends."""
    fresh = path.with_suffix(".part")
    with fresh.open("w") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _finite(value: Any) -> Any:
    """Numbers that are none become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
