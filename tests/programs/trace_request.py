"""Which modules a streamed answer of chat passes in the server, thread by thread, in the order of the first call.

python -m tests.programs.trace_request --engine_dir ENGINE
"""

import argparse
import threading
from pathlib import Path
from types import FrameType

from tests.programs.traced import traced
from tests.runtime.server.served import eventually, serving_engine

THREADS = {
    "ingot prepare": "prepare: renders the template, encodes",
    "ingot text": "text: turns tokens into text",
    "ingot engine": "engine: runs the steps",
    "": "loop: reads and answers HTTP",
}
TOKENS = 8


def trace(engine: Path) -> dict[str, list[str]]:
    """The modules of one answer, by thread."""
    on = threading.Event()

    def thread(frame: FrameType, event: str) -> str | None:
        name = threading.current_thread().name
        return next(each for each in THREADS if name.startswith(each)) if on.is_set() else None

    with traced(thread) as found, serving_engine(engine) as served, served.http() as http:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": TOKENS}
        http.post("/v1/chat/completions", json=ask).raise_for_status()  # what is done once is done now
        eventually(served.is_between_steps)
        on.set()
        http.post("/v1/chat/completions", json=ask | {"stream": True}).raise_for_status()
        eventually(served.is_between_steps)
        on.clear()
    return found.modules


def main() -> None:
    """For the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine_dir", type=Path, required=True)
    modules = trace(parser.parse_args().engine_dir)
    for thread, names in modules.items():
        print(f"{THREADS[thread]} ({len(names)}):\n    {', '.join(names)}")
    everything = {name for names in modules.values() for name in names}
    print(f"{len(everything)} modules of ingot, {len(modules)} threads")


if __name__ == "__main__":
    main()
