"""rope_kv_write: rotation as a complex product, and each token's keys and values in its slot."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.op import Array, KvCache
from tests.plugins.ops.calls import LAYOUT, evaluate, make_batch, random_array

HEADS, KV_HEADS, DIM = 4, LAYOUT.kv_heads, LAYOUT.head_dim


def turned(x: Array, angle: Array, interleaved: bool) -> Array:
    """[tokens, heads, dim]: each pair as a complex number times e^(i angle)."""
    half = angle.shape[1]
    out = x.astype(np.float64)
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    pair = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angle)[:, None]
    out[..., first], out[..., second] = pair.real, pair.imag
    return out.astype(np.float32)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("half", [0, 1, 2])
def test_rotation_and_slots(interleaved: int, half: int) -> None:
    qkv = random_array(3, (HEADS + 2 * KV_HEADS) * DIM)
    angle = random_array(3, half, seed=1)
    cos_sin = np.hstack([np.cos(angle), np.sin(angle)]) if half else None
    cache = KvCache(LAYOUT, 6)
    batch = make_batch([0, 0, 0], [2, 1], [2, 0], [[4, 1], [3, -1]])
    attrs: dict[str, Attr] = {
        "layer": 1, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "interleaved": interleaved,
    }  # fmt: skip
    (q,) = evaluate("rope_kv_write", [qkv, cos_sin], attrs, batch, cache)
    parts = np.split(qkv.reshape(3, -1, DIM), [HEADS, HEADS + KV_HEADS], axis=1)
    np.testing.assert_allclose(q.reshape(3, HEADS, DIM), turned(parts[0], angle, bool(interleaved)), atol=1e-6)
    keys = turned(parts[1], angle, bool(interleaved))
    for token, (block, slot) in enumerate([(4, 2), (1, 0), (3, 0)]):
        np.testing.assert_allclose(cache.keys[1, block, :, slot], keys[token], atol=1e-6)
        np.testing.assert_array_equal(cache.values[1, block, :, slot], parts[2][token])
    assert np.isfinite(cache.keys).sum() == 3 * KV_HEADS * DIM
    assert np.isnan(cache.values[0]).all()
