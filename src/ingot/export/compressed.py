"""A Checkpoint as a Hugging Face directory whose weights are compressed-tensors (`convert/quantised/formats` reads it).

codes                              format           tensors of a module
4 bits, whole numbers              pack-quantized   weight_packed I32, weight_scale, weight_shape
4 bits, whole zero points          pack-quantized   and weight_zero_point I32, packed along the rows
8 bits, a scale for each row       int-quantized    weight I8, weight_scale
FP8, a scale for each row          float-quantized  weight F8_E4M3, weight_scale
floats                             none             weight
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.stored_codes import CheckpointWeight, StoredCodes
from ingot.dtypes import DType
from ingot.errors import UnsupportedModelError
from ingot.tensor_file import TensorFileWriter, TensorSpec

_ROWS = 256  # worked on at a time
_MIDDLE = np.uint8(8)  # stored codes of 4 bits are so much too high
_MOST = 15  # of 4 bits
_WEIGHTS_FILE = "model.safetensors"

Bits = npt.NDArray[np.generic]
Read = Callable[[], Iterator[Bits]]


def compressed_problem(codes: StoredCodes, shape: tuple[int, ...]) -> str:
    """Why the format does not hold such codes of a weight [rows, columns]; "": it does."""
    rows, columns = shape
    if codes.table:
        return "its codes stand for the values of a table"
    if codes.group < columns and columns % codes.group:
        return f"groups of {codes.group} do not divide {columns} columns"
    if codes.bits == 8:
        return "" if codes.group >= columns else f"its bytes have a scale for each group of {codes.group} columns"
    if codes.zero is None and not codes.signed:
        return "its codes are unsigned, without zero points"
    if codes.zero is None:
        return ""
    if codes.signed:
        return "its signed codes have zero points"
    for begin in range(0, rows, _ROWS):
        zeros = codes.zero(begin, min(begin + _ROWS, rows))
        if not np.array_equal(zeros, np.rint(zeros).clip(0, _MOST)):
            return f"its zero points are not all whole numbers from 0 to {_MOST}"
    return ""


def write_compressed(
    folder: Path,
    config: dict[str, object],
    weights: Mapping[str, CheckpointWeight],
    floats: Sequence[str],
    advance: Callable[[int], None],
) -> None:
    """config.json and model.safetensors. weights: by their names in the files. floats: those whose codes become
    float32."""
    tensors: list[tuple[TensorSpec, Read]] = []
    schemes: dict[str, list[str]] = {}
    kept: list[str] = []
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.codes is None or name in floats:
            tensors.append(_floats(name, weight))
            kept += [module] if len(weight.shape) == 2 and name.endswith(".weight") else []
        else:
            tensors += _module(module, weight, weight.codes)
            schemes.setdefault(json.dumps(_scheme(weight.codes, weight.shape[1])), []).append(module)
    if "lm_head.weight" not in weights:
        kept.append("lm_head")
    stored = {spec.dtype for spec, _ in tensors}
    plain = [dtype for dtype in (DType.BF16, DType.F16) if dtype in stored and DType.F32 not in stored]
    config["dtype"] = {DType.BF16: "bfloat16", DType.F16: "float16"}[plain[0]] if plain else "float32"
    if schemes:
        config["quantization_config"] = _settings(schemes, kept)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with TensorFileWriter(folder / _WEIGHTS_FILE, [spec for spec, _ in tensors]) as file:
        for _, read in tensors:
            for block in read():
                file.write(block)
                advance(block.nbytes)


def _settings(schemes: Mapping[str, Sequence[str]], kept: Sequence[str]) -> dict[str, object]:
    """quantization_config. One scheme is that of all Linear; several name their modules."""
    groups = {}
    for number, (scheme, modules) in enumerate(schemes.items()):
        targets = ["Linear"] if len(schemes) == 1 else list(modules)
        read = json.loads(scheme)
        whole = "float-quantized" if read["type"] == "float" else "int-quantized"
        form = whole if read["num_bits"] == 8 else "pack-quantized"
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": read,
            "input_activations": None,
            "output_activations": None,
            "format": form,
        }
    forms = {str(each["format"]) for each in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _scheme(codes: StoredCodes, columns: int) -> dict[str, object]:
    """How the weights of a group of modules are quantised."""
    whole = codes.group >= columns
    return {
        "num_bits": codes.bits,
        "type": "float" if codes.floats else "int",
        "symmetric": codes.zero is None,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else codes.group,
        "dynamic": False,
        "actorder": None,
    }


def _floats(name: str, weight: CheckpointWeight) -> tuple[TensorSpec, Read]:
    dtype = weight.dtype or DType.F32
    spec = TensorSpec(name=name, dtype=dtype, shape=weight.shape)
    return spec, functools.partial(_blocks, weight.bits, weight.shape[0])


def _blocks(read: Callable[[int, int], Bits], rows: int) -> Iterator[Bits]:
    for begin in range(0, rows, _ROWS):
        yield read(begin, min(begin + _ROWS, rows))


def _module(module: str, weight: CheckpointWeight, codes: StoredCodes) -> list[tuple[TensorSpec, Read]]:
    n, k = weight.shape
    groups = -(-k // codes.group)

    def spec(part: str, dtype: DType, *shape: int) -> TensorSpec:
        return TensorSpec(name=f"{module}.{part}", dtype=dtype, shape=shape)

    scale = (spec("weight_scale", DType.F32, n, groups), functools.partial(_blocks, codes.scale, n))
    if codes.bits == 8:
        kind = DType.F8 if codes.floats else DType.I8
        return [(spec("weight", kind, n, k), functools.partial(_blocks, codes.codes, n)), scale]
    packed = spec("weight_packed", DType.I32, n, -(-k // 8))
    shape = np.array([n, k], np.int64)
    found: list[tuple[TensorSpec, Read]] = [
        (packed, functools.partial(_blocks, functools.partial(_packed, codes), n)),
        scale,
        (spec("weight_shape", DType.I64, 2), lambda: iter([shape])),
    ]
    if codes.zero is not None:
        zeros = functools.partial(_zeros, codes, n)
        found.append((spec("weight_zero_point", DType.I32, -(-n // 8), groups), zeros))
    return found


def _packed(codes: StoredCodes, begin: int, end: int) -> Bits:
    """Words [rows, K / 8] of codes, 8 too high; those with zero points are stored from 0 on, which is 8 too high."""
    stored = codes.codes(begin, end).view(np.uint8)
    return _words(stored + _MIDDLE if codes.signed else stored)


def _zeros(codes: StoredCodes, rows: int) -> Iterator[Bits]:
    assert codes.zero is not None, "the caller has looked"
    yield np.ascontiguousarray(_words(codes.zero(0, rows).astype(np.uint8).T).T)


def _words(fields: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """[n, k] → [n, k / 8], 4 bits each, the first lowest."""
    padded = np.zeros((len(fields), -(-fields.shape[1] // 8) * 8), np.uint8)
    padded[:, : fields.shape[1]] = fields & np.uint8(15)
    pairs = padded[:, 0::2] | (padded[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<u4")


def unsaid(name: str, reason: str, form: str) -> UnsupportedModelError:
    """A weight whose codes a format does not hold."""
    return UnsupportedModelError(
        f"the format {form} cannot hold the codes of a weight",
        where=name,
        expected="codes of 4 bits, with whole zero points or none, or of 8 bits without; and scales of groups",
        got=reason,
        hint="--as_floats writes such weights as float32 numbers of the same values; `ingot quantize --codes "
        "symmetric` makes codes that every format holds",
    )
