"""Part a: what TensorRT-RTX says of this GPU, by the first 64 bytes of an engine for all the GPUs that it knows."""

from collections.abc import Iterator

from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.plugins.registry import find_target
from ingot.plugins.tensorrt.bindings import Messages, load, logger
from ingot.plugins.tensorrt.library import find_rtx
from ingot.plugins.tensorrt.plan_file import HEADER_BYTES, read_header
from ingot.quickstart import SHIPPED
from tests.gpu_proof.result import Check, Result
from tests.gpu_proof.work import Job, checkpoint_of, engine_of

TARGET = "tensorrt-rtx"


def checks(job: Job) -> Iterator[Check]:
    """A single one."""
    yield Check("TensorRT-RTX on this GPU", lambda: rtx_validity(job))


def rtx_validity(job: Job) -> Iterator[Result]:
    """Expected: refused on 9.0 and 10.x, valid on the others. Where it is valid the engine runs."""
    name, library, target = "TensorRT-RTX on this GPU", find_rtx(), find_target(TARGET)
    reason = library if isinstance(library, str) else target.build_blocker()
    if isinstance(library, str) or reason is not None:
        yield Result(name=name, command="ingot doctor", missing=reason)
        return
    checkpoint = checkpoint_of(job.work, SHIPPED)
    engine, command = engine_of(checkpoint, BuildConfig(target=TARGET))
    data = (engine / "rank0.plan").read_bytes()[:HEADER_BYTES]
    trt, messages = load(library), Messages()
    log = logger(trt, messages.add)
    runtime = trt.Runtime(log)
    validity, reasons = runtime.get_engine_validity(data)
    valid, here = validity != trt.EngineValidity.INVALID, target.run_blocker() is None
    figures = {
        "validity": validity.name,
        "reasons": str(reasons),
        "capabilities": ", ".join(read_header(data, name).capabilities),
        "ingot_runs_it": here,
        "library": str(library),
        "sm": job.gpu.sm,
    }
    yield Result(
        name=name, command=f"{command}; Runtime.get_engine_validity(header)", ok=valid == here, figures=figures
    )
    if here:
        found = compare(engine, checkpoint, CompareOptions(target=TARGET))
        yield Result(
            name="its logits against the Checkpoint",
            command=f"ingot verify {engine} --against {checkpoint}",
            ok=not found.findings,
            figures={**found.results(), "findings": [each.what for each in found.findings]},
        )
