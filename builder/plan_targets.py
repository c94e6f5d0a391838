"""All that is decided about a target before the first byte of an engine is written: a TargetBuild for each target.

graph of plugins → precision, activations and limits → target passes → Program → step passes → Plan → variants
→ tactics → machine code
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ingot.builder.activations import SampleErrors, choose_activations
from ingot.builder.compressible import Compressible
from ingot.builder.export import export
from ingot.builder.expressions import WeightReader, check_sources
from ingot.builder.graph import Graph
from ingot.builder.kernel_limits import check_graph, check_plan
from ingot.builder.limits import fit_limits
from ingot.builder.lost_codes import lost_codes
from ingot.builder.lower import Lowering, ModelShape, cache_groups, read_shape
from ingot.builder.names import name_nodes
from ingot.builder.parallel_map import cores
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.compress_weights import CompressWeights, compressing_kernels
from ingot.builder.passes.cut_stages import CutStages, find_cuts
from ingot.builder.passes.keep_codes import KeepCodes, may_order
from ingot.builder.passes.split_ranks import SplitRanks, own_heads
from ingot.builder.passes.split_sums import split_passes
from ingot.builder.pipeline import (
    plan_passes,
    program_passes,
    require_plugins,
    run_passes,
    run_step_passes,
    structure_passes,
    target_passes,
)
from ingot.builder.precision import (
    choose_main,
    choose_products,
    choose_unquantised,
    keeps,
    kept_products,
    may_rearrange,
    products_of,
    table_dtype,
)
from ingot.builder.predict import Sample, choose_sample
from ingot.builder.program import Program
from ingot.builder.schedule import Dump, schedule
from ingot.builder.tune import tune
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType, Precision
from ingot.errors import BuildError, UsageError
from ingot.lost_codes import lost_lines
from ingot.plan import Limits, Plan, Step
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import CompilesGraph, JoinsRanks, Progress, RunsRanks, Target, Tunable, WithLibrary

# What the process needs beside the graph and the blocks: interpreter, numpy, onnx and the compiled passes.
BASE_MEMORY = 88 << 20
GRAPH_COPIES = 12  # times the bytes of model.onnx: its objects in Python


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetBuild:
    """What one target's part of an engine will be.

    graph    what the target compiles instead of running the plan's steps, None where it runs them
    reports  of the passes, those that every target shares included
    notes    one sentence each: choices
    lost_codes  matmul → why its codes are not kept
    lowered  one sentence for each default limit that is lowered to what the model allows
    timings  a line for every product and number of rows that was timed
    sample   what is run to predict the engine's speed
    further  the same for the ranks after the first; only plan and lowering differ
    whole    the plan of one rank that has everything: what it says of the model holds for the engine
    """

    target: Target
    precision: Precision
    activation_errors: dict[str, float | None]
    plan: Plan
    graph: OpGraph | None
    lowering: Lowering
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]
    lost_codes: Mapping[str, str]
    lowered: tuple[str, ...]
    timings: tuple[str, ...]
    sample: Sample | None
    whole: Plan
    further: tuple["TargetBuild", ...] = ()

    @property
    def ranks(self) -> tuple["TargetBuild", ...]:
        """Every rank's, in order."""
        return (self, *self.further)


def plan_targets(
    config: BuildConfig,
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    progress: Progress,
    *,
    estimate: bool = False,
) -> list[TargetBuild]:
    """A TargetBuild for each target. estimate: no engine will be written: of the ranks of a pipeline stage, which cost
    the same, the first one alone is planned."""
    for option, size in (("--tp_size", config.tp_size), ("--pp_size", config.pp_size)):
        if size > 1:
            _require_ranks(option, size, targets)
    graph, reports = _structure(checkpoint, config.dump_passes)
    for target in targets:
        check_graph(graph, target)
    errors = SampleErrors(checkpoint, progress)
    builds: list[TargetBuild] = []
    units = config.parts
    fitting = Compressible(checkpoint, config.workers or cores(), progress) if _compresses(config, targets) else None
    for target in targets:
        dump = config.dump_passes
        if dump is not None and len(targets) > 1:
            dump /= target.name.replace("/", "-")
            _make_folder(dump)
        own = dataclasses.replace(config, dump_passes=dump)
        if builds and checkpoint.config.quantised:  # each target may take other products apart
            graph, _ = _structure(checkpoint, None)
        kept, wholes = _keep_codes(own, checkpoint, graph, len(reports) + 1, target, units=units)
        made = (*reports, *kept)
        builds.append(
            _plan_target(own, checkpoint, graph, made, wholes, errors, target, progress, estimate, units, fitting)
        )
    return builds


def _compresses(config: BuildConfig, targets: Sequence[Target]) -> bool:
    """Whether bf16 weights become bf16c where they can: if all of an engine's targets take them, so that these can
    share the weights. New weights of a refit may have other exponents."""
    return config.compress_weights and not config.refit and all(map(compressing_kernels, targets))


