"""Engines that several end-to-end tests share: built once per session, by the commands themselves."""

import json
from pathlib import Path

import pytest

from ingot.quickstart import SHIPPED
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model

LARGE = {**TINY_LLAMA, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 3000}


@pytest.fixture(scope="session")
def shipped_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, converted."""
    folder = tmp_path_factory.mktemp("shipped") / "checkpoint"
    ingot("convert", "--model_dir", SHIPPED, "--output_dir", folder).succeeds()
    return folder


@pytest.fixture(scope="session")
def shipped_engine(shipped_checkpoint: Path) -> Path:
    """The shipped model for the best ISA of this machine."""
    folder = shipped_checkpoint.with_name("engine")
    ingot("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", folder).succeeds()
    return folder


@pytest.fixture(scope="session")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 110 MB in bf16: it takes a moment to build, and its memory is seen."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    random = ("--config", folder / "config.json", "--random_weights", 1)
    ingot("convert", *random, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of a few thousand weights, converted; it has no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    model = write_model(folder / "model", TINY_LLAMA)
    ingot("convert", "--model_dir", model, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path) -> Path:
    """The random llama for the best ISA of this machine."""
    folder = tiny_checkpoint.with_name("engine")
    ingot("build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", folder).succeeds()
    return folder
