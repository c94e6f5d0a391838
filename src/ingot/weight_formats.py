"""The formats of quantised weights, a row each: what is stored of a row of numbers, and how products take it.

Every row of a weight has a float32 scale. What it stands for is scale * q. In formats that a search makes, q is a whole
number that fits a signed byte:

    w8     q is the code
    w4gG   q is the code times the multiplier of its group of G columns

Formats that keep the codes and scales of a quantised checkpoint have float16 numbers for each group of G columns. A
code of 2 to 4 bits stands for a value of a table, a signed byte is the value itself:

    w2tgG, w3tgG, w4tgG, w8tgG  q is the value times the group's scale
    w4tsgG, w8tsgG              the same, of the value less the group's zero point; or plus the group's offset

Scales of GGUF's K-quants are whole numbers of a unit, a float16 that UNIT_COLUMNS columns share:

    w3kg16, w6kgG               q is the code times the group's scale, a signed byte of units; codes have signs
    w2ksg16, w4ksg32, w5ksg32   the same, of codes from 0 on, plus the group's offset, a signed byte of other units

FP8 keeps its bytes and float32 scales:

    f8      q is the number that the byte stands for (E4M3)
    f8gG    q is that times the group's scale

How bytes lie in panels is the layout's affair (`plugins/layouts.py`), how scales are found the search's
(`builder/quantise.py`). `plugins/cpu/matmul/weight_formats.h` has what C++ needs of the table; a test holds them equal.
"""

import dataclasses

PANEL = 16  # output columns of a panel
HEADER_BYTES = 128  # of a quantised panel: scales and sums
SCALE_BYTES = 4  # of a row, float32
UNIT_COLUMNS = 256  # whose groups share units


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """dtype: its name in plans and kernels; products with int8 activations add "a8" to it.

    bits            of a code
    codes           the lowest and the highest
    groups          columns that may share a multiplier or scale, a precision each; nothing: there are none
    rows_alone      whether rows may have no groups where others have
    multiplier      the largest magnitude of one; it is never 0
    group_bytes     of a group in one row: its multiplier, its scale, its scale and shift
    unit_bytes      of UNIT_COLUMNS columns in one row: the units of what their groups have; 0: they have none
    k_block         columns of a packed row are filled up to a multiple of it
    in_tables       tables of token and position rows may have it
    lm_head         precision of lm_head in an engine of this format, unless an option says another
    int8_tolerance  relative error of a product's output up to which its inputs are rounded to int8; 0: never
    """

    dtype: str
    bits: int
    codes: tuple[int, int]
    groups: tuple[int, ...] = ()
    rows_alone: bool = False
    multiplier: int = 0
    group_bytes: int = 0
    unit_bytes: int = 0
    k_block: int
    in_tables: bool = False
    lm_head: str
    int8_tolerance: float

    @property
    def precisions(self) -> tuple[str, ...]:
        """Their names in options."""
        alone = (self.dtype,) if self.rows_alone or not self.groups else ()
        return (*alone, *(f"{self.dtype}g{group}" for group in self.groups))

    @property
    def rounds_inputs(self) -> bool:
        """Whether there are products with int8 inputs."""
        return self.int8_tolerance > 0


# With w8, stories260K and the shipped model have no error above 4 %, and their KL divergence from f32 stays below 0.002
# with every input rounded.
W8 = WeightFormat(dtype="w8", bits=8, codes=(-127, 127), k_block=64, in_tables=True, lm_head="w8", int8_tolerance=0.04)
W4 = WeightFormat(
    dtype="w4",
    bits=4,
    codes=(-8, 7),
    groups=(128, 64, 32),
    multiplier=15,
    group_bytes=1,
    k_block=128,
    lm_head="w8",
    int8_tolerance=0.05,
)
W4T = dataclasses.replace(W4, dtype="w4t", codes=(0, 15), groups=(128, 64, 32, 16), multiplier=0, group_bytes=2)
W2T = dataclasses.replace(W4T, dtype="w2t", bits=2, codes=(0, 3))
W3T = dataclasses.replace(W4T, dtype="w3t", bits=3, codes=(0, 7), groups=(128, 64, 32))
W4TS = dataclasses.replace(W4T, dtype="w4ts", group_bytes=4)
W8T = dataclasses.replace(W4T, dtype="w8t", bits=8, codes=(-128, 127), int8_tolerance=W8.int8_tolerance)
W8TS = dataclasses.replace(W8T, dtype="w8ts", group_bytes=4)
W4KS = dataclasses.replace(W4TS, dtype="w4ks", groups=(32,), group_bytes=2, unit_bytes=4, k_block=UNIT_COLUMNS)
W2KS = dataclasses.replace(W4KS, dtype="w2ks", bits=2, codes=(0, 3), groups=(16,))
W3K = dataclasses.replace(W2KS, dtype="w3k", bits=3, codes=(-4, 3), group_bytes=1, unit_bytes=2)
W5KS = dataclasses.replace(W4KS, dtype="w5ks", bits=5, codes=(0, 31), int8_tolerance=W8.int8_tolerance)
W6K = dataclasses.replace(W5KS, dtype="w6k", bits=6, codes=(-32, 31), groups=(32, 16), group_bytes=1, unit_bytes=2)
F8 = WeightFormat(
    dtype="f8",
    bits=8,
    codes=(0, 255),
    groups=(128, 64, 32, 16),
    rows_alone=True,
    group_bytes=4,
    k_block=64,
    lm_head="w8",
    int8_tolerance=0,
)
FORMATS = {each.dtype: each for each in (W8, W4, W2T, W3T, W4T, W4TS, W8T, W8TS, W2KS, W3K, W4KS, W5KS, W6K, F8)}
TABLE_FORMAT = next(each for each in FORMATS.values() if each.in_tables)
QUANTISED = tuple(name for each in (W8, W4) for name in each.precisions)  # that options offer: a search makes them
KEPT = tuple(
    name for each in (W2T, W3T, W4T, W4TS, W8T, W8TS, W2KS, W3K, W4KS, W5KS, W6K, F8) for name in each.precisions
)  # that only quantised checkpoints have
