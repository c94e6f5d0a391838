"""Every example is short, and runs on the shipped model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.engine import read_plan
from ingot.quickstart import SHIPPED
from tests.house.project import ROOT
from tests.runtime.server.served import serving_engine

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "build.py": "kernel calls, ",
    "chat.py": "prompt tokens found in the cache: ",
    "generate.py": "blocks in use afterwards: 0",
    "logits_processor.py": "'A man' → '",
    "openai_client.py": " tokens in, 24 out",
    "stream.py": "prefill tokens and decode rows of each step: [[",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that examples/build.py fills."""
    work = tmp_path_factory.mktemp("examples")
    assert SAYS["build.py"] in run("build.py", SHIPPED, work)
    return work


@pytest.fixture
def url(work: Path) -> Iterator[str]:
    """Of a server."""
    with serving_engine(work / "engine") as served:
        yield f"{served.url}/v1"


def run(name: str, *arguments: object) -> str:
    """What an example prints; a warning ends it."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_six_short_scripts_and_a_check_for_each() -> None:
    assert len(EXAMPLES) == 6
    assert {path.name for path in EXAMPLES} == set(SAYS)
    assert [path.name for path in EXAMPLES if len(path.read_text().splitlines()) > 60] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SAYS) - {"build.py", "openai_client.py"}))
def test_an_engine_is_all_that_an_example_needs(name: str, work: Path) -> None:
    assert SAYS[name] in run(name, work / "engine")


@pytest.mark.slow
def test_the_recipe_of_the_build_is_applied(work: Path) -> None:
    kernels = {step.name: step.kernel for step in read_plan(work / "engine").steps}
    assert kernels["layers.0/gate_up"].startswith("matmul.w4")
    assert kernels["layers.0/down"].startswith("matmul.w8")


@pytest.mark.slow
def test_a_conversation_finds_its_beginning_in_the_cache(work: Path) -> None:
    *_, found = run("chat.py", work / "engine", "Who is the prince?", "Where does he live?").split()
    assert int(found) > 0


@pytest.mark.slow
def test_no_letter_that_the_processor_forbids(work: Path) -> None:
    text = run("logits_processor.py", work / "engine", "A man").partition(" → ")[2]
    assert len(text) > 20
    assert "e" not in text.lower()


@pytest.mark.slow
def test_the_client_of_openai(url: str) -> None:
    assert SAYS["openai_client.py"] in run("openai_client.py", url)
