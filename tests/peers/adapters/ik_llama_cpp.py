"""ik_llama.cpp, a fork of llama.cpp with its own CPU kernels, built here from its sources; it reads llama.cpp's files.

It has no packages: `install` clones the commit below, unless the folder src is there already.
"""

import json
import re
from pathlib import Path

from tests.peers.adapters.llama_cpp import build_tools, output, run
from tests.peers.adapters.protocol import WARM_UP, Job, regimes_of, serve
from tests.peers.regimes import Regime

REPOSITORY = "https://github.com/ikawrakow/ik_llama.cpp"
COMMIT = "8337e4cd3861406fc04e0854b1409cd1b027fbc9"
TOOLS = ("llama-bench", "llama-batched-bench")
_AVX2 = ("AVX2", "FMA", "F16C")
_AVX512 = (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
_SWITCHES = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "AVXVNNI"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "AVX512_BF16"),
    "amx": (*_AVX512, "AVX512_BF16"),  # it has no kernels for tiles
}
_PLAIN = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "GGML_NATIVE")
_REPACKING = (("0", ()), ("1", ("-rtr",)))  # tensors as they lie in the file, or in its own order of rows
_ROW = re.compile(r"\|" + r"\s*([\d.]+)\s*\|" * 10)  # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S


def cmake_switches(isa: str) -> list[str]:
    """What an ISA means to its build. Its switch AVX512 leaves out VL and DQ, without which it takes none of its fast
    kernels, and does not compile."""
    flags = "-mavx512vl -mavx512dq" if "AVX512" in _SWITCHES[isa] else ""
    return [
        *(f"-D{name}=OFF" for name in _PLAIN),
        *(f"-DGGML_{name}=ON" for name in _SWITCHES[isa]),
        *(f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX")),
    ]


def install(job: Job) -> None:
    """Clone, configure, compile."""
    root = job.work / "ik_llama.cpp"
    source = root / "src"
    if not (source / "CMakeLists.txt").exists():
        run("git", "clone", "--filter=blob:none", "--no-checkout", REPOSITORY, source)
        run("git", "-C", source, "checkout", COMMIT)
    build_tools(source, root / f"build-{job.isa}", cmake_switches(job.isa), TOOLS)


def prepare(job: Job) -> None:
    """llama.cpp's adapter has made the file."""
    if not job.file.exists():
        raise FileNotFoundError(f"{job.file}, which the adapter of llama.cpp makes")


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """As of llama.cpp: the fastest of both kinds of attention, and of tensors repacked or not."""
    speeds = {
        regime.name: _prefill(job, regime) if regime.kind == "prefill" else _decode(job, regime)
        for regime in regimes_of(job)
    }
    return f"ik_llama.cpp {COMMIT[:9]}", speeds


def _decode(job: Job, regime: Regime) -> float:
    found, tokens = 0.0, regime.generated - 1
    for attention in ("auto",) if regime.context is None else ("on", "off"):
        for _, repacking in _REPACKING:
            words = ["-m", job.file, "-t", job.threads, "-tb", job.threads, "-npp", regime.prompt, "-ntg", tokens]
            words += ["-npl", regime.sequences, "-c", regime.sequences * (regime.prompt + tokens), "-fa", attention]
            text = output(_tool(job, "llama-batched-bench"), *words, *repacking, both=True)  # its table is on stderr
            found = max(found, decode_speed(text))
    return found


def decode_speed(text: str) -> float:
    """Tokens per second, from the only row of its table. Raises ValueError."""
    rows = [match for match in map(_ROW.match, text.splitlines()) if match]
    if len(rows) != 1:
        raise ValueError(f"llama-batched-bench printed {len(rows)} rows: {text[-200:]}")
    return float(rows[0][8])


def _prefill(job: Job, regime: Regime) -> float:
    found = []
    for repacked, _ in _REPACKING:
        words = ["-m", job.file, "-t", job.threads, "-p", regime.prompt, "-n", 0, "-r", 1, "-fa", "0,1", "-o", "json"]
        words += ["-rtr", repacked, "-w", int(regime.prompt <= WARM_UP)]
        found += [float(row["avg_ts"]) for row in json.loads(output(_tool(job, "llama-bench"), *words))]
    return max(found)


def _tool(job: Job, name: str) -> Path:
    return job.work / f"ik_llama.cpp/build-{job.isa}/bin" / name


if __name__ == "__main__":
    serve(prepare, measure, {"install": install})
