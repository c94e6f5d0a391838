"""Whether ingot reads each type of GGUF blocks as llama.cpp does, bit for bit: random blocks through both decoders.

python -m tests.programs.gguf_decoders [--blocks 1000] [--seed 0]

It needs the package xllamacpp. Prints a line for each type, and ends with 1 where a number differs.
"""

import argparse
import ctypes
import importlib
import sys

import numpy as np
import numpy.typing as npt

from ingot.convert.gguf.blocks import TYPES, BlockType
from ingot.convert.gguf.packing import Packing
from ingot.dtypes import to_float32


def ours(packing: Packing, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[blocks, size], as the expressions of a Checkpoint compute it."""
    codes = packing.codes(raw)
    values = np.array(packing.table, np.float32)[codes] if packing.table else codes.astype(np.float32)
    groups = values.reshape(len(raw), -1, packing.group)
    scale = to_float32(packing.scale(raw), packing.scale_dtype).reshape(len(raw), -1)
    if packing.scale_unit is not None:
        scale = scale * packing.scale_unit(raw).astype(np.float32)
    groups = groups * scale[:, :, None]
    if packing.offset is not None:
        offset = to_float32(packing.offset(raw), packing.offset_dtype).reshape(len(raw), -1)
        if packing.offset_unit is not None:
            offset = offset * packing.offset_unit(raw).astype(np.float32)
        groups = groups + offset[:, :, None]
    return groups.reshape(len(raw), -1)


def theirs(library: ctypes.CDLL, kind: BlockType, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[blocks, size]"""
    found = np.empty((len(raw), kind.size), np.float32)
    name = kind.name[:-1].lower() + "K" if kind.name.endswith("_K") else kind.name.lower()
    decode = getattr(library, f"dequantize_row_{name}")
    decode(ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_int64(found.size))
    return found


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    library = ctypes.CDLL(importlib.import_module("xllamacpp.xllamacpp").__file__)
    rng, wrong = np.random.default_rng(options.seed), 0
    for kind in TYPES.values():
        if kind.packing is None:
            continue
        raw = rng.integers(0, 256, (options.blocks, kind.nbytes)).astype(np.uint8)
        with np.errstate(all="ignore"):
            got, wanted = ours(kind.packing, raw), theirs(library, kind, raw)
        read = np.isfinite(got).all(axis=1)  # convert refuses scales that are no numbers
        different = int((got != wanted)[read].sum())
        print(f"{kind.name:8} {read.sum():6,} blocks of {kind.size}, {different:,} numbers differ")
        wrong += different
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
