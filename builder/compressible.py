"""Which weights can be stored as bf16c: all of their panels must have room for their patches, so all of their values
are read once while the engine is planned."""

from collections.abc import Callable, Sequence

from ingot.builder.expressions import WeightReader, key
from ingot.builder.pack import WeightUse, fits_compressed
from ingot.builder.parallel_map import parallel_map
from ingot.checkpoint import Checkpoint

Progress = Callable[[str, int, int], None]


class Compressible:
    """Remembers what it has found: ranks and targets share weights."""

    def __init__(self, checkpoint: Checkpoint, threads: int, progress: Progress) -> None:
        """threads: that read a weight each."""
        self._checkpoint, self._threads, self._progress = checkpoint, threads, progress
        self._known: dict[tuple[object, ...], bool] = {}

    def __call__(self, uses: Sequence[WeightUse]) -> set[str]:
        """Names of those that can."""
        unknown = {self._key(use): use for use in uses if self._key(use) not in self._known}
        with WeightReader(self._checkpoint) as reader:
            found = parallel_map(lambda use: fits_compressed(reader, use), unknown.values(), self._threads)
            for done, (each, fits) in enumerate(zip(unknown, found, strict=True), 1):
                self._known[each] = fits
                self._progress("counting exponents of bf16 weights", done, len(unknown))
        return {use.name for use in uses if self._known[self._key(use)]}

    @staticmethod
    def _key(use: WeightUse) -> tuple[object, ...]:
        return key(use.tensor), use.shape, use.gated
