"""What a check found, and the file that keeps it."""

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ingot
from ingot.plugins.cuda.gpu import Found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One check.

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


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(folder: Path, part: str, what: str, command: str, found: Found, results: Sequence[Result]) -> Path:
    """The file of a part; its name tells GPU and time. Numbers that are none become null."""
    gpu = found.gpus[0]
    document = {
        "part": part,
        "what": what,
        "command": command,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
        "gpu": gpu.name,
        "sm": gpu.sm,
        "memory_bytes": gpu.memory_bytes,
        "cuda_driver": found.driver,
        "ingot_version": ingot.__version__,
        "results": [_finite(dataclasses.asdict(each)) for each in results],
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join([f"gpu-{part}", *gpu.name.lower().split(), f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"])
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
