"""Official clients and frameworks of agents, in a venv of their own, against our server with the shipped model.

python -m tests.programs.clients [--venv build/clients]

Installs them where they are missing, which needs a package index. Prints a line for each: its version, and whether it
passes (`client_checks` says what is asked). Exit code 1: one failed.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.programs import client_checks
from tests.runtime.server.served import ServeProcess

MODEL = "tiny"
SERVED = ("--chat_template", "chatml", "--served_model_name", MODEL)


def prepare(place: Path) -> Path:
    """The interpreter of a venv that has the clients."""
    python = place / "bin/python"
    if not python.exists():
        venv.create(place, with_pip=True)
    packages = [package for package, _ in client_checks.CHECKS.values()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def check(python: Path, names: tuple[str, ...] = ()) -> int:
    """Its exit code."""
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        work = Path(folder)
        convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "checkpoint"))
        build(BuildConfig(), work / "checkpoint", work / "engine")
        with ServeProcess(work / "engine", SERVED) as server:
            print("| client | version | |\n|---|---|---|", flush=True)
            return subprocess.run([python, client_checks.__file__, server.url, MODEL, *names]).returncode


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path("build/clients"))
    return check(prepare(parser.parse_args().venv))


if __name__ == "__main__":
    sys.exit(main())
