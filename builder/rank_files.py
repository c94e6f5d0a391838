"""Which targets of an engine share a rank file: those whose weights have the same bytes in the same places.

cuda/sm89 ─┐                                   cpu/avx2 ─┐
cuda/sm90 ─┴▶ rank0.engine: rows of weights,   cpu/amx ──┴▶ rank0.cpu.engine: the same weights in panels
              then a cubin for each
"""

import dataclasses
from collections.abc import Iterator, Sequence

from ingot.builder.expressions import key
from ingot.builder.lower import Lowering
from ingot.builder.pack import add_constants
from ingot.builder.plan_targets import TargetBuild
from ingot.engine_writer import Block
from ingot.plan import Plan
from ingot.plugins.target import Constant


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFilePlan:
    """One rank file.

    rank     whose it is
    files    as in `ingot.manifest.TargetEntry`
    lowering of the weights
    plans    by target, with their constants
    """

    files: str
    rank: int
    lowering: Lowering
    plans: dict[str, Plan]
    constants: tuple[tuple[Constant, ...], ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the section, which is the same for every plan."""
        return next(iter(self.plans.values())).weight_bytes

    def constant_blocks(self) -> Iterator[Block]:
        """Behind the packed weights, in the order of the file, each once."""
        written: set[int] = set()
        for plan, constants in zip(self.plans.values(), self.constants, strict=True):
            places = {weight.name: weight.pieces[0].offset for weight in plan.weights}
            for constant in constants:
                if places[constant.name] not in written:
                    written.add(places[constant.name])
                    yield places[constant.name], memoryview(constant.data)


def plan_rank_files(builds: Sequence[TargetBuild], constants: Sequence[tuple[Constant, ...]]) -> list[RankFilePlan]:
    """Those of every rank, in order. constants: of each build."""
    by_rank = zip(*(target_build.ranks for target_build in builds), strict=True)
    return [each for rank, own in enumerate(by_rank) for each in _of_rank(rank, own, constants)]


def _of_rank(rank: int, builds: Sequence[TargetBuild], constants: Sequence[tuple[Constant, ...]]) -> list[RankFilePlan]:
    """A rank file for each kind of weights, in the order of the builds; the first has no word in its file's name."""
    alike: dict[object, list[int]] = {}
    for index, target_build in enumerate(builds):
        sources = tuple((use.name, key(use.tensor)) for use in target_build.lowering.uses)
        alike.setdefault((target_build.plan.weights, sources), []).append(index)
    rank_files: list[RankFilePlan] = []
    for members in alike.values():
        own = [builds[index] for index in members]
        added = [constants[index] for index in members]
        taken = [each.files for each in rank_files]
        plans = add_constants([target_build.plan for target_build in own], added)
        rank_files.append(
            RankFilePlan(
                files=_word(own[0].target.name, taken) if rank_files else "",
                rank=rank,
                lowering=own[0].lowering,
                plans=dict(zip((target_build.target.name for target_build in own), plans, strict=True)),
                constants=tuple(added),
            )
        )
    return rank_files


def _word(target: str, taken: Sequence[str]) -> str:
    """The family of the first target, or its whole name where another file has that word."""
    family = target.split("/")[0]
    return target.replace("/", "-") if family in taken else family
