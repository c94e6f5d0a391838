"""Official clients that are installed here, each in a process of its own; `programs.clients` installs them all."""

import dataclasses
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import client_checks
from tests.runtime.server.served import CONFIG, Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    with serving_engine(engine, dataclasses.replace(CONFIG, chat_template="chatml")) as served:
        yield served


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", client_checks.CHECKS)
def test_a_client_gets_what_its_users_ask_for(served: Served, name: str) -> None:
    package, _ = client_checks.CHECKS[name]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    command = [sys.executable, client_checks.__file__, served.url, "tiny", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" | passes |\n")


def test_what_a_schema_forbids_fails() -> None:
    client_checks.fits({"sky": "grey", "deg": -40})
    refused: tuple[object, ...] = ({"sky": "grey"}, {"sky": "blue", "deg": 0}, {"sky": "grey", "deg": 41}, [])
    for wrong in refused:
        with pytest.raises(AssertionError):
            client_checks.fits(wrong)
