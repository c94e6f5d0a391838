"""llama.cpp, built here from the sources inside the package llama-cpp-python, timed by its own benchmarks.

The output product and the embeddings of Q4_0 are stored as Q8_0: as many bytes as in ingot's 4-bit engines.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.peers.adapters.protocol import WARM_UP, Job, become, regimes_of, serve
from tests.peers.load import MAX_INPUT, MAX_OUTPUT, RUNNING
from tests.peers.regimes import Regime

PACKAGE = "llama-cpp-python==0.3.36"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")
SERVER = "llama-server"
_AVX2 = ("AVX2", "FMA", "F16C", "BMI2")
_AVX512 = (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
_BF16 = (*_AVX512, "AVX512_BF16")
_SWITCHES = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "AVX_VNNI"),
    "avx512": _AVX512,
    "avx512bf16": _BF16,
    "amx": (*_BF16, "AMX_TILE", "AMX_INT8", "AMX_BF16"),
}
_PLAIN = (
    "BUILD_SHARED_LIBS",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_SERVER",
    "LLAMA_BUILD_APP",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "GGML_NATIVE",
)
_CONVERT = """
import sys
sys.path[:0] = [".", "gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"  # a made-up one is not in its list
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def cmake_switches(isa: str) -> list[str]:
    """What an ISA means to llama.cpp's build."""
    return [f"-D{name}=OFF" for name in _PLAIN] + [f"-DGGML_{name}=ON" for name in _SWITCHES[isa]]


def install(job: Job) -> None:
    """Download, unpack, configure, compile."""
    root = job.work / "llama.cpp"
    source, binaries = root / "src", root / f"build-{job.isa}"
    if not (source / "CMakeLists.txt").exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE.split("==")[0]]
        run(*pip, PACKAGE, "-d", root)
        unpack(next(root.glob("llama_cpp_python-*.tar.gz")), source)
    build_tools(source, binaries, [*compilers(job.isa), *cmake_switches(job.isa)], TOOLS)


