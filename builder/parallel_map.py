"""Work on the blocks of a weight on several threads, results in order: numpy lets go of the interpreter meanwhile."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def parallel_map(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """work(item) for every item, in their order, on several threads; at most one item more than threads at a time.

    What numpy does about NaN and infinities is the caller's choice on these threads, too.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2))
    if len(first) < 2:  # nothing to share
        yield from map(work, first)
        return
    waiting: deque[Future[Result]] = deque()
    settings = np.geterr()

    def work_alike(item: Item) -> Result:
        with np.errstate(**settings):
            return work(item)

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            for item in itertools.chain(first, items):
                waiting.append(pool.submit(work_alike, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
