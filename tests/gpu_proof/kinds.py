"""Part e: every kernel alone, of weight formats in the width of Llama 3.1 8B and of models with other kinds of layers.

Weights are random. An engine has few layers, in the full width: enough that no layer finds its weights in the caches.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from tests import quantised as write
from tests.convert.quantised.test_formats import AWQ, GPTQ, compressed, fp8
from tests.gpu_proof.result import Check, Result
from tests.gpu_proof.shapes import SHAPES
from tests.gpu_proof.times import decode_times, prefill_times
from tests.gpu_proof.work import Job
from tests.quantised_experts import Sizes, write_experts
from tests.real_models import REAL_MODELS

TOKENS = 4096  # of the vocabulary: the last matmul is timed in part d
BATCHES, CONTEXT, PROMPTS = (1, 64), 1024, (2048,)
AT_ONCE = 6  # engines that are made together
Make = Callable[[Path], ConvertOptions]
"""folder → how a model is converted, which it may have written there"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What is measured. options: of the build."""

    make: Make
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _wide(layers: int = 2) -> dict[str, object]:
    """Two layers: of the last one, a prompt computes one row alone."""
    return {**SHAPES["llama-3.1-8b"], "num_hidden_layers": layers, "vocab_size": TOKENS}


def _seeded(config: Mapping[str, object], folder: Path) -> ConvertOptions:
    """Random floats."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return ConvertOptions(config=path, random_weights=1, dtype=DType.BF16, output_dir=folder / "checkpoint")


def _of_model(name: str, layers: int) -> Make:
    return partial(_seeded, {**REAL_MODELS[name].cut(layers), "vocab_size": TOKENS})


def _quantised(settings: Mapping[str, object], packer: write.Packer) -> Make:
    """Random codes, as a program that quantises stores them."""
    return partial(_stored, settings, packer)


def _stored(settings: Mapping[str, object], packer: write.Packer, folder: Path) -> ConvertOptions:
    config = _wide()
    hidden, inner, dim = (int(str(config[key])) for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = (dim * int(str(config[key])) for key in ("num_attention_heads", "num_key_value_heads"))
    sizes = [(heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads)]
    products = dict(zip(write.PRODUCTS, [*sizes, (inner, hidden), (inner, hidden), (hidden, inner)], strict=True))
    write.write_model(folder / "model", settings, packer, config=config, products=products)
    return ConvertOptions(model_dir=folder / "model", dtype=DType.BF16, output_dir=folder / "checkpoint")


def _fp8_experts(folder: Path) -> ConvertOptions:
    """In blocks, in the width of Qwen3-30B-A3B, with half as many experts."""
    of_heads = {"heads": 32, "kv_heads": 4, "head_dim": 128}
    sizes = Sizes(hidden=2048, inner=768, shared=768, experts=64, slots=8, vocab=TOKENS, positions=40960, **of_heads)
    packer = write.bytes_with_scale(DType.F8, "weight_scale_inv", (128, 128))
    write_experts(folder / "model", _FP8_BLOCKS, packer, sizes)
    return ConvertOptions(model_dir=folder / "model", dtype=DType.BF16, output_dir=folder / "checkpoint")


_GPTQ8 = {**GPTQ, "bits": 8, "group_size": 128, "sym": False}
_FP4 = compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
_FP8 = fp8("float-quantized", "channel")
_FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_FLOATS = partial(_seeded, _wide())
KINDS: Mapping[str, Kind] = {
    "bf16": Kind(make=_FLOATS, options={"precision": "bf16"}),
    "bf16, own matmuls": Kind(make=_FLOATS, options={"precision": "bf16", "gemm_library": False}),
    "w8": Kind(make=_FLOATS, options={"precision": "w8"}),
    "w4g64": Kind(make=_FLOATS, options={"precision": "w4g64"}),
    "awq": Kind(make=_quantised({**AWQ, "group_size": 128}, write.awq(128))),
    "nvfp4": Kind(make=_quantised(_FP4, write.fp4("weight_packed", 16, factor="weight_global_scale", divides=True))),
    "gptq 8 bits": Kind(make=_quantised(_GPTQ8, write.gptq(8, 128))),
    "fp8 rows": Kind(make=_quantised(_FP8, write.bytes_with_scale(DType.F8, "weight_scale", (1, 0)))),
    "fp8 blocks": Kind(make=_quantised(_FP8_BLOCKS, write.bytes_with_scale(DType.F8, "weight_scale_inv", (128, 128)))),
    "fp8 rows, fp8 inputs": Kind(
        make=_quantised(_FP8, write.bytes_with_scale(DType.F8, "weight_scale", (1, 0))), options={"activations": "fp8"}
    ),
    "fp8 blocks, fp8 inputs": Kind(
        make=_quantised(_FP8_BLOCKS, write.bytes_with_scale(DType.F8, "weight_scale_inv", (128, 128))),
        options={"activations": "fp8"},
    ),
    "fp8 experts": Kind(make=_fp8_experts),
    "fp8 experts, fp8 inputs": Kind(make=_fp8_experts, options={"activations": "fp8"}),
    "int8 cache": Kind(make=_FLOATS, options={"precision": "bf16", "kv_cache_dtype": "int8"}),
    "fp8 cache": Kind(make=_FLOATS, options={"precision": "bf16", "kv_cache_dtype": "fp8"}),
    "qwen3.5-35b-a3b": Kind(make=_of_model("qwen3.5-35b-a3b", 4), options={"precision": "bf16"}),
    "deepseek-v3": Kind(make=_of_model("deepseek-v3", 2), options={"precision": "bf16"}),
    "gemma-4-26b-a4b": Kind(make=_of_model("gemma-4-26b-a4b", 6), options={"precision": "bf16"}),
    "lfm2-8b-a1b": Kind(make=_of_model("lfm2-8b-a1b", 4), options={"precision": "bf16"}),
    "gpt-oss-20b": Kind(make=_of_model("gpt-oss-20b", 2), options={"precision": "bf16"}),
    "nemotron-3-nano": Kind(make=_of_model("nemotron-3-nano", 6), options={"precision": "bf16"}),
}


def checks(job: Job) -> Iterator[Check]:
    """All engines at once, which takes minutes; then each one's kernels."""
    yield Check("engines", lambda: _engines(job))
    for name in KINDS:
        yield Check(name, partial(_times, job, name))


