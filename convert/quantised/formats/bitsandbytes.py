"""bitsandbytes: nf4 and fp4 in blocks of the flat weight, and int8 with a scale per row.

    weight U8 [N * K / 2, 1], high nibble first; weight.absmax F32 [blocks], weight.quant_map F32 [16]
    weight.quant_state.bitsandbytes__nf4: JSON in bytes; absmax may be quantised itself (nested_*)
    weight I8 [N, K], SCB F32 [N]: the scale is SCB / 127

Blocks may begin within a row: then columns share a scale in groups that fit both.
"""

import math

import numpy as np

from ingot.configs.read import Section, parse_json
from ingot.convert.quantised.bits import Bytes
from ingot.convert.quantised.form import Bits, Code, Quantised, Rows, value_piece
from ingot.convert.quantised.module import Format, Module
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor, read_elements, read_rows

_STATE = "weight.quant_state.bitsandbytes__"
_MOST_JSON = 1 << 16  # bytes of a quant_state
_STORAGE = ("U8", "I8", "F16", "BF16", "F32")


def read(module: Module) -> Quantised:
    return _read_int8(module) if module.has("SCB") else _read_4bit(module)


def _read_int8(module: Module) -> Quantised:
    n, k = module.part("weight", ("I8",), 2).shape
    module.part("SCB", ("F32",))
    module.require("SCB", (n,))

    def scales() -> Bits:
        found: Bits = (module.scales("SCB").view(np.float32) * np.float32(1 / 127)).reshape(n, 1)
        return found

    scale = value_piece(DType.F32, (n, 1), scales, module.where("SCB"))
    return module.made((n, k), Code.I8, k, module.stored_codes("weight"), {"scale": scale}, codes="weight")


def _read_4bit(module: Module) -> Quantised:
    kinds = [kind for kind in ("nf4", "fp4") if module.has(_STATE + kind)]
    state = _state(module, _STATE + (kinds or ["nf4"])[0])
    n, k = _shape(state)
    block = state.integer("blocksize", minimum=1)
    group = math.gcd(k, block)
    codes = module.part("weight", _STORAGE)
    if codes.nbytes * 2 != n * k:
        raise CheckpointError(
            "a quantised weight has another size than its quant_state says",
            where=f"{codes.file}: {codes.name}",
            expected=f"{n * k // 2:,} bytes for [{n}, {k}]",
            got=f"{codes.nbytes:,} bytes",
        )
    stored = StoredTensor(
        name=codes.name,
        file=codes.file,
        dtype_name="U8",
        shape=(codes.nbytes,),
        offset=codes.offset,
        nbytes=codes.nbytes,
    )
    module.part("weight.quant_map", ("F32",), 1)
    module.require("weight.quant_map", (16,))
    table = tuple(float(value) for value in read_rows(module.parts["weight.quant_map"]))
    if not all(map(math.isfinite, table)):
        raise CheckpointError("a quant_map holds NaN or infinities", where=module.where("weight.quant_map"))
    blocks = -(-n * k // block)
    module.part("weight.absmax", ("U8",) if state.has("nested_blocksize") else ("F32",), 1)
    module.require("weight.absmax", (blocks,))
    _check_nested(module, state, blocks)

    def rows(begin: int, end: int) -> Bytes:
        first, last = begin * k, end * k
        found = read_elements(stored, first // 2, -(-last // 2)).view(np.uint8)
        spread = np.stack([found >> 4, found & 15], axis=-1).reshape(-1)
        return spread[first % 2 :][: last - first].reshape(end - begin, k)

    def load() -> Rows:
        return rows

    def scales() -> Bits:
        owners = np.arange(n * k // group, dtype=np.int64) * group // block
        found: Bits = _absmax(module, state)[owners].reshape(n, k // group)
        return found

    scale = value_piece(DType.F32, (n, k // group), scales, module.where("weight.absmax"))
    code = Code.integers(4, k, signed=False)
    return module.made((n, k), code, group, load, {"scale": scale}, table=table, codes="weight")


def _state(module: Module, part: str) -> Section:
    """The JSON in a tensor."""
    tensor = module.part(part, ("U8",), 1)
    where = f"{tensor.file}: {tensor.name}"
    if tensor.nbytes > _MOST_JSON:
        raise CheckpointError("a quant_state is too large", where=where, expected=f"at most {_MOST_JSON:,} bytes")
    values = parse_json(read_rows(tensor).tobytes(), where, CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError("a quant_state holds no JSON object", where=where, got=type(values).__name__)
    return Section(values, where)


def _shape(state: Section) -> tuple[int, int]:
    sizes = state.numbers("shape")
    if len(sizes) != 2 or any(size != int(size) or not 1 <= size < 1 << 31 for size in sizes):
        raise CheckpointError(
            "a quant_state has no usable shape",
            where=state.place("shape"),
            expected="[rows, columns]",
            got=str(list(sizes)),
        )
    return int(sizes[0]), int(sizes[1])


def _check_nested(module: Module, state: Section, blocks: int) -> None:
    if state.has("nested_blocksize"):
        module.part("weight.nested_absmax", ("F32",), 1)
        module.require("weight.nested_absmax", (-(-blocks // state.integer("nested_blocksize", minimum=1)),))
        module.part("weight.nested_quant_map", ("F32",), 1)
        module.require("weight.nested_quant_map", (256,))
        state.number("nested_offset")


def _absmax(module: Module, state: Section) -> Bits:
    """The scale of each block; of quantised ones as bitsandbytes computes it, in float32."""
    stored = read_rows(module.parts["weight.absmax"])
    if not state.has("nested_blocksize"):
        return stored
    outer = read_rows(module.parts["weight.nested_absmax"]).view(np.float32)
    values = read_rows(module.parts["weight.nested_quant_map"]).view(np.float32)[stored.view(np.uint8)]
    owners = np.arange(len(stored)) // state.integer("nested_blocksize")
    with np.errstate(over="ignore"):  # an offset that float32 does not hold is refused as an infinite scale
        found: Bits = values * outer[owners] + np.float32(state.number("nested_offset"))
    return found


def _skipped(settings: Section) -> tuple[str, ...]:
    return settings.words("llm_int8_skip_modules") if settings.has("llm_int8_skip_modules") else ()


FORMAT = Format(
    names=("bitsandbytes",),
    marks=("SCB", "weight.absmax"),
    parts=(
        "weight",
        "SCB",
        "weight_format",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        f"{_STATE}nf4",
        f"{_STATE}fp4",
    ),
    read=read,
    skipped=_skipped,
    idle=("weight_format",),
)
