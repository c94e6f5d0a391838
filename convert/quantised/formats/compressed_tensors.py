"""compressed-tensors, which llm-compressor writes.

pack-quantized         weight_packed I32 [N, K * bits / 32], codes 2^(bits - 1) too high; weight_scale [N, G];
                       weight_shape I64 [2]; weight_zero_point I32 [N * bits / 32, G]; weight_g_idx I32 [K]
int-, naive-quantized  weight I8 [N, K], weight_scale [N, G] or [1]
float-quantized        weight F8_E4M3 [N, K], weight_scale [1], [N, 1], or [N/a, K/b] of blocks
mxfp8-quantized        weight F8_E4M3 [N, K], weight_scale U8 [N, K/32]
nvfp4-pack-quantized   weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_global_scale, a divisor
mxfp4-pack-quantized   weight_packed U8 [N, K/2], weight_scale U8 [N, K/32]
"""

import math

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes, fields, fields_per_word
from ingot.convert.quantised.form import Code, Piece, Quantised, Rows, value_piece
from ingot.convert.quantised.formats.fp4 import read_fp4
from ingot.convert.quantised.formats.fp8 import read_block, read_fp8
from ingot.convert.quantised.module import FLOATS, Format, Module, column_order, order_piece, sections, unsupported
from ingot.convert.quantised.patterns import matches
from ingot.dtypes import DType
from ingot.errors import CheckpointError, ConfigError
from ingot.tensor_file import read_rows

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_ROWS = 1 << 16  # of codes, which are looked at to tell how they are packed
_EXPONENTS = ("U8", "F8_E8M0")
_IDLE = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
)


def read(module: Module) -> Quantised:
    settings = module.settings
    sparse = settings.section("sparsity_config").text("format", "dense") if settings.has("sparsity_config") else "dense"
    if sparse != "dense":
        raise unsupported(
            "compressed-tensors with sparse weights are not supported", settings, "sparsity_config", "format dense"
        )
    _refuse_rotated_inputs(settings)
    scheme = _scheme(settings, module.name)
    weights = scheme.section("weights")
    place = scheme if scheme.has("format") else settings
    form = place.text("format")
    if form not in _FORMATS:
        raise unsupported("compressed-tensors of this format are not supported", place, "format", ", ".join(_FORMATS))
    if form == "nvfp4-pack-quantized":
        return read_fp4(module, "weight_packed", "weight_scale", 16, ("F8_E4M3",), "weight_global_scale", divides=True)
    if form == "mxfp4-pack-quantized":
        return read_fp4(module, "weight_packed", "weight_scale", 32, _EXPONENTS)
    if form == "mxfp8-quantized":
        module.part("weight_scale", _EXPONENTS, 2)
        return read_fp8(module, "weight_scale", (1, 32))
    module.part("weight_scale", FLOATS)
    if form == "float-quantized" or (form == "naive-quantized" and weights.text("type", "int") == "float"):
        blocks = weights.text("strategy") == "block"
        return read_fp8(module, "weight_scale", read_block(weights, "block_structure") if blocks else None)
    return _read_packed(module, weights) if form == "pack-quantized" else _read_bytes(module, weights)


def _refuse_rotated_inputs(settings: Section) -> None:
    """Raise UnsupportedModelError for matrices that multiply inputs, results or the KV cache while the model runs.

    Those of weights are part of the stored weights.
    """
    transforms = settings.section("transform_config") if settings.has("transform_config") else Section({}, "")
    for scheme in sections(transforms, "config_groups").values():
        for applied in scheme.tables("apply"):
            if not applied.text("location").startswith("weight_"):
                raise unsupported(
                    "compressed-tensors with rotated inputs are not supported",
                    applied,
                    "location",
                    "weight_input, weight_output",
                )


def _scheme(settings: Section, name: str) -> Section:
    """The group of the configuration that a module belongs to: the one that names it before the one of all Linear."""
    found = list(sections(settings, "config_groups").values())
    for group in found:
        for target in group.words("targets"):
            if target == name or (target.startswith("re:") and matches(target[3:], name)):
                return group
    for group in found:
        if "Linear" in group.words("targets"):
            return group
    raise ConfigError(
        "the quantization config has no group for a quantised module", where=settings.place("config_groups"), got=name
    )


def _group(module: Module, weights: Section, columns: int) -> int:
    """Columns that share a scale; the scales have the shape of it."""
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise unsupported(
            "compressed-tensors with scales of this strategy are not supported", weights, "strategy", "group, channel"
        )
    size = weights.integer("group_size", minimum=-1) if strategy == "group" else -1
    return module.group(size, columns, "weight_scale", 1)


