"""Checkpoint → Engine, the main path.

    read the graph → structure passes → for every target (`plan_targets`): precision and limits → target passes → lower
    → plan memory and weights → compile kernels → share rank files → check memory and disk
    → stream the packed weights → publish

The graph is the only source: config.json of the checkpoint only adds facts for people to the manifest.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ingot import __version__
from ingot.builder.digests import checkpoint_digest, program_digest
from ingot.builder.draft_engine import check_draft, check_plans, draft_config, draft_files, planned_only
from ingot.builder.expressions import WeightReader
from ingot.builder.model_card import layout_card, model_card, weight_sources
from ingot.builder.pack import BLOCK_BYTES, Packer
from ingot.builder.parallel_map import cores
from ingot.builder.passes.base import PassReport
from ingot.builder.plan_targets import TargetBuild, base_memory, common_notes, plan_targets
from ingot.builder.predict import Prediction, predict
from ingot.builder.rank_files import RankFilePlan, plan_rank_files
from ingot.builder.refit_record import make_record, record_name, require_refittable
from ingot.builder.tune import MEMORY as TUNING_MEMORY
from ingot.checkpoint import COMPANION_FILES, Checkpoint
from ingot.companions import check_companions, check_token_ids, tokenizer_memory
from ingot.configs.build import BuildConfig
from ingot.configs.sizes import format_bytes
from ingot.configs.token_ids import TokenIds
from ingot.engine import SECTION_ALIGNMENT, is_engine
from ingot.engine_writer import RankFile, write_engine
from ingot.errors import BuildError, CheckpointError, IngotError
from ingot.manifest import DRAFT, MANIFEST_NAME, Manifest, TargetEntry, rank_file
from ingot.output_dir import OutputDir
from ingot.plan import Plan, plans_to_json
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.registry import find_targets
from ingot.plugins.target import CompilesGraph, Constant, File, Progress, SelfTuning, Target, file_name
from ingot.resource_estimate import ResourceEstimate

MANIFEST_BYTES = 1 << 20  # of disk: manifest and the ends of sections
CODE_BYTES = 2 << 20  # of disk: machine code for one GPU target, at most
NETWORK_MEMORY = 512 << 20  # of the process in which another compiler makes a network
NETWORK_BYTES = 2 << 20  # of disk: a layer of a network that another compiler makes, at most
BLOCK_COPIES = 7  # a chunk read, a block as stored, as float32, rounded, packed; one in each thread, and one to write

_OWN_FILES = (MANIFEST_NAME, "rank*", "refit*.onnx", *COMPANION_FILES)
ENGINE_FILES = (*_OWN_FILES, *(f"{DRAFT}/{name}" for name in _OWN_FILES))  # patterns of all that an engine consists of
CAPABILITIES = ("context_logits", "generation_logits", "greedy", "log_probs", "paged_kv", "sampling")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetReport:
    """What a build did for one target.

    file        its rank file
    passes      what every pass did
    timings     a line for every product and number of rows that was timed
    prediction  how fast it will be here, None where that is not known (a note says why)
    """

    target: str
    precision: str
    file: str
    plan: Plan
    passes: tuple[PassReport, ...]
    timings: tuple[str, ...]
    prediction: Prediction | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """What a build did, or would do (dry_run).

    targets      in the order in which they were asked for
    notes        one sentence each: choices, weights that are not finite
    lowered      one sentence for each default limit that is lowered to what the model allows
    memory       bytes the build was expected to need at most
    engine_bytes of all rank files
    """

    output_dir: Path
    dry_run: bool
    targets: tuple[TargetReport, ...]
    notes: tuple[str, ...]
    lowered: tuple[str, ...]
    memory: int
    engine_bytes: int
    seconds: float

    @property
    def target(self) -> str:
        """Name of the first target."""
        return self.targets[0].target

    @property
    def precision(self) -> str:
        """Precision of the first target."""
        return self.targets[0].precision

    @property
    def plan(self) -> Plan:
        """Plan of the first target."""
        return self.targets[0].plan

    @property
    def passes(self) -> tuple[PassReport, ...]:
        """Reports of the first target's passes."""
        return self.targets[0].passes

    @property
    def prediction(self) -> Prediction | None:
        """Predicted speed of the first target."""
        return self.targets[0].prediction


