"""vLLM on CPUs, its engine driven step by step within this process.

No tool of vLLM makes 4-bit weights, so `prepare` writes the checkpoint in the format of GPTQ, each weight rounded to
the nearest code: the speed does not depend on which codes they are. lm_head stays in bf16, as GPTQ leaves it.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes
from tests.peers.adapters.stepping import run_load
from tests.peers.load import RUNNING, Load

_GROUP, _MIDDLE = 128, 8  # columns of a scale; the code of the value 0
_KV_GIB = 2
_SEQUENCES = 64
VARIABLES = (
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"),
    *("VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT", "HF_HUB_OFFLINE"),
)
_IMAGES = ("torchvision", "torchaudio", "torchcodec")


def prepare(job: Job) -> None:
    """Nothing for bf16: vLLM reads the checkpoint as it is."""
    if job.weights != "bf16":
        shutil.rmtree(job.prepared, ignore_errors=True)
        job.prepared.mkdir(parents=True)
        _write_gptq(job.checkpoint, job.prepared)


def _write_gptq(source: Path, target: Path) -> None:
    import safetensors.torch
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int64)

    def packed(codes: Any, dim: int) -> Any:
        """Eight codes along a dimension in each int32, the first in its lowest bits."""
        parts = codes.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
        words = (parts << shifts).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()

    def quantised(weight: Any) -> dict[str, Any]:
        columns = weight.shape[1]
        groups = weight.float().unflatten(1, (-1, _GROUP))
        scales = (groups.abs().amax(-1, keepdim=True) / (_MIDDLE - 1)).clamp(min=1e-8)
        codes = ((groups / scales).round().clamp(-_MIDDLE, _MIDDLE - 1) + _MIDDLE).flatten(1).T
        scales = scales[..., 0].T.contiguous()
        return {
            "qweight": packed(codes, 0),
            "qzeros": packed(torch.full(scales.shape, _MIDDLE - 1), 1),
            "scales": scales.half(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
        }

    tensors: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            if name.endswith("_proj.weight"):
                parts = quantised(tensor)
                tensors |= {f"{name.removesuffix('weight')}{part}": values for part, values in parts.items()}
            else:
                tensors[name] = tensor
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*"):
        if file.suffix in (".json", ".model") and "safetensors" not in file.name and file.name != "config.json":
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": _GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    (target / "config.json").write_text(json.dumps(config))


def _variables(job: Job) -> tuple[str, ...]:
    """In the order of VARIABLES."""
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    return "0", str(_KV_GIB), ",".join(map(str, cores)), "1", str(job.folder / "cache"), "1"


class Engine:
    """Its engine, whose scheduler runs in this process."""

    def __init__(self, job: Job, running: int = _SEQUENCES) -> None:
        """running: how many requests at once."""
        values = _variables(job)
        os.environ |= dict(zip(VARIABLES, values, strict=True))
        import vllm  # reads the variables
        from vllm.v1.engine.llm_engine import LLMEngine

        self._vllm = vllm
        arguments = vllm.EngineArgs(
            model=str(job.checkpoint if job.weights == "bf16" else job.prepared),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=running,
            enable_prefix_caching=False,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.version = f"vllm {vllm.__version__}"
        self._numbers = 0
        self._came: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        """For `run_load`."""
        name = f"{number}-{self._numbers}"  # it takes no name twice
        self._numbers += 1
        params = self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        self._came[name], self._asked[name] = 0, number

    def step(self) -> dict[int, int]:
        """How many tokens each request has got by this step; for `run_load`."""
        if not self.engine.has_unfinished_requests():
            raise RuntimeError("requests ended before they had all their tokens")
        came: dict[int, int] = {}
        for output in self.engine.step():
            name, total = output.request_id, len(output.outputs[0].token_ids)
            came[self._asked[name]] = total - self._came[name]
            self._came[name] = total
        return came


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Step by step: the first tokens end when every request has one."""
    engine = Engine(job)

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        came = [0] * len(prompts)
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add(number, prompt, tokens)
        first = start
        while sum(came) < len(prompts) * tokens:
            waits = 0 in came
            for number, count in engine.step().items():
                came[number] += count
            if waits:
                first = time.perf_counter()
        return first - start, time.perf_counter() - first

    return engine.version, time_regimes(generate, regimes_of(job))


def load(job: Job) -> str:
    """No server is between."""
    return run_load(Engine(job, RUNNING), Load.from_json(sys.stdin.read())).as_json()


def install(job: Job) -> None:
    """Without the package for images: pip takes its CUDA build, which does not load beside torch for CPUs."""
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *_IMAGES], check=True)


def _preload() -> None:
    """Begin again with Intel's OpenMP loaded first, as vLLM's documentation asks for."""
    libraries = map(str, (Path(sys.prefix) / "lib").glob("libiomp5.so"))
    if "LD_PRELOAD" not in os.environ and (found := next(libraries, None)):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": found})


if __name__ == "__main__":
    if sys.argv[1] in ("measure", "load"):
        _preload()
    serve(prepare, measure, {"load": load, "install": install})