def _read_bytes(module: Module, weights: Section) -> Quantised:
    n, k = module.part("weight", ("I8",), 2).shape
    scale: Piece
    order = None
    if weights.text("strategy", "channel") == "group":
        group = _group(module, weights, k)
        scale = module.scale_piece("weight_scale", (n, -(-k // group)))
        order = column_order(module, "weight_g_idx", k, group) if module.has("weight_g_idx") else None
    else:
        scale, group = module.blocks_piece("weight_scale", n, k, None)
    stored = module.stored_codes("weight")

    def load() -> Rows:
        rows = stored()
        return rows if order is None else lambda begin, end: rows(begin, end)[:, order]

    pieces = {
        "scale": scale,
        "zero": _zero_bytes(module, scale.shape),
        "order": order_piece(order, module.where("weight_g_idx")),
    }
    return module.made((n, k), Code.I8, group, load, pieces, codes="weight")


def _read_packed(module: Module, weights: Section) -> Quantised:
    bits = weights.integer("num_bits", minimum=1)
    if bits > 8:
        raise unsupported(
            "compressed-tensors with this number of bits are not supported", weights, "num_bits", "at most 8"
        )
    words = module.part("weight_packed", ("I32",), 2)
    n, k = _shape(module)
    scale = module.part("weight_scale", FLOATS, 2)
    module.require("weight_scale", (n, scale.shape[1]))
    group = _group(module, weights, k)
    order = column_order(module, "weight_g_idx", k, group) if module.has("weight_g_idx") else None
    whole = _has_whole_fields(module, k, bits)
    unpack = fields_per_word if whole else fields
    centre = np.uint8(1 << bits - 1)

    def rows(begin: int, end: int) -> Bytes:
        found = unpack(read_rows(words, begin, end).view(np.int32), bits)[:, :k]
        return (found if order is None else found[:, order]) - centre

    def load() -> Rows:
        return rows

    shape = (n, scale.shape[1])
    code = Code.integers(bits, k, signed=True)
    pieces = {
        "scale": module.scale_piece("weight_scale", shape),
        "zero": _zero_points(module, shape, bits, whole=whole),
        "order": order_piece(order, module.where("weight_g_idx")),
    }
    return module.made((n, k), code, group, load, pieces, bits=bits, codes="weight_packed")


def _shape(module: Module) -> tuple[int, int]:
    """weight_shape: [N, K]."""
    tensor = module.part("weight_shape", ("I64", "I32"), 1)
    module.require("weight_shape", (2,))
    n, k = (int(size) for size in read_rows(tensor))
    packed = module.parts["weight_packed"].shape
    if n != packed[0] or not 0 < k <= packed[1] * 32:
        raise CheckpointError(
            "the weight_shape of a quantised module does not fit its codes",
            where=f"{tensor.file}: {tensor.name}",
            expected=f"{packed[0]} rows of at most {packed[1] * 32} columns",
            got=f"[{n}, {k}]",
        )
    return n, k


def _has_whole_fields(module: Module, columns: int, bits: int) -> bool:
    """Whether the highest bits of each word are left empty, as before 0.20. Where rows have as many words in both
    ways, the bits themselves tell.
    """
    words, whole, dense = module.parts["weight_packed"], -(-columns // (32 // bits)), -(-columns * bits // 32)
    if words.shape[1] not in (whole, dense):
        module.require("weight_packed", (words.shape[0], dense))
    if whole != dense or 32 % bits == 0:
        return whole != dense and words.shape[1] == whole
    spare = np.uint32((1 << 32) - (1 << 32 // bits * bits))
    return not (read_rows(words, 0, min(words.shape[0], _ROWS)).view(np.uint32) & spare).any()


def _zero_points(module: Module, shape: tuple[int, int], bits: int, *, whole: bool) -> Piece | None:
    """Packed along the rows, or a byte each. Where a file of an asymmetric weight has none, all were 0."""
    if not module.has("weight_zero_point"):
        return None
    tensor = module.part("weight_zero_point", ("I32", "I8"), 2)
    if tensor.dtype_name == "I8":
        return _zero_bytes(module, shape, 1 << bits - 1)
    n, groups = shape
    rows = -(-n // (32 // bits)) if whole else -(-n * bits // 32)
    module.require("weight_zero_point", (rows, groups))
    unpack = fields_per_word if whole else fields

    def load() -> Bytes:
        words = np.ascontiguousarray(read_rows(tensor).view(np.int32).T)
        return unpack(words, bits)[:, :n].T - np.uint8(1 << bits - 1)

    return value_piece(DType.I8, shape, load, module.where("weight_zero_point"))


def _zero_bytes(module: Module, shape: tuple[int, ...], limit: int = 128) -> Piece | None:
    """limit: zero points are at least -limit, and less than limit."""
    if not module.has("weight_zero_point"):
        return None
    tensor = module.part("weight_zero_point", ("I8",))
    count = math.prod(tensor.shape)
    if tensor.shape != shape and (shape[1] > 1 or count not in (1, shape[0])):
        module.require("weight_zero_point", shape)

    def load() -> Bytes:
        found = np.broadcast_to(read_rows(tensor).reshape(-1, shape[1]), shape).astype(np.int16)
        if (found < -limit).any() or (found >= limit).any():
            raise CheckpointError(
                "zero points lie outside the codes",
                where=module.where("weight_zero_point"),
                expected=f"{-limit} to {limit - 1}",
                got=f"{found.min()} to {found.max()}",
            )
        return found.astype(np.int8).view(np.uint8)

    return value_piece(DType.I8, shape, load, module.where("weight_zero_point"))


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("ignore") if settings.has("ignore") else ()


FORMAT = Format(
    names=("compressed-tensors", "compressed_tensors"),
    marks=("weight_packed", "weight_scale"),
    parts=(
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        *_IDLE,
    ),
    read=read,
    skipped=_skipped,
    idle=_IDLE,
)
