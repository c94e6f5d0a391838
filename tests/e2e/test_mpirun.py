"""Commands on an engine of two ranks, as MPI starts them; skipped where mpi4py or mpirun is missing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from ingot.runtime.distributed import find_mpirun
from tests.runtime.mpich import is_mpich

MPIRUN = find_mpirun()
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIRUN is None, reason="needs mpi4py and mpirun"
)
# For an mpirun of Open MPI that the test starts by itself: what users are told to set. MPICH needs nothing.
OWN_LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "self,tcp",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
PROMPT = ("--prompt", "The prince", "--max_output_len", "12", "--temperature", "0.8", "--seed", "3")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("mpirun")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    for name, ranks, stages in (("whole", 1, 1), ("e", 2, 1), ("stages", 1, 2)):
        config = BuildConfig(target="cpu", tp_size=ranks, pp_size=stages, sum_parts=2, autotune=False)
        build(config, work / "c", work / name)
    return work / "e"


def ingot(*args: object, launcher: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    command = [*launcher, sys.executable, "-m", "ingot", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


WAYS = [
    ("e", "shm"),
    ("stages", "mpi"),
    pytest.param("e", "mpi", marks=pytest.mark.slow),
    pytest.param("stages", "shm", marks=pytest.mark.slow),
]
OPS = [("e", {"all_reduce", "all_gather"}), pytest.param("stages", {"recv"}, marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "collectives"), WAYS)
def test_the_text_of_one_rank(name: str, collectives: str, engine: Path) -> None:
    expected = ingot("run", "--engine_dir", engine.with_name("whole"), *PROMPT)
    found = ingot("run", "--engine_dir", engine.with_name(name), *PROMPT, "--collectives", collectives)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout
    assert "starting 2 ranks: " in found.stderr


@pytest.mark.slow
def test_drafts_leave_the_text_as_it_is(engine: Path) -> None:
    """With ranks that share each layer; pipeline stages compute none."""
    drafts = ("--speculative_config", json.dumps({"method": "ngram", "prompt_lookup_min": 1}))
    greedy = ("--prompt", "The prince and the king", "--max_output_len", "200", "--temperature", "0")
    expected = ingot("run", "--engine_dir", engine.with_name("whole"), *greedy)
    found = ingot("run", "--engine_dir", engine, *greedy, *drafts)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout
    refused = ingot("run", "--engine_dir", engine.with_name("stages"), *greedy, *drafts)
    assert refused.returncode == 2
    assert "--pp_size computes no drafts" in refused.stderr


@pytest.mark.slow
def test_refusals(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ingot("run", "--engine_dir", engine, *PROMPT, "--kv_cache_memory", "1KiB")
    assert found.returncode == 1
    assert "error: " in found.stderr
    for name, value in OWN_LAUNCHER.items():
        monkeypatch.setenv(name, value)
    many = (str(MPIRUN), "-n", "2")
    found = ingot("run", "--engine_dir", engine.with_name("whole"), *PROMPT, launcher=many)
    assert found.returncode == 2
    assert "2 processes are started for an engine of one rank" in found.stderr


@pytest.mark.slow
def test_a_library_of_mpi_that_does_not_load(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libmpi.so").write_bytes(b"no library")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    found = ingot("run", "--engine_dir", engine, *PROMPT)
    assert found.returncode == 2
    assert found.stderr.startswith("error: mpi4py cannot be used")
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ops"), OPS)
def test_benchmarks(name: str, ops: set[str], engine: Path, tmp_path: Path) -> None:
    args = ("--engine_dir", engine.with_name(name), "--json")
    short = ("--input_len", 20, "--batch_size", 2, "--repetitions", 1)
    found = ingot("bench", "kernels", *args, *short)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["ranks"] == 2
    assert ops <= {op["name"] for op in report["phases"][1]["ops"]}
    rows = [{"arrival": n / 100, "input_len": 40 + n, "output_len": 8} for n in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = ("--trace", tmp_path / "t.jsonl", "--num_requests", 4, "--ttft_ms", 1e-3)
    found = ingot("bench", "serve", "--offline", *args, *trace)
    assert found.returncode == 0, found.stderr
    assert all(run["good_share"] == 0 for mode in json.loads(found.stdout)["modes"] for run in mode["rates"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e", "stages"])
def test_a_full_dev_shm_does_no_harm(name: str, engine: Path) -> None:
    """As in a container whose /dev/shm has 64 KiB left, or none."""
    full = "mount -t tmpfs -o size=64k none /dev/shm && ! head -c 100000 /dev/zero 2>&- > /dev/shm/full"
    launcher = ("unshare", "--mount", "sh", "-c", f'{full} && exec "$@"', "sh")
    tried = subprocess.run([*launcher, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"mounts are not permitted here: {tried.stderr}")
    expected = ingot("run", "--engine_dir", engine.with_name("whole"), *PROMPT)
    found = ingot("run", "--engine_dir", engine.with_name(name), *PROMPT, launcher=launcher)
    if is_mpich():  # whose ranks meet in files there
        assert found.returncode == 1
        assert "expected: 8 MiB for 2 ranks\n  got: 0.0 MiB\n  next: make it larger" in found.stderr
        return
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout


@pytest.mark.slow
@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_without_memory_ends_all(poor: int, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, and within seconds; the other one waits for it at that time."""
    for name, value in OWN_LAUNCHER.items():
        monkeypatch.setenv(name, value)
    before = set(os.listdir("/dev/shm"))
    run = [sys.executable, "-m", "ingot", "run", "--engine_dir", str(engine), *PROMPT, "--kv_cache_memory", "2GiB"]
    ranks = [run, run]
    ranks[poor] = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh", *run]
    command = [str(MPIRUN), "-n", "1", *ranks[0], ":", "-n", "1", *ranks[1]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 1
    assert f"error: there is not enough memory for the engine\n  where: rank {poor}\n" in found.stderr
    assert found.stdout == ""
    assert set(os.listdir("/dev/shm")) <= before
