"""examples/deploy: what its files name is there. No engine of containers is needed to see that."""

import json
import re
from typing import Any

import click
import pytest

from ingot.cli.serve import command
from tests.house.project import ROOT, pyproject

DEPLOY = ROOT / "examples/deploy"
DOCKERFILE, COMPOSE = (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "compose.yaml").read_text()


def json_line(text: str, key: str) -> list[str]:
    """The list behind a key or an instruction."""
    found: list[str] = json.loads(re.findall(rf"^\s*{key}:? (\[.*\])", text, flags=re.MULTILINE)[-1])
    return found


@pytest.mark.parametrize("arguments", [json_line(DOCKERFILE, "CMD"), json_line(COMPOSE, "command")])
def test_the_server_takes_these_options(arguments: list[str]) -> None:
    program, subcommand, *given = json_line(DOCKERFILE, "ENTRYPOINT")
    assert (program, subcommand) == ("ingot", "serve")
    context: click.Context = command.make_context("serve", [*given, *arguments])
    params: dict[str, Any] = context.params
    assert (str(params["engine_dir"]), params["host"], params["port"]) == ("/engine", "0.0.0.0", 8000)


def test_files_and_places() -> None:
    for source in re.findall(r"- (\./\S+?):/", COMPOSE):
        assert (DEPLOY / source).is_file()
    assert re.findall(r"dockerfile: (\S+)", COMPOSE) == ["examples/deploy/Dockerfile"]
    assert (ROOT / "examples/deploy/Dockerfile.dockerignore").is_file(), "the name that docker looks for"
    keys = json_line(COMPOSE, "command")[json_line(COMPOSE, "command").index("--api_key_file") + 1]
    assert keys == "/run/secrets/" + json_line(COMPOSE.replace("[api_keys]", '["api_keys"]'), "secrets")[0]
    assert re.search(r"\$\{ENGINE_DIR:\?.*\}:/engine:ro", COMPOSE)
    dashboards = (DEPLOY / "dashboards.yml").read_text()
    assert re.findall(r"dashboard.json:(\S+)/ingot.json", COMPOSE)[0] in dashboards
    assert "ingot:8000" in (DEPLOY / "prometheus.yml").read_text()
    assert "http://prometheus:9090" in (DEPLOY / "grafana.yml").read_text()


def test_probes_ask_for_readiness_and_drains_have_time() -> None:
    for text in (DOCKERFILE, COMPOSE):
        assert "http://127.0.0.1:8000/health/ready" in text
    grace = int(re.findall(r"stop_grace_period: (\d+)s", COMPOSE)[0])
    drain = float(json_line(COMPOSE, "command")[-1])
    assert grace > drain + 5, "drain_timeout, last words and the last step"


def test_the_image_has_what_it_builds_and_runs_with() -> None:
    project: Any = pyproject()
    extras = re.findall(r"ingot-\*\.whl\)\[(\w+)\]", DOCKERFILE)
    assert extras == ["serve"]
    assert extras[0] in project["project"]["optional-dependencies"]
    assert "ingot" in project["project"]["scripts"]
