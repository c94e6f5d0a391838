"""One quantised module of a source: its tensors, what the configuration says of it, and checks that both share."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.configs.read import Section
from ingot.convert.quantised.bits import exponents_as_bf16
from ingot.convert.quantised.form import Bits, Code, Piece, Quantised, Rows, code_piece, value_piece
from ingot.dtypes import DType, to_float32
from ingot.errors import CheckpointError, ConfigError, UnsupportedModelError
from ingot.tensor_file import StoredTensor, read_rows

FLOATS = ("F32", "F16", "BF16")
_SCALE_TYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16, "F8_E4M3": DType.F8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """names   as `quant_method` says
    marks   a module that has one of these tensors is quantised
    parts   all tensors that such a module may have, but for its bias
    idle    those of them that change no weight: scales of inputs and of the KV cache, notes of the writer
    read    makes its weight
    skipped the modules that the configuration leaves unquantised, as it spells them
    joint   what stands between a module's name and a part's
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    parts: tuple[str, ...]
    read: "Callable[[Module], Quantised]"
    skipped: Callable[[Section], tuple[str, ...]]
    idle: tuple[str, ...] = ()
    joint: str = "."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """name  without the name of a tensor
    parts  name within the module → tensor
    bias   whether there is one beside them
    used   parts that were asked for
    """

    name: str
    format: str
    parts: Mapping[str, StoredTensor]
    settings: Section
    bias: bool = False
    used: set[str] = dataclasses.field(default_factory=set)

    def where(self, part: str = "") -> str:
        """For errors."""
        if part in self.parts:
            return f"{self.parts[part].file}: {self.parts[part].name}"
        return f"{self.name}.{part}" if part else self.name

    def has(self, part: str) -> bool:
        return part in self.parts

    def part(self, name: str, dtypes: Sequence[str], ndim: int | None = None) -> StoredTensor:
        """A tensor that must be there, of one of these types. Raises CheckpointError."""
        if name not in self.parts:
            raise CheckpointError(
                f"a quantised module lacks its {name}",
                where=self.where(),
                got=", ".join(sorted(self.parts)),
                hint="download the model again; if it is complete, it was made by a writer that ingot does not know",
            )
        self.used.add(name)
        tensor = self.parts[name]
        if tensor.dtype_name not in dtypes or (ndim is not None and len(tensor.shape) != ndim):
            raise CheckpointError(
                f"the {name} of a quantised module is not what the format stores",
                where=f"{tensor.file}: {tensor.name}",
                expected=" or ".join(dtypes) + ("" if ndim is None else f" of {ndim} dimensions"),
                got=f"{tensor.dtype_name} {list(tensor.shape)}",
            )
        return tensor

    def require(self, part: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor has this shape."""
        if self.parts[part].shape != shape:
            raise CheckpointError(
                f"the {part} of a quantised module does not fit its codes",
                where=f"{self.parts[part].file}: {self.parts[part].name}",
                expected=str(list(shape)),
                got=str(list(self.parts[part].shape)),
                hint="check bits and group size in the quantization config against the files",
            )

    def group(self, size: int, columns: int, part: str, axis: int) -> int:
        """The group size, -1 or 0 standing for a whole row, which `part` must have a scale for along `axis`."""
        group = columns if size in (-1, 0) or size > columns else size
        if group < 1:
            raise ConfigError("the group size of a quantised weight is wrong", where=self.settings.where, got=str(size))
        shape = list(self.parts[part].shape)
        shape[axis] = -(-columns // group)
        self.require(part, tuple(shape))
        return group

    def made(
        self,
        shape: tuple[int, int],
        code: Code,
        group: int,
        load: Callable[[], Rows],
        pieces: Mapping[str, Piece | None],
        *,
        memory: int = 0,
        table: tuple[float, ...] = (),
        bits: int = 8,
        divides: bool = False,
        codes: str,
    ) -> Quantised:
        """The weight.

        codes   the tensor that holds its codes
        bits    that a code has at most
        pieces  tensors by their roles; None stands for a tensor that the module does not have
        """
        if 0 in shape:
            raise CheckpointError("a quantised weight has no elements", where=self.where(codes), got=str(list(shape)))
        whole_groups = shape[1] % group == 0  # the nodes of a table compute no others
        if code is Code.I4 and bits < 4 and whole_groups and pieces.get("zero") is None:
            code, table, load = Code.U4, _few_values(bits), _places(load, bits)
        return Quantised(
            name=f"{self.name}.weight",
            format=self.format,
            file=self.parts[codes].file,
            shape=shape,
            code=code,
            group=group,
            pieces={
                "codes": code_piece(code, shape, load, memory),
                **{name: piece for name, piece in pieces.items() if piece is not None},
            },
            table=table,
            divides=divides,
        )

    def stored_codes(self, part: str) -> Callable[[], Rows]:
        """Rows of bytes as they lie in the file."""
        tensor = dataclasses.replace(self.parts[part], dtype_name="U8")
        return lambda: lambda begin, end: read_rows(tensor, begin, end).view(np.uint8)

    def scale_type(self, part: str) -> DType:
        """The type of the scales that are stored: exponents become bf16."""
        name = self.parts[part].dtype_name
        return DType.BF16 if name in ("U8", "F8_E8M0") else _SCALE_TYPES[name]

    def scales(self, part: str) -> Bits:
        """The stored bits, exponents as bf16."""
        tensor = self.parts[part]
        if tensor.dtype_name in ("U8", "F8_E8M0"):
            bits = read_rows(dataclasses.replace(tensor, dtype_name="U8"))
            return exponents_as_bf16(bits.view(np.uint8)).reshape(tensor.shape)
        return read_rows(tensor).reshape(tensor.shape)

    def scale_piece(
        self, part: str, shape: tuple[int, int], arrange: Callable[[Bits], Bits] = lambda bits: bits
    ) -> Piece:
        """The scales of a weight; arrange: brings them into the shape [rows, groups]."""
        return value_piece(self.scale_type(part), shape, lambda: arrange(self.scales(part)), self.where(part))

    def blocks_piece(self, part: str, rows: int, columns: int, block: tuple[int, int] | None) -> tuple[Piece, int]:
        """Scales of the whole weight, of rows, or of blocks [a, b]: repeated for every row; and the group size."""
        tensor = self.parts[part]
        count = math.prod(tensor.shape)
        if count == 1 and block is None:
            return self.scale_piece(part, (rows, 1), lambda bits: np.repeat(bits.reshape(1, 1), rows, axis=0)), columns
        if block is None:
            if tensor.shape not in ((rows, 1), (rows,)):
                self.require(part, (rows, 1))
            return self.scale_piece(part, (rows, 1), lambda bits: bits.reshape(rows, 1)), columns
        high, wide = min(block[0], rows), min(block[1], columns)
        self.require(part, (-(-rows // high), -(-columns // wide)))
        shape = (rows, -(-columns // wide))
        return self.scale_piece(part, shape, lambda bits: np.repeat(bits, high, axis=0)[:rows]), wide

    def number(self, part: str, dtypes: Sequence[str] = ("F32",)) -> float:
        """The one value of a tensor of one of these types, finite and not zero."""
        tensor = self.part(part, dtypes)
        if math.prod(tensor.shape) != 1:
            self.require(part, (1,))
        value = float(to_float32(read_rows(tensor), _SCALE_TYPES[tensor.dtype_name]).reshape(-1)[0])
        if not math.isfinite(value) or value == 0:
            raise CheckpointError(
                "a scale of a quantised weight is zero, NaN or infinite", where=self.where(part), got=str(value)
            )
        return value

    def factor_piece(self, part: str, rows: int, dtypes: Sequence[str] = ("F32",)) -> Piece:
        """One number for all rows."""
        value = np.float32(self.number(part, dtypes))
        return value_piece(DType.F32, (rows, 1), lambda: np.full((rows, 1), value), self.where(part))


def _few_values(bits: int) -> tuple[float, ...]:
    """The values of signed codes of fewer than four bits, as a table. It tells `ingot build` how few they are."""
    values = np.zeros(16)
    values[: 1 << bits] = np.arange(-(1 << bits - 1), 1 << bits - 1)
    return tuple(values.tolist())


def _places(load: Callable[[], Rows], bits: int) -> Callable[[], Rows]:
    """Signed codes → their places in that table."""

    def loaded() -> Rows:
        rows = load()
        return lambda begin, end: rows(begin, end).view(np.uint8) + np.uint8(1 << bits - 1)

    return loaded


def column_order(module: Module, part: str, columns: int, group: int) -> npt.NDArray[np.int64] | None:
    """Columns in the order of their groups, from the group of each; None where they lie in order already.

    Raises CheckpointError where groups are not of one size, but for the last one.
    """
    tensor = module.part(part, ("I32", "I64"), 1)
    module.require(part, (columns,))
    groups = read_rows(tensor).astype(np.int64)
    if columns and groups[0] == -1 and (groups == -1).all():
        return None
    wanted = np.arange(columns) // group
    if np.array_equal(groups, wanted):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], wanted):
        raise CheckpointError(
            "the groups of a quantised weight have other sizes than the configuration says",
            where=f"{tensor.file}: {tensor.name}",
            expected=f"groups 0 to {int(wanted[-1])} of {group} columns, the last one with what remains of {columns}",
            got=f"groups {int(groups.min())} to {int(groups.max())}",
        )
    return order


def order_piece(order: npt.NDArray[np.int64] | None, where: str) -> Piece | None:
    """order: the columns as they are stored. The piece says where each column lies."""
    if order is None:
        return None
    places = np.argsort(order).astype(np.int32)
    return value_piece(DType.I32, places.shape, lambda: places, where)


def sections(settings: Section, key: str) -> dict[str, Section]:
    """The objects in an object, by name; nothing where there is none."""
    outer = settings.section(key) if settings.has(key) else Section({}, settings.where)
    values = settings.raw(key)
    return {name: outer.section(name) for name in values} if isinstance(values, dict) else {}


def unsupported(what: str, settings: Section, key: str, expected: str) -> UnsupportedModelError:
    """A variant of a format that is not read."""
    return UnsupportedModelError(
        what,
        where=settings.place(key),
        expected=expected,
        got=repr(settings.raw(key))[:200],
        hint="use the model's original weights, or another quantised version of it (docs/quantised_checkpoints.md)",
    )