def _structure(checkpoint: Checkpoint, dump: Path | None) -> tuple[Graph, list[PassReport]]:
    """The graph of plugins, whose nodes have their names."""
    graph = Graph.load(checkpoint.graph_path)
    if dump is not None:
        _make_folder(dump)
        graph.save(dump / "00_checkpoint.onnx")
    reports = run_passes(graph, structure_passes(), dump=dump)
    require_plugins(graph, reports)
    name_nodes(graph)
    return graph, reports


def _keep_codes(
    config: BuildConfig, checkpoint: Checkpoint, graph: Graph, first: int, target: Target, *, units: int
) -> tuple[list[PassReport], dict[str, str]]:
    """Reports of the pass that only quantised checkpoints need; what products are parts of. A rank has only a part of
    some inputs, and new weights may come in another order: there no columns are put in order."""
    if not checkpoint.config.quantised:
        return [], {}
    with WeightReader(checkpoint) as reader:
        keep = KeepCodes(
            reader=reader,
            wanted=may_rearrange(config, target),
            takes=lambda precision: keeps(config, target, precision),
            units=units,
            ordered=lambda node: not config.refit and (config.parts == 1 or may_order(node, config.parts)),
            alike=config.parts > 1,
        )
        return run_passes(graph, (keep,), dump=config.dump_passes, first=first), keep.wholes


def _require_ranks(option: str, ranks: int, targets: Sequence[Target]) -> None:
    """Raises BuildError for what has one rank only."""
    alone = [target.name for target in targets if not isinstance(target, (RunsRanks, JoinsRanks))]
    if alone:
        raise BuildError(
            f"{option} {ranks} is not supported on {', '.join(alone)}",
            where=f"{option} {ranks}",
            expected="cpu and cuda targets, and ref",
            hint=f"give {option} 1, or build for a cuda or CPU target",
        )


def _plan_target(
    config: BuildConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    reports: Sequence[PassReport],
    wholes: Mapping[str, str],
    errors: SampleErrors,
    target: Target,
    progress: Progress,
    estimate: bool,
    units: int,
    fitting: Compressible | None,
) -> TargetBuild:
    """The target passes set the same attributes whatever an earlier target has set there."""
    notes: list[str] = []
    kept = kept_products(config, graph, target, units=units)
    precision = choose_main(config, graph, target, kept, notes)
    kv_dtype = _kv_dtype(config, precision)
    exact = choose_unquantised(config, precision, graph)
    others = [node.name for node in products_of(graph) if node.name not in exact]
    wanted = exact | choose_products(config, precision, kept, others, wholes)
    products, activation_errors = choose_activations(graph, errors, wanted, target, notes)
    late = target_passes(target, products=products, tables=table_dtype(precision), kv=kv_dtype)
    own = run_passes(graph, late, dump=config.dump_passes, first=len(reports) + 1)
    shape = read_shape(graph)
    model = checkpoint.config.model
    limits, lowered = fit_limits(config, shape.positions, sparse_beyond=model.sparse_beyond if model else 0)
    dump = Dump(config.dump_passes, len(reports) + len(own) + 1)
    parts = shape, limits, kv_dtype
    cuts: list[int] = []
    planned = [
        _plan_rank(config, checkpoint, graph, parts, target, rank, cuts, fitting, dump if rank == 0 else None)
        for rank in range(0, config.ranks, config.tp_size if estimate else 1)
    ]
    lowering, plan = planned[0]
    alone = dataclasses.replace(config, tp_size=1, pp_size=1, sum_parts=config.parts)
    whole = plan
    if config.ranks > 1 and not estimate:
        whole = _plan_rank(alone, checkpoint, graph, parts, target, 0, [], fitting, None)[1]
    timings: list[str] = []
    if config.autotune:
        for begin in range(0, config.ranks, config.tp_size):  # the ranks of a stage have the same steps
            tuning = tune(planned[begin][1], target, config.timing_cache, progress)
            timings.extend(line for line in tuning.table if line not in timings)
            notes.extend(note for note in tuning.notes if note not in notes)
            for rank in range(begin, begin + config.tp_size):
                planned[rank] = planned[rank][0], dataclasses.replace(planned[rank][1], tactics=tuning.tactics)
        plan = planned[0][1]
    notes.extend(_library_notes(plan, target))
    if isinstance(target, WithLibrary) and config.gemm_library and config.parts > 1:
        notes.append(f"ingot's own kernels compute all matmuls: with {target.library}, bits would depend on --tp_size")
    notes.extend(_whole_notes([each for _, each in planned[:: config.tp_size]], whole, config.tp_size))
    lost = lost_codes(lowering.uses, config, target, units=units)
    notes.extend(f"codes of {line}" for line in lost_lines(lost))
    sample = _sample(config, checkpoint, plan, target, notes)
    first = TargetBuild(
        target=target,
        precision=precision,
        activation_errors=activation_errors,
        plan=plan,
        graph=export(graph, lowering) if isinstance(target, CompilesGraph) else None,
        lowering=lowering,
        reports=(*reports, *own, *dump.reports),
        notes=tuple(notes),
        lost_codes=lost,
        lowered=tuple(lowered),
        timings=tuple(timings),
        sample=sample,
        whole=whole,
    )
    further = (dataclasses.replace(first, lowering=each, plan=its, sample=None) for each, its in planned[1:])
    return dataclasses.replace(first, further=tuple(further))


