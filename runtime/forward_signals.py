"""Stands between `ingot serve` and mpirun, as a program of its own: `python -I forward_signals.py mpirun ...`.

    SIGTERM, SIGINT, SIGHUP ──▶ this process ──SIGUSR1──▶ mpirun ──▶ every rank: the first one drains, the others go on

mpirun would kill its ranks at once for the signals on the left, but hands SIGUSR1 on. If this process is killed, the
system sends mpirun SIGTERM, which ends the ranks. A server that ends without a signal has failed.
"""

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def run(command: Sequence[str]) -> int:
    """Run mpirun to its end; its exit code."""
    parent_ends = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        parent_ends(_PR_SET_PDEATHSIG, signal.SIGTERM)

    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def drain(number: int, frame: object) -> None:
        asked.append(number)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, drain)
    # a session of its own: the terminal's Ctrl-C must not reach mpirun itself
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    if asked:
        process.send_signal(signal.SIGUSR1)
    code = process.wait()
    if code == 0 and not asked:  # so ends Open MPI's where it has lost another machine
        return 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
