"""Checkpoint → Engine, the main path.

    read the graph → structure passes → decide precision and limits → target passes → lower → plan memory and weights
    → check memory and disk → stream the packed weights → publish

The graph is the only source: config.json of the checkpoint only adds facts for people to the manifest.
"""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot import __version__
from ingot.builder.activations import choose_activations
from ingot.builder.expressions import WeightReader, check_sources
from ingot.builder.facts import model_facts
from ingot.builder.graph import Graph
from ingot.builder.limits import fit_limits
from ingot.builder.lower import Lowering, read_shape
from ingot.builder.names import name_nodes
from ingot.builder.pack import BLOCK_BYTES, Packer, add_constants
from ingot.builder.passes.base import PassReport
from ingot.builder.pipeline import require_plugins, run_passes, structure_passes, target_passes
from ingot.builder.precision import choose_main, choose_products, choose_routers, products_of, table_dtype
from ingot.builder.predict import Prediction, Sample, choose_sample, predict
from ingot.builder.tune import MEMORY as TUNING_MEMORY
from ingot.builder.tune import tune
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.token_ids import read_token_ids
from ingot.dtypes import DType, Precision
from ingot.engine import SECTION_ALIGNMENT, is_engine
from ingot.engine_writer import Block, write_engine
from ingot.errors import BuildError, CheckpointError, IngotError, UsageError
from ingot.forecast import Forecast
from ingot.manifest import Manifest
from ingot.output_dir import OutputDir
from ingot.plan import KvLayout, Plan
from ingot.plugins.registry import find_target
from ingot.plugins.target import Constant, Target

# What the process needs beside the graph and the blocks: interpreter, numpy, onnx and the compiled passes.
BASE_MEMORY = 80 << 20
GRAPH_COPIES = 12  # times the bytes of model.onnx: its objects in Python
MANIFEST_BYTES = 1 << 20  # of disk: manifest and the ends of sections
BLOCK_COPIES = 6  # a block as stored, as float32, rounded or quantised, packed; one in each thread, and one to write

CAPABILITIES = ("context_logits", "generation_logits", "greedy", "log_probs", "paged_kv", "sampling")

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """What a build did, or would do (dry_run).

    notes        one sentence each: lowered defaults, choices, weights that are not finite
    passes       what every pass did
    timings      a line for every product and number of rows that was timed
    prediction   how fast it will be here, None where that is not known (a note says why)
    memory       bytes the build was expected to need at most
    engine_bytes of the rank file
    """

    output_dir: Path
    dry_run: bool
    target: str
    precision: str
    plan: Plan
    passes: tuple[PassReport, ...]
    notes: tuple[str, ...]
    timings: tuple[str, ...]
    prediction: Prediction | None
    memory: int
    engine_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """All that is decided before the first byte is written. sample: what is run to predict the engine's speed."""

    target: Target
    precision: Precision
    activation_errors: dict[str, float | None]
    plan: Plan
    lowering: Lowering
    constants: tuple[Constant, ...]
    reports: list[PassReport]
    notes: list[str]
    timings: tuple[str, ...]
    sample: Sample | None


