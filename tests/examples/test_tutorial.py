"""docs/tutorial.md does what it says: its commands run one after the other, and the server answers as printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ingot
from tests.house.documents import blocks, shell_lines
from tests.house.project import ROOT

# The ingot that is tested, also from another directory.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(ingot.__file__).parents[1])}
PAGE = (ROOT / "docs/tutorial.md").read_text()
LINES = list(shell_lines(PAGE))
SERVE = next(line for line in LINES if line.startswith("ingot serve"))
COMMANDS = [line for line in LINES if line.startswith("ingot ") and line != SERVE]
REQUESTS = [line for line in LINES if line.startswith("curl ") and "127.0.0.1:8000" in line]
ANSWERS = [json.loads(block) for block in blocks(PAGE, "json")]


def run(line: str, work: Path) -> "subprocess.CompletedProcess[str]":
    """A command of the page."""
    command = [sys.executable, "-m", *shlex.split(line)]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands have run."""
    work = tmp_path_factory.mktemp("tutorial")
    assert "cp -r src/ingot/shipped model" in LINES
    shutil.copytree(ROOT / "src/ingot/shipped", work / "model")
    written = [line for line in LINES if line.startswith("echo ")]
    for line in written:
        subprocess.run(["sh", "-c", line], cwd=work, check=True)
    assert [line.split(" > ")[1] for line in written] == ["schema.json", "keys"]
    for line in COMMANDS:
        done = run(line, work)
        assert done.returncode == 0, done.stderr
    return work


@pytest.fixture(scope="module")
def url(work: Path) -> Iterator[str]:
    """The server of the page, on a port that is free."""
    command = [sys.executable, "-m", *shlex.split(SERVE.replace("8000", "0"))]
    with subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        try:
            yield next(found[0] for line in process.stderr if (found := re.findall(r"http://\S+:[0-9]+", line)))
        finally:
            process.terminate()
            assert process.wait(60) == 0, "SIGTERM drains, exit code 0"


def ask(words: Sequence[str]) -> tuple[int, Any]:
    """What curl would do: status and answer."""
    url = next(word for word in words if word.startswith("http"))
    headers = dict(words[index + 1].split(": ", 1) for index, word in enumerate(words) if word == "-H")
    data = words[words.index("-d") + 1].encode() if "-d" in words else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def shape(value: Any) -> Any:
    """Keys of an answer, without what they hold."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else None


def test_the_page_has_every_step() -> None:
    assert [line.split()[1] for line in [*COMMANDS, SERVE]] == ["convert", "build", "run", "run", "verify", "serve"]
    assert len(REQUESTS) == len(ANSWERS) == 3


@pytest.mark.slow
def test_the_engine_is_there(work: Path) -> None:
    assert (work / "engine/config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=["ready", "completion", "no key"])
def test_the_server_answers_as_printed(number: int, url: str) -> None:
    status, answer = ask(shlex.split(REQUESTS[number].replace("http://127.0.0.1:8000", url)))
    assert status == (401 if "error" in ANSWERS[number] else 200)
    assert shape(answer) == shape(ANSWERS[number])
    if "choices" not in answer:
        assert answer == ANSWERS[number]
