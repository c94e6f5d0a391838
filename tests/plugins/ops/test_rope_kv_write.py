"""rope_kv_write: rotation as a complex product, and each token's keys and values in its slot."""

import dataclasses

import numpy as np
import pytest
import torch

from ingot.dtypes import DType
from ingot.plan import Attr
from ingot.plugins.op import Array, KvCache
from ingot.plugins.quantised import round_to_int8
from tests.plugins.ops.calls import LAYOUT, evaluate, make_batch, random_array

HEADS, KV_HEADS, DIM = 4, LAYOUT.kv_heads, LAYOUT.head_dim


def rotated(x: Array, angle: Array, interleaved: bool) -> Array:
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
        "layer": 1,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "interleaved": interleaved,
        "norm_eps": 0.0,
        "value_norm": 0,
        "keys_as_values": 0,
    }
    (q,) = evaluate("rope_kv_write", [qkv, cos_sin, None, None], attrs, batch, cache)
    parts = np.split(qkv.reshape(3, -1, DIM), [HEADS, HEADS + KV_HEADS], axis=1)
    np.testing.assert_allclose(q.reshape(3, HEADS, DIM), rotated(parts[0], angle, bool(interleaved)), atol=1e-6)
    keys = rotated(parts[1], angle, bool(interleaved))
    for token, (block, slot) in enumerate([(4, 2), (1, 0), (3, 0)]):
        np.testing.assert_allclose(cache.keys[1, block, :, slot], keys[token], atol=1e-6)
        np.testing.assert_array_equal(cache.values[1, block, :, slot], parts[2][token])
    assert np.isfinite(cache.keys).sum() == 3 * KV_HEADS * DIM
    assert np.isnan(cache.values[0]).all()


def test_an_int8_cache_rounds_what_has_been_rotated() -> None:
    """Codes are whole, the largest is 127 in every row, and no number is further off than half a code."""
    cache, exact = KvCache(dataclasses.replace(LAYOUT, dtype=DType.I8), 6), KvCache(LAYOUT, 6)
    qkv, angle = random_array(3, (HEADS + 2 * KV_HEADS) * DIM), random_array(3, 2, seed=1)
    attrs: dict[str, Attr] = {
        "layer": 1,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "interleaved": 0,
        "norm_eps": 0.0,
        "value_norm": 0,
        "keys_as_values": 0,
    }
    for each in (cache, exact):
        inputs = [qkv, np.hstack([np.cos(angle), np.sin(angle)]), None, None]
        evaluate("rope_kv_write", inputs, attrs, make_batch([0] * 3, [3], [0], [[4]]), each)
    for codes, scales, numbers in (
        (cache.keys, cache.key_scales, exact.keys),
        (cache.values, cache.value_scales, exact.values),
    ):
        codes, scales, numbers = codes[1, 4], scales[1, 4][..., None], numbers[1, 4]
        assert (np.abs(codes).max(axis=-1) == 127).all()
        np.testing.assert_array_equal(codes, np.rint(codes))
        assert (np.abs(codes * scales - numbers) <= 0.5001 * scales).all()
    assert np.isnan(cache.key_scales).sum() == cache.key_scales.size - 3 * KV_HEADS
    assert np.isnan(cache.value_scales[0]).all()


def test_rounding_to_int8() -> None:
    rows = np.array([[0, 0], [127, -0.5], [1, np.nan], [-np.inf, 1], [1e-37, 0], [1.5e-36, 3e38]], np.float32)
    codes, scales = round_to_int8(rows)
    np.testing.assert_array_equal(codes, [[0, 0], [127, 0], [0, 0], [0, 0], [0, 0], [0, 127]])
    np.testing.assert_array_equal(scales, np.array([0, 1, np.nan, np.nan, 1e-37 / 127, 3e38 / 127], np.float32))


@pytest.mark.parametrize("as_values", [0, 1])
def test_values_are_normed_and_may_be_the_keys(as_values: int) -> None:
    """Keys as they are before their norm and rotation; the norm has no weight."""
    qkv, angle = random_array(3, (HEADS + (2 - as_values) * KV_HEADS) * DIM), random_array(3, 2, seed=1)
    cache = KvCache(LAYOUT, 6)
    attrs: dict[str, Attr] = {
        "layer": 1,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "interleaved": 0,
        "norm_eps": 0.1,
        "value_norm": 1,
        "keys_as_values": as_values,
    }
    weight = 1 + random_array(DIM)
    inputs = [qkv, np.hstack([np.cos(angle), np.sin(angle)]), weight, weight]
    evaluate("rope_kv_write", inputs, attrs, make_batch([0] * 3, [3], [0], [[4]]), cache)
    parts = qkv.reshape(3, -1, DIM)
    keys, values = parts[:, HEADS : HEADS + KV_HEADS], parts[:, -KV_HEADS:]
    for found, part, factor, turns in (
        (cache.keys, keys, weight, angle),
        (cache.values, values, np.ones_like(weight), 0 * angle),
    ):
        run = torch.nn.functional.rms_norm(torch.from_numpy(part), [DIM], torch.from_numpy(factor), 0.1).numpy()
        np.testing.assert_allclose(found[1, 4, :, :3].transpose(1, 0, 2), rotated(run, turns, False), atol=1e-6)


@pytest.mark.parametrize("together", [False, True])
def test_norms_come_before_the_rotation(together: bool) -> None:
    """Over each head, or over all heads of q and all of k; values stay as they are."""
    qkv, angle = random_array(3, (HEADS + 2 * KV_HEADS) * DIM), random_array(3, 2, seed=1)
    weights = [1 + random_array(n * DIM if together else DIM, seed=n) for n in (HEADS, KV_HEADS)]
    cache = KvCache(LAYOUT, 6)
    attrs: dict[str, Attr] = {
        "layer": 1,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "interleaved": 0,
        "norm_eps": 0.1,
        "value_norm": 0,
        "keys_as_values": 0,
    }
    inputs = [qkv, np.hstack([np.cos(angle), np.sin(angle)]), *weights]
    (q,) = evaluate("rope_kv_write", inputs, attrs, make_batch([0] * 3, [3], [0], [[4]]), cache)
    parts = np.split(qkv, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=1)
    for found, part, weight, count in (
        (q, parts[0], weights[0], HEADS),
        (cache.keys[1, 4].transpose(1, 0, 2).reshape(3, -1), parts[1], weights[1], KV_HEADS),
    ):
        run = torch.from_numpy(part.reshape(3, -1, len(weight)))
        normed = torch.nn.functional.rms_norm(run, [len(weight)], torch.from_numpy(weight), 0.1).numpy()
        expected = rotated(normed.reshape(3, count, DIM), angle, False).reshape(3, -1)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(cache.values[1, 4].transpose(1, 0, 2).reshape(3, -1), parts[2])
