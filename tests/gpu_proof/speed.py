"""Part d: decode and prefill of models with random weights in bf16, beside the machine's limits and transformers.

Decode is judged by the steps in which all sequences of a batch decode. `ingot bench latency` gives all prompts at once,
and the TPOT of a request has the steps in it that compute the prompts of the others; so the median gap between tokens
is taken, at the places in the answers where the first requests have no prompts beside them any more, and the last ones
still have all others.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
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
from tests.gpu_proof.result import Check, Result
from tests.gpu_proof.shapes import SHAPES, Wanted
from tests.gpu_proof.times import decode_times, prefill_times, same_bits
from tests.gpu_proof.work import Job, engine_of, engine_place

SHORT = 16  # tokens of context that cost an attention next to nothing
TRANSFORMERS = Path(__file__).with_name("transformers_speed.py")
SECONDS = 510
AGAIN = 200  # decode steps that must give the same bits
PRODUCTS = "large products in bf16"
WANTED = Wanted()


def speed(job: Job) -> Iterator[Check]:
    """Large products; then per shape: its engine, decode of each batch, each kernel alone, prefill, transformers."""
    yield Check.of(PRODUCTS, _products)
    for shape in job.shapes:
        yield from _of_shape(job, shape)


def _of_shape(job: Job, name: str) -> Iterator[Check]:
    """Checkpoint and engine are made apart: each takes minutes for a large shape."""
    yield Check(f"{name}: checkpoint", lambda: _checkpoint(job, name))
    yield Check(f"{name}: engine", lambda: _engine_ready(job, name))
    yield Check(f"{name}: decode", lambda: _decodes(job, name))
    for size in job.batches:
        yield Check(f"{name}: kernels of {size}", partial(_kernels, job, name, size))
    yield Check.of(f"{name}: a step again and again", _again, job, name)
    for length in job.prompts:
        yield Check.of(f"{name}: prefill of {length}", _prefill, job, name, length)
        yield Check(f"{name}: kernels of a prompt of {length}", partial(_prompt_kernels, job, name, length))
    numbers = [str(job.context), str(job.output)]
    if not job.transformers:
        return
    for kind, asked, more in (("decode", job.batches, numbers), ("prefill", job.prompts, [])):
        for size in asked:
            given = [kind, str(job.work / f"{name}.json"), str(size), *more]
            regime = f"{kind} of {size}"
            yield Check.of(f"{name}: {regime} beside transformers", _ratio, job, name, regime, given)


def _products() -> Result:
    """Operations per second of a large product, which prefill is judged by."""
    answer = _torch(["products"])
    rate = answer.get("operations_per_second")
    return Result(
        name=PRODUCTS,
        command=answer["command"],
        missing=answer.get("missing"),
        figures={"tflops": rate / 1e12} if rate else {},
    )


def _files(job: Job, name: str) -> tuple[Path, Path]:
    """The shape's config.json, its Checkpoint."""
    config = job.work / f"{name}.json"
    config.write_text(json.dumps(SHAPES[name]))
    return config, job.work / f"{name}-checkpoint"


def _build_config(job: Job) -> BuildConfig:
    longest = max(job.context + _output(job, job.context), *job.prompts) + 1
    return BuildConfig(
        target=job.target,
        precision="bf16",
        max_batch_size=max(job.batches),
        max_input_len=longest - 1,
        max_seq_len=longest,
        max_num_tokens=max(job.prompts),
    )


def _checkpoint(job: Job, name: str) -> Iterator[Result]:
    """Weights are made here, from a seed. Not where there is an engine already."""
    config, checkpoint = _files(job, name)
    if not checkpoint.is_dir() and not engine_place(checkpoint, _build_config(job)).is_dir():
        convert(ConvertOptions(config=config, random_weights=1, output_dir=checkpoint))
    return iter(())


def _engine_ready(job: Job, name: str) -> Iterator[Result]:
    """Large shapes together would fill the disk, so the Checkpoint goes when the engine is there."""
    _, checkpoint = _files(job, name)
    _engine(job, name)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return iter(())


def _engine(job: Job, name: str) -> tuple[Path, str]:
    config, checkpoint = _files(job, name)
    engine, command = engine_of(checkpoint, _build_config(job))
    return engine, f"ingot convert --config {config} --random_weights 1 --output_dir {checkpoint}; {command}"


def _decodes(job: Job, name: str) -> Iterator[Result]:
    """Of each batch; attention alone by the difference that context makes."""
    engine, command = _engine(job, name)
    output, plan = _output(job, job.context), read_plan(engine)
    options = ["--output_len", str(output), "--repetitions", str(job.repetitions)]
    batches = [word for size in job.batches for word in ("--batch_size", str(size))]
    decode = f"{command}; ingot bench latency --engine_dir {engine} --input_len {job.context} " + " ".join(
        [*batches, *options]
    )
    long, short = (_latency(job, engine, job.batches, length, output) for length in (job.context, SHORT))
    for each, less in zip(long.batches, short.batches, strict=True):
        step = _step_ms(job, each, job.context)
        yield _decode(name, decode, long, each, step)
        if each.batch_size > 1:
            more = step - _step_ms(job, less, SHORT)
            yield _attention(name, decode, plan, long, each, more / 1e3, job.context - SHORT)


