"""How weights lie in an Engine: the packed layouts, with pack and unpack in numpy (the definition for every kernel).

    row           C order, as in the checkpoint
    row.w8        per row: float32 scale, then K signed bytes, zeros up to a multiple of 4 bytes
    panel16.f32   [ceil(N/16)][K][16]               f32: 16 output columns side by side, K rows
    panel16.bf16  [ceil(N/16)][ceil(K/32)*16][16][2] bf16: pairs of K rows interleaved, K padded to 32 with zeros.
                  1 KiB (16 pair rows x 64 bytes) is exactly one AMX tile; a 64-byte row is also what AVX-512 and
                  AVX2 kernels read: low halves are the even k of 16 columns, high halves the odd k.
    panel16.bf16c the same numbers in 12 bits: `plugins/compressed.py`
    panel16.w8    [ceil(N/16)] of   64  scale float32 [16]
                                    64  sums of the column's q, int32 [16]: for kernels that add 128 to activations
                                  1024  a tile [16][16][4] per 64 of K (padded with zeros): row r holds k = 4r .. 4r+3
                                        of 16 columns, as AMX tiles and VPDPBUSD take them
    panel16.w4gG  [ceil(N/16)] of   64  scale         64  sums, as above
                                   16*g multipliers int8 [g][16], g = ceil(Kp / G), zeros up to a multiple of 64 bytes
                                  1024  a block per 128 of Kp: low nibbles are the tile of the first 64 k, high nibbles
                                        that of the other 64; a nibble is the code + 8
                  Kp is K rounded up to 128; padding has the code 0 (nibble 8) and, in groups of its own, multiplier 1.
    panel16.w4tgG [ceil(N/16)] of   64  scale         64  table, int8 [16]; a byte, 1 where shifts are offsets; a byte,
                                       1 where values have more bits; a byte, see `plugins/short_ways.py`; after 13
                                       others the more bits, int8 [16]
                                  32*g group scales, float16 [g][16]; of w4ts [g][2][16]: scales, then shifts; zeros up
                                       to a multiple of 64 bytes
                                   64  a line per 8 of Kp: four bytes of each column, k and k + 4 in the low and the
                                       high nibble
    panel16.w2tgG, .w3tgG  as w4tgG, but their lines: of w2 a line per 16 of Kp, k, k + 4, k + 8 and k + 12 in a byte,
                  low bits first; of w3 three lines per 32 of Kp: two of low bits, as of w2, and one of upper bits, of
                  k, k + 4 .. k + 28 in a byte
    panel16.w8tgG the same, where zeros lie in place of the table and of more bits; 64 bytes are a line per 4 of Kp,
                  four signed bytes of each column. Kp is K rounded up to 128, with zeros
    panel16.w2ksg16, .w4ksg32,      64  scale         64  zeros
           .w5ksg32                 64  for each 256 of Kp: units of scales and of offsets, float16 [2][16]; then, of
                                  16*g  the groups of these columns, scales in units, int8 [g][16], and offsets in
                                  16*g  units, int8 [g/2][16][2]; zeros up to a multiple of 64 bytes
                                    64  w4: a line per 8 of Kp, as of w4t; w2: as of w2t; w5: five lines per 32 of Kp:
                                       four of low nibbles, as of w4t, and one of upper bits, as of w3t
    panel16.w3kg16, .w6kgG  the same, of scales alone. w3: as of w3t; w6: three lines per 16 of Kp, two of low nibbles
                  and one of two upper bits each. A code is stored with half of their number more, 4 or 32. Kp is K
                  rounded up to 256, with zeros
    panel16.f8    [ceil(N/16)] of   64  scale         64  zeros
                                 64*g group scales of f8gG, float32 [g][16]
                                   64  a line per 4 of Kp, byte by byte [4][16]; Kp is K rounded up to 64, with zeros

N is padded to a multiple of 16 with zeros (scales 0, code 0, multiplier 1). A gated product (gate and up of an MLP)
alternates panels: panel 2p holds gate columns 16p .. 16p+15 and panel 2p+1 the up columns of the same numbers, each
padded by itself.
Experts are packed one by one: a piece of their weight [experts, N, K] holds its panels of each, one after the other.
"""

