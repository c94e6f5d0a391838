"""bf16 in 12 bits, without loss: the panels of layout panel16.bf16c.

The upper byte of a bf16 number is its sign and seven bits of its exponent. Trained weights of one panel have few
exponents, so sixteen upper bytes, those that most numbers of a panel have, get codes of four bits. The lower bytes are
stored as they are. The few numbers with other upper bytes are patches: stored whole, with their places. If a panel has
more of them than there is room for, the weight stays bf16.

    16            upper bytes, uint8 [16]
    4 * patches   uint16 [patches, 2]: a number, and its place in its tile of restored lines; zeros
    2 * counts    uint16 [tiles + 1]: how many patches there are before each tile, and in all. The header up to here
                  ends at a multiple of 64: the smallest that has room for a patch per tile
    768 * tiles   a tile is 32 k of 16 columns, four blocks of 8 k each. A block has 64 bytes of codes, in low nibbles
                  those of its first 64 numbers, in high nibbles the others; then 128 lower bytes

A block restores four lines of 64 bytes, as panel16.bf16 has them. 16 lower bytes are those of eight numbers of a line,
then those in the same places of the next line: vectors of bytes interleave so.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.weight_formats import PANEL

TILE_K, TILE_BYTES = 32, 768
CODES = 16
_PLACES = TILE_K * PANEL  # of numbers of a tile

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class CompressedPanel:
    """Where the parts of a panel of K columns lie, in bytes."""

    k: int

    @property
    def tiles(self) -> int:
        """How many tiles of 32 columns a panel has."""
        return -(-self.k // TILE_K)

    @property
    def header_bytes(self) -> int:
        """Bytes of upper bytes, patches and counts."""
        return -(-(CODES + 6 * self.tiles + 2) // 64) * 64

    @property
    def most_patches(self) -> int:
        """How many numbers need no code; uint16 counts them."""
        return min((self.header_bytes - CODES - 2 * (self.tiles + 1)) // 4, 0xFFFF)

    @property
    def nbytes(self) -> int:
        """Bytes of the panel."""
        return self.header_bytes + self.tiles * TILE_BYTES


def fits(bits: Words) -> bool:
    """Whether all panels of bf16 rows [n, K] have room for their patches."""
    counts = _counts(_upper(_lines(bits)))
    coded = np.partition(counts, -CODES, axis=1)[:, -CODES:].sum(axis=1)
    return bool((counts.sum(axis=1) - coded <= CompressedPanel(bits.shape[1]).most_patches).all())


def compress(bits: Words) -> Bytes:
    """bf16 rows [n, K] → panels [ceil(n/16), panel bytes]. Raises ValueError if the rows do not fit."""
    place, lines = CompressedPanel(bits.shape[1]), _lines(bits)
    panels = np.zeros((len(lines), place.nbytes), np.uint8)
    codes = _upper(lines)
    common = np.sort(np.argsort(-_counts(codes), axis=1, kind="stable")[:, :CODES], axis=1)
    panels[:, :CODES] = common
    code_of = np.full((len(lines), 256), CODES, np.uint8)
    code_of[np.arange(len(lines))[:, None], common] = np.arange(CODES)
    for own, each in zip(code_of, codes, strict=True):  # panel by panel: it takes less memory
        each[:] = own[each]
    _write_patches(panels, place, lines, codes == CODES)
    codes &= 15
    blocks = panels[:, place.header_bytes :].reshape(len(lines), -1, 3, 64)  # a view
    low, high = np.moveaxis(_interleaved(codes), 2, 0)
    blocks[:, :, 0] = low | high << 4
    blocks[:, :, 1:] = _interleaved(lines.astype(np.uint8))
    return panels


def restore(panels: Bytes, n: int, k: int) -> Words:
    """Inverse of `compress`."""
    place = CompressedPanel(k)
    panels = panels.reshape(-1, place.nbytes)
    blocks = panels[:, place.header_bytes :].reshape(len(panels), -1, 3, 64)
    codes = _lines_of(np.stack([blocks[:, :, 0] & 15, blocks[:, :, 0] >> 4], axis=2))
    upper = panels[np.arange(len(panels))[:, None], codes].astype(np.uint16)
    words = upper << 8 | _lines_of(blocks[:, :, 1:])
    for panel, counts in enumerate(_counts_before(panels, place).astype(np.int64)):
        patches = panels[panel, CODES : CODES + 4 * place.most_patches].view(np.uint16).reshape(-1, 2)
        for tile in np.flatnonzero(counts[1:] > counts[:-1]):  # of damaged panels, what a kernel makes of them
            own = patches[counts[tile] : counts[tile + 1]]
            words[panel, tile * _PLACES + own[:, 1] % _PLACES] = own[:, 0]
    pairs = words.reshape(len(panels), -1, PANEL, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(pairs.reshape(len(panels) * PANEL, -1)[:n, :k])


def _lines(bits: Words) -> Words:
    """Rows [n, K] → numbers in the order of lines of panel16.bf16 [panels, K * 16], with zeros behind rows and
    columns."""
    n, k = bits.shape
    padded = bits
    if n % PANEL or k % TILE_K or not bits.flags.c_contiguous:
        padded = np.zeros((-(-n // PANEL) * PANEL, -(-k // TILE_K) * TILE_K), np.uint16)
        padded[:n, :k] = bits
    pairs = padded.view(np.uint32).reshape(-1, PANEL, padded.shape[1] // 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1)).view(np.uint16).reshape(len(pairs), -1)


def _upper(lines: Words) -> Bytes:
    return (lines >> 8).astype(np.uint8)


def _counts(upper: Bytes) -> npt.NDArray[np.int64]:
    """[panels, numbers] → how many numbers have each upper byte [panels, 256]."""
    return np.stack([np.bincount(each, minlength=256) for each in upper])


def _interleaved(lines: Bytes) -> Bytes:
    """Bytes in the order of lines [panels, numbers] → [panels, blocks, 2, 64] in the order of lower bytes."""
    parts = lines.reshape(len(lines), -1, 2, 2, 4, 8)  # blocks, halves of a block, lines, parts of a line
    return np.ascontiguousarray(parts.transpose(0, 1, 2, 4, 3, 5)).reshape(len(lines), -1, 2, 64)


def _lines_of(interleaved: Bytes) -> Bytes:
    """Inverse of `_interleaved`."""
    parts = interleaved.reshape(len(interleaved), -1, 2, 4, 2, 8)
    return np.ascontiguousarray(parts.transpose(0, 1, 2, 4, 3, 5)).reshape(len(interleaved), -1)


def _counts_before(panels: Bytes, place: CompressedPanel) -> Words:
    """How many patches there are before each tile, and in all [panels, tiles + 1]: a view."""
    return panels[:, place.header_bytes - 2 * (place.tiles + 1) : place.header_bytes].view(np.uint16)


def _write_patches(panels: Bytes, place: CompressedPanel, lines: Words, patched: npt.NDArray[np.bool_]) -> None:
    panel, at = np.nonzero(patched)
    before = np.searchsorted(panel, np.arange(len(panels) + 1))
    if (np.diff(before) > place.most_patches).any():
        raise ValueError("a panel has more upper bytes than codes and patches hold")
    number = np.arange(len(panel)) - before[panel]  # of a patch in its panel
    patches = panels[:, CODES : CODES + 4 * place.most_patches].view(np.uint16)
    patches[panel, 2 * number], patches[panel, 2 * number + 1] = lines[panel, at], at % _PLACES
    by_tile = np.bincount(panel * place.tiles + at // _PLACES, minlength=len(panels) * place.tiles)
    _counts_before(panels, place)[:, 1:] = np.cumsum(by_tile.reshape(len(panels), -1), axis=1)
