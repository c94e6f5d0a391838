"""What holds threads or native memory stays in the process that made it, and has one copy."""

import os
import threading
from typing import NoReturn, SupportsIndex

from ingot.errors import RequestError, UsageError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread that an engine needs. Raises RequestError if the system has none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RequestError(
            "the system starts no thread", where=thread.name, got=str(error), hint="raise ulimit -u, or pids.max"
        ) from error


class Owned:
    """Base of what cannot be copied, pickled, or used in a forked child: the threads of a process and whatever they
    were in the middle of do not come along with a fork.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process made it."""
        return os.getpid() == self._process

    def require_here(self) -> None:
        """Raise RequestError in a forked child."""
        if not self.is_here:
            raise RequestError(
                "an engine cannot be used in a forked child of the process that opened it",
                expected=f"process {self._process}",
                got=f"process {os.getpid()}",
                hint="open the engine in the child; with use_mmap=True processes share the weights",
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            f"{type(self).__name__} holds an open engine, which cannot be copied or pickled",
            hint="pass the engine directory on, and open it where it is needed",
        )
