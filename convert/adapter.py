"""A LoRA adapter, as PEFT saves it, merged into its base model while the weights are read.

    W + scale * B A                          scale = alpha / r; with use_rslora alpha / sqrt(r)
    m * rows of (W + scale * B A) / norms    with use_dora, whose magnitudes m are stored beside A and B

A [r, in] is read whole, B [out, r] a block at a time; of a token table the other way round. Sums are float64, and are
rounded once, to the type of W. Weights that the adapter holds whole (modules_to_save, biases) stand in the place of the
model's.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.configs.read import Section
from ingot.convert.pickled import read_pickled
from ingot.convert.quantised.patterns import matches
from ingot.convert.source import ADAPTER_FILE
from ingot.convert.weights import Bits
from ingot.convert.wrapped import text_name
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import CheckpointError, ConfigError, MissingModelError, UnsupportedModelError, spelled
from ingot.tensor_file import StoredTensor, read_elements, read_header, read_rows

_FILES = {"adapter_model.safetensors": read_header, "adapter_model.bin": read_pickled}
_BLOCK = 1 << 20  # elements that are summed at a time
_FLOATS = DType.F32, DType.F16, DType.BF16
_PREFIX = "base_model.model."
_PART = re.compile(  # of a module's tensor: which part it is; older files name the adapter, too
    r"(?P<module>.+)\.(?:lora_(?P<embedding>embedding_)?(?P<factor>[AB])|(?P<magnitudes>lora_magnitude_vector))"
    r"(?:\.default)?(?:\.weight)?"
)
_WRAPPED = ".modules_to_save", ".base_layer"  # parts of the names of whole weights
_SAME_BASE = "true", "false", "gaussian", "orthogonal", "eva"  # ways to begin training that leave the base as it was
MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload), and convert the result"

# Keys of adapter_config.json that change what a model computes in other ways: what to say of them.
_REFUSED = {
    "alora_invocation_tokens": "the adapter is active from certain tokens on (aLoRA), so it cannot be merged",
    "arrow_config": "the adapter chooses among others for each token (Arrow), so it cannot be merged",
    "layer_replication": "the adapter repeats layers of its base model",
    "lora_bias": "the adapter adds biases to its matrices (lora_bias)",
    "target_parameters": "the adapter changes stacked parameters (target_parameters)",
    "trainable_token_indices": "the adapter changes single rows of the token table (trainable_token_indices)",
    "use_bdlora": "the adapter's matrices are block diagonal (BD-LoRA)",
    "use_qalora": "the adapter was trained for groups of a quantised base (QA-LoRA)",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """What is added to a weight.

    a, b        [rank, in], [out, rank]; of an embedding a has a column for each token
    transposed  the weight is stored [in, out]
    magnitudes  of DoRA, one for each row
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    embedding: bool
    transposed: bool = False
    magnitudes: StoredTensor | None = None

    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        shape = (self.a.shape[1], self.b.shape[0]) if self.embedding else (self.b.shape[0], self.a.shape[1])
        return (shape[1], shape[0]) if self.transposed else shape

    @property
    def by_columns(self) -> bool:
        """Whether rows of the weight are columns of A, not rows of B."""
        return self.embedding != self.transposed

    def added(self, begin: int, end: int) -> npt.NDArray[np.float64]:
        """What is added to rows [begin, end) of the weight."""
        if not self.by_columns:
            return self.scale * (_values(self.b, begin, end) @ _values(self.a))
        rank, cols = self.a.shape
        columns = [read_elements(self.a, i * cols + begin, i * cols + end) for i in range(rank)]
        return self.scale * (_float64(np.stack(columns), self.a).T @ _values(self.b).T)


def _values(tensor: StoredTensor, begin: int = 0, end: int | None = None) -> npt.NDArray[np.float64]:
    """Rows of a tensor."""
    return _float64(read_rows(tensor, begin, end), tensor)


