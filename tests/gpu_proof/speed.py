"""Part d: decode and prefill of models with random weights in bf16, beside the machine's limits and transformers."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.bench.bytes_read import kv_bytes_per_token
from ingot.bench.latency import BatchLatency, LatencyOptions, LatencyReport, bench_latency
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.plan import Plan
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load
from tests.gpu_proof.result import Result
from tests.gpu_proof.shapes import SHAPES, Wanted
from tests.gpu_proof.work import Job, engine_of

SHORT = 16  # tokens of context that cost an attention next to nothing
TRANSFORMERS = Path(__file__).with_name("transformers_speed.py")
SECONDS = 540
WANTED = Wanted()


def speed(job: Job) -> Iterator[Result]:
    """Per shape: decode of each batch, attention alone by the difference that context makes, prefill, transformers."""
    for shape in job.shapes:
        yield from of_shape(job, shape, SHAPES[shape])


def of_shape(job: Job, name: str, shape: Mapping[str, object]) -> Iterator[Result]:
    """The results of one."""
    engine, command = _engine(job, name, shape)
    plan, options = read_plan(engine), ["--output_len", str(job.output), "--repetitions", str(job.repetitions)]
    batches = [word for size in job.batches for word in ("--batch_size", str(size))]
    decode = f"{command}; ingot bench latency --engine_dir {engine} --input_len {job.context} " + " ".join(
        [*batches, *options]
    )
    long, short = (_latency(job, engine, job.batches, length, job.output) for length in (job.context, SHORT))
    for each, less in zip(long.batches, short.batches, strict=True):
        yield _decode(name, decode, long, each)
        if each.batch_size > 1:
            yield _attention(name, decode, plan, long, each, less, job.context - SHORT)
    theirs = _transformers(job, name, shape)
    rate = theirs.get("products_per_second")
    speeds: dict[str, float] = {f"decode {each.batch_size}": each.tokens_per_second for each in long.batches}
    for length in job.prompts:
        result = _prefill(job, name, engine, plan, length, rate)
        speeds[f"prefill {length}"] = result.figures["tokens_per_second"]
        yield result
    yield from _ratios(name, theirs, speeds)


def _engine(job: Job, name: str, shape: Mapping[str, object]) -> tuple[Path, str]:
    """Weights are made here, from a seed."""
    checkpoint, config = job.work / f"{name}-checkpoint", job.work / f"{name}.json"
    config.write_text(json.dumps(shape))
    if not checkpoint.is_dir():
        convert(ConvertOptions(config=config, random_weights=1, output_dir=checkpoint))
    longest = max(job.context + job.output, *job.prompts) + 1
    build = BuildConfig(
        target=job.target,
        precision="bf16",
        max_batch_size=max(job.batches),
        max_input_len=longest - 1,
        max_seq_len=longest,
        max_num_tokens=max(job.prompts),
    )
    engine, command = engine_of(checkpoint, build)
    return engine, f"ingot convert --config {config} --random_weights 1 --output_dir {checkpoint}; {command}"


def _latency(job: Job, engine: Path, batches: Sequence[int], length: int, output: int) -> LatencyReport:
    options = LatencyOptions(
        engine_dir=engine, batch_sizes=batches, input_len=length, output_len=output, repetitions=job.repetitions
    )
    return bench_latency(options, lambda what, done, total: None)


def _decode(name: str, command: str, report: LatencyReport, each: BatchLatency) -> Result:
    fraction = each.bandwidth_fraction
    enough = None if fraction is None or each.batch_size > 1 else fraction >= WANTED.decode_of_bandwidth
    return Result(
        name=f"{name}: decode of {each.batch_size}",
        command=command,
        ok=enough,
        figures={
            "tokens_per_second": each.batch_size * 1e3 / each.tpot_ms if each.tpot_ms else None,
            "tpot_ms": each.tpot_ms,
            "gbs": each.bandwidth_gbs,
            "of_bandwidth": fraction,
            "wanted": WANTED.decode_of_bandwidth,
            "machine_gbs": report.machine_gbs,
            "input_len": report.input_len,
        },
    )


def _attention(
    name: str, command: str, plan: Plan, report: LatencyReport, each: BatchLatency, less: BatchLatency, tokens: int
) -> Result:
    """What `tokens` more of context cost every step."""
    nbytes = each.batch_size * tokens * kv_bytes_per_token(plan)
    seconds = ((each.tpot_ms or 0.0) - (less.tpot_ms or 0.0)) / 1e3
    gbs = nbytes / seconds / 1e9 if seconds > 0 else None
    fraction = gbs / report.machine_gbs if gbs else None
    return Result(
        name=f"{name}: attention of {each.batch_size}",
        command=f"{command}, and with --input_len {SHORT}",
        ok=None if fraction is None else fraction >= WANTED.attention_of_bandwidth,
        figures={"gbs": gbs, "of_bandwidth": fraction, "wanted": WANTED.attention_of_bandwidth, "seconds": seconds},
    )


def _prefill(job: Job, name: str, engine: Path, plan: Plan, length: int, rate: float | None) -> Result:
    """From the prompt to its first token. rate: operations per second of large products, here and now."""
    (each,) = _latency(job, engine, [1], length, 1).batches
    work, load = PlanWork(plan), Load(sequences=[(0, length)], rows=1)
    operations = sum(work.of(step, load).operations for step in plan.steps)
    seconds = each.ttft_ms / 1e3
    fraction = operations / seconds / rate if rate else None
    return Result(
        name=f"{name}: prefill of {length}",
        command=f"ingot bench latency --engine_dir {engine} --input_len {length} --output_len 1",
        ok=None if fraction is None else fraction >= WANTED.prefill_of_products,
        figures={
            "tokens_per_second": length / seconds,
            "ttft_ms": each.ttft_ms,
            "tflops": operations / seconds / 1e12,
            "of_products": fraction,
            "wanted": WANTED.prefill_of_products,
            "products_tflops": rate and rate / 1e12,
        },
    )


def _transformers(job: Job, name: str, shape: Mapping[str, object]) -> dict[str, Any]:
    """Its tokens per second by regime, and what the GPU multiplies; "missing" where it cannot be had."""
    config = job.work / f"{name}.json"
    numbers = [str(job.context), str(job.output)]
    command = [
        sys.executable,
        str(TRANSFORMERS),
        str(config),
        *numbers,
        ",".join(map(str, job.batches)),
        ",".join(map(str, job.prompts)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"command": " ".join(command), "missing": f"transformers took more than {SECONDS} s"}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"command": " ".join(command), "missing": said}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"command": " ".join(command), **answer}


def _ratios(name: str, theirs: Mapping[str, Any], ours: Mapping[str, float]) -> Iterator[Result]:
    label, command = f"{name}: beside transformers", theirs["command"]
    if "missing" in theirs:
        yield Result(name=label, command=command, missing=theirs["missing"])
        return
    for regime, speed_of_theirs in theirs["speeds"].items():
        ratio = ours[regime] / speed_of_theirs if speed_of_theirs else None
        yield Result(
            name=f"{label}: {regime}",
            command=command,
            ok=None if ratio is None else ratio >= WANTED.ratio,
            figures={"ratio": ratio, "wanted": WANTED.ratio, "ours": ours[regime], "theirs": speed_of_theirs},
        )