def build(
    config: BuildConfig,
    checkpoint_dir: Path,
    output_dir: Path,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda line: None,
) -> BuildReport:
    """Write an Engine for one or more targets. say: gets the estimate of memory and disk before the first byte is
    written.

    Raises UsageError (options, the output directory), CheckpointError (the source), BuildError (what cannot be built),
    CapacityError (memory, disk). Then, as after Ctrl-C, no output is left behind.
    """
    begin, checkpoint = time.monotonic(), Checkpoint.open(Path(checkpoint_dir))
    targets = find_targets(config.target)
    if config.draft_dir is not None:
        check_draft(config, checkpoint, targets)
    if not config.dry_run:
        _require_buildable(targets)
    _resource_estimate(config, checkpoint, targets, output_dir, 0).check_memory(config.max_mem)
    check_companions(checkpoint.path)
    notes: list[str] = []
    with graph_errors(checkpoint.graph_path):
        builds = plan_targets(config, checkpoint, targets, progress)
        if config.refit:
            require_refittable(builds)
        tokens = check_token_ids(checkpoint.path, builds[0].plan.vocab_size)
        draft = draft_config(config, builds[0].plan.limits)
        if config.draft_dir is not None:  # what cannot be built is refused before the work begins
            check_plans(builds[0].plan, build(planned_only(draft), config.draft_dir, output_dir).plan)
        rank_files = plan_rank_files(builds, [()] * len(builds))
        engine_bytes = sum(map(_engine_bytes, rank_files)) + _made_bytes(builds)
        samples = [target_build.sample.memory for target_build in builds if target_build.sample is not None]
        estimate = _resource_estimate(config, checkpoint, targets, output_dir, engine_bytes, max(samples, default=0))
        say(f"the build {estimate}")
        if not config.dry_run:
            with OutputDir(Path(output_dir), is_previous=is_engine, parts=ENGINE_FILES, say=say) as out:
                out.require_space(estimate.disk)
                rank_files = plan_rank_files(
                    builds, [_constants(target_build, progress, say) for target_build in builds]
                )
                made = _files(builds, config, progress, say)
                if config.refit:
                    made |= {
                        record_name(each.files): make_record(each.lowering.uses, checkpoint) for each in rank_files
                    }
                if config.draft_dir is not None:
                    say("building the draft model")
                    build(draft, config.draft_dir, out.path / DRAFT, progress, say)
                notes = _write(
                    builds, rank_files, made, checkpoint, tokens, out.path, progress, config.workers or cores()
                )
    reports = tuple(
        _target_report(target_build, _rank_file_of(target_build, rank_files), Path(output_dir), notes)
        for target_build in builds
    )
    return BuildReport(
        output_dir=Path(output_dir),
        dry_run=config.dry_run,
        targets=reports,
        notes=(*common_notes(builds), *notes),
        lowered=builds[0].lowered,  # the graph and the limits are the same for all
        memory=estimate.memory,
        engine_bytes=sum(map(_engine_bytes, rank_files)),
        seconds=time.monotonic() - begin,
    )


def _require_buildable(targets: Sequence[Target]) -> None:
    """All of them, before the work begins for one."""
    reasons = {target.name: reason for target in targets if (reason := target.build_blocker()) is not None}
    if reasons:
        raise BuildError(
            f"this machine cannot build for {', '.join(reasons)}",
            got="; ".join(dict.fromkeys(reasons.values())),
            hint="`ingot doctor --all` says what is missing",
        )


