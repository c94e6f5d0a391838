"""What a long piece of work will need, said and checked before it starts."""

import dataclasses
import shutil
from pathlib import Path

from ingot.configs.sizes import format_bytes
from ingot.errors import CapacityError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResourceEstimate:
    """memory  most bytes that the process will have resident
    disk    bytes that it will write
    free    bytes that are free where it writes
    """

    memory: int
    disk: int
    free: int

    @classmethod
    def at(cls, target: Path, *, memory: int, disk: int) -> "ResourceEstimate":
        """For an output directory that may not exist yet."""
        place = Path(target).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return cls(memory=memory, disk=disk, free=shutil.disk_usage(place).free)

    def __str__(self) -> str:
        return (
            f"needs at most {format_bytes(self.memory)} of memory and {format_bytes(self.disk)} of disk "
            f"({format_bytes(self.free)} of disk are free)"
        )

    def check_memory(self, max_mem: int | None) -> None:
        """Raise CapacityError if more is needed than --max_mem allows."""
        if max_mem is not None and self.memory > max_mem:
            raise CapacityError(
                "the work needs more memory than --max_mem allows",
                expected=f"at least {format_bytes(self.memory)}",
                got=format_bytes(max_mem),
                hint=f"give --max_mem {-(-self.memory >> 20)}MiB or more",
            )
