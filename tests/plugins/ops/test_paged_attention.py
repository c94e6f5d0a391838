"""paged_attention: against torch's attention, sequence by sequence; slots that belong to nobody are never read."""

import numpy as np
import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.ministral3 import modeling_ministral3

from ingot.convert.alibi import bf16_slopes, slopes_of
from ingot.plan import Attr
from ingot.plugins.op import KvCache
from tests.plugins.ops.calls import LAYOUT, evaluate, make_batch, random_array

DIM = LAYOUT.head_dim


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_against_torch(heads: int, window: int) -> None:
    cache = KvCache(LAYOUT, 6)
    batch = make_batch([0] * 4, [3, 1], [3, 7], [[5, 2, -1], [1, 4, 0]])
    history = [random_array(2, 6, 2, DIM, seed=1), random_array(2, 8, 2, DIM, seed=2)]
    for (keys, values), table in zip(history, batch.block_tables[0], strict=True):
        positions = np.arange(len(keys))
        cache.write(1, table[positions // 3], positions % 3, keys, values)
    q = random_array(4, heads * DIM, seed=3)
    attrs: dict[str, Attr] = {"layer": 1, "heads": heads, "kv_heads": 2, "head_dim": DIM, "scale": 0.7}
    attrs |= {"window": window, "softcap": 0.0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1}
    (y,) = evaluate("paged_attention", [q], attrs, batch, cache)
    for begin, end, (keys, values) in ((0, 3, history[0]), (3, 4, history[1])):
        length = keys.shape[0]
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        mask = mask.triu(length - (end - begin) - window + 1) if window else mask
        expected = torch.nn.functional.scaled_dot_product_attention(
            torch.from_numpy(q[begin:end].reshape(-1, heads, DIM)).transpose(0, 1),
            torch.from_numpy(keys).transpose(0, 1),
            torch.from_numpy(values).transpose(0, 1),
            attn_mask=mask,
            scale=0.7,
            enable_gqa=True,
        )
        np.testing.assert_allclose(y[begin:end], expected.transpose(0, 1).reshape(end - begin, -1).numpy(), atol=1e-5)


def test_scores_are_capped() -> None:
    cache, batch = KvCache(LAYOUT, 6), make_batch([0], [1], [2], [[5]])
    keys, values = random_array(2, 3, 2, DIM, seed=1)
    cache.write(0, 5, np.arange(3), keys, values)
    q = random_array(1, 2 * DIM, seed=3) * 9
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": DIM,
        "scale": 0.7,
        "window": 0,
        "softcap": 1.5,
        "bf16_bias": 0,
        "growth": 0.0,
        "growth_every": 1,
    }
    (y,) = evaluate("paged_attention", [q], attrs, batch, cache)
    scores = 1.5 * np.tanh(np.einsum("hd,nhd->hn", q.reshape(2, DIM), keys) * 0.7 / 1.5)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(y.reshape(2, DIM), np.einsum("hn,nhd->hd", weights, values), atol=1e-6)


def test_a_sink_is_the_score_of_a_token_without_a_value() -> None:
    """gpt-oss's: the softmax of transformers, whose last column is dropped."""
    cache, batch = KvCache(LAYOUT, 6), make_batch([0], [1], [2], [[5]])
    keys, values = random_array(2, 3, 2, DIM, seed=1)
    cache.write(0, 5, np.arange(3), keys, values)
    q, sinks = random_array(1, 2 * DIM, seed=3), np.array([2.0, -1.0], np.float32)
    attrs: dict[str, Attr] = {"layer": 0, "heads": 2, "kv_heads": 2, "head_dim": DIM, "scale": 0.7}
    (y,) = evaluate(
        "paged_attention",
        [q, sinks],
        {**attrs, "window": 2, "softcap": 0.0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1},
        batch,
        cache,
    )
    scores = np.einsum("hd,nhd->hn", q.reshape(2, DIM), keys)[:, 1:] * 0.7
    joined = torch.softmax(torch.from_numpy(np.concatenate([scores, sinks[:, None]], axis=1)), dim=-1)
    expected = np.einsum("hn,nhd->hd", joined[:, :-1].numpy(), values[1:])
    np.testing.assert_allclose(y.reshape(2, DIM), expected, atol=1e-6)


@pytest.mark.parametrize("bf16", [0, 1])
def test_slopes_as_those_of_transformers(bf16: int) -> None:
    """Bloom adds slope * token, which differs by a number for each row; Falcon's products are bf16, and scaled."""
    heads, scale = 6, 0.7
    cache, batch = KvCache(LAYOUT, 6), make_batch([0] * 2, [2], [5], [[5, 2, 1]])
    keys, values = random_array(2, 7, 2, DIM, seed=1)
    positions = np.arange(7)
    cache.write(0, np.array([5, 2, 1])[positions // 3], positions % 3, keys, values)
    q = random_array(2, heads * DIM, seed=3)
    module = modeling_falcon if bf16 else modeling_bloom
    arguments = (torch.ones(1, 7), heads, torch.bfloat16 if bf16 else torch.float32)
    bias = module.build_alibi_tensor(*arguments).float().numpy().reshape(heads, 7) * (scale if bf16 else 1)
    slopes = np.array(bf16_slopes(heads) if bf16 else slopes_of(heads), np.float32)
    attrs: dict[str, Attr] = {"layer": 0, "heads": heads, "kv_heads": 2, "head_dim": DIM, "scale": scale}
    attrs |= {"window": 0, "softcap": 0.0, "bf16_bias": bf16, "growth": 0.0, "growth_every": 1}
    (y,) = evaluate("paged_attention", [q, None, slopes], attrs, batch, cache)
    for row, seen in ((0, 6), (1, 7)):
        grouped = np.repeat(keys[:seen], 3, axis=1), np.repeat(values[:seen], 3, axis=1)
        scores = np.einsum("hd,nhd->hn", q[row].reshape(heads, DIM), grouped[0]) * scale + bias[:, :seen]
        weights = torch.softmax(torch.from_numpy(scores), dim=-1).numpy()
        expected = np.einsum("hn,nhd->hd", weights, grouped[1])
        np.testing.assert_allclose(y[row].reshape(heads, DIM), expected, atol=1e-6)


def test_queries_grow_with_their_position() -> None:
    """As transformers scales those of Ministral 3."""
    cache, batch = KvCache(LAYOUT, 6), make_batch([0] * 2, [2], [5], [[5, 2, 1]])
    for position in range(7):
        keys, values = random_array(2, 2, DIM, seed=position)
        cache.write(0, (5, 2, 1)[position // 3], np.array(position % 3), keys, values)
    q = random_array(2, 4 * DIM, seed=9)
    attrs: dict[str, Attr] = {"layer": 0, "heads": 4, "kv_heads": 2, "head_dim": DIM, "scale": 0.7}
    attrs |= {"window": 0, "softcap": 0.0, "bf16_bias": 0}
    (y,) = evaluate("paged_attention", [q], {**attrs, "growth": 0.3, "growth_every": 3}, batch, cache)
    factors = modeling_ministral3.get_llama_4_attn_scale(torch.tensor([[5, 6]]), 0.3, 3).numpy().reshape(2, 1)
    (expected,) = evaluate("paged_attention", [q * factors], {**attrs, "growth": 0.0, "growth_every": 1}, batch, cache)
    np.testing.assert_allclose(y, expected, atol=1e-6)
