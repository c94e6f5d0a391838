"""Checkpoint + calibration text → Checkpoint with quantised weights, the main path.

choose the products → the text through the model: each product's weight is quantised on its own inputs, and kept
(`walk.py`, `methods.py`, `unfinished.py`) → codes and scales beside the other weights, the Graph rewritten
(`rewrite.py`) → publish
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from ingot import __version__
from ingot.builder.build import graph_errors
from ingot.builder.calibrated.levels import Float32, Levels
from ingot.builder.calibrated.methods import (
    Found,
    Inputs,
    Wanted,
    quantise_product,
    quantise_stack,
    rows_at_a_time,
    squares_memory,
)
from ingot.builder.calibrated.rewrite import Fold, Leaf, StoredGraph
from ingot.builder.calibrated.tensors import NewTensor, Progress, copied, pieces, write_tensors
from ingot.builder.calibrated.text import text_hash
from ingot.builder.calibrated.text_model import TextModel
from ingot.builder.calibrated.unfinished import Unfinished, unfinished
from ingot.builder.calibrated.walk import TOKENS, Parts, walk, weight_name
from ingot.builder.expressions import WeightReader, check_sources, leaves, matrix_shape
from ingot.builder.graph import Graph
from ingot.builder.pack import WeightUse
from ingot.builder.precision import LM_HEAD
from ingot.builder.stored_weight import StoredWeight
from ingot.checkpoint import CALIBRATION, CHECKPOINT_FILES, GRAPH_FILE, Checkpoint, is_calibrated
from ingot.configs.quantize import QuantizeOptions
from ingot.dtypes import DType
from ingot.errors import UsageError
from ingot.output_dir import OutputDir
from ingot.plan import Step
from ingot.resource_estimate import ResourceEstimate
from ingot.tensor_file import TensorSpec

BASE_MEMORY = 160 << 20  # bytes: the process without weights or activations
WEIGHTS_FILE = "model.safetensors"
QUANTISING = "quantising matmuls"  # the stage of the progress


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProductReport:
    """method and format for people; loss, plain: relative error of the product's outputs on the text, and that of
    rounding to the nearest."""

    name: str
    format: str
    method: str
    loss: float
    plain: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeReport:
    """left: products that stay floats, and why."""

    output_dir: Path
    products: tuple[ProductReport, ...]
    left: tuple[str, ...]
    tokens: int
    resumed: int


def quantize(
    options: QuantizeOptions,
    checkpoint_dir: Path,
    texts: Sequence[str],
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> QuantizeReport:
    """Write the Checkpoint. texts: what calibrates it. Raises an IngotError; what products were made by then is kept
    for the next run of the same work, as it is after Ctrl-C."""
    checkpoint = Checkpoint.open(checkpoint_dir)
    checkpoint.require_float("quantise the original weights: a second time loses more")
    with graph_errors(checkpoint.graph_path):
        work = _Work.choose(options, checkpoint, texts)
    estimate = ResourceEstimate.at(options.output_dir, memory=work.memory, disk=2 * work.stored_bytes)
    say(f"quantising {estimate}")
    estimate.check_memory(options.max_mem)
    with (
        OutputDir(options.output_dir, is_previous=is_calibrated, parts=CHECKPOINT_FILES, say=say) as out,
        WeightReader(checkpoint) as reader,
    ):
        out.require_space(estimate.disk)
        with unfinished(out.target, work.fingerprint) as kept:
            resumed = sum(number in kept for number in range(len(work.chosen)))
            if resumed:
                say(f"continuing after {resumed} of {len(work.chosen)} matmuls")
            work.make(reader, kept, progress)
            reports = _write(work, kept, reader, texts, out.path, progress)
    return QuantizeReport(
        output_dir=options.output_dir,
        products=tuple(reports),
        left=work.left,
        tokens=sum(map(len, work.text.windows)),
        resumed=resumed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A step whose weight is quantised. leaves: the weights of the Checkpoint that it is made of, in order of rows;
    fold: what can take one."""

    name: str
    weight: str
    leaves: tuple[Leaf, ...]
    fold: Fold | None
    precision: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """chosen: the products in the order of the plan."""

    checkpoint: Checkpoint
    options: QuantizeOptions
    text: TextModel
    chosen: tuple[_Product, ...]
    left: tuple[str, ...]
    graph: StoredGraph
    fingerprint: str

    @classmethod
    def choose(cls, options: QuantizeOptions, checkpoint: Checkpoint, texts: Sequence[str]) -> "_Work":
        """Raises UsageError where the text or the recipe does not fit the model."""
        text = TextModel.open(checkpoint, texts, options.calibration_tokens)
        stored = StoredGraph(onnx.load(checkpoint.graph_path, load_external_data=False))
        found, left = _products(text, stored)
        if not found:
            raise UsageError(
                "the model has no matmul that can be quantised",
                got="; ".join(left),
                hint="build it with --precision, without ingot quantize or --recipe",
            )
        precisions = options.precisions([each.name for each in found])
        chosen = tuple(dataclasses.replace(each, precision=precisions[each.name]) for each in found)
        return cls(
            checkpoint=checkpoint,
            options=options,
            text=text,
            chosen=chosen,
            left=tuple(left),
            graph=stored,
            fingerprint=_fingerprint(checkpoint, options, text.windows, precisions),
        )

    @property
    def uses(self) -> dict[str, WeightUse]:
        return {use.name: use for use in self.text.model.lowering.uses}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the result, at most."""
        return sum(sums.nbytes for sums in self.checkpoint.config.weights.values())

    @property
    def memory(self) -> int:
        """Bytes: activations around a product; and either codes of it in some ways, squares of its inputs and copies of
        some rows, or what it gives with what it is made of."""
        tokens, shapes = (
            sum(map(len, self.text.windows)),
            [matrix_shape(self.uses[p.weight].tensor) for p in self.chosen],
        )
        width = min(columns for _, columns in shapes)  # of what goes from layer to layer

        def needed(weight_rows: int, columns: int) -> int:
            block = min(weight_rows, rows_at_a_time(columns)) * columns
            quantising = 4 * weight_rows * columns + 2 * squares_memory(columns) + 10 * 4 * block
            running = 4 * (tokens + 3 * min(tokens, TOKENS)) * weight_rows
            return 4 * tokens * (columns + 2 * width) + max(quantising, running)

        return BASE_MEMORY + max(itertools.starmap(needed, shapes))

    def make(self, reader: WeightReader, kept: Unfinished, progress: Progress) -> None:
        """Every product that is not kept yet; progress counts what these take."""
        numbers = {each.name: number for number, each in enumerate(self.chosen)}
        efforts = [0 if number in kept else self._effort(each) for number, each in enumerate(self.chosen)]

        def quantise(step: Step, weight: StoredWeight, parts: Parts) -> Sequence[Found]:
            number = numbers[step.name]
            progress(QUANTISING, sum(efforts[:number]), sum(efforts))
            if number not in kept:
                kept.write(number, _quantised(self.chosen[number], self.options, weight, parts))
            return kept.read(number)

        walk(self.text.plan, self.text.model.lowering.uses, reader, self.text.windows, list(numbers), quantise)
        progress(QUANTISING, sum(efforts), sum(efforts))

    def _effort(self, product: _Product) -> int:
        """Operations that grow fastest, in millions: those of every row with H."""
        weight_rows, columns = matrix_shape(self.uses[product.weight].tensor)
        return 1 + weight_rows * columns * columns // 10**6


def _quantised(product: _Product, options: QuantizeOptions, weight: StoredWeight, parts: Parts) -> list[Found]:
    weight_rows, columns = weight.shape[-2:]
    wanted = Wanted.of(product.precision, options.codes, columns, options.ways)
    if len(weight.shape) == 3:
        return quantise_stack(
            weight.read, weight_rows, weight.shape[0], lambda expert: Inputs(parts.get(expert, ()), columns), wanted
        )
    tied = None if product.fold is None else product.fold.tied
    return [quantise_product(weight.read, weight_rows, Inputs(parts[0], columns), wanted, tied)]


def _products(text: TextModel, stored: StoredGraph) -> tuple[list[_Product], list[str]]:
    """(products that can be quantised, what is left as it is and why)"""
    by_name, found, left, seen = {use.name: use for use in text.model.lowering.uses}, [], [], set[str]()
    for step in text.products():
        if step.name in text.steering or step.name == LM_HEAD:
            continue
        use = by_name[weight_name(step)]
        names = list(leaves(use.tensor))
        parts = [leaf for leaf in (stored.leaf(name) for name in names) if leaf is not None]
        if len(parts) != len(names) or sum(leaf.rows for leaf in parts) != matrix_shape(use.tensor)[0]:
            left.append(f"{step.name}: its weight is stored in a way that cannot be quantised")
        elif seen & set(names):
            left.append(f"{step.name}: its weight is shared with another matmul")
        else:
            fold = stored.fold_before(parts) if len(use.shape) == 2 else None
            found.append(_Product(name=step.name, weight=use.name, leaves=tuple(parts), fold=fold, precision=""))
        seen |= set(names)
    made = {leaf.name for each in found for leaf in each.leaves}
    return [
        each if each.fold is None or each.fold.divided in (None, *made) else dataclasses.replace(each, fold=None)
        for each in found
    ], left


def _fingerprint(
    checkpoint: Checkpoint, options: QuantizeOptions, windows: list[list[int]], precisions: Mapping[str, str]
) -> str:
    """What the products are made of."""
    sums = {name: [each.nbytes, each.crc32] for name, each in checkpoint.config.weights.items()}
    graph = hashlib.sha256(checkpoint.graph_path.read_bytes()).hexdigest()
    made_of = [__version__, graph, sums, windows, precisions, options.codes, options.ways]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _write(
    work: _Work, kept: Unfinished, reader: WeightReader, texts: Sequence[str], folder: Path, progress: Progress
) -> list[ProductReport]:
    """Fill the Checkpoint's directory."""
    reports, tensors, quantised, losses = [], list[NewTensor](), dict[str, str](), dict[str, float]()
    vectors = Graph.load(work.checkpoint.graph_path).surgeon.tensors()
    weights: list[tuple[Leaf, Levels, int, dict[str, NewTensor]]] = []  # no codes, which would be those of all products
    vectors_made: dict[str, str] = {}
    divisors: dict[str, Float32] = {}
    for number, product in enumerate(work.chosen):
        found = kept.read(number)
        report = _report(product, found)
        reports.append(report)
        for leaf, first in zip(product.leaves, np.cumsum([0, *(leaf.rows for leaf in product.leaves)]), strict=False):
            made = pieces(kept, number, leaf, int(first), found, divisors)
            tensors += made.values()
            weights.append((leaf, found[0].levels, found[0].group, made))
            quantised[leaf.name] = report.format
            losses[leaf.name] = float(f"{report.loss:.4g}")
        if (fold := found[0].fold) is not None:
            assert product.fold is not None, "a product is folded where something takes it"
            factors = np.empty(product.fold.tied.max() + 1, np.float32)
            factors[product.fold.tied] = fold
            if product.fold.divided is not None:
                divisors[product.fold.divided] = factors
            for name, offset in ((each.name, np.float32(each.offset)) for each in product.fold.vectors):
                check_sources(vectors[name], work.checkpoint)
                values = (reader.read_rows(vectors[name], 0, len(factors))[:, 0] + offset) / factors - offset
                vectors_made[name] = f"{name}/folded"
                spec = TensorSpec(name=vectors_made[name], dtype=DType.F32, shape=(len(factors),))
                tensors.append(NewTensor(spec=spec, read=functools.partial(iter, [values.astype(np.float32)])))
    others = _others(work, {leaf.name for leaf, *_ in weights})
    tensors += others
    places, sums = write_tensors(folder / WEIGHTS_FILE, tensors, progress)
    for leaf, levels, group, made in weights:
        work.graph.replace(leaf, levels, group, {kind: places[each.spec.name] for kind, each in made.items()})
    for name, fresh in vectors_made.items():
        work.graph.replace_vector(name, places[fresh], fresh)
    for each in others:
        work.graph.move(places[each.spec.name])
    (folder / GRAPH_FILE).write_bytes(work.graph.finish().SerializeToString())
    for file in work.checkpoint.companions():
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(work.checkpoint.path / file, folder / file)
    config = dataclasses.replace(
        work.checkpoint.config,
        ingot_version=__version__,
        weights={WEIGHTS_FILE: sums},
        sources={**work.checkpoint.config.sources, CALIBRATION: text_hash(texts)},
        quantised=quantised,
        losses=losses,
    )
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    return reports


def _report(product: _Product, found: Sequence[Found]) -> ProductReport:
    first, energy = found[0], sum(each.energy for each in found) or 1.0
    grain = f" g{first.group}" if first.group < first.codes.shape[1] else ""
    return ProductReport(
        name=product.name,
        format=f"ingot {first.levels.kind}{grain}, {first.method}",
        method=first.method,
        loss=float(np.sqrt(sum(each.loss for each in found) / energy)),
        plain=float(np.sqrt(sum(each.plain for each in found) / energy)),
    )


def _others(work: _Work, replaced: set[str]) -> list[NewTensor]:
    """What stays as it is."""
    return [
        NewTensor(
            spec=TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape),
            read=functools.partial(copied, work.checkpoint, tensor),
        )
        for tensor in work.graph.stored(work.checkpoint)
        if tensor.name not in replaced
    ]
