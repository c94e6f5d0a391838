"""Which modules of ingot a piece of work enters, for the programs that print the way of a request, a weight or the
input_ids. Native code is not seen."""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Frame = types.FrameType


class Trace:
    """modules: under the key that `key` gives for a call, in the order of the first call. Calls without one are left
    out."""

    def __init__(self, key: Callable[[Frame, str], str | None]) -> None:
        self._key = key
        self.modules: dict[str, list[str]] = {}

    def __call__(self, frame: Frame, event: str, argument: object) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event not in ("call", "return") or not name.startswith("ingot."):
            return
        key = self._key(frame, event)
        if key is not None and event == "call":
            found = self.modules.setdefault(key, [])
            if (short := name.removeprefix("ingot.")) not in found:
                found.append(short)


class Stages:
    """Keys of a Trace: the stage that this thread entered last. stages: module and function → stage."""

    def __init__(self, stages: Mapping[tuple[str, str], str]) -> None:
        self._stages = stages
        self._entered = threading.local()

    def __call__(self, frame: Frame, event: str) -> str | None:
        stack: list[str] = self._entered.__dict__.setdefault("stack", [])
        module = str(frame.f_globals["__name__"]).removeprefix("ingot.")
        stage = self._stages.get((module, frame.f_code.co_name))
        if stage is not None and event == "call":
            stack.append(stage)
        elif stage is not None and stack:
            stack.pop()
        return stack[-1] if stack else None


@contextlib.contextmanager
def traced(key: Callable[[Frame, str], str | None]) -> Iterator[Trace]:
    """What this thread, and threads that start inside the block, enter there."""
    found = Trace(key)
    hook: Any = found  # the types of profile functions name no event but five
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def table(modules: Mapping[str, list[str]]) -> list[str]:
    """Rows of Markdown, a line for each key; the modules sorted, since threads meet them in any order."""
    lines = ["| stage | modules |", "|---|---|"]
    return lines + [f"| {key} | {', '.join(f'`{name}`' for name in sorted(names))} |" for key, names in modules.items()]
