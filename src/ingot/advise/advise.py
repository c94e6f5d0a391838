"""Checkpoint + calibration text → recipes on the front of size, speed and loss, the main path.

what each product loses by each precision (`builder/sensitivity.py`) → how much each kind of product matters, by builds
in which it alone is small → recipes (`points.py`) → each is built and measured (`measure.py`) → the front, the pick

Losses of all points are measured. The additive model only proposes mixtures.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.advise.front import Advice, AdviseOptions, Point, SpeedCheck, by_front, pick
from ingot.advise.measure import Reference, length_for, request_speed, step_speed
from ingot.advise.measured import Measured
from ingot.advise.points import LADDER, Choice, LossModel, kind_of, only, recipe_of, uniform, words
from ingot.builder.build import BuildReport, build, graph_errors
from ingot.builder.calibrated.text_model import TextModel
from ingot.builder.expressions import WeightReader, stored_dtypes
from ingot.builder.lower import cache_groups
from ingot.builder.sensitivity import ProductLoss, product_losses
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.recipe import Recipe
from ingot.configs.sizes import format_bytes
from ingot.dtypes import DType
from ingot.errors import CapacityError
from ingot.plugins.registry import find_target
from ingot.plugins.target import Tunable

ACTIVATIONS = ("bf16", "int8")
CHECKED = ("w4g128", "w8")  # weights of points that whole requests check
MEASURING = "measuring recipes"

Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


def advise(
    options: AdviseOptions,
    checkpoint_dir: Path,
    texts: Sequence[str],
    work: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    say: Say = lambda line: None,
) -> Advice:
    """work: where engines lie while they are measured. Raises an IngotError: UsageError where no point keeps to the
    budgets, CapacityError where the disk has no room."""
    checkpoint = Checkpoint.open(checkpoint_dir)
    checkpoint.require_float("take the original weights; `ingot build` keeps the codes of this Checkpoint")
    with tempfile.TemporaryDirectory(prefix="ingot-advise-", dir=work) as folder:
        with graph_errors(checkpoint.graph_path):
            trial = _Trial.begin(options, checkpoint, texts, Path(folder), progress, say)
        found = trial.points()
        checks, perplexity = trial.checks(found), trial.perplexity
    points = by_front(found, options.batches)
    return Advice(
        target=find_target("cpu").name,
        tokens=sum(map(len, trial.text.windows)),
        perplexity=perplexity,
        points=tuple(points),
        checks=tuple(checks),
        picked=pick(options, points, perplexity) if options.picks else None,
    )


@dataclasses.dataclass(kw_only=True)
class _Trial:
    """Builds and measures engines one by one; only the reference's logits stay."""

    options: AdviseOptions
    checkpoint: Checkpoint
    text: TextModel
    folder: Path
    known: Measured
    progress: Progress
    source: str
    products: list[ProductLoss]
    done: int = 0
    total: int = 0

    @classmethod
    def begin(
        cls,
        options: AdviseOptions,
        checkpoint: Checkpoint,
        texts: Sequence[str],
        folder: Path,
        progress: Progress,
        say: Say,
    ) -> "_Trial":
        text = TextModel.open(checkpoint, texts, options.tokens)
        uses = text.model.lowering.uses
        stored = {dtype for use in uses if use.panels for dtype, _ in stored_dtypes(use.tensor)}
        source = "bf16" if stored == {DType.BF16} else "f32"
        numbers = sum(use.nbytes for use in uses) // DType.F32.itemsize
        logits = 4 * sum(map(len, text.windows)) * text.model.shape.vocab_size
        disk, free = (6 if source == "bf16" else 8) * numbers + logits, shutil.disk_usage(folder).free
        say(f"measuring takes at most {format_bytes(disk)} of disk in {folder} ({format_bytes(free)} are free)")
        if disk > free:
            raise CapacityError(
                "there is no room for the engines that are measured",
                where=str(folder),
                expected=format_bytes(disk),
                got=format_bytes(free),
                hint="name another directory with --work_dir",
            )
        known = Measured(options.measured, _made_of(checkpoint, text))

        def losses() -> list[dict[str, Any]]:
            with WeightReader(checkpoint) as reader:
                return [dataclasses.asdict(each) for each in product_losses(text, reader, LADDER, progress)]

        products = [ProductLoss(**each) for each in known.get_or_measure("products", losses)]
        return cls(
            options=options,
            checkpoint=checkpoint,
            text=text,
            folder=folder,
            known=known,
            progress=progress,
            source=source,
            products=products,
        )

    def points(self) -> list[Point]:
        """Every recipe, measured."""
        kinds = list(dict.fromkeys(kind_of(each.name) for each in self.products))
        alike = [uniform(self.products, each) for each in LADDER]
        self.total = len(kinds) + len(ACTIVATIONS) * (len(alike) + self.options.mixtures)
        self.progress(MEASURING, 0, self.total)
        base = self._loss(alike[-1], "bf16")
        matters = {kind: self._loss(only(self.products, kind), "bf16") - base for kind in kinds}
        model = LossModel.fit(self.products, matters)
        found = []
        for choice in [*alike, *model.mixtures(self.options.mixtures)]:
            quantised = any(each.startswith("w") for each in choice.values())
            for activations in ACTIVATIONS if quantised else ACTIVATIONS[:1]:
                found.append(self._point(choice, activations, base + model.predicted(choice)))
        self.progress(MEASURING, self.total, self.total)
        return found

    def checks(self, points: Sequence[Point]) -> list[SpeedCheck]:
        """Two points whose speed is measured in whole requests."""
        batches, found = self.options.batches, []
        for weights in CHECKED:
            point = next((each for each in points if (each.weights, each.activations) == (weights, "int8")), None)
            if point is None:
                continue
            measure = functools.partial(self._requests, point.recipe)
            speeds = self.known.get_or_measure(f"requests of {batches}: {point.recipe}", measure)
            found += [
                SpeedCheck(
                    weights=weights,
                    activations=point.activations,
                    batch=batch,
                    predicted=point.decode[batch],
                    measured=speeds[str(batch)],
                )
                for batch in batches
            ]
        return found

    def _requests(self, recipe: str) -> dict[str, float]:
        self._build(recipe)
        return {str(batch): speed for batch, speed in request_speed(self._engine, self.options.batches).items()}

    @property
    def _engine(self) -> Path:
        return self.folder / "engine"

    @functools.cached_property
    def reference(self) -> Reference:
        """Made when a loss is first measured."""
        config = BuildConfig(precision=self.source, activations="f32", kv_cache_dtype="f32", autotune=False)
        self._build_config(config)
        most = self.text.model.shape.positions - 1  # an engine draws a token after them
        return Reference(self._engine, [each[:most] for each in self.text.windows], self.folder / "logits")

    @property
    def perplexity(self) -> float:
        """What the exact model has on the text."""
        return float(self.known.get_or_measure("perplexity", lambda: self.reference.perplexity))

    def _build(self, recipe: str, *, timed: bool = True) -> BuildReport:
        """As `--config` reads it, so that what is measured is what the file says."""
        file = self.folder / "recipe.toml"
        file.write_text(recipe, encoding="utf-8")
        read = Recipe.load(file)
        return self._build_config(
            BuildConfig(
                precision=read.precision or "auto",
                lm_head_precision=read.lm_head_precision,
                activations=read.activations or "bf16",
                layers=read.layers,
                autotune=timed and self.options.autotune,
            )
        )

    def _build_config(self, config: BuildConfig) -> BuildReport:
        """The engine takes the place of the one before."""
        longest = max(map(len, self.text.windows))
        positions = self.text.model.shape.positions
        length = min(max(longest + 1, length_for(positions)), positions)
        sized = dataclasses.replace(
            config,
            max_batch_size=max(self.options.batches),
            max_input_len=max(1, length - 1),
            max_seq_len=length,
            max_num_tokens=max(length, max(self.options.batches)),
            timing_cache=self.folder / "timings.json" if config.autotune else None,
        )
        return build(sized, self.checkpoint.path, self._engine)

    def _loss(self, choice: Choice, activations: str) -> float:
        """KL alone."""
        recipe = recipe_of(choice, activations).to_toml()

        def measure() -> float:
            reference = self.reference
            self._build(recipe, timed=False)
            return reference.loss(self._engine).kl

        found = float(self.known.get_or_measure(f"KL: {recipe}", measure))
        self._advance()
        return found

    def _point(self, choice: Choice, activations: str, modelled: float) -> Point:
        recipe, batches = recipe_of(choice, activations).to_toml(), self.options.batches

        def measure() -> dict[str, Any]:
            reference = self.reference
            nbytes = self._build(recipe).plan.weight_bytes
            speed, loss = step_speed(self._engine, batches), reference.loss(self._engine)
            return {"nbytes": nbytes, **dataclasses.asdict(speed), **dataclasses.asdict(loss)}

        found = dict(self.known.get_or_measure(f"point of {batches}: {recipe}", measure))
        self._advance()
        return Point(
            weights=words(choice),
            activations=activations,
            recipe=recipe,
            serving=found["nbytes"] + self._cache_bytes(),
            modelled_kl=modelled if activations == "bf16" else None,
            decode={int(batch): speed for batch, speed in found.pop("decode").items()},
            **found,
        )

    def _cache_bytes(self) -> int:
        """KV cache of the sequences that are asked for, in bf16."""
        shape = self.text.model.shape
        length = min(self.options.context, shape.positions)
        limits = dataclasses.replace(self.text.plan.limits, max_seq_len=length + 1)
        groups = cache_groups(shape, limits, BuildConfig().tokens_per_block, DType.BF16, frees_windows=True)
        return self.options.batch * sum(group.blocks_of(length) * group.block_bytes for group in groups)

    def _advance(self) -> None:
        self.done += 1
        self.progress(MEASURING, self.done, self.total)


def _made_of(checkpoint: Checkpoint, text: TextModel) -> str:
    """What the figures are of."""
    target = find_target("cpu")
    machine = target.machine() if isinstance(target, Tunable) else target.name
    sums: Mapping[str, Any] = {name: [each.nbytes, each.crc32] for name, each in checkpoint.config.weights.items()}
    graph = hashlib.sha256(checkpoint.graph_path.read_bytes()).hexdigest()
    made_of = [__version__, machine, graph, sums, text.windows]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