import re
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType
from ingot.plugins.code_lines import gather_lines, spread_lines
from ingot.plugins.compressed import CompressedPanel, compress, restore
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.short_ways import short_ways
from ingot.plugins.unit_panels import read_units, write_units
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.weight_formats import HEADER_BYTES, PANEL, SCALE_BYTES, TABLE_FORMAT, UNIT_COLUMNS, W4, WeightFormat

_MORE_BITS = slice(96, 112)  # bytes of a panel's header
ROW = "row"
ROW_W8 = "row.w8"
K_BLOCK = {DType.F32: 1, DType.BF16: 32}  # K is padded to a multiple of this; of quantised rows: see their format

Bytes = npt.NDArray[np.uint8]
SomeRows = TypeVar("SomeRows", QuantisedRows, GroupedRows, UnitRows, F8Rows)


def row_layout(dtype: DType) -> str:
    """Name of the layout of tables and vectors."""
    return ROW_W8 if dtype.weight_format is TABLE_FORMAT else ROW


def panel_layout(dtype: DType, group: int = 0) -> str:
    """Name of the panel layout of `dtype`."""
    return f"panel{PANEL}.{dtype.value}" + (f"g{group}" if group else "")


def group_of(layout: str) -> int:
    """The group of a layout's name, 0 where there is none."""
    found = re.search(r"\.[wf]\d+[a-z]*?g(\d+)", layout)
    return int(found[1]) if found else 0


