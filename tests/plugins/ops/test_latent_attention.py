"""latent_attention: against attention with the keys and values of each head written out, as the paper has it."""

import numpy as np
import torch

from ingot.plan import Attr
from ingot.plugins.op import KvCache
from ingot.plugins.registry import find_op
from tests.plugins.ops.calls import evaluate, make_batch, random_array
from tests.plugins.ops.latent import CACHE, RANK, WIDTH, latent_group

HEADS, KEY, VALUE = 3, 5, 7


def test_absorbed_is_expanded() -> None:
    cache, batch = KvCache(latent_group(), 6), make_batch([0] * 4, [3, 1], [3, 7], [[5, 2, -1], [1, 4, 0]])
    history = [random_array(6, WIDTH, seed=1), random_array(8, WIDTH, seed=2)]
    for rows, table in zip(history, batch.block_tables[0], strict=True):
        positions = np.arange(len(rows))
        cache.write(1, table[positions // 3], positions % 3, rows[:, None], rows[:, None, :RANK])
    still, rotary = random_array(4, HEADS, KEY, seed=3), random_array(4, HEADS, WIDTH - RANK, seed=4)
    to_keys, to_values = random_array(HEADS, KEY, RANK, seed=5), random_array(HEADS, VALUE, RANK, seed=6)
    absorbed = np.einsum("thk,hkr->thr", still, to_keys)
    attrs: dict[str, Attr] = {**CACHE, "scale": 0.3}
    q = np.concatenate([absorbed, rotary], axis=2).reshape(4, -1)
    (mixed,) = evaluate("latent_attention", [q], attrs, batch, cache)
    found = np.einsum("thr,hvr->thv", mixed.reshape(4, HEADS, RANK), to_values)
    for begin, end, rows in ((0, 3, history[0]), (3, 4, history[1])):
        low, shared = rows[:, :RANK], np.broadcast_to(rows[:, RANK:], (HEADS, len(rows), WIDTH - RANK))
        keys = np.concatenate([np.einsum("nr,hkr->hnk", low, to_keys), shared], axis=2)
        queries = np.concatenate([still, rotary], axis=2)[begin:end].transpose(1, 0, 2)
        mask = torch.ones(end - begin, len(rows), dtype=torch.bool).tril(len(rows) - (end - begin))
        expected = torch.nn.functional.scaled_dot_product_attention(
            torch.from_numpy(queries),
            torch.from_numpy(keys),
            torch.from_numpy(np.einsum("nr,hvr->hnv", low, to_values)),
            attn_mask=mask,
            scale=0.3,
        )
        np.testing.assert_allclose(found[begin:end], expected.transpose(0, 1).numpy(), atol=1e-4)


def test_sizes() -> None:
    problem = find_op("latent_attention").size_problem
    assert problem(((36,), None, None, None), CACHE) is None
    assert "q" in str(problem(((35,), None, None, None), CACHE))
    assert "leaves nothing" in str(problem(((36,), None, None, None), {**CACHE, "rank": 12}))
