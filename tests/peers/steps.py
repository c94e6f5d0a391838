"""What must be there before anything is measured, as steps; each leaves a stamp and is not done again.

environment → packages → (engine) → checkpoint → the engine's own files
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.peers.adapters.protocol import Job
from tests.peers.peers import INGOT, PEERS, Peer, Variant
from tests.peers.regimes import parse_regimes

PACKAGES = Path(__file__).resolve().parents[2]  # the folder of the package tests
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command that is done once. what: words for the reader, and the name of its log."""

    what: str
    command: Sequence[str]
    environment: Mapping[str, str]

    @property
    def slug(self) -> str:
        """Name of its files."""
        return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.what)


def interpreter(peer: Peer, work: Path) -> str:
    """The Python that runs a peer's adapter."""
    return sys.executable if peer.environment is None else str(work / peer.environment / "bin/python")


def adapter_command(peer: Peer, action: str, job: Job) -> list[str]:
    """Runs the adapter."""
    return [interpreter(peer, job.work), "-m", f"tests.peers.adapters.{peer.adapter}", action, job.as_json()]


def adapter_environment(peer: Peer, threads: int, caps: Mapping[str, str]) -> dict[str, str]:
    """A peer sees nothing of this interpreter's packages; everyone uses as many threads."""
    found = {**os.environ, **caps, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep) if peer.environment is None else []
    found["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *(str(Path(path).resolve()) for path in inherited if path)])
    return found


def steps_of(variant: Variant, job: Job, caps: Mapping[str, str], *, mixed: bool = False) -> list[Step]:
    """All steps of a variant in order; variants share those that are equal. mixed: its server is wanted too."""
    peer, work, threads = variant.peer, job.work, job.threads
    made = _file_steps(variant, job, caps)
    long = any(regime.long for regime in parse_regimes(job.regimes))
    job = dataclasses.replace(job, regimes="", threads=0)  # nothing that is kept depends on them
    environment = adapter_environment(peer, threads, caps)
    steps = list(made)
    if peer.environment is not None:
        python = interpreter(peer, work)
        make = [sys.executable, "-m", "venv", str(work / peer.environment)]
        steps.append(Step(what=f"environment {peer.environment}", command=make, environment=environment))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements]
        steps.append(Step(what=f"packages of {peer.name}", command=pip, environment=environment))
    plain = dataclasses.replace(job, model="", weights="")
    if peer.installs:
        command = adapter_command(peer, "install", plain)
        steps.append(Step(what=f"build of {peer.name} for {job.isa}", command=command, environment=environment))
    if peer.builds_server and mixed:
        command = adapter_command(peer, "install_server", plain)
        steps.append(Step(what=f"server of {peer.name} for {job.isa}", command=command, environment=environment))
    checkpoint = [sys.executable, "-m", "tests.peers.models", job.model, str(job.checkpoint)]
    ours = adapter_environment(INGOT, threads, {})
    steps.append(Step(what=f"checkpoint {job.model}", command=checkpoint, environment=ours))
    what = f"{job.model} for {variant.name} on {job.isa}"
    steps.append(Step(what=what, command=adapter_command(peer, "prepare", job), environment=environment))
    if peer.lengthens and long:
        command = adapter_command(peer, "lengthen", job)
        steps.append(Step(what=f"{what}, long prompts", command=command, environment=environment))
    return steps


def _file_steps(variant: Variant, job: Job, caps: Mapping[str, str]) -> list[Step]:
    """How llama.cpp makes the GGUF file that a variant reads; nothing where it reads none, or makes it itself."""
    maker = next(peer for peer in PEERS if peer.adapter == "llama_cpp")
    if not job.of_file or variant.peer is maker:
        return []
    return steps_of(dataclasses.replace(variant, peer=maker), dataclasses.replace(job, peer=maker.name), caps)


class Workshop:
    """Does steps below one folder."""

    def __init__(self, work: Path, say: Say) -> None:
        self._work, self._say = work, say
        self._failed: dict[str, str] = {}

    def done(self, step: Step) -> bool:
        """Whether this very command was done before."""
        stamp = self._stamp(step)
        return stamp.exists() and stamp.read_text() == _signature(step)

    def do(self, steps: Sequence[Step]) -> str | None:
        """All that are not done yet; words if one of them fails."""
        for step in steps:
            if step.what not in self._failed and not self.done(step):
                self._do(step)
            if step.what in self._failed:
                return self._failed[step.what]
        return None

    def _do(self, step: Step) -> None:
        self._say(step.what)
        log = self._work / "logs" / f"{step.slug}.log"
        for path in (log, self._stamp(step)):
            path.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            try:
                status = subprocess.run(
                    step.command, env=step.environment, cwd=self._work, stdout=file, stderr=subprocess.STDOUT
                ).returncode
            except OSError as error:
                file.write(f"{error}\n")
                status = -1
        if status == 0:
            self._stamp(step).write_text(_signature(step))
        else:
            self._failed[step.what] = f"{step.what} failed: {last_words(log.read_text(errors='replace'))}"
            self._say(f"{self._failed[step.what]} (all of it: {log})")

    def _stamp(self, step: Step) -> Path:
        return self._work / "done" / step.slug


def last_words(text: str) -> str:
    """The last line that says something, cut to fit into a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it said nothing"


def _signature(step: Step) -> str:
    return "\n".join(step.command)
