"""One engine of the shipped model for all tests of the server, and one server that most of them share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.runtime.server.served import Served, serving_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model for the best ISA of this machine, and a chat template beside it."""
    folder = tmp_path_factory.mktemp("served")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=folder / "checkpoint"))
    build(BuildConfig(), folder / "checkpoint", folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    """A server; every test must leave it empty."""
    with serving_engine(engine) as served:
        yield served


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        found: Served = request.getfixturevalue("served")
        assert found.is_empty(), "blocks are held though nobody asks for anything"
