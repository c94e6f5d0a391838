"""rope_query rotates queries as rope_kv_write does, and touches no cache."""

import numpy as np
import pytest

from ingot.plan import Attr
from ingot.plugins.op import KvCache
from tests.plugins.ops.calls import LAYOUT, evaluate, make_batch, random_array

HEADS, KV_HEADS, DIM = 4, LAYOUT.kv_heads, LAYOUT.head_dim


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("half", [0, 2])
@pytest.mark.parametrize("norm", [0, DIM, HEADS * DIM])
def test_as_queries_that_come_with_keys(interleaved: int, half: int, norm: int) -> None:
    qkv, angle = random_array(3, (HEADS + 2 * KV_HEADS) * DIM), random_array(3, half, seed=1)
    turns = np.hstack([np.cos(angle), np.sin(angle)]) if half else None
    weight = 1 + random_array(norm, seed=2) if norm else None
    attrs: dict[str, Attr] = {"heads": HEADS, "head_dim": DIM, "interleaved": interleaved, "norm_eps": 0.1}
    batch, cache = make_batch([0] * 3, [3], [0], [[4]]), KvCache(LAYOUT, 6)
    (found,) = evaluate("rope_query", [qkv[:, : HEADS * DIM], turns, weight], attrs, batch, cache)
    assert np.isnan(cache.keys).all()
    attrs |= {"layer": 1, "kv_heads": KV_HEADS, "value_norm": 0, "keys_as_values": 0}
    (wanted,) = evaluate("rope_kv_write", [qkv, turns, weight, None], attrs, batch, cache)
    np.testing.assert_array_equal(found, wanted)
    assert half or norm or (found == qkv[:, : HEADS * DIM]).all()
