"""GPTQ of 2, 3, 4 and 8 bits, as GPTQModel and AutoGPTQ write it.

    qweight I32 [K * bits / 32, N]   fields along K, one dense stream per column
    qzeros I32 [G, N * bits / 32]    fields along N; version 1 stores z - 1, with 0 as the largest field
    scales [G, N], g_idx I32 [K]     the group of each column; absent or ascending where columns are in order

Labels lie: symmetric files of version 2 call themselves version 1. So a symmetric weight is known by its zero points,
which are all one number.
"""

import dataclasses

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes, fields
from ingot.convert.quantised.form import Code, Quantised, Rows, value_piece
from ingot.convert.quantised.module import FLOATS, Format, Module, column_order, order_piece, sections, unsupported
from ingot.convert.quantised.patterns import matches
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor, read_rows

_BITS = (2, 3, 4, 8)
_VERSIONS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """How one module is packed. less: what a zero point's field is lower than the zero point."""

    bits: int
    group_size: int
    symmetric: bool
    less: int


def read(module: Module) -> Quantised:
    settings = module.settings
    own = _own(settings, module.name)
    version = settings.text("checkpoint_format", "gptq")
    if version not in _VERSIONS:
        raise unsupported(
            "GPTQ with this checkpoint_format is not supported", settings, "checkpoint_format", ", ".join(_VERSIONS)
        )
    return read_gptq(
        module,
        Packing(
            bits=own.integer("bits", settings.integer("bits", 4)),
            group_size=own.integer("group_size", settings.integer("group_size", 128, minimum=-1), minimum=-1),
            symmetric=own.boolean("sym", settings.boolean("sym", False)),
            less=int(version == "gptq"),
        ),
    )


def _own(settings: Section, name: str) -> Section:
    """What `dynamic` says of one module."""
    for pattern, values in sections(settings, "dynamic").items():
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), name):
            return values
    return Section({}, settings.where)


def read_gptq(module: Module, packing: Packing) -> Quantised:
    """The packing alone, which AutoRound writes too."""
    bits, settings = packing.bits, module.settings
    if bits not in _BITS:
        raise unsupported(
            "GPTQ with this number of bits is not supported", settings, "bits", ", ".join(map(str, _BITS))
        )
    words, zeros = module.part("qweight", ("I32",), 2), module.part("qzeros", ("I32",), 2)
    n, k = words.shape[1], words.shape[0] * 32 // bits
    scales = module.part("scales", FLOATS, 2)
    groups = scales.shape[0]
    module.require("scales", (groups, n))
    module.require("qzeros", (groups, -(-n * bits // 32)))
    group = module.group(packing.group_size, k, "scales", 0)
    order = column_order(module, "g_idx", k, group) if module.has("g_idx") else None
    centre = np.uint8(1 << bits - 1 if packing.symmetric else 0)

    def load() -> Rows:
        if packing.symmetric:
            _check_symmetric(module, zeros, n, bits)
        held = read_rows(words)

        def rows(begin: int, end: int) -> Bytes:
            found = fields(np.ascontiguousarray(held[:, begin:end].T), bits)
            return (found if order is None else found[:, order]) - centre

        return rows

    def zero_points() -> Bytes:
        return (fields(read_rows(zeros), bits)[:, :n].T + np.uint8(packing.less)) & np.uint8((1 << bits) - 1)

    zero = None if packing.symmetric else value_piece(DType.U8, (n, groups), zero_points, module.where("qzeros"))
    pieces = {
        "scale": module.scale_piece("scales", (n, groups), lambda found: found.T),
        "zero": zero,
        "order": order_piece(order, module.where("g_idx")),
    }
    code = Code.integers(bits, k, signed=packing.symmetric)
    return module.made((n, k), code, group, load, pieces, memory=words.nbytes, bits=bits, codes="qweight")


def _check_symmetric(module: Module, zeros: StoredTensor, n: int, bits: int) -> None:
    """Raise CheckpointError unless all zero points are the middle of the codes, by either version's spelling."""
    found, middle = np.unique(fields(read_rows(zeros), bits)[:, :n]), 1 << bits - 1
    if found.tolist() not in ([middle], [middle - 1]):
        raise CheckpointError(
            "a weight that the configuration calls symmetric has zero points",
            where=module.where("qzeros"),
            expected=f"{middle - 1} (version 1) or {middle} (version 2) in every field",
            got=", ".join(map(str, found[:10])),
            hint='write "sym": false into the quantization config if the zero points are meant',
        )


def _skipped(settings: Section) -> tuple[str, ...]:
    left = [f"re:{pattern[2:]}" for pattern in sections(settings, "dynamic") if pattern.startswith("-:")]
    return (*left, *(settings.words("modules_to_not_convert") if settings.has("modules_to_not_convert") else ()))


FORMAT = Format(
    names=("gptq",), marks=("qweight",), parts=("qweight", "qzeros", "scales", "g_idx"), read=read, skipped=_skipped
)