def _float64(bits: Bits, tensor: StoredTensor) -> npt.NDArray[np.float64]:
    return to_float32(bits, tensor.dtype).astype(np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Merge:
    """How elements of a weight change. whole: what stands in its place; factors: what is added."""

    weight: StoredTensor
    whole: StoredTensor | None
    factors: _Factors | None

    @property
    def memory(self) -> int:
        """Bytes of a factor that is read whole and of a block of the other one, as stored, in float32 and float64."""
        if self.factors is None:
            return 0
        rank, rows = self.factors.a.shape[0], _BLOCK // self.weight.shape[1] + 2
        whole = self.factors.b if self.factors.by_columns else self.factors.a
        return 16 * (math.prod(whole.shape) + rank * min(rows, self.weight.shape[0]))

    def __call__(self, bits: Bits, begin: int, /) -> Bits:
        end = begin + bits.size
        with np.errstate(all="ignore"):  # what is no number is counted where it is written
            return np.concatenate(
                [self._block(at, min(at + _BLOCK, end)) for at in range(begin, end, _BLOCK)] or [bits]
            )

    def _block(self, begin: int, end: int) -> Bits:
        if self.factors is None:
            return from_float32(self._floats(begin, end), self.weight.dtype)
        cols = self.weight.shape[1]
        first, last = begin // cols, -(-end // cols)
        rows = self._floats(first * cols, last * cols).reshape(-1, cols) + self.factors.added(first, last)
        if (of := self.factors.magnitudes) is not None:
            rows *= (_values(of, first, last).reshape(-1) / np.linalg.norm(rows, axis=1))[:, None]
        found = rows.reshape(-1)[begin - first * cols : end - first * cols].astype(np.float32)
        return from_float32(found, self.weight.dtype)

    def _floats(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Elements of the weight before anything is added."""
        source = self.whole or dataclasses.replace(self.weight, change=None)
        return to_float32(read_elements(source, begin, end), source.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An opened adapter. files: what it was read from; whole: weight → what stands in its place; factors: module →
    what is added to its weight."""

    path: Path
    files: tuple[Path, ...]
    whole: Mapping[str, StoredTensor]
    factors: Mapping[str, _Factors]
    transposed: bool  # whether weights are stored [in, out]

    def merged(self, tensors: Mapping[str, StoredTensor], quantised: Collection[str]) -> dict[str, StoredTensor]:
        """The weights of the base model, with the adapter in them. quantised: names of those that are not in `tensors`.
        Raises CheckpointError where the adapter belongs to another model, UnsupportedModelError where it changes
        quantised weights."""
        names = _Names((*tensors, *quantised))
        called = {name: names.find(name) for name in (*self.whole, *(f"{module}.weight" for module in self.factors))}
        self._refuse_unknown([name for name, own in called.items() if own is None])
        own_names = {theirs: own for theirs, own in called.items() if own is not None}
        self._refuse_quantised(set(own_names.values()) & set(quantised))
        whole = {own_names[name]: tensor for name, tensor in self.whole.items()}
        factors = {own_names[f"{module}.weight"]: each for module, each in self.factors.items()}
        if (len(whole), len(factors)) != (len(self.whole), len(self.factors)):
            raise CheckpointError("the adapter changes a weight twice, under two names", where=str(self.path))
        found = dict(tensors)
        for name in dict.fromkeys((*whole, *factors)):
            weight = tensors[name]
            stands, adds = whole.get(name), factors.get(name)
            if (stands is not None and stands.shape != weight.shape) or weight.dtype not in _FLOATS:
                raise self._unfit(weight, (stands or weight).name, (stands or weight).shape)
            if adds is not None:
                adds = self._fitted(adds, weight)
            merge = _Merge(weight=weight, whole=stands, factors=adds)
            found[name] = dataclasses.replace(weight, change=merge)
        return found

    def _refuse_unknown(self, unknown: Sequence[str]) -> None:
        if unknown:
            tied = any(text_name(name) == "lm_head.weight" for name in unknown)
            raise CheckpointError(
                "the adapter changes weights that the model does not have",
                where=str(self.path),
                expected="an adapter of this model",
                got=f"{len(unknown):,}: {_some(unknown)}",
                hint=f"the model's lm_head is its token table: {MERGE_WITH_PEFT}"
                if tied
                else "give the adapter's base model as --model_dir",
            )

    def _refuse_quantised(self, changed: Collection[str]) -> None:
        if changed:
            raise UnsupportedModelError(
                "the adapter changes weights that are quantised, whose codes cannot hold the sum",
                where=str(self.path),
                expected="a base model in float32, float16 or bfloat16",
                got=f"{len(changed):,} quantised weights: {_some(sorted(changed))}",
                hint="convert the original model with --lora, then quantise with ingot quantize or build --precision",
            )

    def _fitted(self, factors: _Factors, weight: StoredTensor) -> _Factors:
        """Turned around where the weight is stored [in, out]."""
        transposed = not factors.embedding and (
            self.transposed or weight.shape == factors.shape()[::-1] != factors.shape()
        )
        fitted = dataclasses.replace(factors, transposed=transposed)
        if weight.shape != fitted.shape():
            raise self._unfit(weight, f"{factors.b.name} and {factors.a.name}", fitted.shape())
        if fitted.magnitudes is not None and (transposed or factors.embedding):
            raise self._not_merged("magnitudes (DoRA) of a weight that is stored [in, out]", fitted.magnitudes.name)
        return fitted

    def _unfit(self, weight: StoredTensor, names: str, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            "the adapter does not fit the model",
            where=f"{self.path}: {names}",
            expected=f"what fits {weight.name} {list(weight.shape)}",
            got=str(list(shape)),
            hint="give the adapter's base model as --model_dir; if the adapter added tokens, " + MERGE_WITH_PEFT,
        )

    def _not_merged(self, what: str, where: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"ingot does not merge {what}", where=f"{self.path}: {where}", hint=MERGE_WITH_PEFT
        )

    def without_effect(self) -> tuple[str, ...]:
        """A sentence if all sums are those of the base model."""
        factors = self.factors.values()
        if self.whole or any(each.magnitudes or np.any(_values(each.b)) for each in factors):
            return ()
        return (f"the adapter {self.path} changes nothing: all its matrices B are zeros",)


def unread_changes(tensors: Iterable[StoredTensor], read: Collection[str]) -> tuple[str, ...]:
    """A sentence about changed weights that a conversion does not read. read: names of those that it reads"""
    unread = [each.name for each in tensors if each.change is not None and each.name not in read]
    return (f"the conversion leaves out weights that the adapter changes: {_some(unread)}",) if unread else ()


def _some(names: Sequence[str]) -> str:
    return ", ".join(each[:200] for each in names[:5]) + (", ..." if len(names) > 5 else "")


class _Names:
    """Names of a model's tensors, as its files and as PEFT spell them. Files of the inner model alone lack the first
    parts of a name; those of a wrapper for images have others."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {text_name(name): name for name in names}
        self._alike = dict[str, list[str]]()  # last part of a module's name → names of its tensors
        for name in self._names:
            self._alike.setdefault(_last_part(name), []).append(name)

    def find(self, name: str) -> str | None:
        """The file's name of the tensor that PEFT calls `name`."""
        wanted = text_name(name)
        if wanted in self._names:
            return self._names[wanted]
        alike = self._alike.get(_last_part(wanted), [])
        ends = [each for each in alike if wanted.endswith(f".{each}") or each.endswith(f".{wanted}")]
        return self._names[ends[0]] if len(ends) == 1 else None


def _last_part(name: str) -> str:
    """a.q_proj.weight → q_proj"""
    return name.rpartition(".")[0].rpartition(".")[2]


def read_adapter(path: Path) -> Adapter:
    """Opens a directory of PEFT. Raises MissingModelError, CheckpointError, ConfigError, or UnsupportedModelError for
    an adapter of another kind than those of the file's head."""
    if not path.is_dir():
        raise MissingModelError(
            "there is no such adapter directory",
            where=str(path),
            expected=f"a directory with {ADAPTER_FILE} and {' or '.join(_FILES)}",
            hint=f"{spelled(path)}; --lora takes a local path",
        )
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None or not (path / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"the directory lacks {ADAPTER_FILE if file else 'the weights of an adapter'}",
            where=str(path),
            expected=f"{ADAPTER_FILE}, and {' or '.join(_FILES)}",
            hint="give a directory that PEFT saved",
        )
    settings = Section.from_file(path / ADAPTER_FILE)
    _refuse(settings)
    whole: dict[str, StoredTensor] = {}
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in _FILES[file.name](file).items():
        if not name.startswith(_PREFIX):
            raise CheckpointError(
                "a tensor is not named as PEFT names those of adapters",
                where=f"{file}: {name[:200]}",
                expected=f"{_PREFIX}...",
                hint="give a directory that PEFT saved",
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                "a tensor of the adapter has a type that weights do not have",
                where=f"{file}: {name[:200]}",
                expected=", ".join(each.value for each in _FLOATS),
                got=tensor.dtype.value,
                hint="save the adapter in one of these types",
            )
        own = name.removeprefix(_PREFIX)
        if (part := _PART.fullmatch(own)) is not None:
            kind = "magnitudes" if part["magnitudes"] else f"{part['embedding'] or ''}{part['factor']}"
            parts.setdefault(part["module"], {})[kind] = tensor
        else:
            for text in _WRAPPED:
                own = own.replace(f"{text}.default.", ".").replace(f"{text}.", ".")
            whole[own] = tensor
    return Adapter(
        path=path,
        files=(path / ADAPTER_FILE, file),
        whole=whole,
        factors={module: _factors(settings, file, module, each) for module, each in parts.items()},
        transposed=settings.boolean("fan_in_fan_out", False),
    )


def _refuse(settings: Section) -> None:
    """Raises UnsupportedModelError for adapters that are more than matrices which are added to weights."""
    kind = settings.text("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(
            "ingot merges no adapters of this kind", where=settings.place("peft_type"), expected="LORA", got=kind
        )
    for key, said in _REFUSED.items():
        if settings.raw(key) not in (None, False, [], {}):
            raise UnsupportedModelError(said, where=settings.place(key), hint=MERGE_WITH_PEFT)
    begun = settings.raw("init_lora_weights")
    if begun is not None and str(begun).lower() not in _SAME_BASE:
        raise UnsupportedModelError(
            "the training of the adapter began with another base model than the one that is stored",
            where=settings.place("init_lora_weights"),
            expected=", ".join(_SAME_BASE),
            got=str(begun)[:200],
            hint="save it again by save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _factors(settings: Section, file: Path, module: str, parts: Mapping[str, StoredTensor]) -> _Factors:
    """What is added to the weight of a module. Raises CheckpointError for parts that do not belong together."""
    embedding = "embedding_A" in parts or "embedding_B" in parts
    pair = [parts.get(f"embedding_{each}" if embedding else each) for each in "AB"]
    a, b = pair
    rank = a.shape[0] if a is not None and len(a.shape) == 2 else 0
    if a is None or b is None or not rank or len(b.shape) != 2 or b.shape[1] != rank:
        raise CheckpointError(
            "the two matrices of a module do not belong together",
            where=f"{file}: {module}",
            expected="A of [rank, in] and B of [out, rank]",
            got=", ".join("none" if each is None else str(list(each.shape)) for each in pair),
        )
    magnitudes = parts.get("magnitudes")
    if (magnitudes is None) == settings.boolean("use_dora", False) or (
        magnitudes is not None and math.prod(magnitudes.shape) != b.shape[0]
    ):
        raise CheckpointError(
            "the magnitudes of a module do not belong to its matrices",
            where=f"{file}: {module}",
            expected=f"{b.shape[0]} magnitudes" if settings.boolean("use_dora", False) else "none without use_dora",
            got="none" if magnitudes is None else str(list(magnitudes.shape)),
        )
    if rank != (said := _of_module(settings, "rank_pattern", "r", module)):
        raise CheckpointError(
            "a module of the adapter has another rank than its configuration says",
            where=f"{file}: {module}",
            expected=f"rank {said:g}",
            got=f"rank {rank}",
        )
    alpha = _of_module(settings, "alpha_pattern", "lora_alpha", module)
    scale = alpha / (math.sqrt(rank) if settings.boolean("use_rslora", False) else rank)
    return _Factors(a=a, b=b, scale=scale, embedding=embedding, magnitudes=magnitudes)


def _of_module(settings: Section, patterns: str, key: str, module: str) -> float:
    """A number that a pattern of modules may change: the first one that is the end of a module's name."""
    given = settings.raw(patterns) or {}
    if not isinstance(given, dict):
        raise ConfigError("the patterns are not an object", where=settings.place(patterns), got=repr(given)[:200])
    for pattern, value in given.items():
        if matches(pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})$", module, of="the adapter"):
            return Section({key: value}, f"{settings.place(patterns)}.{pattern[:200]}").number(key, above=0)
    return settings.number(key, above=0)
