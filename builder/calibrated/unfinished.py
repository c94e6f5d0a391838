"""Products that an interrupted run has made, in a hidden directory beside the output; the next run of the same work
takes them.

    .NAME.unfinished/work        what is made of what: another work's products are thrown away
                     00007.npz  a product, under its final name only when it is whole
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.levels import BYTES, E4M3, EVEN, SHIFTED, UNEVEN, Scales
from ingot.builder.calibrated.methods import Found
from ingot.errors import CapacityError, UsageError

_LEVELS = {"bytes": BYTES, "even": EVEN, "shifted": SHIFTED, "uneven": UNEVEN, "f8": E4M3}


class Unfinished:
    """The products by number."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __contains__(self, number: int) -> bool:
        return self._file(number).is_file()

    def read(self, number: int) -> list[Found]:
        """Its matrices, one for each expert."""
        with np.load(self._file(number), allow_pickle=False) as held:
            recorded = json.loads(str(held["recorded"]))
            return [
                Found(
                    codes=held[f"codes{i}"],
                    scales=Scales(scale=held[f"scale{i}"], zero=held.get(f"zero{i}")),
                    levels=_LEVELS[each.pop("levels")],
                    fold=held.get(f"fold{i}"),
                    **each,
                )
                for i, each in enumerate(recorded)
            ]

    def write(self, number: int, found: Sequence[Found]) -> None:
        """Raises CapacityError where the disk is full; then the products before this one stay."""
        arrays, recorded = dict[str, npt.NDArray[np.generic]](), []
        names = {levels: name for name, levels in _LEVELS.items()}
        for i, each in enumerate(found):
            parts: dict[str, npt.NDArray[np.generic] | None] = {
                "codes": each.codes,
                "scale": each.scales.scale,
                "zero": each.scales.zero,
                "fold": each.fold,
            }
            arrays |= {f"{name}{i}": array for name, array in parts.items() if array is not None}
            numbers = {key: getattr(each, key) for key in ("group", "method", "loss", "plain", "energy")}
            recorded.append({"levels": names[each.levels], **numbers})
        part = self._file(number).with_suffix(".part")
        try:
            with part.open("wb") as file:
                np.savez(file, recorded=np.array(json.dumps(recorded)), **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            part.rename(self._file(number))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise CapacityError(
                "a quantised matmul cannot be saved",
                where=str(part),
                got=error.strerror,
                hint="free space, then run the command again: it continues with the next matmul",
            ) from error

    def _file(self, number: int) -> Path:
        return self.path / f"{number:05}.npz"


@contextlib.contextmanager
def unfinished(output: Path, work: str) -> Iterator[Unfinished]:
    """Removed when the block ends well. work: what is made of what.

    Raises UsageError where another process is at it.
    """
    path = output.with_name(f".{output.name}.unfinished")
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                "another process quantises into this directory", where=str(output), hint="wait for it, or stop it"
            ) from error
        if not _is(path / "work", work):
            for entry in path.iterdir():
                entry.unlink()
            (path / "work").write_text(work, encoding="utf-8")
        yield Unfinished(path)
        shutil.rmtree(path)
    finally:
        os.close(lock)


def _is(path: Path, work: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == work
