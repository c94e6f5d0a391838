"""How many instructions the warps of an attention block issue per tile of the KV cache: the difference that more
context makes. `python -m tests.plugins.cuda.ptx.costs` prints them."""

import struct
from collections import Counter

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType
from ingot.plugins.cuda.compiler import Compiler, Specialisation, find_compiler
from ingot.plugins.cuda.shapes import attention_shared_bytes
from tests.plugins.cuda.ptx.launches import ptx_of
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.parse import Kernel, parse

TILE, BLOCK, GROUP, THREADS = 64, 32, 4, 128
SHORT, LONG = 3, 6  # tiles


def attention_cost(nvcc: Compiler, kernel: str, head_dim: int) -> Counter[str]:
    """Of one tile, by name. A block's 64 tokens lie in two pages; GQA with four heads for a KV head."""
    types = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=head_dim, tokens_per_block=BLOCK)
    entry = parse(ptx_of(nvcc, types))[kernel]
    new = 1 if kernel == "attention_decode" else 16
    short, long = (_launch(entry, head_dim, tiles * TILE - new, new) for tiles in (SHORT, LONG))
    return Counter({name: (long[name] - short[name]) // (LONG - SHORT) for name in long if long[name] != short[name]})


def loads_per_tile(head_dim: int) -> int:
    """Copies of 16 bytes that a warp issues at once: K and V of a tile."""
    return 2 * TILE * head_dim * 2 // 16 // 32


def _launch(entry: Kernel, head_dim: int, past: int, new: int) -> Counter[str]:
    machine, pages = Machine(), -(-(past + new) // BLOCK)

    def place(values: npt.NDArray[np.generic]) -> int:
        room = np.zeros(values.nbytes + 256, np.uint8)
        data = room[-room.ctypes.data % 256 :][: values.nbytes]
        data[:] = values.reshape(-1).view(np.uint8)
        machine.memory.add(data.ctypes.data, data)
        return int(data.ctypes.data)

    pool, rows = np.zeros((pages, BLOCK, head_dim), np.uint16), np.zeros((new, GROUP, head_dim), np.float32)
    items, table = np.array([[0, 0, new, past]], np.int32), np.arange(pages, dtype=np.int32)
    sums = place(np.zeros(16 * (head_dim + 2), np.float32))
    addresses = [place(each) for each in (rows, rows, pool, pool, items, table)]
    given = struct.pack("<8Q4i2fi", *addresses, sums, sums, pages, GROUP, 1, 0, 0.1, 0.0, 0)
    shared = attention_shared_bytes(head_dim, decode=new == 1)
    return machine.launch(entry, (1, 1, 1), THREADS, shared, given)


def main() -> None:
    """Print them."""
    nvcc = find_compiler()
    assert nvcc is not None, "this needs nvcc"
    for kernel in ("attention_decode", "attention_prefill"):
        for head_dim in (64, 128):
            cost = attention_cost(nvcc, kernel, head_dim)
            most = ", ".join(f"{name} {count}" for name, count in cost.most_common(12))
            print(f"{kernel}, head_dim {head_dim}: {cost.total()} instructions a tile: {most}")


if __name__ == "__main__":
    main()
