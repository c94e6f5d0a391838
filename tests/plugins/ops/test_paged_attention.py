"""paged_attention: against torch's attention, sequence by sequence; slots that belong to nobody are never read."""

import numpy as np
import pytest
import torch

from ingot.plan import Attr
from ingot.plugins.op import KvCache
from tests.plugins.ops.calls import LAYOUT, evaluate, make_batch, random_array

DIM = LAYOUT.head_dim


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_against_torch(heads: int) -> None:
    cache = KvCache(LAYOUT, 6)
    batch = make_batch([0] * 4, [3, 1], [3, 7], [[5, 2, -1], [1, 4, 0]])
    history = [random_array(2, 6, 2, DIM, seed=1), random_array(2, 8, 2, DIM, seed=2)]
    for (keys, values), table in zip(history, batch.block_tables, strict=True):
        for position in range(keys.shape[0]):
            cache.write(1, int(table[position // 3]), position % 3, keys[position], values[position])
    q = random_array(4, heads * DIM, seed=3)
    attrs: dict[str, Attr] = {"layer": 1, "heads": heads, "kv_heads": 2, "head_dim": DIM, "scale": 0.7}
    (y,) = evaluate("paged_attention", [q], attrs, batch, cache)
    for begin, end, (keys, values) in ((0, 3, history[0]), (3, 4, history[1])):
        length = keys.shape[0]
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        expected = torch.nn.functional.scaled_dot_product_attention(
            torch.from_numpy(q[begin:end].reshape(-1, heads, DIM)).transpose(0, 1),
            torch.from_numpy(keys).transpose(0, 1),
            torch.from_numpy(values).transpose(0, 1),
            attn_mask=mask,
            scale=0.7,
            enable_gqa=True,
        )
        np.testing.assert_allclose(y[begin:end], expected.transpose(0, 1).reshape(end - begin, -1).numpy(), atol=1e-5)
