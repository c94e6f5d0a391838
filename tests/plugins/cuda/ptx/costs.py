"""How many instructions the warps of a block issue: in attention per tile of the KV cache, in products per slab of K.
It is the difference that more context, or a longer K, makes. Kernels that go row by row: for one row, in all.
`python -m tests.plugins.cuda.ptx.costs` prints them."""

import dataclasses
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.dtypes import KV_CODES, DType
from ingot.plugins.cuda import compiler
from ingot.plugins.cuda.compiler import Compiler, Specialisation, find_compiler
from ingot.plugins.cuda.fp8_products import FP8_KERNELS, fp8_shared_bytes, fp8_threads
from ingot.plugins.cuda.own_products import FEW_ROWS
from ingot.plugins.cuda.shapes import attention_shared_bytes, prefill_rows
from ingot.plugins.cuda.wide_products import WIDE_THREADS, wide_shared_bytes
from ingot.plugins.layouts import panel_bytes
from ingot.plugins.short_ways import SCALES_OF_FEW_BITS, WHOLE_SHIFTS
from ingot.weight_formats import FORMATS, PANEL
from tests.plugins.cuda.emulated.units import unit_of
from tests.plugins.cuda.ptx.launches import kernel_of, ptx_of
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.parse import Kernel

TILE, BLOCK, GROUP, THREADS = 64, 32, 4, 128
SHORT, LONG = 3, 6  # tiles
COPY = (("matrix_units.cuh", "copy_async"), ("matrix_units.cuh", "copy_word_async"))
LOADING = {  # kernel → files and functions, beside COPY; heads of more than 256 dims have one way for both
    "attention_decode": (("decode_attention.cuh", "load_pages"), ("decode_codes.cuh", "load")),
    "attention_prefill": (("prefill_pages.cuh", "load"), ("prefill_pages.cuh", "fetch")),
}
CONVERTING = (
    *(("kv_cache.cuh", function) for function in ("two", "two_apart", "upper", "copy_eight")),
    *(("matrix_units.cuh", "fused_bf16"), ("prefill_pages.cuh", "convert")),
)
ATTENTION = [  # kernel, head_dim, codes
    (kernel, head_dim, codes)
    for kernel in ("attention_decode", "attention_prefill")
    for codes in (None, *KV_CODES)
    for head_dim in ((64, 128, 256) if codes else (64, 128, 512))
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one tile: instructions by name; how many of them load, up to the copies themselves; how many make numbers of
    codes."""

    instructions: Counter[str]
    loading: int
    converting: int


def attention_cost(nvcc: Compiler, kernel: str, head_dim: int, codes: DType | None = None) -> Cost:
    """A tile's 64 tokens lie in two pages; GQA with four heads for a KV head. codes: of the cache, else it has bf16."""
    wide = head_dim > 256
    types = Specialisation(
        weight=DType.BF16,
        kv=DType.BF16,
        head_dim=head_dim,
        tokens_per_block=BLOCK,
        alone=wide or codes is not None,
        kv_codes=codes,
    )
    new = 1 if kernel == "attention_decode" else prefill_rows(head_dim) // GROUP
    text, entry = ptx_of(nvcc, types, unit_of(kernel)), kernel_of(nvcc, types, kernel)
    files = {int(number): Path(name).name for number, name in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    (short, few), (long, many) = (_launch(entry, head_dim, codes, tiles * TILE - new, new) for tiles in (SHORT, LONG))
    names = Counter({name: (long[name] - short[name]) // (LONG - SHORT) for name in long if long[name] != short[name]})
    more = {(files.get(file), line): many[file, line] - few[file, line] for file, line in many}

    def of(functions: Sequence[tuple[str, str]]) -> int:
        lines = {(file, line) for file, function in functions for line in _lines_of(file, function)}
        return sum(count for place, count in more.items() if place in lines) // (LONG - SHORT)

    loading = of((*LOADING["attention_prefill" if wide else kernel], *COPY))
    return Cost(instructions=names, loading=loading, converting=of(CONVERTING) if codes else 0)


def _lines_of(file: str, function: str) -> Iterator[int]:
    """Those of all functions of the name."""
    lines = (compiler.SOURCES / file).read_text().splitlines()
    for begin, first in enumerate(lines, 1):
        if re.match(rf" *INGOT_DEVICE .*\b{function}\([^;]*$", first):
            end = first[: len(first) - len(first.lstrip())] + "}"
            last = begin if first.endswith("}") else lines.index(end, begin) + 1
            yield from range(begin, last + 1)


def loads_per_tile(head_dim: int, codes: DType | None = None) -> int:
    """Copies of 16 bytes that a warp issues at once: K and V of a tile."""
    return 2 * TILE * head_dim * (codes or DType.BF16).itemsize // 16 // 32


def place_in(machine: Machine, nbytes: int, values: npt.NDArray[np.generic] | None = None) -> int:
    """Where memory of the machine lies, at a multiple of 256. values: what it holds; else zeros."""
    room = np.zeros(nbytes + 256, np.uint8)
    data = room[-room.ctypes.data % 256 :][:nbytes]
    if values is not None:
        data[:] = values.reshape(-1).view(np.uint8)
    machine.memory.add(data.ctypes.data, data)
    return int(data.ctypes.data)


def _launch(
    entry: Kernel, head_dim: int, codes: DType | None, past: int, new: int
) -> tuple[Counter[str], Counter[tuple[int, int]]]:
    machine, pages = Machine(), -(-(past + new) // BLOCK)

    def place(values: npt.NDArray[np.generic]) -> int:
        return place_in(machine, values.nbytes, values)

    pool = np.zeros((pages, BLOCK, head_dim + 4 if codes else 2 * head_dim), np.uint8)  # with scales behind codes
    rows = np.zeros((new, GROUP, head_dim), np.float32)
    items, table = np.array([[0, 0, new, past]], np.int32), np.arange(pages, dtype=np.int32)
    sums = place(np.zeros(16 * (head_dim + 2), np.float32))
    addresses = [place(each) for each in (rows, rows, pool, pool, items, table)]
    given = struct.pack("<8Q4i2f2Qifii", *addresses, sums, sums, pages, GROUP, 1, 0, 0.1, 0.0, 0, 0, 0, 0.0, 1, 0)
    shared = attention_shared_bytes(head_dim, decode=new == 1, codes=codes is not None)
    return machine.launch(entry, (1, 1, 1), THREADS, shared, given), machine.lines


PRODUCTS = {  # kernel → rows of x in a block
    f"product_{kind}{rows}": rows for kind in ("", *(f"{each}_" for each in FORMATS)) for rows in (8, 16, 64, 128)
}


PANELS = {  # of codes of 4 bits: the table, bytes 80 to 82 of the header
    "in order": (range(-8, 8), (0, 0, WHOLE_SHIFTS)),  # as those of AWQ, GPTQ and Q4_0
    "offsets": (range(16), (1, 0, 0)),  # Q4_K and Q4_1
    "short scales": ([0] * 16, (0, 0, SCALES_OF_FEW_BITS)),  # MXFP4 and NVFP4
    "others": ([0] * 16, (0, 0, 0)),
}
WAYS = (  # kernel, columns of a group, panels: those that take other ways to the numbers
    ("product_w4_8", 32, "in order"),
    ("product_w2t_8", 32, "in order"),
    ("product_w3t_8", 32, "in order"),
    ("product_w6k_8", 16, "in order"),
    ("product_w4t_8", 32, "in order"),
    ("product_w4t_8", 16, "short scales"),
    ("product_w4t_8", 32, "short scales"),
    ("product_w4t_8", 32, "others"),
    ("product_w4ts_8", 32, "in order"),
    ("product_w4ts_8", 32, "offsets"),
    ("product_w4ts_8", 128, "offsets"),
    ("product_w4ts_8", 128, "others"),
    ("product_f8_8", 0, "in order"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightOf:
    """panels: one of PANELS."""

    dtype: DType
    group: int
    panels: str = "in order"

    def placed(self, machine: Machine, n: int, k: int) -> int:
        """Where it lies in the machine's memory."""
        weight = np.zeros(2 * n * k, np.uint8)
        if self.dtype in (DType.W4T, DType.W4TS):
            table, others = PANELS[self.panels]
            for panel in range(n // PANEL):
                header = weight[panel * panel_bytes(k, self.dtype, self.group) :]
                header[64:83] = np.array([*table, *others], np.int8).view(np.uint8)
        return place_in(machine, weight.nbytes, weight)


def product_cost(nvcc: Compiler, kernel: str, group: int = 128, panels: str = "in order") -> Counter[str]:
    """A slab's instructions by name, of all warps of a block that computes 32 rows of the weight (few rows of x) or 128
    (many). group, panels: of a weight of codes (WeightOf)."""
    codes = tuple(DType(each) for each in FORMATS if kernel.startswith(f"product_{each}_"))
    types = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=16, tokens_per_block=16, codes=codes)
    entry, rows = kernel_of(nvcc, types, kernel), PRODUCTS[kernel]
    few, n = rows <= FEW_ROWS, 32 if rows <= FEW_ROWS else 128
    least = 32 if few else 8  # slabs from which each further one costs the same
    weight = WeightOf(dtype=codes[0] if codes else DType.BF16, group=group, panels=panels)
    short, long = (
        _multiply(entry, rows, n, 32 * slabs, 0 if few else 256 * (128 + rows), weight) for slabs in (least, 2 * least)
    )
    return Counter({name: (long[name] - short[name]) // least for name in long if long[name] != short[name]})


WIDE_PRODUCTS = {  # kernel of warpgroups → type of the weight, rows of x in a block
    f"{what}_{'' if dtype is DType.BF16 else f'{dtype.value}_'}wide_{rows}": (dtype, rows)
    for what in ("product", "experts")
    for dtype in (DType.BF16, *map(DType, FORMATS))
    for rows in (64, 128, 256)
    if rows < 256 or (what == "product" and dtype is not DType.BF16)
}
WIDE_GROUP = 64  # columns of a group of codes
WIDE_WAYS = (  # as WAYS
    ("product_w4t_wide_128", "short scales"),
    ("product_w4ts_wide_128", "offsets"),
    ("product_w4ts_wide_128", "others"),
)


def wide_cost(nvcc: Compiler, kernel: str, panels: str = "in order") -> Counter[str]:
    """A slab's instructions by name, of all warps of a block that computes 128 rows of the weight. A step has two."""
    dtype, rows = WIDE_PRODUCTS[kernel]
    types = Specialisation(
        weight=DType.BF16,
        kv=DType.BF16,
        head_dim=16,
        tokens_per_block=16,
        codes=(dtype,) if dtype.is_quantised else (),
        experts=kernel.startswith("experts_"),
        wide=True,
    )
    entry, least, shared = kernel_of(nvcc, types, kernel), 32, wide_shared_bytes(rows, dtype)
    multiply = _multiply_of_expert if types.experts else _multiply
    weight = WeightOf(dtype=dtype, group=WIDE_GROUP, panels=panels)
    short, long = (multiply(entry, rows, 128, 32 * slabs, shared, weight, WIDE_THREADS) for slabs in (least, 2 * least))
    return Counter({name: (long[name] - short[name]) // least for name in long if long[name] != short[name]})


FP8_PRODUCTS = {each: int(each.rpartition("_")[2]) for each in FP8_KERNELS}  # kernel → rows of x in a block
FP8_EXPERTS = {name.replace("product", "experts"): rows for name, rows in FP8_PRODUCTS.items()}


def fp8_cost(nvcc: Compiler, kernel: str, group: int) -> Counter[str]:
    """As `wide_cost`, also of warps. A step has four slabs."""
    wide = "wide" in kernel
    types = Specialisation(
        weight=DType.BF16,
        kv=DType.BF16,
        head_dim=16,
        tokens_per_block=16,
        codes=(DType.F8,),
        experts=kernel in FP8_EXPERTS,
        wide=wide,
        fp8=True,
    )
    entry, rows, n = kernel_of(nvcc, types, kernel), {**FP8_PRODUCTS, **FP8_EXPERTS}[kernel], 128

    def counted(k: int) -> Counter[str]:
        machine = Machine()
        sizes = (4 * rows * n, rows * k, 2 * n * k, 4 * rows * k)
        y, x, weight, scales = (place_in(machine, size) for size in sizes)
        counts = place_in(machine, 256, np.full(64, rows, np.int32))
        given = struct.pack("<6Q6i2Q", y, x, weight, 0, 0, counts, n, k, 0, 0, 0, group, scales, 0)
        if types.experts:
            tiles = place_in(machine, 16, np.array([0, 0, rows, 0], np.int32))
            pairs = place_in(machine, 4 * rows, np.arange(rows, dtype=np.int32))
            given = struct.pack("<6Q7i2f", y, x, weight, 0, tiles, pairs, 1, n, k, 0, 0, 0, group, 0.0, 1.0)
            given += struct.pack("<4xQ", scales)
        shape = kernel.replace("experts", "product")  # whose tiles those of experts are
        return machine.launch(entry, (1, 1, 1), fp8_threads(shape), fp8_shared_bytes(shape), given)

    short, long = counted(1024), counted(2048)
    return Counter({name: (long[name] - short[name]) // 32 for name in long if long[name] != short[name]})


def _multiply(
    entry: Kernel, rows: int, n: int, k: int, shared: int, weight: WeightOf, threads: int = 256
) -> Counter[str]:
    machine = Machine()
    y, x = (place_in(machine, size) for size in (4 * rows * n, 2 * rows * k))
    counts = place_in(machine, 256, np.full(64, rows, np.int32))
    addresses = (y, x, weight.placed(machine, n, k), 0, 0, counts)
    given = struct.pack("<6Q6iQ", *addresses, n, k, 0, 0, 0, weight.group, 0)
    return machine.launch(entry, (1, 1, 1), threads, shared, given)


def _multiply_of_expert(
    entry: Kernel, rows: int, n: int, k: int, shared: int, weight: WeightOf, threads: int
) -> Counter[str]:
    """A whole tile."""
    machine = Machine()
    y, x = (place_in(machine, size) for size in (4 * rows * n, 2 * rows * k))
    tiles = place_in(machine, 16, np.array([0, 0, rows, 0], np.int32))
    pairs = place_in(machine, 4 * rows, np.arange(rows, dtype=np.int32))
    addresses = (y, x, weight.placed(machine, n, k), 0, tiles, pairs)
    given = struct.pack("<6Q7i2f", *addresses, 1, n, k, 0, 0, 0, weight.group, 0.0, 1.0)
    return machine.launch(entry, (1, 1, 1), threads, shared, given)


HIDDEN, GATED, HEADS, KV_HEADS, HEAD_DIM = 2048, 8192, 32, 8, 64  # of Llama-3.2-1B
ROW_KERNELS = (
    "embed",
    "residual_norm",
    "rotate_and_store",
    "epilogue",
    "gather_rows",
)  # 2,048 columns a block, or 16 heads


def row_cost(nvcc: Compiler, kernel: str) -> Counter[str]:
    """Instructions by name, of all warps that compute one row of Llama-3.2-1B; its activations are bf16."""
    types = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=HEAD_DIM, tokens_per_block=BLOCK)
    entry, machine, heads = kernel_of(nvcc, types, kernel), Machine(), HEADS + 2 * KV_HEADS

    def place(nbytes: int) -> int:
        return place_in(machine, nbytes)

    y, x, up, weight = (place(4 * max(GATED, heads * HEAD_DIM)) for _ in range(4))
    keys, values, zeros = place(2 * BLOCK * HIDDEN), place(2 * BLOCK * HIDDEN), place(256)
    given, blocks, threads = {
        "embed": (struct.pack("<6Qif", y, weight, 0, zeros, zeros, zeros, HIDDEN, 1.0), 1, 256),
        "residual_norm": (struct.pack("<6Qifii", y, up, x, up, weight, 0, HIDDEN, 1e-5, 0, 1), 1, HIDDEN // 8),
        "rotate_and_store": (
            struct.pack("<10Q6if", y, keys, values, x, up, 0, 0, *[zeros] * 3, 1, HEADS, KV_HEADS, HEAD_DIM, 0, 0, 0),
            heads // 16,
            128,
        ),
        "epilogue": (struct.pack("<6Q4i", y, x, up, 0, 0, 0, GATED, GATED, 1, 1), GATED // 2048, 256),
        "gather_rows": (struct.pack("<3Qi", y, x, zeros, HIDDEN), 1, 256),
    }[kernel]
    return machine.launch(entry, (1, blocks, 1), threads, 0, given)


PROMPTS = ("delta_prompts_128", "kda_prompts_128", "mamba_prompts_128")


def token_cost(nvcc: Compiler, kernel: str) -> Counter[str]:
    """Instructions by name, of all warps of a block that goes through a token of a prompt: 32 columns of a head."""
    types = Specialisation(weight=DType.BF16, kv=DType.BF16, head_dim=64, tokens_per_block=BLOCK, states=True)
    entry = kernel_of(nvcc, types, kernel)
    short, long = (_carry(entry, kernel, tokens) for tokens in (32, 64))
    return Counter({name: (long[name] - short[name]) // 32 for name in long if long[name] != short[name]})


def _carry(entry: Kernel, kernel: str, tokens: int) -> Counter[str]:
    machine, dims, columns = Machine(), 128, 32

    def place(values: npt.NDArray[np.generic]) -> int:
        return place_in(machine, values.nbytes, values)

    of_dims, mamba = kernel.startswith("kda"), kernel.startswith("mamba")
    sizes = (columns, 2 * dims + columns, dims, 1)  # of a token in y, x, dt, beta
    y, x, dt, beta = (place(np.ones(tokens * size, np.float32)) for size in sizes)
    a_log, slots = place(np.zeros(1, np.float32)), place(np.zeros(dims * columns, np.float32))
    runs, table = place(np.array([0, 0, tokens, 0], np.int32)), place(np.array([-1] * (tokens // BLOCK), np.int32))
    pointers = (y, x, dt, 0 if mamba else beta, a_log, 0, runs, slots, table)
    shape = (tokens // BLOCK, dims * columns, 1, 1, dims, columns, mamba, of_dims)
    given = struct.pack("<9Q8i4f", *pointers, *shape, 1.0, 0.0 if mamba else 1e-6, 0.0, 3e38)
    shared = 4 * 16 * (2 * ((2 + of_dims) * dims + columns + 4) + 128)
    return machine.launch(entry, (1, 1, 1), 256, shared, given)


def main() -> None:
    """Print them."""
    nvcc = find_compiler()
    assert nvcc is not None, "this needs nvcc"
    for kernel in PRODUCTS:
        names = product_cost(nvcc, kernel)
        print(f"{kernel}: {names.total()} instructions a slab")
        print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(12)))
    for kernel, group, panels in WAYS:
        names = product_cost(nvcc, kernel, group, panels)
        print(f"{kernel}, groups of {group or 'no'} columns, {panels}: {names.total()} instructions a slab")
    for kernel, panels in WIDE_WAYS:
        print(f"{kernel}, {panels}: {wide_cost(nvcc, kernel, panels).total()} instructions a slab")
    for kernel in WIDE_PRODUCTS:
        names = wide_cost(nvcc, kernel)
        print(f"{kernel}: {names.total()} instructions a slab")
        print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(12)))
    for kernel in (*FP8_PRODUCTS, *FP8_EXPERTS):
        for group in (0, 128):
            names = fp8_cost(nvcc, kernel, group)
            print(f"{kernel}, {'groups' if group else 'rows'}: {names.total()} instructions a slab")
            print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(12)))
    for kernel in ROW_KERNELS:
        names = row_cost(nvcc, kernel)
        print(f"{kernel}: {names.total()} instructions a row, of all warps")
        print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(12)))
    for kernel in PROMPTS:
        names = token_cost(nvcc, kernel)
        print(f"{kernel}: {names.total()} instructions a token, of all warps")
        print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(12)))
    for kernel, head_dim, codes in ATTENTION:
        cost, loads = attention_cost(nvcc, kernel, head_dim, codes), loads_per_tile(head_dim, codes)
        what = f"{kernel}, head_dim {head_dim}, {(codes or DType.BF16).value}"
        print(f"{what}: {cost.instructions.total()} instructions a tile")
        print(f"  loading: {cost.loading}, {cost.loading / loads:.1f} for each load of 16 bytes")
        if codes:
            numbers = 2 * TILE * head_dim // 64
            print(f"  converting: {cost.converting}, {cost.converting / numbers:.1f} for two numbers of each lane")
        print("  " + ", ".join(f"{name} {count}" for name, count in cost.instructions.most_common(12)))


if __name__ == "__main__":
    main()
