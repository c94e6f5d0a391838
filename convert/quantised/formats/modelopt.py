"""NVIDIA ModelOpt: FP8, NVFP4 and INT4 with AWQ's factors, in Hugging Face's layout.

    FP8                   weight F8_E4M3 [N, K], weight_scale [] or [N]
    NVFP4                 weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 [] (multiplied)
    W4A16_AWQ, W4A8_AWQ   weight U8 [N/2, K]: low nibbles are rows 2i, high ones rows 2i + 1, signed;
                          weight_scale [N, K/g]; weight_scale_2 of W4A8_AWQ is for kernels that compute in FP8
    W8A8_SQ_PER_CHANNEL   weight I8 [N, K], weight_scale [N]

pre_quant_scale [K], which any of them may have, belongs to the input and so to the columns. Scales of inputs and of the
KV cache are not needed: inputs are not rounded by them.
"""

import dataclasses

import numpy as np

from ingot.configs.read import Section
from ingot.convert.quantised.bits import Bytes, signed_bytes
from ingot.convert.quantised.form import Code, Piece, Quantised, Rows, value_piece
from ingot.convert.quantised.formats.fp4 import read_fp4
from ingot.convert.quantised.formats.fp8 import read_fp8
from ingot.convert.quantised.module import FLOATS, Format, Module, unsupported
from ingot.tensor_file import read_rows

_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_INT4 = ("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ")
_NVFP4 = ("NVFP4", "NVFP4_AWQ")
_INT8 = ("W8A8_SQ_PER_CHANNEL",)
_IDLE = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale")


def read(module: Module) -> Quantised:
    weight = _without_columns(module)
    columns = _columns(module, weight.shape[1])
    return weight if columns is None else dataclasses.replace(weight, pieces={**weight.pieces, "columns": columns})


def _without_columns(module: Module) -> Quantised:
    """The weight but for the factors of its columns."""
    settings = module.settings
    own = settings
    if settings.text("quant_algo") == "MIXED_PRECISION":
        layers = settings.section("quantized_layers")
        own = layers.section(module.name)
    algorithm = own.text("quant_algo")
    if algorithm in _FP8:
        module.part("weight_scale", FLOATS)
        return read_fp8(module, "weight_scale", None)
    if algorithm in _NVFP4:
        return read_fp4(module, "weight", "weight_scale", 16, ("F8_E4M3",), "weight_scale_2")
    if algorithm in _INT4:
        if algorithm == "W4A8_AWQ" and module.has("weight_scale_2"):
            module.part("weight_scale_2", FLOATS)
        return _read_int4(module, own.integer("group_size", settings.integer("group_size", 128)))
    if algorithm in _INT8:
        n, k = module.part("weight", ("I8",), 2).shape
        module.part("weight_scale", FLOATS)
        scale, group = module.blocks_piece("weight_scale", n, k, None)
        return module.made((n, k), Code.I8, group, module.stored_codes("weight"), {"scale": scale}, codes="weight")
    raise unsupported(
        "ModelOpt with this quant_algo is not supported", own, "quant_algo", ", ".join((*_FP8, *_NVFP4, *_INT4, *_INT8))
    )


def _read_int4(module: Module, group_size: int) -> Quantised:
    tensor = module.part("weight", ("U8",), 2)
    n, k = 2 * tensor.shape[0], tensor.shape[1]
    scale = module.part("weight_scale", FLOATS, 2)
    module.require("weight_scale", (n, scale.shape[1]))
    group = module.group(group_size, k, "weight_scale", 1)

    def rows(begin: int, end: int) -> Bytes:
        pairs = read_rows(tensor, begin // 2, -(-end // 2)).view(np.uint8)
        found = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, k)[begin % 2 :][: end - begin]
        return signed_bytes(found)

    def load() -> Rows:
        return rows

    pieces = {"scale": module.scale_piece("weight_scale", (n, scale.shape[1]))}
    return module.made((n, k), Code.integers(4, k, signed=True), group, load, pieces, codes="weight")


def _columns(module: Module, columns: int) -> Piece | None:
    """Factors of the product's input."""
    if not module.has("pre_quant_scale"):
        return None
    module.part("pre_quant_scale", FLOATS, 1)
    module.require("pre_quant_scale", (columns,))
    dtype, where = module.scale_type("pre_quant_scale"), module.where("pre_quant_scale")
    return value_piece(dtype, (columns,), lambda: module.scales("pre_quant_scale"), where)


def _skipped(settings: Section) -> tuple[str, ...]:
    for key in ("exclude_modules", "ignore"):
        if settings.has(key):
            return settings.words(key)
    return ()


FORMAT = Format(
    names=("modelopt", "modelopt_fp4"),
    marks=("weight_scale",),
    parts=("weight", "weight_scale", "weight_scale_2", "pre_quant_scale", *_IDLE),
    read=read,
    skipped=_skipped,
    idle=_IDLE,
)
