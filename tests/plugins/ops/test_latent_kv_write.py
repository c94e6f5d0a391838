"""latent_kv_write: latents normed, keys and queries rotated by pairs as complex numbers are."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.op import KvCache
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array
from tests.plugins.ops.latent import CACHE, RANK, WIDTH, latent_group


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rows_of_the_cache_and_queries(interleaved: int) -> None:
    q, latent, norm = random_array(4, 3 * 9), random_array(4, WIDTH, seed=1), random_array(RANK, seed=2)
    angles = random_array(4, 2, seed=3)
    cache, batch = KvCache(latent_group(), 6), make_batch([0] * 4, [3, 1], [2, 0], [[5, 2], [4, -1]])
    attrs: dict[str, Attr] = {**CACHE, "interleaved": interleaved, "norm_eps": 1e-6, "growth": 0.0, "growth_every": 1}
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    (written,) = evaluate("latent_kv_write", [q, latent, table, norm], attrs, batch, cache)

    def rotated(x: np.ndarray) -> np.ndarray:  # [tokens, heads, 4]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :2], x[..., 2:])
        made = (first + 1j * second) * np.exp(1j * angles)[:, None]
        parts = [made.real, made.imag]
        return np.stack(parts, axis=-1).reshape(x.shape) if interleaved else np.concatenate(parts, axis=-1)

    again: dict[str, Attr] = {**attrs, "growth": 0.25, "growth_every": 3}
    (grown,) = evaluate("latent_kv_write", [q, latent, table, norm], again, batch, cache)
    positions = np.array([2, 3, 4, 0])
    assert positions[0] // 3 == 0 < positions[1] // 3
    factors = 1 + 0.25 * np.log(1 + np.floor(positions / 3))
    np.testing.assert_allclose(grown, written * factors[:, None], rtol=1e-6)
    queries = q.reshape(4, 3, 9)
    np.testing.assert_array_equal(written.reshape(4, 3, 9)[..., :5], queries[..., :5])
    np.testing.assert_allclose(written.reshape(4, 3, 9)[..., 5:], rotated(queries[..., 5:]), atol=1e-6)
    low = latent[:, :RANK]
    value = low / np.sqrt((low**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    expected = np.concatenate([value, rotated(latent[:, None, RANK:])[:, 0]], axis=1)
    for token, (block, slot) in enumerate(((5, 2), (2, 0), (2, 1), (4, 0))):
        np.testing.assert_allclose(cache.keys[1, block, 0, slot], expected[token], atol=1e-6)
    assert np.isnan(cache.keys[0]).all(), "another layer's"
    assert cache.values.base is cache.keys, "nothing is kept twice"


def test_sizes() -> None:
    problem = find_op("latent_kv_write").size_problem
    assert problem(((27,), (12,), (4,), (8,)), CACHE) is None
    for shapes, said in (
        (((28,), (12,), (4,), (8,)), "28 columns"),
        (((9,), (12,), (4,), (8,)), "at least 4"),
        (((27,), (11,), (4,), (8,)), "latent"),
        (((27,), (12,), (6,), (8,)), "rotary"),
        (((27,), (12,), (4,), (7,)), "norm"),
    ):
        assert said in str(problem(shapes, CACHE))
    assert "leaves nothing" in str(problem(((27,), (12,), None, (12,)), {**CACHE, "rank": 12}))