def _whole_notes(stages: Sequence[Plan], whole: Plan, ranks: int) -> Iterator[str]:
    """Layers whose attention or states every rank has as the whole model has them. stages: of one rank each."""
    if ranks == 1 or whole is stages[0]:  # an estimate has no other
        return
    known = {step.name: step.attrs for step in whole.steps}

    def alike(step: Step) -> bool:
        own, its = ({**attrs, "layer": 0} for attrs in (step.attrs, known[step.name]))
        return own == its

    layers = {
        step.name.rpartition("/")[0] for plan in stages for step in plan.steps if "layer" in step.attrs and alike(step)
    }
    if layers:
        yield (
            f"attention or states of {len(layers)} layers are not divided: each of {ranks} ranks computes and holds "
            "them whole"
        )


def _plan_rank(
    config: BuildConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    model: tuple[ModelShape, Limits, DType],
    target: Target,
    rank: int,
    cuts: list[int],
    fitting: Compressible | None,
    dump: Dump | None,
) -> tuple[Lowering, Plan]:
    """One rank's weights and plan. model: shape and limits of the engine, type of the KV cache; cuts: where pipeline
    stages end, which the first rank finds for all.

    Ranks of a stage are neighbours, and the last stage comes first: rank 0 draws.
    """
    shape, limits, kv_dtype = model
    lowering = Lowering(graph, panels=target.packs_products)
    for use in lowering.uses:
        check_sources(use.tensor, checkpoint)
    stage, place = config.pp_size - 1 - rank // config.tp_size, rank % config.tp_size
    sums = split_passes(lowering, target, config.parts, place, config.tp_size)
    ranks = tuple(SplitRanks(sums=each) for each in sums if config.tp_size > 1)

    stages: list[CutStages] = []

    def plan_of(program: Program) -> Plan:
        own = own_heads(shape, ranks)
        caches = cache_groups(own, limits, config.tokens_per_block, kv_dtype, frees_windows=target.frees_windows)
        return lowering.plan(program, limits, stages[0].caches(caches) if stages else caches, own)

    def cut(program: Program) -> tuple[Program, PassReport]:
        if not cuts:
            cuts.extend(find_cuts(program, lowering.uses, plan_of(program).caches, limits.max_seq_len, config.pp_size))
        stages.append(CutStages(lowering=lowering, target=target, stage=stage, cuts=cuts))
        return stages[0](program)

    compress = None
    if fitting is not None:
        compress = CompressWeights(lowering=lowering, kernels=compressing_kernels(target), fitting=fitting)
    program = run_step_passes(
        lowering.program,
        program_passes(target, config, lowering, sums=sums, ranks=ranks, cut=cut, compress=compress),
        lambda report, made: None if dump is None or made is None else dump(report, plan_of(made)),
    )
    plan = plan_of(program)
    check_plan(plan, target)
    for each in plan_passes(target):
        plan, report = each(plan)
        if dump is not None:
            dump(report, plan)
    return lowering, schedule(plan, target, *(() if dump is None else (dump,)))


def _library_notes(plan: Plan, target: Target) -> list[str]:
    """What the engine needs of the machine that runs it."""
    if not isinstance(target, WithLibrary) or {*target.library_kernels().values()}.isdisjoint(
        step.kernel for step in plan.steps
    ):
        return []
    return [f"{target.library} computes matmuls of many rows; machines without it refuse the engine"]


def _sample(config: BuildConfig, checkpoint: Checkpoint, plan: Plan, target: Target, notes: list[str]) -> Sample | None:
    """None, and why, where no speed can be predicted."""
    if not config.autotune or config.dry_run or config.ranks > 1:
        return None  # nothing is to be timed, there will be no engine, or one process is not all of it
    if isinstance(target, Tunable) and target.run_blocker() is not None:
        return None  # as `tune` has said
    room = None if config.max_mem is None else config.max_mem - base_memory(checkpoint)
    found = choose_sample(plan, target, room)
    if isinstance(found, str):
        notes.append(found)
        return None
    return found


def base_memory(checkpoint: Checkpoint) -> int:
    """Bytes beside what is made of the weights."""
    return BASE_MEMORY + GRAPH_COPIES * checkpoint.graph_path.stat().st_size


def common_notes(builds: Sequence[TargetBuild]) -> list[str]:
    """What holds for every target is said once, all else with the target's name."""
    notes: list[str] = []
    for target_build in builds:
        for note in target_build.notes:
            shared = all(note in other.notes for other in builds)
            said = note if shared else f"{target_build.target.name}: {note}"
            if said not in notes:
                notes.append(said)
    return notes


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "the graphs cannot be dumped there", where=str(folder), got=error.strerror, hint="choose another folder"
        ) from error


def _kv_dtype(config: BuildConfig, precision: Precision) -> DType:
    if config.kv_cache_dtype != "auto":
        return {"fp8": DType.F8}.get(config.kv_cache_dtype) or DType(config.kv_cache_dtype)
    return DType.BF16 if precision.dtype.is_quantised else precision.dtype