def build(
    config: BuildConfig, checkpoint_dir: Path, output_dir: Path, progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> BuildReport:  # fmt: skip
    """Write an Engine. say: gets the forecast before the first byte is written.

    Raises an IngotError in words; then, as after Ctrl-C, no output is left behind.
    """
    begin = time.monotonic()
    checkpoint = Checkpoint.open(Path(checkpoint_dir))
    target = find_target(config.target)
    if not config.dry_run and (reason := target.unbuildable()) is not None:
        raise BuildError(f"this machine cannot build for {target.name}", got=reason, hint="see ingot doctor")
    _forecast(config, checkpoint, output_dir, 0).check_memory(config.max_mem)
    with graph_errors(checkpoint.graph_path):
        job = _decide(config, checkpoint, target, progress)
        engine_bytes = _engine_bytes(job.plan)
        forecast = _forecast(config, checkpoint, output_dir, engine_bytes, job.sample)
        if say is not None:
            say(f"the build {forecast}")
        if not config.dry_run:
            with OutputDir(Path(output_dir), is_previous=is_engine) as out:
                out.require_space(forecast.disk)
                job.notes.extend(_write(job, checkpoint, out.path, progress))
    prediction = None
    if job.sample is not None and not config.dry_run:
        found = predict(job.sample, Path(output_dir), target)
        if isinstance(found, str):
            job.notes.append(found)
        else:
            prediction = found
    return BuildReport(
        output_dir=Path(output_dir), dry_run=config.dry_run, target=target.name, precision=str(job.precision),
        plan=job.plan, passes=tuple(job.reports), notes=tuple(job.notes), timings=job.timings,
        prediction=prediction, memory=forecast.memory, engine_bytes=engine_bytes,
        seconds=time.monotonic() - begin,
    )  # fmt: skip


@contextlib.contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """A graph may be malformed in more ways than passes can foresee: say so in words, whatever they stumble over."""
    try:
        yield
    except (IngotError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            "the graph of the checkpoint cannot be followed", where=str(path), got=f"{type(error).__name__}: {error}",
            hint="convert the model again; if that does not help, this is a bug of ingot",
        ) from error  # fmt: skip


def _decide(config: BuildConfig, checkpoint: Checkpoint, target: Target, progress: Progress | None) -> _Job:
    graph = Graph.load(checkpoint.graph_path)
    if config.dump_passes is not None:
        _make_folder(config.dump_passes)
        graph.save(config.dump_passes / "00_checkpoint.onnx")
    passes = structure_passes()
    reports = run_passes(graph, passes, dump=config.dump_passes)
    require_plugins(graph, reports)
    name_nodes(graph)
    notes: list[str] = []
    precision = choose_main(config, graph, target, notes)
    kv_dtype = _kv_dtype(config, precision)
    routers = choose_routers(precision, graph)
    others = [node.name for node in products_of(graph) if node.name not in routers]
    wanted = routers | choose_products(config, precision, others)
    tables = table_dtype(precision)
    products, errors = choose_activations(graph, checkpoint, wanted, target, progress, notes)
    late = target_passes(target, products=products, tables=tables, kv=kv_dtype)
    reports += run_passes(graph, late, dump=config.dump_passes, first=len(passes) + 1)
    shape = read_shape(graph)
    limits, lowered = fit_limits(config, shape.positions)
    kv = KvLayout(
        num_layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        tokens_per_block=config.tokens_per_block, dtype=kv_dtype,
    )  # fmt: skip
    lowering = Lowering(graph, panels=target.packs_products)
    for use in lowering.uses:
        check_sources(use.tensor, checkpoint)
    plan = lowering.plan(limits, kv, shape, config.shards or _threads())
    timings: tuple[str, ...] = ()
    if config.autotune:
        tuning = tune(plan, target, config.timing_cache, progress)
        plan, timings = dataclasses.replace(plan, tactics=tuning.tactics), tuning.table
        notes.extend(tuning.notes)
    sample = _sample(config, checkpoint, plan, target, notes)
    constants = () if config.dry_run else target.constants(plan)
    return _Job(
        target=target, precision=precision, activation_errors=errors, plan=add_constants(plan, constants),
        lowering=lowering, constants=constants, reports=reports, notes=[*notes, *lowered], timings=timings,
        sample=sample,
    )  # fmt: skip


def _sample(config: BuildConfig, checkpoint: Checkpoint, plan: Plan, target: Target, notes: list[str]) -> Sample | None:
    """None, and why, where no speed can be predicted."""
    if not config.autotune or config.dry_run:
        return None  # nothing is to be timed, or there will be no engine
    room = None if config.max_mem is None else config.max_mem - _base_memory(checkpoint)
    found = choose_sample(plan, target, room)
    if isinstance(found, str):
        notes.append(found)
        return None
    return found


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the graphs cannot be dumped there", where=str(folder), got=error.strerror, hint="choose another folder"
        ) from error


def _kv_dtype(config: BuildConfig, precision: Precision) -> DType:
    if config.kv_cache_dtype != "auto":
        return DType(config.kv_cache_dtype)
    return DType.BF16 if precision.dtype.is_quantised else precision.dtype


def _base_memory(checkpoint: Checkpoint) -> int:
    """Bytes beside what is made of the weights."""
    return BASE_MEMORY + GRAPH_COPIES * checkpoint.graph_path.stat().st_size


def _forecast(
    config: BuildConfig, checkpoint: Checkpoint, target: Path, engine_bytes: int, sample: Sample | None = None
) -> Forecast:
    """Of memory before any work; of disk as soon as the size of the engine is known."""
    blocks = (_threads() + 1) * BLOCK_COPIES * BLOCK_BYTES
    timing, predicting = TUNING_MEMORY if config.autotune else 0, 0 if sample is None else sample.memory
    memory = _base_memory(checkpoint) + max(blocks, timing, predicting)
    carried = sum((checkpoint.path / name).stat().st_size for name in checkpoint.companions())
    return Forecast.at(target, memory=memory, disk=engine_bytes + MANIFEST_BYTES + carried)


def _write(job: _Job, checkpoint: Checkpoint, directory: Path, progress: Progress | None) -> list[str]:
    """Fill the engine directory; returns notes."""
    plan, done = job.plan, 0
    total = sum(weight.nbytes for weight in plan.weights)

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress("packing weights", done, total)

    tokens = read_token_ids(checkpoint.path)
    manifest = Manifest(
        ingot_version=__version__, model=model_facts(checkpoint, plan), target=job.target.name,
        precision=str(job.precision), limits=plan.limits, capabilities=CAPABILITIES, ranks=1, eos_ids=tokens.eos,
        bos_id=tokens.bos, pad_id=tokens.pad, parts=(), sources=checkpoint.config.sources,
        activation_errors=job.activation_errors,
    )  # fmt: skip
    with WeightReader(checkpoint.path) as reader:
        packer = Packer(reader, job.lowering.uses, plan.weights, _threads())
        files = [checkpoint.path / name for name in checkpoint.companions()]
        blocks = itertools.chain(packer.blocks(advance), _constant_blocks(job))
        write_engine(directory, manifest, plan, blocks, files, checkpoint.path)
    return [f"weight {name} holds {count} values that are NaN or infinite" for name, count in packer.nonfinite.items()]


def _constant_blocks(job: _Job) -> Iterator[Block]:
    places = {weight.name: weight.pieces[0].offset for weight in job.plan.weights}
    for constant in job.constants:
        yield places[constant.name], memoryview(constant.data)


def _threads() -> int:
    """Cores of this process."""
    return len(os.sched_getaffinity(0))


def _engine_bytes(plan: Plan) -> int:
    text = len(plan.to_json().encode())
    return -(-(4096 + text) // SECTION_ALIGNMENT) * SECTION_ALIGNMENT + plan.weight_bytes