def _engines(job: Job) -> Iterator[Result]:
    with ProcessPoolExecutor(AT_ONCE) as pool:
        for name, why_not in zip(KINDS, pool.map(partial(engine_of_kind, job.work, job.target), KINDS), strict=True):
            if why_not:
                yield Result(name=name, command="", ok=False, figures={"said": why_not})


def engine_of_kind(work: Path, target: str, name: str) -> str:
    """Made once. Gives what went wrong, in words."""
    folder = place(work, name)
    if (folder / "engine").is_dir():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    kind = KINDS[name]
    longest = max(CONTEXT, *PROMPTS)
    try:
        options = kind.make(folder)
        if not options.output_dir.is_dir():
            convert(options)
        config = BuildConfig(
            target=target,
            max_batch_size=max(BATCHES),
            max_input_len=longest,
            max_seq_len=longest + 1,
            max_num_tokens=max(PROMPTS),
            **kind.options,
        )
        build(config, options.output_dir, folder / "engine")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def place(work: Path, name: str) -> Path:
    """Where model, Checkpoint and engine of a kind lie."""
    return work / re.sub(r"[^a-z0-9.]+", "-", name)


def _times(job: Job, name: str) -> Iterator[Result]:
    engine = place(job.work, name) / "engine"
    if not engine.is_dir():
        return
    for batch in BATCHES:
        yield from decode_times(name, engine, job.target, batch, CONTEXT)
    for length in PROMPTS:
        yield from prefill_times(name, engine, job.target, length)
