"""Engine + Checkpoint of the same shapes → Engine with the new weights, the main path. No pass runs, nothing is timed.

check the engine → read how its weights are made (`refit_record.py`) → pack the new ones → publish
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from ingot import __version__
from ingot.builder.build import ENGINE_FILES, MANIFEST_BYTES, graph_errors, process_memory
from ingot.builder.digests import checkpoint_digest
from ingot.builder.expressions import WeightReader
from ingot.builder.model_card import model_card, weight_sources
from ingot.builder.pack import Packer, WeightUse
from ingot.builder.parallel_map import cores
from ingot.builder.refit_record import RefitReport, read_record, record_name
from ingot.checkpoint import Checkpoint
from ingot.companions import check_companions, check_token_ids
from ingot.engine import is_engine, open_engine, read_manifest, read_plan
from ingot.engine_writer import RankFile, write_engine
from ingot.errors import EngineError
from ingot.manifest import Manifest, TargetEntry, rank_file
from ingot.output_dir import OutputDir
from ingot.plan import Plan
from ingot.plugins.target import Progress
from ingot.resource_estimate import ResourceEstimate


def refit(
    engine_dir: Path,
    checkpoint_dir: Path,
    output_dir: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> RefitReport:
    """Write the engine with the weights of another Checkpoint; output_dir None: in place of the old one.

    The result has the bytes of a build of that Checkpoint with the same options. Raises an IngotError; then, as after
    Ctrl-C, the old engine is as it was.
    """
    begin = time.monotonic()
    manifest = _refittable(engine_dir)
    open_engine(engine_dir).close()  # which checks every byte
    checkpoint = Checkpoint.open(checkpoint_dir)
    check_companions(checkpoint.path)
    entries = {entry.files: entry for entry in reversed((manifest, *manifest.others))}
    plans = {target: read_plan(engine_dir, target=target) for target in manifest.targets}
    with graph_errors(checkpoint.graph_path):
        uses = {files: read_record(engine_dir / record_name(files), checkpoint) for files in entries}
        tokens = check_token_ids(checkpoint.path, plans[manifest.target].vocab_size)
    target_dir = engine_dir if output_dir is None else output_dir
    weights = sum(use.nbytes for each in uses.values() for use in each)
    files = [checkpoint.path / name for name in checkpoint.companions()]
    disk = sum((engine_dir / rank_file(0, each)).stat().st_size for each in entries) + MANIFEST_BYTES
    estimate = ResourceEstimate.at(
        target_dir, memory=process_memory(checkpoint), disk=disk + sum(file.stat().st_size for file in files)
    )
    say(f"the refit {estimate}")
    fresh = dataclasses.replace(
        _with_sources(manifest, uses, checkpoint),
        ingot_version=__version__,
        model=model_card(checkpoint, plans[manifest.target]),
        eos_ids=tokens.eos,
        bos_id=tokens.bos,
        pad_id=tokens.pad,
        parts=(),
        checkpoint=checkpoint_digest(checkpoint),
        sources=checkpoint.config.sources,
    )
    records = {record_name(each): (engine_dir / record_name(each)).read_bytes() for each in entries}
    with (
        OutputDir(target_dir, is_previous=is_engine, parts=ENGINE_FILES, say=say) as out,
        WeightReader(checkpoint) as reader,
    ):
        out.require_space(estimate.disk)
        packed = _Packed(reader, fresh, plans, uses, progress, weights)
        write_engine(out.path, fresh, packed.contents, files, checkpoint.path, records, packed.finish)
    bad = {name: count for each in packed.packers.values() for name, count in each.nonfinite.items()}
    return RefitReport(
        output_dir=target_dir,
        targets=manifest.targets,
        nbytes=weights,
        seconds=time.monotonic() - begin,
        notes=tuple(f"weight {name} holds {count} values that are NaN or infinite" for name, count in bad.items()),
    )


class _Packed:
    """The rank files of the new engine."""

    def __init__(
        self,
        reader: WeightReader,
        manifest: Manifest,
        plans: dict[str, Plan],
        uses: dict[str, list[WeightUse]],
        progress: Progress,
        total: int,
    ) -> None:
        self._done = 0
        self.packers: dict[str, Packer] = {}
        self.contents: list[RankFile] = []
        self._files = {entry.target: entry.files for entry in (manifest, *manifest.others)}

        def advance(nbytes: int) -> None:
            self._done += nbytes
            progress("packing weights", self._done, total)

        for files, each in uses.items():
            own = {target: plan for target, plan in plans.items() if self._files[target] == files}
            self.packers[files] = Packer(reader, each, next(iter(own.values())).weights, cores())
            blocks = self.packers[files].blocks(advance)
            self.contents.append(RankFile(files=files, plans=own, blocks=blocks))

    def finish(self, manifest: Manifest) -> Manifest:
        """With what packing has changed."""
        return manifest.with_weight_errors({target: self.packers[each].errors for target, each in self._files.items()})


def _refittable(engine_dir: Path) -> Manifest:
    """The manifest of an engine that takes new weights. Raises EngineError."""
    manifest = read_manifest(engine_dir)
    if any(manifest.part(record_name(entry.files)) is None for entry in (manifest, *manifest.others)):
        raise EngineError(
            "the engine takes no new weights: it was built without --refit",
            where=str(engine_dir),
            hint="build it again with ingot build --refit; later weights then need no build",
        )
    if manifest.ingot_version != __version__:
        raise EngineError(
            "the engine was built by another version of ingot, which may pack weights otherwise",
            where=str(engine_dir),
            expected=__version__,
            got=manifest.ingot_version,
            hint="build it again with ingot build --refit",
        )
    return manifest


def _with_sources(manifest: Manifest, uses: dict[str, list[WeightUse]], checkpoint: Checkpoint) -> Manifest:
    """What each target says of its weights; no results of ingot verify, which were those of the old ones."""

    def sources(entry: TargetEntry) -> dict[str, str]:
        return weight_sources(uses[entry.files], checkpoint)

    others = tuple(
        dataclasses.replace(each, weight_sources=sources(each), weight_errors={}, verification={})
        for each in manifest.others
    )
    return dataclasses.replace(
        manifest, weight_sources=sources(manifest), weight_errors={}, verification={}, others=others
    )
