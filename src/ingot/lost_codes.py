"""Why an engine does not keep the codes of weights that a checkpoint has quantised: lines for people."""

import re
from collections.abc import Mapping

_LAYER = re.compile(r"layers\.(\d+)/(.+)")


def lost_lines(lost: Mapping[str, str]) -> list[str]:
    """One line for each reason. lost: matmul → why its codes were not kept."""
    by_reason: dict[str, dict[str, list[int]]] = {}
    for matmul, reason in sorted(lost.items()):
        found = _LAYER.fullmatch(matmul)
        name = found[2] if found else matmul
        by_reason.setdefault(reason, {}).setdefault(name, []).extend([int(found[1])] if found else [])
    lines = []
    for reason, names in by_reason.items():
        said = [f"layers.{ranges(sorted(layers))}/{name}" if layers else name for name, layers in names.items()]
        lines.append(f"{', '.join(said)}: {reason}")
    return lines


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
