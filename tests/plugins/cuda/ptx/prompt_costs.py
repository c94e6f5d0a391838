"""How many instructions the three warpgroups of attention_prompt issue for a tile of tokens: the difference that more
context makes. `python -m tests.plugins.cuda.ptx.prompt_costs` prints them."""

import struct
from collections import Counter

import numpy as np

from ingot.dtypes import DType
from ingot.plugins.cuda.compiler import Compiler, Specialisation, find_compiler
from ingot.plugins.cuda.shapes import warpgroup_shared_bytes
from tests.plugins.cuda.ptx.costs import BLOCK, GROUP, place_in
from tests.plugins.cuda.ptx.launches import kernel_of
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.parse import Kernel

KERNELS = [(kernel, dims) for kernel in ("attention_prompt", "attention_prompt_bent") for dims in (64, 128)]
ROWS, THREADS = 128, 384
TILE = {64: 128, 128: 64}  # dims of a head → tokens
_SHORT, _LONG = 4, 8  # tiles before the last one


def prompt_cost(nvcc: Compiler, kernel: str, head_dim: int) -> Counter[str]:
    """Instructions by name, for 128 rows: GQA with four heads for a KV head."""
    types = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=head_dim, tokens_per_block=BLOCK, warpgroups=True)
    entry = kernel_of(nvcc, types, kernel)
    short, long = (_launch(entry, head_dim, tiles * TILE[head_dim]) for tiles in (_SHORT, _LONG))
    return Counter({name: (long[name] - short[name]) // (_LONG - _SHORT) for name in long if long[name] != short[name]})


def _launch(entry: Kernel, head_dim: int, past: int) -> Counter[str]:
    machine, new = Machine(), ROWS // GROUP
    pages = -(-(past + new) // BLOCK)
    pool, rows = np.zeros((pages, BLOCK, 2 * head_dim), np.uint8), np.zeros((new, GROUP, head_dim), np.float32)
    items, table, count = (
        np.array([[0, 0, new, past]], np.int32),
        np.arange(pages, dtype=np.int32),
        np.ones(1, np.int32),
    )
    y, q, keys, values, at_items, tables, number, sums = (
        place_in(machine, each.nbytes, each) for each in (rows, rows, pool, pool, items, table, count, rows)
    )
    given = struct.pack(
        "<8Q4i2f2QifiiQi",
        y,
        q,
        keys,
        values,
        at_items,
        tables,
        sums,
        sums,
        pages,
        GROUP,
        1,
        0,
        0.1,
        0.0,
        0,
        0,
        0,
        0.0,
        1,
        0,
        number,
        1,
    )
    return machine.launch(entry, (1, 1, 1), THREADS, warpgroup_shared_bytes(head_dim), given)


def main() -> None:
    """Print them."""
    nvcc = find_compiler()
    assert nvcc is not None, "this needs nvcc"
    for kernel, head_dim in KERNELS:
        names = prompt_cost(nvcc, kernel, head_dim)
        print(f"{kernel}, head_dim {head_dim}: {names.total()} instructions a tile of {TILE[head_dim]} tokens")
        print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(14)))


if __name__ == "__main__":
    main()
