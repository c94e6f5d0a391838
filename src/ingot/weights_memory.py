"""Memory for copies of weights: 2 MiB pages, which are read faster than the 4 KiB pages of a mapped file.

A processor finds a page's place in a table of some thousand entries; of 4 KiB each they cover a few MiB, less than a
layer. On machines of several memory nodes a page lies on the node of the core that first writes it.
"""

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.errors import CapacityError
from ingot.plan import Plan

HUGE_PAGE = 2 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NumaPlacement:
    """Where the parts of a copy should lie.

    cores  of each memory node
    node   byte offset in the weights section → which of the nodes
    """

    cores: tuple[frozenset[int], ...]
    node: Callable[[int], int]


PlanPlacement = Callable[[Plan], NumaPlacement | None]
"""None: the weights are best used where they are mapped."""


def offers_huge_pages(setting: Path = _SETTING) -> bool:
    """Whether the system gives 2 MiB pages to who asks for them."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def huge_pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros in memory of their own, from a multiple of 2 MiB on; committed page by page, when first written.

    Raises CapacityError.
    """
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(
            "the weights cannot be copied: too little address space",
            expected=f"{nbytes} bytes",
            got=str(error),
            hint="pass use_mmap=True (--use_mmap)",
        ) from error
    if offers_huge_pages():
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE
    return whole[begin : begin + nbytes]