@contextlib.contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """A graph may be malformed in more ways than passes can foresee: say so in words, whatever they stumble over."""
    try:
        yield
    except (IngotError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            "the graph of the Checkpoint cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            hint="convert the model again; if that does not help, this is a bug of ingot",
        ) from error


def _resource_estimate(
    config: BuildConfig,
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    output_dir: Path,
    engine_bytes: int,
    sample_memory: int = 0,
) -> ResourceEstimate:
    """Memory before any work; disk as soon as the size of the engine is known. sample_memory: of a prediction."""
    tuning = TUNING_MEMORY if config.autotune else 0
    memory = process_memory(checkpoint, max(tuning, sample_memory), config.workers)
    carried = sum((checkpoint.path / name).stat().st_size for name in checkpoint.companions())
    memory += NETWORK_MEMORY if any(isinstance(target, CompilesGraph) for target in targets) else 0
    return ResourceEstimate.at(output_dir, memory=memory, disk=engine_bytes + MANIFEST_BYTES + carried)


def process_memory(checkpoint: Checkpoint, other: int = 0, workers: int | None = None) -> int:
    """Bytes that packing needs. other: what is done before or after it. workers: of a BuildConfig."""
    blocks = ((workers or cores()) + 1) * BLOCK_COPIES * BLOCK_BYTES
    return base_memory(checkpoint) + max(blocks, other, tokenizer_memory(checkpoint.path))


def _constants(target_build: TargetBuild, progress: Progress, say: Say) -> tuple[Constant, ...]:
    begin = time.monotonic()
    constants = target_build.target.extra_sections(target_build.plan, progress)
    if constants:
        nbytes = sum(len(constant.data) for constant in constants)
        seconds = time.monotonic() - begin
        say(f"compiled {format_bytes(nbytes)} of machine code for {target_build.target.name} in {seconds:.1f} s")
    return constants


def _made_bytes(builds: Sequence[TargetBuild]) -> int:
    """What compilers will make, about."""
    layers = sum(
        target_build.plan.num_layers for target_build in builds if isinstance(target_build.target, CompilesGraph)
    )
    return CODE_BYTES * sum(target_build.target.on_gpu for target_build in builds) + NETWORK_BYTES * layers


def _compile(target: Target, graph: OpGraph, plan: Plan, config: BuildConfig, progress: Progress) -> tuple[File, ...]:
    if isinstance(target, SelfTuning):
        return target.compile_timed(graph, plan, progress, cache=config.timing_cache, timed=config.autotune)
    assert isinstance(target, CompilesGraph), "it was given a graph"
    return target.compile(graph, plan, progress)


def _files(builds: Sequence[TargetBuild], config: BuildConfig, progress: Progress, say: Say) -> dict[str, bytes]:
    """What targets store beside the rank files, by name."""
    made: dict[str, bytes] = {}
    for target_build in builds:
        if target_build.graph is None:
            continue
        begin, word = time.monotonic(), target_build.target.name if made else ""
        compiled = _compile(target_build.target, target_build.graph, target_build.plan, config, progress)
        named = {file_name(each.suffix, word): each.data for each in compiled}
        sizes = ", ".join(f"{name} of {format_bytes(len(data))}" for name, data in named.items())
        say(f"made {sizes} for {target_build.target.name} in {time.monotonic() - begin:.1f} s")
        made |= named
    return made


