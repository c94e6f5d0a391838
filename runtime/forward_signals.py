"""Stands between `ingot serve` and mpirun, as a program of its own: `python -I forward_signals.py mpirun ...`.

    SIGTERM, SIGINT, SIGHUP ──▶ this process ──SIGUSR1──▶ mpirun ──▶ every rank: the first one drains, the others go on

mpirun would kill its ranks at once for the signals on the left, but hands SIGUSR1 on. If this process is killed, the
system sends mpirun SIGTERM, which ends the ranks. A server that ends without a signal has failed.

A guard, which is a process of its own, kills an mpirun that stands still: while Open MPI 5 ends, two of its threads may
wait for each other for ever (PMIx_server_finalize). Its ranks have ended then, and it does not ask for their end. The
guard outlives this process. With `--end` in front of mpirun, which commands have that drain nothing, SIGTERM goes on
in the place of SIGUSR1, and the exit code says which signal it was.

Who starts this program blocks the signals before, so that none is lost while Python starts.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

END = "--end"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAID = {signal.SIGTERM: ("terminated", 143), signal.SIGINT: ("interrupted", 130), signal.SIGHUP: ("hung up", 129)}
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 5.0  # between two looks of the guard; it kills at the second one that finds only ended ranks


def run(command: Sequence[str], *, drains: bool = True) -> int:
    """Run mpirun to its end; its exit code, or where nothing drains that of a signal."""
    forwarded = signal.SIGUSR1 if drains else signal.SIGTERM
    parent_ends = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        parent_ends(_PR_SET_PDEATHSIG, signal.SIGTERM)

    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def drain(number: int, frame: object) -> None:
        asked.append(number)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(forwarded)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, drain)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # a session of its own where ranks drain: the terminal's Ctrl-C must not reach mpirun itself
    process = subprocess.Popen(command, start_new_session=drains, preexec_fn=end_with_parent)
    start_guard(process.pid)
    if asked:
        process.send_signal(forwarded)
    code = process.wait()
    if asked and not drains:
        said, code = _SAID[signal.Signals(asked[0])]
        print(said, file=sys.stderr, flush=True)
        return code
    if drains and code == 0 and not asked:  # so ends Open MPI's where it has lost another machine
        return 1
    return code if code >= 0 else 128 - code


def start_guard(launcher: int) -> None:
    """Leave a process behind that ends with the launcher, or kills it. None where the system lacks what it needs."""
    try:
        handle = os.pidfd_open(launcher)  # readable once the launcher has ended; its number may be another's then
    except (AttributeError, OSError):  # before Linux 5.3
        return
    if not Path(f"/proc/{launcher}/task/{launcher}/children").is_file() or os.fork():
        os.close(handle)
        return
    os.setsid()
    for number in SIGNALS:  # whole groups of processes get them
        signal.signal(number, signal.SIG_IGN)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    looks = 0
    while looks < 2:
        if ended.poll(_LOOK_SECONDS * 1000):
            os._exit(0)
        looks = looks + 1 if states_of_children(launcher) == {"Z"} else 0  # Z: ended, and nobody has asked for its end
    print("mpirun did not end after its ranks; it has been killed", file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os._exit(0)


def states_of_children(process: int) -> set[str]:
    """As the system names them, each once. This process does not count, which may be a child itself."""
    states: set[str] = set()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in {*task.read_text().split()} - {str(os.getpid())}:
                with contextlib.suppress(OSError):
                    states.add(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
    return states


if __name__ == "__main__":
    ends = sys.argv[1] == END
    sys.exit(run(sys.argv[2:] if ends else sys.argv[1:], drains=not ends))
