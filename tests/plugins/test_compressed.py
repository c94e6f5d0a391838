"""bf16 in 12 bits: every number comes back, and weights that do not fit are found."""

import numpy as np
import numpy.typing as npt
import pytest

from ingot.dtypes import DType, float32_to_bf16
from ingot.plugins.compressed import CODES, CompressedPanel, compress, fits, restore
from ingot.plugins.layouts import pack_panels, panel_bytes, panel_layout, unpack_panels

SHAPES = ((1, 1), (16, 32), (17, 33), (48, 300), (130, 2048))


def trained(seed: int, n: int, k: int) -> npt.NDArray[np.uint16]:
    """Numbers as training leaves them."""
    return float32_to_bf16(np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(0.02))


def with_patches(seed: int, n: int, k: int, count: int) -> npt.NDArray[np.uint16]:
    """The same, with `count` numbers of any bits in each panel."""
    random = np.random.default_rng(seed)
    bits = (trained(seed, n, k) & 0x80FF | 0x3C00).astype(np.uint16)
    for first in range(0, n, 16):
        panel = bits[first : first + 16].reshape(-1)  # a view
        places = random.choice(panel.size, min(count, panel.size), replace=False)
        panel[places] = random.integers(0, 1 << 16, len(places))
    return bits


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_comes_back(n: int, k: int) -> None:
    most = CompressedPanel(k).most_patches
    for bits in (trained(n, n, k), with_patches(n, n, k, most // 2), np.zeros((n, k), np.uint16)):
        assert fits(bits)
        packed = compress(bits)
        assert packed.shape == (-(-n // 16), CompressedPanel(k).nbytes)
        np.testing.assert_array_equal(restore(packed, n, k), bits)
        np.testing.assert_array_equal(unpack_panels(pack_panels(bits, DType.BF16C), n, k, DType.BF16C), bits)


def test_counts_of_patches_fit_their_type() -> None:
    assert CompressedPanel(1 << 28).most_patches == 0xFFFF


def test_weights_take_three_quarters_of_their_bytes() -> None:
    assert panel_layout(DType.BF16C) == "panel16.bf16c"
    for k in (512, 2048, 14336):
        assert panel_bytes(k, DType.BF16C) < 0.765 * panel_bytes(k, DType.BF16)


@pytest.mark.parametrize("k", [32, 300, 2048])
def test_each_panel_has_room_for_as_many_patches_as_it_says(k: int) -> None:
    """The second panel has numbers of sixteen upper bytes, zeros of padding among them, and one number each of further
    ones."""
    most = CompressedPanel(k).most_patches
    assert most >= CompressedPanel(k).tiles
    bits = np.full((32, k), 0x3C12, np.uint16)
    panel = bits[16:].reshape(-1)
    kinds = CODES - 1 - (k % 32 > 0)
    panel[: 8 * kinds] = np.repeat(np.arange(1, kinds + 1), 8) << 8 | 0x34
    for count in (most, most + 1):
        panel[len(panel) - count :] = np.arange(count) + 0x40 << 8 | 0x56
        assert fits(bits) == (count == most)
        if count == most:
            np.testing.assert_array_equal(restore(compress(bits), 32, k), bits)
        else:
            with pytest.raises(ValueError, match="patches"):
                compress(bits)