def _prompt_steps(job: Job, size: int, length: int) -> int:
    """How many steps compute the prompts of a batch at most: decode rows of others and odd ends take tokens too."""
    return 2 + -(-size * length // max(1, max(job.prompts) - size - SHORT))


def _output(job: Job, length: int) -> int:
    """Tokens of each request, so that the largest batch decodes `job.output` of them together."""
    return job.output + 2 * _prompt_steps(job, max(job.batches), length)


def _step_ms(job: Job, each: BatchLatency, length: int) -> float:
    """A step in which all sequences of a batch decode."""
    steps = _prompt_steps(job, each.batch_size, length)
    return statistics.median(each.itl_ms[steps : len(each.itl_ms) - steps])


def _kernels(job: Job, name: str, size: int) -> Iterator[Result]:
    engine, _ = _engine(job, name)
    return decode_times(name, engine, job.target, size, job.context)


def _again(job: Job, name: str) -> Result:
    """Kernels that overlap must not take what is not there yet: a race would change bits."""
    engine, _ = _engine(job, name)
    alike = same_bits(engine, job.target, min(16, *job.batches), job.context, AGAIN)
    command = f"python -m tests.gpu_proof --parts d, {engine.name}"
    figures = {"steps": AGAIN, "with the bits of the first": alike}
    return Result(name=f"{name}: a step again and again", command=command, ok=alike == AGAIN, figures=figures)


def _prompt_kernels(job: Job, name: str, length: int) -> Iterator[Result]:
    engine, _ = _engine(job, name)
    return prefill_times(name, engine, job.target, length)


def _latency(job: Job, engine: Path, batches: Sequence[int], length: int, output: int) -> LatencyReport:
    options = LatencyOptions(
        engine_dir=engine, batch_sizes=batches, input_len=length, output_len=output, repetitions=job.repetitions
    )
    return bench_latency(options, lambda what, done, total: None)


def _decode(name: str, command: str, report: LatencyReport, each: BatchLatency, step_ms: float) -> Result:
    """step_ms: of a step in which all decode."""
    gbs = None if each.bandwidth_gbs is None or each.tpot_ms is None else each.bandwidth_gbs * each.tpot_ms / step_ms
    fraction = gbs / report.machine_gbs if gbs else None
    enough = None if fraction is None or each.batch_size > 1 else fraction >= WANTED.decode_of_bandwidth
    return Result(
        name=f"{name}: decode of {each.batch_size}",
        command=command,
        ok=enough,
        figures={
            "tokens_per_second": each.batch_size * 1e3 / step_ms,
            "step_ms": step_ms,
            "tpot_ms": each.tpot_ms,
            "gbs": gbs,
            "of_bandwidth": fraction,
            "wanted": WANTED.decode_of_bandwidth,
            "machine_gbs": report.machine_gbs,
            "input_len": report.input_len,
        },
    )


def _attention(
    name: str, command: str, plan: Plan, report: LatencyReport, each: BatchLatency, seconds: float, tokens: int
) -> Result:
    """What `tokens` more of context cost every step. seconds: this."""
    nbytes = each.batch_size * tokens * kv_bytes_per_token(plan)
    gbs = nbytes / seconds / 1e9 if seconds > 0 else None
    fraction = gbs / report.machine_gbs if gbs else None
    return Result(
        name=f"{name}: attention of {each.batch_size}",
        command=f"{command}, and with --input_len {SHORT}",
        ok=None if fraction is None else fraction >= WANTED.attention_of_bandwidth,
        figures={"gbs": gbs, "of_bandwidth": fraction, "wanted": WANTED.attention_of_bandwidth, "seconds": seconds},
    )


def _prefill(job: Job, name: str, length: int) -> Result:
    """From the prompt to its first token, beside the rate of large products on this machine."""
    engine, _ = _engine(job, name)
    plan, rate = read_plan(engine), _figure(job, PRODUCTS, "tflops")
    (each,) = _latency(job, engine, [1], length, 1).batches
    work, load = PlanWork(plan), Load(sequences=[(0, length)], logit_rows=1)
    tflops = sum(work.of(step, load).operations for step in plan.steps) / each.ttft_ms / 1e9
    fraction = tflops / rate if rate else None
    return Result(
        name=f"{name}: prefill of {length}",
        command=f"ingot bench latency --engine_dir {engine} --input_len {length} --output_len 1",
        ok=None if fraction is None else fraction >= WANTED.prefill_of_products,
        figures={
            "tokens_per_second": length / each.ttft_ms * 1e3,
            "ttft_ms": each.ttft_ms,
            "tflops": tflops,
            "of_products": fraction,
            "wanted": WANTED.prefill_of_products,
            "products_tflops": rate,
        },
    )


def _torch(given: Sequence[str]) -> dict[str, Any]:
    """What transformers_speed.py says, in a process of its own; "missing" where it cannot be had."""
    command = [sys.executable, str(TRANSFORMERS), *given]
    by_hand = " ".join(["python", "/".join(TRANSFORMERS.parts[-3:]), *given])
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"command": by_hand, "missing": f"transformers took more than {SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"command": by_hand, "missing": said}
    answer: dict[str, Any] = json.loads(lines[-1])
    return {"command": by_hand, **answer}


def _ratio(job: Job, name: str, regime: str, given: Sequence[str]) -> Result:
    """Ours to theirs."""
    theirs, ours = _torch(given), _figure(job, f"{name}: {regime}", "tokens_per_second")
    speed_of_theirs = theirs.get("tokens_per_second")
    ratio = ours / speed_of_theirs if ours and speed_of_theirs else None
    return Result(
        name=f"{name}: {regime} beside transformers",
        command=theirs["command"],
        ok=None if ratio is None else ratio >= WANTED.ratio,
        missing=theirs.get("missing"),
        figures={"ratio": ratio, "wanted": WANTED.ratio, "ours": ours, "theirs": speed_of_theirs},
    )


def _figure(job: Job, name: str, key: str) -> float | None:
    """Of a result that there is already."""
    return next((each.figures.get(key) for each in job.found if each.name == name), None)