def padded_k(k: int, dtype: DType) -> int:
    quantised = dtype.weight_format
    block = K_BLOCK[dtype] if quantised is None else quantised.k_block
    return -(-k // block) * block


def num_panels(n: int, *, gated: bool = False) -> int:
    """Panels of a product with n weight rows; gated: n counts gate and up rows together."""
    return 2 * -(-(n // 2) // PANEL) if gated else -(-n // PANEL)


def panel_bytes(k: int, dtype: DType, group: int = 0) -> int:
    quantised = dtype.weight_format
    if dtype is DType.BF16C:
        return CompressedPanel(k).nbytes
    if quantised is None:
        return PANEL * padded_k(k, dtype) * dtype.itemsize
    groups = _group_bytes(padded_k(k, dtype), quantised, group) if group else 0
    return HEADER_BYTES + groups + PANEL * padded_k(k, dtype) * quantised.bits // 8


def row_bytes(k: int, dtype: DType) -> int:
    """Bytes of one row of a table or vector."""
    return SCALE_BYTES + -(-k // 4) * 4 if dtype.weight_format is TABLE_FORMAT else k * dtype.itemsize


def pack_panels(weight_rows: npt.NDArray[np.generic], dtype: DType) -> npt.NDArray[np.generic]:
    """[n, K] stored bits of `dtype` (n <= any) → [ceil(n/16), ...] panels, C-contiguous."""
    n, k = weight_rows.shape
    if dtype is DType.BF16C:
        return compress(weight_rows.view(np.uint16))
    panels = -(-n // PANEL)
    padded = weight_rows
    if (panels * PANEL, padded_k(k, dtype)) != weight_rows.shape or not weight_rows.flags.c_contiguous:
        padded = np.zeros((panels * PANEL, padded_k(k, dtype)), dtype=dtype.storage)
        padded[:n, :k] = weight_rows
    words = padded.view(np.uint32).reshape(panels, PANEL, -1)  # a float32, or a pair of bf16 that stay neighbours
    packed = np.ascontiguousarray(words.transpose(0, 2, 1)).view(dtype.storage)
    return packed if dtype is DType.F32 else packed.reshape(panels, -1, PANEL, 2)


def unpack_panels(panels: npt.NDArray[np.generic], n: int, k: int, dtype: DType) -> npt.NDArray[np.generic]:
    """Inverse of `pack_panels`: any array holding the packed elements → [n, K] stored bits."""
    if dtype is DType.BF16C:
        return restore(panels.view(np.uint8), n, k)
    flat = panels.reshape(-1, padded_k(k, dtype) * PANEL)
    if dtype is DType.F32:
        weight_rows = flat.reshape(len(flat), -1, PANEL).transpose(0, 2, 1)
    else:
        weight_rows = flat.reshape(len(flat), -1, PANEL, 2).transpose(0, 2, 1, 3).reshape(len(flat), PANEL, -1)
    return np.ascontiguousarray(weight_rows.reshape(len(flat) * PANEL, -1)[:n, :k])


def pack_quantised(weight_rows: WeightRows, *, gated: bool = False) -> Bytes:
    """Rows of any number → panels [ceil(n/16), panel_bytes]. gated: gate rows, then up rows."""
    if isinstance(weight_rows, GroupedRows):
        return _pack_grouped(interleave_quantised(weight_rows) if gated else weight_rows)
    if isinstance(weight_rows, UnitRows):
        return _pack_units(interleave_quantised(weight_rows) if gated else weight_rows)
    if isinstance(weight_rows, F8Rows):
        return _pack_f8(interleave_quantised(weight_rows) if gated else weight_rows)
    weight_rows = interleave_quantised(weight_rows) if gated else weight_rows
    n, k = weight_rows.shape
    dtype = DType(weight_rows.format.dtype)
    count = -(-n // PANEL)
    panels = np.zeros((count, panel_bytes(k, dtype, weight_rows.group)), np.uint8)
    panels[:, :64] = _padded(weight_rows.scale, count * PANEL).reshape(count, PANEL).view(np.uint8)
    sums = _padded(weight_rows.integers.sum(axis=1, dtype=np.int32), count * PANEL)
    panels[:, 64:HEADER_BYTES] = sums.reshape(count, PANEL).view(np.uint8)
    tiles = _tiles(_padded(weight_rows.codes, count * PANEL, padded_k(k, dtype)))
    if weight_rows.multipliers is None:
        panels[:, HEADER_BYTES:] = tiles.view(np.uint8).reshape(count, -1)
        return panels
    groups = -(-padded_k(k, dtype) // weight_rows.group)
    multipliers = _padded(weight_rows.multipliers, count * PANEL, groups)
    multipliers[multipliers == 0] = 1
    by_group = multipliers.reshape(count, PANEL, groups).transpose(0, 2, 1)
    panels[:, HEADER_BYTES : HEADER_BYTES + groups * PANEL] = by_group.reshape(count, -1).view(np.uint8)
    nibbles = (tiles.view(np.int8) + np.int8(8)).view(np.uint8).reshape(count, -1, 2, 1024)
    blocks = nibbles[:, :, 0] | nibbles[:, :, 1] << 4
    panels[:, HEADER_BYTES + _group_bytes(padded_k(k, dtype), weight_rows.format, weight_rows.group) :] = (
        blocks.reshape(count, -1)
    )
    return panels


def _pack_grouped(weight_rows: GroupedRows) -> Bytes:
    n, k = weight_rows.shape
    dtype, count = DType(weight_rows.format.dtype), -(-n // PANEL)
    padded, groups = padded_k(k, dtype), weight_rows.group_scale.shape[1]
    panels = np.zeros((count, panel_bytes(k, dtype, weight_rows.group)), np.uint8)
    panels[:, :64] = _padded(weight_rows.scale, count * PANEL).reshape(count, PANEL).view(np.uint8)
    panels[:, 80] = weight_rows.is_offset[::PANEL]
    if weight_rows.table is not None:
        panels[:, 64:80] = weight_rows.table[::PANEL].view(np.uint8)
    if weight_rows.more_bits is not None:
        panels[:, _MORE_BITS] = weight_rows.more_bits[::PANEL].view(np.uint8)
        panels[:, 81] = weight_rows.more_bits[::PANEL].any(axis=1)
    values = _half_numbers(weight_rows.format)
    numbers = np.zeros((count, -(-padded // weight_rows.group), values, PANEL), np.float16)
    for place, each in enumerate(each for each in (weight_rows.group_scale, weight_rows.shift) if each is not None):
        by_panel = _padded(each, count * PANEL, groups).reshape(count, PANEL, groups)
        numbers[:, :groups, place] = by_panel.transpose(0, 2, 1)
    flat = numbers.reshape(count, -1).view(np.uint8)
    panels[:, HEADER_BYTES : HEADER_BYTES + flat.shape[1]] = flat
    panels[:, 82] = short_ways(numbers[:, :, 0], numbers[:, :, 1] if values > 1 else None, panels[:, 80] != 0)
    codes = _padded(weight_rows.codes, count * PANEL, padded).view(np.uint8)
    lines = codes.reshape(count, PANEL, padded // 4, 4).transpose(0, 2, 1, 3).reshape(count, padded // 4, -1)
    if weight_rows.table is not None:
        lines = gather_lines(lines, weight_rows.bits)
    panels[:, panels.shape[1] - lines[0].size :] = lines.reshape(count, -1)
    return panels


def unpack_grouped(data: Bytes, n: int, k: int, dtype: DType, group: int) -> GroupedRows:
    """Inverse of `pack_quantised` for formats with float16 scales of groups."""
    described = dtype.weight_format
    assert described is not None, f"{dtype} has no groups"
    panels = data.reshape(-1, panel_bytes(k, dtype, group))
    count, padded, groups = len(panels), padded_k(k, dtype), -(-k // group)
    scale = np.ascontiguousarray(panels[:, :64]).view(np.float32).reshape(-1)[:n]
    values = _half_numbers(described)
    begin, size = HEADER_BYTES, groups * values * PANEL * 2
    stored = np.ascontiguousarray(panels[:, begin : begin + size]).view(np.float16)
    numbers = stored.reshape(count, groups, values, PANEL).transpose(2, 0, 3, 1)
    by_row = numbers.reshape(values, count * PANEL, groups)[:, :n].astype(np.float32)
    lines = panels[:, panels.shape[1] - padded * PANEL * described.bits // 8 :].reshape(count, -1, 4 * PANEL)
    few = described.bits < 8
    fours = (spread_lines(lines, described.bits) if few else lines).reshape(count, -1, PANEL, 4)
    codes = np.ascontiguousarray(fours.transpose(0, 2, 1, 3).reshape(count * PANEL, padded)[:n, :k])
    return GroupedRows(
        scale=scale,
        codes=codes if few else codes.view(np.int8),
        group_scale=by_row[0],
        table=np.repeat(panels[:, 64:80].view(np.int8), PANEL, axis=0)[:n] if few else None,
        more_bits=np.repeat(panels[:, _MORE_BITS].view(np.int8), PANEL, axis=0)[:n] if panels[:, 81].any() else None,
        shift=by_row[1] if values > 1 else None,
        is_offset=np.repeat(panels[:, 80] != 0, PANEL)[:n],
        bits=described.bits,
        group=group,
    )


def _pack_units(weight_rows: UnitRows) -> Bytes:
    n, k = weight_rows.shape
    dtype, group, count = DType(weight_rows.format.dtype), weight_rows.group, -(-n // PANEL)
    panels = np.zeros((count, panel_bytes(k, dtype, group)), np.uint8)
    panels[:, :64] = _padded(weight_rows.scale, count * PANEL).reshape(count, PANEL).view(np.uint8)
    write_units(weight_rows, panels)
    return panels


def unpack_units(data: Bytes, n: int, k: int, dtype: DType, group: int) -> UnitRows:
    """Inverse of `pack_quantised` for formats whose groups have whole numbers of units."""
    described = dtype.weight_format
    assert described is not None, f"{dtype} has no units"
    panels = data.reshape(-1, panel_bytes(k, dtype, group))
    return read_units(
        panels, np.ascontiguousarray(panels[:, :64]).view(np.float32).reshape(-1)[:n], k, described, group
    )


def _pack_f8(weight_rows: F8Rows) -> Bytes:
    (n, k), group = weight_rows.shape, weight_rows.group
    count, padded = -(-n // PANEL), padded_k(k, DType.F8)
    panels = np.zeros((count, panel_bytes(k, DType.F8, group)), np.uint8)
    panels[:, :64] = _padded(weight_rows.scale, count * PANEL).reshape(count, PANEL).view(np.uint8)
    if weight_rows.group_scale is not None:
        groups = -(-padded // group)
        by_panel = _padded(weight_rows.group_scale, count * PANEL, groups).reshape(count, PANEL, groups)
        scales = np.ascontiguousarray(by_panel.transpose(0, 2, 1)).view(np.uint8)
        panels[:, HEADER_BYTES : HEADER_BYTES + groups * PANEL * SCALE_BYTES] = scales.reshape(count, -1)
    codes = _padded(weight_rows.codes, count * PANEL, padded).reshape(count, PANEL, padded)
    panels[:, panels.shape[1] - padded * PANEL :] = codes.transpose(0, 2, 1).reshape(count, -1)
    return panels


def unpack_f8(data: Bytes, n: int, k: int, group: int = 0) -> F8Rows:
    """Inverse of `pack_quantised` for f8."""
    panels = data.reshape(-1, panel_bytes(k, DType.F8, group))
    count, padded = len(panels), padded_k(k, DType.F8)
    scales = None
    if group:
        groups = -(-k // group)
        stored = np.ascontiguousarray(panels[:, HEADER_BYTES : HEADER_BYTES + groups * PANEL * SCALE_BYTES])
        by_panel = stored.view(np.float32).reshape(count, groups, PANEL).transpose(0, 2, 1)
        scales = by_panel.reshape(count * PANEL, groups)[:n]
    codes = panels[:, panels.shape[1] - padded * PANEL :].reshape(count, padded, PANEL).transpose(0, 2, 1)
    return F8Rows(
        scale=np.ascontiguousarray(panels[:, :64]).view(np.float32).reshape(-1)[:n],
        codes=np.ascontiguousarray(codes.reshape(count * PANEL, padded)[:n, :k]),
        group_scale=scales,
        group=group,
    )


def unpack_quantised(data: Bytes, n: int, k: int, group: int = 0) -> QuantisedRows:
    """Inverse of `pack_quantised`: any array holding the bytes. group: 0 for w8."""
    dtype = DType.W4 if group else DType.W8
    panels = data.reshape(-1, panel_bytes(k, dtype, group))
    count = len(panels)
    scale = np.ascontiguousarray(panels[:, :64]).view(np.float32).reshape(-1)[:n]
    if not group:
        codes = _untiled(np.ascontiguousarray(panels[:, HEADER_BYTES:]).view(np.int8))
        return QuantisedRows(scale=scale, codes=np.ascontiguousarray(codes[:n, :k]))
    groups, start = -(-k // group), HEADER_BYTES + _group_bytes(padded_k(k, dtype), W4, group)
    blocks = panels[:, start:].reshape(count, -1, 1, 1024)
    nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(count, -1)
    codes = _untiled(nibbles.view(np.int8) - np.int8(8))
    by_group = np.ascontiguousarray(panels[:, HEADER_BYTES : HEADER_BYTES + groups * PANEL]).view(np.int8)
    multipliers = by_group.reshape(count, groups, PANEL).transpose(0, 2, 1).reshape(-1, groups)[:n]
    return QuantisedRows(
        scale=scale,
        codes=np.ascontiguousarray(codes[:n, :k]),
        multipliers=np.ascontiguousarray(multipliers),
        group=group,
    )


def pack_table(weight_rows: QuantisedRows) -> Bytes:
    """w8 rows → layout row.w8, [n, row_bytes]."""
    n, k = weight_rows.shape
    table = np.zeros((n, row_bytes(k, DType.W8)), np.uint8)
    table[:, :4] = np.ascontiguousarray(weight_rows.scale)[:, None].view(np.uint8)
    table[:, 4 : 4 + k] = weight_rows.codes.view(np.uint8)
    return table


def unpack_table(data: Bytes, k: int) -> QuantisedRows:
    """Inverse of `pack_table`."""
    table = data.reshape(-1, row_bytes(k, DType.W8))
    scale = np.ascontiguousarray(table[:, :4]).view(np.float32).reshape(-1)
    return QuantisedRows(scale=scale, codes=np.ascontiguousarray(table[:, 4 : 4 + k]).view(np.int8))


def interleave_gated(weight_rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[2I, K] (gate rows, then up rows) → [2 * ceil(I/16) * 16, K] with alternating groups of 16, zero padded."""
    half, k = weight_rows.shape[0] // 2, weight_rows.shape[1]
    padded = -(-half // PANEL) * PANEL
    pair = np.zeros((2, padded, k), dtype=weight_rows.dtype)
    pair[0, :half], pair[1, :half] = weight_rows[:half], weight_rows[half:]
    return np.ascontiguousarray(pair.reshape(2, -1, PANEL, k).transpose(1, 0, 2, 3).reshape(2 * padded, k))


def deinterleave_gated(weight_rows: npt.NDArray[np.generic], half: int) -> npt.NDArray[np.generic]:
    """Inverse of `interleave_gated` for I = half."""
    k = weight_rows.shape[1]
    pair = weight_rows.reshape(-1, 2, PANEL, k).transpose(1, 0, 2, 3).reshape(2, -1, k)
    return np.ascontiguousarray(np.concatenate([pair[0, :half], pair[1, :half]]))


def interleave_quantised(weight_rows: SomeRows) -> SomeRows:
    """As `interleave_gated`."""
    half = weight_rows.shape[0] // 2
    numbers = interleave_gated(np.arange(1, 2 * half + 1)[:, None])[:, 0].astype(np.int64)  # 0: padding
    taken = weight_rows.take(numbers - 1)
    taken.scale[numbers == 0] = 0
    taken.codes[numbers == 0] = 0
    if isinstance(taken, UnitRows):
        taken.codes[numbers == 0] = taken.format.codes[0]  # stored as zeros, as all padding
        for each in (taken.count, taken.unit, taken.offset_count, taken.offset_unit):
            if each is not None:
                each[numbers == 0] = 0
    elif isinstance(taken, (GroupedRows, F8Rows)):
        for each in (taken.group_scale, taken.shift if isinstance(taken, GroupedRows) else None):
            if each is not None:
                each[numbers == 0] = 0
    elif taken.multipliers is not None:
        taken.multipliers[numbers == 0] = 1
    return taken


def deinterleave_quantised(weight_rows: SomeRows, half: int) -> SomeRows:
    """As `deinterleave_gated`."""
    return weight_rows.take(deinterleave_gated(np.arange(weight_rows.shape[0])[:, None], half)[:, 0].astype(np.int64))


def _group_bytes(padded: int, described: WeightFormat, group: int) -> int:
    """Bytes of what groups have. padded: K with its padding."""
    row = -(-padded // group) * described.group_bytes + -(-padded // UNIT_COLUMNS) * described.unit_bytes
    return -(-row * PANEL // 64) * 64


def _half_numbers(described: WeightFormat) -> int:
    """Float16 numbers of a group: its scale, and its shift."""
    return described.group_bytes // 2


def _padded(values: npt.NDArray[np.generic], *shape: int) -> npt.NDArray[np.generic]:
    """Zeros after the last row and column."""
    padded = np.zeros(shape, values.dtype)
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


def _tiles(weight_rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[panels * 16, multiple of 64] bytes → [panels, ...] in the order of the tiles."""
    k = weight_rows.shape[1]
    return np.ascontiguousarray(weight_rows.reshape(-1, PANEL, k // 4, 4).transpose(0, 2, 1, 3))


def _untiled(tiles: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """[panels, 16 * K] in the order of the tiles → [panels * 16, K]."""
    count, size = tiles.shape
    return tiles.reshape(count, size // 64, PANEL, 4).transpose(0, 2, 1, 3).reshape(count * PANEL, -1)
