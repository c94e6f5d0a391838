"""What computes a product for few and for many rows: a part of a Plan."""

import dataclasses
from typing import Annotated

from ingot.configs.exact import Between, Count, Like

Name = Annotated[str, Like(r"[^\0]+", "a name")]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What computes a product in steps of at most `most_rows` rows, where no tile before it does.

    kernel  as it is launched, or the name of a library
    rows    that a thread block computes together; 0 where a library chooses
    parts   into which the columns of the weight are cut; their sums are added up in a launch of its own
    """

    most_rows: Count
    kernel: Name
    rows: Annotated[int, Between(0, 1 << 20)] = 0
    parts: Annotated[int, Between(1, 64)] = 1

    def __str__(self) -> str:
        return f"{self.words()} up to {self.most_rows} rows"

    def words(self) -> str:
        """What it is, for any number of rows."""
        tiles = f" (tiles of {self.rows} rows)" if self.rows and str(self.rows) not in self.kernel else ""
        return f"{self.kernel}{tiles}{f' in {self.parts} parts' if self.parts > 1 else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Kernel calls of products that are computed alike, and by what: tiles for more and more rows, up to those of the
    largest step."""

    steps: tuple[Name, ...]
    tiles: tuple[Tile, ...]
