"""Which modules a streamed answer of chat passes in the server, thread by thread, in the order of the first call.

python -m tests.programs.trace_request --engine_dir ENGINE
"""

import argparse
import threading
from pathlib import Path
from types import FrameType

from tests.runtime.server.served import eventually, serving_engine

THREADS = {
    "ingot text_": "prepare: renders the template, encodes",
    "ingot text": "text: turns tokens into text",
    "ingot engine": "engine: runs the steps",
    "": "loop: reads and answers HTTP",
}
TOKENS = 8


class _Trace:
    """modules: by thread, those whose functions were called there while `on`, in order."""

    def __init__(self) -> None:
        self.on = False
        self.modules: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if self.on and event == "call" and name.startswith("ingot."):
            thread = threading.current_thread().name
            found = self.modules.setdefault(next(each for each in THREADS if thread.startswith(each)), [])
            if name not in found:
                found.append(name)


def trace(engine: Path) -> dict[str, list[str]]:
    """The modules of one answer, by thread."""
    found = _Trace()
    threading.setprofile(found)
    try:
        with serving_engine(engine) as served, served.http() as http:
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": TOKENS}
            http.post("/v1/chat/completions", json=ask).raise_for_status()  # what is done once is done now
            eventually(served.is_between_steps)
            found.on = True
            http.post("/v1/chat/completions", json=ask | {"stream": True}).raise_for_status()
            eventually(served.is_between_steps)
            found.on = False
    finally:
        threading.setprofile(None)
    return found.modules


def main() -> None:
    """For the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    modules = trace(parser.parse_args().engine_dir)
    for thread, names in modules.items():
        print(f"{THREADS[thread]} ({len(names)}):\n    {', '.join(name.removeprefix('ingot.') for name in names)}")
    everything = {name for names in modules.values() for name in names}
    print(f"{len(everything)} modules of ingot, {len(modules)} threads")


if __name__ == "__main__":
    main()