def build_tools(source: Path, binaries: Path, switches: Sequence[str], tools: Sequence[str]) -> None:
    """Configure and compile with this environment's cmake and ninja."""
    programs = Path(sys.executable).parent
    configure = [programs / "cmake", "-S", source, "-B", binaries, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    run(*configure, f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", *switches)
    _compile(binaries, *tools)


def install_server(job: Job) -> None:
    """In the same folder: what its server has beyond the tools."""
    binaries = job.work / "llama.cpp" / f"build-{job.isa}"
    run(Path(sys.executable).parent / "cmake", "-DLLAMA_BUILD_SERVER=ON", binaries)
    _compile(binaries, SERVER)


def _compile(binaries: Path, *targets: str) -> None:
    parallel = ["--parallel", str(len(os.sched_getaffinity(0)))]
    run(Path(sys.executable).parent / "cmake", "--build", binaries, *parallel, "--target", *targets)


def compilers(isa: str) -> list[str]:
    """clang for amx, where there is one, since what GCC 12 makes of it crashes; else what CMake finds."""
    found = [path for path in map(shutil.which, ("clang-16", "clang")) if path] if isa == "amx" else []
    if not found:
        return []
    return [f"-DCMAKE_C_COMPILER={found[0]}", f"-DCMAKE_CXX_COMPILER={found[0].replace('clang', 'clang++')}"]


def unpack(archive: Path, target: Path) -> None:
    """The folder vendor/llama.cpp of a source distribution."""
    partly = target.with_name(target.name + ".partly")
    shutil.rmtree(partly, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            inside = re.match(r"[^/]+/vendor/llama\.cpp/(.+)", member.name)
            if inside and (member.isfile() or member.isdir()):
                member.name = inside[1]
                tar.extract(member, partly, filter="data")
    partly.rename(target)


def prepare(job: Job) -> None:
    """Checkpoint → GGUF in bf16 → quantised; files that others read too are mixtures as llama-quantize makes them."""
    plain = job.folder / "bf16.gguf"
    if not plain.exists():
        job.folder.mkdir(parents=True, exist_ok=True)
        partly = plain.with_name("bf16.partly")
        arguments = [job.checkpoint, "--outfile", partly, "--outtype", "bf16"]
        run(sys.executable, "-c", _CONVERT, *arguments, cwd=job.work / "llama.cpp/src")
        partly.rename(plain)
    if job.of_file:
        job.file.parent.mkdir(parents=True, exist_ok=True)
        run(_tool(job, "llama-quantize"), plain, job.file, job.of_file)
    elif job.weights != "BF16":
        heads = ["--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0"]
        run(_tool(job, "llama-quantize"), *heads, plain, _gguf(job), job.weights)


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Decode by llama-batched-bench, prefill by llama-bench; the faster of flash attention on and off if it matters."""
    speeds: dict[str, float] = {}
    decodes = [regime for regime in regimes_of(job) if regime.kind == "decode"]
    for lengths in dict.fromkeys(map(_lengths, decodes)):
        speeds |= _decode(job, [regime for regime in decodes if _lengths(regime) == lengths])
    speeds |= {regime.name: _prefill(job, regime) for regime in regimes_of(job) if regime.kind == "prefill"}
    return PACKAGE.replace("==", " "), speeds


def _lengths(regime: Regime) -> tuple[int, int]:
    """Tokens of a prompt, and decoded after it."""
    return regime.prompt, regime.generated - 1


def _decode(job: Job, regimes: list[Regime]) -> dict[str, float]:
    """All of the same lengths, in one process for each kind of attention; after a short prompt in one of its choice."""
    sizes = [regime.sequences for regime in regimes]
    prompt, tokens = _lengths(regimes[0])
    speeds: dict[str, float] = {}
    for attention in ("auto",) if regimes[0].context is None else ("on", "off"):
        text = output(
            _tool(job, "llama-batched-bench"),
            "-m",
            _gguf(job),
            "-t",
            job.threads,
            "-tb",
            job.threads,
            "-c",
            max(sizes) * (prompt + tokens),
            "-npp",
            prompt,
            "-ntg",
            tokens,
            "-npl",
            ",".join(map(str, sizes)),
            "-fa",
            attention,
            "--output-format",
            "jsonl",
        )
        by_size = {row["pl"]: row["speed_tg"] for row in map(json.loads, _json_lines(text))}
        for regime in regimes:
            speeds[regime.name] = max(speeds.get(regime.name, 0.0), by_size[regime.sequences])
    return speeds


def _json_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("{")]


def _prefill(job: Job, regime: Regime) -> float:
    """It would warm up with a prompt of the same length: beyond a length that only costs minutes."""
    warm_up = ["--no-warmup"] if regime.prompt > WARM_UP else []
    text = output(
        _tool(job, "llama-bench"),
        "-m",
        _gguf(job),
        "-t",
        job.threads,
        "-p",
        regime.prompt,
        "-n",
        0,
        "-r",
        1,
        "-fa",
        "0,1",
        "-o",
        "json",
        *warm_up,
    )
    return max(float(row["avg_ts"]) for row in json.loads(text))


def start_server(job: Job) -> None:
    """Its defaults, but for slots that hold the longest request each, and no cache of prompts."""
    slot = MAX_INPUT + MAX_OUTPUT + 256
    become(
        _tool(job, SERVER),
        "-m",
        _gguf(job),
        "--alias",
        "model",
        "-t",
        job.threads,
        "-tb",
        job.threads,
        "--parallel",
        RUNNING,
        "-c",
        RUNNING * slot,
        "--no-cache-prompt",
        "--cache-ram",
        0,
        "--host",
        "127.0.0.1",
        "--port",
        sys.argv[3],
    )


def run(*command: object, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def output(*command: object, both: bool = False) -> str:
    """What a program prints. both: as errors, too."""
    errors = subprocess.STDOUT if both else None
    words = [str(part) for part in command]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, text=True, check=True).stdout


def _tool(job: Job, name: str) -> Path:
    return job.work / f"llama.cpp/build-{job.isa}/bin" / name


def _gguf(job: Job) -> Path:
    return job.file if job.of_file else job.folder / f"{job.weights.lower()}.gguf"


if __name__ == "__main__":
    serve(prepare, measure, {"install": install, "install_server": install_server, "serve": start_server})
