"""What instructions compute that touch neither memory nor other threads: arrays of operands → an array.

Integers wrap. A fused multiply-add of float32 is computed in float64 and rounded once more: it may differ from the
exact one in the last bit, in very few cases. Approximate functions are numpy's, which are closer than a GPU's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, round_to_f8, to_float32

Values = npt.NDArray[Any]

_KINDS = {"u": np.uint64, "b": np.uint64, "s": np.int64, "f": np.float64}


def dtype_of(kind: str) -> np.dtype[Any]:
    """Of "u32", "pred", ...; bf16 are bits."""
    if kind == "pred":
        return np.dtype(np.bool_)
    if kind == "bf16":
        return np.dtype(np.uint16)
    letter, size = kind[0], int(kind[1:]) // 8
    return np.dtype(f"{ {'u': 'u', 'b': 'u', 's': 'i', 'f': 'f'}[letter] }{size}")


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """compute takes an array for each of `sources`, which are types, and gives one of type `result`."""

    sources: tuple[str, ...]
    result: str
    compute: Callable[..., Values]


def find(op: tuple[str, ...]) -> Operation | None:
    """None for what is no arithmetic, or not known."""
    name, kind = op[0], op[-1]
    if op in _PAIRS:
        return _PAIRS[op]
    if name == "cvt":
        return Operation((op[-1],), op[-2], lambda x: _convert(x, op))
    if name == "setp":
        return _compare(op)
    if name == "selp":
        return Operation((kind, kind, "pred"), kind, lambda x, y, p: np.asarray(np.where(p, x, y)))
    if name in ("shl", "shr"):
        return Operation((kind, "u32"), kind, lambda x, by: _shift(x, by, name == "shl"))
    if name in ("mul", "mad") and kind[0] != "f":
        return _integer_product(op)
    if op == ("fma", "rn", "bf16x2"):
        return Operation(("b32",) * 3, "b32", _fused_pairs)
    if name in _BITS:
        sources, compute = _BITS[name]
        return Operation(tuple(each or kind for each in sources), "u32" if name in _COUNTS else kind, compute)
    table = _FLOATS if kind[0] == "f" else _INTEGERS
    if name not in table:
        return None
    count, compute = table[name]
    if name in ("fma", "mad"):
        compute = _fused(op)
    return Operation((kind,) * count, kind, compute)


def _fp8(x: Values) -> Values:
    """Bits; what is larger than the largest number becomes that."""
    bits = from_float32(round_to_f8(np.where(np.isnan(x), np.float32(0), x)), DType.F8)
    return np.where(np.isnan(x), np.uint16(0x7F), bits).astype(np.uint16)


def _convert(x: Values, op: tuple[str, ...]) -> Values:
    to, source = op[-2], op[-1]
    if to == "bf16":
        return _to_bf16(x)
    if source == "bf16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    if source[0] in "fb" and source != "b16" and to[0] != "f":  # a float becomes an integer: saturates, NaN is 0
        rounded = (
            np.rint(x) if "rni" in op else np.floor(x) if "rmi" in op else np.ceil(x) if "rpi" in op else np.trunc(x)
        )
        low, high = np.iinfo(dtype_of(to)).min, np.iinfo(dtype_of(to)).max
        wide = np.where(np.isnan(rounded), 0, rounded).astype(np.float64)
        inside = (wide >= float(low)) & (wide < float(high) + 1)
        whole = np.where(inside, wide, 0).astype(dtype_of(to))
        return np.where(inside, whole, np.where(wide < float(low), dtype_of(to).type(low), dtype_of(to).type(high)))
    for word, way in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        if word in op:
            x = way(x)
    if "sat" in op:
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1))
    return np.asarray(x).astype(dtype_of(to))


def _to_bf16(x: Values) -> Values:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)


def _pack(high: Values, low: Values, kind: str) -> Values:
    first, second = (
        (_to_bf16(each) if kind == "bf16x2" else np.asarray(each).astype(np.float16).view(np.uint16)).astype(np.uint32)
        for each in np.broadcast_arrays(high, low)
    )
    return first << np.uint32(16) | second


def _fp8_pairs(x: Values) -> Values:
    """The number of the lower byte goes to the lower half."""
    words = np.ascontiguousarray(x).astype(np.uint32)
    low, high = (to_float32((words >> np.uint32(by)).astype(np.uint8), DType.F8) for by in (0, 8))
    return _pack(high, low, "f16x2")


def _fused_pairs(x: Values, y: Values, z: Values) -> Values:
    """Exact in float64, but for rounding: products have 16 bits."""
    words = [np.ascontiguousarray(each, np.uint32) for each in np.broadcast_arrays(x, y, z)]
    low, high = (
        _to_bf16((a.astype(np.float64) * b + c).astype(np.float32)).astype(np.uint32)
        for a, b, c in (
            [part.view(np.float32) for part in parts]
            for parts in ([word << np.uint32(16) for word in words], [word & np.uint32(0xFFFF0000) for word in words])
        )
    )
    return low | high << np.uint32(16)


_ORDERED: dict[str, Callable[..., Values]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _compare(op: tuple[str, ...]) -> Operation:
    word, kind = op[1], op[-1]
    joins = next((each for each in op[2:-1] if each in ("and", "or", "xor")), None)

    def compare(x: Values, y: Values, before: Values | None = None) -> Values:
        unordered: Any = np.isnan(x) | np.isnan(y) if kind[0] == "f" else np.bool_(False)
        if word == "nan":
            found: Any = unordered
        elif word == "num":
            found = ~unordered
        elif word.endswith("u") and len(word) == 3:
            found = _ORDERED[word[:2]](x, y) | unordered
        else:
            found = _ORDERED[word](x, y) & ~unordered
        if before is None:
            return np.asarray(found)
        return np.asarray(
            {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joins or ""](found, before)
        )

    return Operation((kind, kind, *(("pred",) if joins else ())), "pred", compare)


def _shift(x: Values, by: Values, left: bool) -> Values:
    width = x.dtype.itemsize * 8
    within = np.minimum(by, width - 1).astype(x.dtype)
    shifted = x << within if left else x >> within
    return shifted if x.dtype.kind == "i" and not left else np.where(by >= width, 0, shifted)


def _integer_product(op: tuple[str, ...]) -> Operation:
    kind = op[-1]
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    if "wide" in op or "hi" in op:
        result = wide if "wide" in op else kind

        def product(x: Values, y: Values) -> Values:
            if kind[1:] == "64":
                whole = np.array(
                    [int(a) * int(b) >> 64 for a, b in zip(*np.broadcast_arrays(x, y), strict=True)], object
                )
                return np.asarray((whole & (2**64 - 1)).astype(np.uint64).view(dtype_of(kind)))
            whole = x.astype(dtype_of(wide)) * y.astype(dtype_of(wide))
            return np.asarray(whole if "wide" in op else whole >> dtype_of(wide).type(int(kind[1:])))

    else:
        result = kind

        def product(x: Values, y: Values) -> Values:
            return x * y

    if op[0] == "mul":
        return Operation((kind, kind), result, product)
    return Operation((kind, kind, result), result, lambda x, y, z: (product(x, y) + z).astype(dtype_of(result)))


def _fused(op: tuple[str, ...]) -> Callable[..., Values]:
    if op[-1] == "f64":
        return lambda x, y, z: (x.astype(np.longdouble) * y + z).astype(np.float64)
    down = "rm" in op

    def fused(x: Values, y: Values, z: Values) -> Values:
        exact = x.astype(np.float64) * y + z
        near = exact.astype(np.float32)
        return np.asarray(np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near) if down else near)

    return fused


def _quotient(x: Values, y: Values) -> Values:
    """Rounded towards zero."""
    whole: Values = x // np.where(y == 0, 1, y)
    if x.dtype.kind == "u":
        return whole
    return np.asarray(whole + ((whole * y != x) & ((x < 0) != (y < 0))))


def _insert(x: Values, into: Values, at: Values, count: Values) -> Values:
    one = into.dtype.type(1)
    at, count = at.astype(into.dtype), count.astype(into.dtype)
    mask = ((one << count) - one) << at
    return np.asarray((into & ~mask) | (x << at & mask))


def _extract(x: Values, at: Values, count: Values) -> Values:
    width = x.dtype.itemsize * 8
    left = np.clip(width - at.astype(np.int64) - count, 0, width - 1).astype(x.dtype)
    right = np.minimum(width - count.astype(np.int64), width - 1).astype(x.dtype)
    return np.where(count == 0, 0, (x << left) >> right).astype(x.dtype)


def _permute(x: Values, y: Values, selector: Values) -> Values:
    both = y.astype(np.uint64) << np.uint64(32) | x
    result = np.zeros_like(both)
    for place in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


def _logic(x: Values, y: Values, z: Values, table: Values) -> Values:
    result = np.zeros(np.broadcast_shapes(np.shape(x), np.shape(y), np.shape(z)), np.uint32)
    bits = int(np.asarray(table).reshape(-1)[0])
    for case in range(8):
        if bits >> case & 1:
            result |= (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
    return result


def _population(x: Values) -> Values:
    return np.bitwise_count(x)


def _leading_zeros(x: Values) -> Values:
    width = x.dtype.itemsize * 8
    wide = np.asarray(x, np.uint64)
    for step in (1, 2, 4, 8, 16, 32):
        wide = wide | wide >> np.uint64(step)
    return (width - np.bitwise_count(wide).astype(np.int64)).astype(np.uint32)


_COUNTS = ("popc", "clz")
_BITS: dict[str, tuple[tuple[str, ...], Callable[..., Values]]] = {  # "" stands for the type of the instruction
    "bfi": (("", "", "u32", "u32"), _insert),
    "bfe": (("", "u32", "u32"), _extract),
    "prmt": (("u32", "u32", "u32"), _permute),
    "lop3": (("u32", "u32", "u32", "u32"), _logic),
    "popc": (("",), _population),
    "clz": (("",), _leading_zeros),
}
_SHARED: dict[str, tuple[int, Callable[..., Values]]] = {
    "mov": (1, lambda x: x),
    "neg": (1, lambda x: -x),
    "abs": (1, np.abs),
    "add": (2, lambda x, y: x + y),
    "sub": (2, lambda x, y: x - y),
}
_INTEGERS = _SHARED | {
    "and": (2, lambda x, y: x & y),
    "or": (2, lambda x, y: x | y),
    "xor": (2, lambda x, y: x ^ y),
    "not": (1, np.invert),
    "min": (2, np.minimum),
    "max": (2, np.maximum),
    "div": (2, _quotient),
    "rem": (2, lambda x, y: x - y * _quotient(x, y)),
}
_FLOATS = _SHARED | {
    "mul": (2, lambda x, y: x * y),
    "div": (2, lambda x, y: x / y),
    "fma": (3, lambda x, y, z: x * y + z),
    "min": (2, np.fmin),
    "max": (2, np.fmax),
    "sqrt": (1, np.sqrt),
    "rcp": (1, lambda x: x.dtype.type(1) / x),
    "rsqrt": (1, lambda x: x.dtype.type(1) / np.sqrt(x)),
    "ex2": (1, np.exp2),
    "lg2": (1, np.log2),
    "tanh": (1, np.tanh),
    "sin": (1, np.sin),
    "cos": (1, np.cos),
    "copysign": (2, lambda sign, size: np.copysign(size, sign)),
}
_PAIRS = {
    ("cvt", "rn", "bf16x2", "f32"): Operation(("f32", "f32"), "b32", lambda high, low: _pack(high, low, "bf16x2")),
    ("cvt", "rn", "f16x2", "f32"): Operation(("f32", "f32"), "b32", lambda high, low: _pack(high, low, "f16x2")),
    ("cvt", "rn", "f16x2", "e4m3x2"): Operation(("b16",), "b32", _fp8_pairs),
    ("cvt", "rn", "satfinite", "e4m3x2", "f32"): Operation(
        ("f32", "f32"), "b16", lambda high, low: _fp8(high) << np.uint16(8) | _fp8(low)
    ),
}