def _write(
    builds: Sequence[TargetBuild],
    rank_files: Sequence[RankFilePlan],
    made: Mapping[str, bytes],
    checkpoint: Checkpoint,
    tokens: TokenIds,
    directory: Path,
    progress: Progress,
    workers: int,
) -> list[str]:
    """Fill the engine directory; returns notes. made: further files, by name. workers: threads that pack."""
    total, done = sum(use.nbytes for each in rank_files for use in each.lowering.uses), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("packing weights", done, total)

    packers: list[Packer] = []

    def content(reader: WeightReader, each: RankFilePlan) -> RankFile:
        weights = next(iter(each.plans.values())).weights
        packers.append(Packer(reader, each.lowering.uses, weights, workers))
        blocks = itertools.chain(packers[-1].blocks(advance), each.constant_blocks())
        return RankFile(files=each.files, plans=each.plans, blocks=blocks, rank=each.rank)

    with WeightReader(checkpoint) as reader:
        files = [checkpoint.path / name for name in checkpoint.companions()]
        contents = [content(reader, each) for each in rank_files]
        manifest = _manifest(builds, rank_files, checkpoint, tokens)

        def finish(manifest: Manifest) -> Manifest:
            errors: dict[str, dict[str, float]] = {}
            for packer, own in zip(packers, rank_files, strict=True):
                for target in own.plans:
                    _keep_largest(errors.setdefault(target, {}), packer.errors)
            return manifest.with_weight_errors(errors)

        inside = draft_files(directory / DRAFT)
        write_engine(directory, manifest, contents, files, checkpoint.path, made, finish, inside)
    nonfinite = {name: count for packer in packers for name, count in packer.nonfinite.items()}
    return [f"weight {name} holds {count} values that are NaN or infinite" for name, count in nonfinite.items()]


def _keep_largest(errors: dict[str, float], more: Mapping[str, float]) -> None:
    """Several ranks may have shares of one weight: its error is the largest of theirs."""
    for name, error in more.items():
        errors[name] = max(error, errors.get(name, 0.0))


def _manifest(
    builds: Sequence[TargetBuild], rank_files: Sequence[RankFilePlan], checkpoint: Checkpoint, tokens: TokenIds
) -> Manifest:
    """Everything but the parts, which are made by writing."""
    first, *others = (
        TargetEntry(
            target=target_build.target.name,
            precision=str(target_build.precision),
            files=_rank_file_of(target_build, rank_files).files,
            program=program_digest(target_build.whole),
            activation_errors=target_build.activation_errors,
            weight_sources=weight_sources(target_build.lowering.uses, checkpoint),
            lost_codes=target_build.lost_codes,
            built_with=target_build.target.toolchain(),
        )
        for target_build in builds
    )
    plan = builds[0].plan
    return Manifest(
        target=first.target,
        precision=first.precision,
        files=first.files,
        program=first.program,
        built_with=first.built_with,
        activation_errors=first.activation_errors,
        weight_sources=first.weight_sources,
        lost_codes=first.lost_codes,
        others=tuple(others),
        ingot_version=__version__,
        model={**model_card(checkpoint, builds[0].whole), **layout_card(plan, len(builds[0].ranks))},
        limits=plan.limits,
        capabilities=CAPABILITIES,
        ranks=len(builds[0].ranks),
        eos_ids=tokens.eos,
        bos_id=tokens.bos,
        pad_id=tokens.pad,
        parts=(),
        checkpoint=checkpoint_digest(checkpoint),
        sources=checkpoint.config.sources,
    )


def _target_report(target_build: TargetBuild, own: RankFilePlan, output_dir: Path, notes: list[str]) -> TargetReport:
    """The engine is there by now, and so is what a prediction runs."""
    file = rank_file(0, own.files)
    found = (
        None if target_build.sample is None else predict(target_build.sample, output_dir / file, target_build.target)
    )
    if isinstance(found, str):
        notes.append(found)
    return TargetReport(
        target=target_build.target.name,
        precision=str(target_build.precision),
        file=file,
        plan=own.plans[target_build.target.name],
        passes=target_build.reports,
        timings=target_build.timings,
        prediction=None if isinstance(found, str) else found,
    )


def _rank_file_of(target_build: TargetBuild, rank_files: Sequence[RankFilePlan]) -> RankFilePlan:
    return next(each for each in rank_files if target_build.target.name in each.plans)


def _engine_bytes(own: RankFilePlan) -> int:
    text = len(plans_to_json(own.plans).encode())
    return -(-(4096 + text) // SECTION_ALIGNMENT) * SECTION_ALIGNMENT + own.weight_bytes
