"""Rotary positions worked out by hand: what each scaling does to the first and the last pair, and to positions."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from ingot.configs.model import RopeConfig
from ingot.configs.read import Section
from ingot.convert.hf_rope import read_rope
from ingot.convert.rope import inverse_frequencies
from ingot.errors import ConfigError, UnsupportedModelError

DIM = 64
PLAIN = 10000.0 ** (-np.arange(0, DIM, 2) / DIM)


def rope(kind: str, *, most: int = 4096, **values: Any) -> RopeConfig:
    return read_rope(Section({"rope_scaling": {"rope_type": kind, **values}}, "config.json"), DIM, most)


def test_without_scaling() -> None:
    np.testing.assert_allclose(inverse_frequencies(rope("default")), PLAIN, rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(rope("linear", factor=8.0)), PLAIN / 8, rtol=1e-6)
    backwards = dataclasses.replace(rope("linear", factor=8.0), backwards=True)
    np.testing.assert_allclose(inverse_frequencies(backwards), -PLAIN / 8, rtol=1e-6)


def test_yarn_slows_down_long_waves_alone() -> None:
    found = rope("yarn", factor=4.0, original_max_position_embeddings=1024)
    frequencies = inverse_frequencies(found)
    np.testing.assert_allclose(frequencies[:4], PLAIN[:4], rtol=1e-6)
    np.testing.assert_allclose(frequencies[-4:], PLAIN[-4:] / 4, rtol=1e-6)
    ratios = frequencies / PLAIN
    assert (np.diff(ratios) <= 1e-6).all()
    assert found.positions == 4096
    assert found.scale == pytest.approx(0.1 * math.log(4) + 1)
    assert rope("yarn", most=1024, factor=4.0).positions == 4096


def test_scales_of_yarn() -> None:
    values: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 1024}
    both = rope("yarn", **values, mscale=2.0, mscale_all_dim=1.0)
    assert both.scale == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert rope("yarn", **values, mscale=2.0).scale == pytest.approx(0.1 * math.log(4) + 1)
    assert rope("yarn", **values, mscale=2.0, mscale_all_dim=1.0, attention_factor=3.0).scale == 3.0


def test_llama_keeps_short_waves_and_slows_down_long_ones() -> None:
    values: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    frequencies = inverse_frequencies(rope("llama3", factor=8.0, **values))
    turns = 1024 * PLAIN / (2 * np.pi)
    np.testing.assert_allclose(frequencies[turns > 4], PLAIN[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(frequencies[turns < 1], PLAIN[turns < 1] / 8, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"high_freq_factor is not more|beta_fast is less"):
        rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)


@pytest.mark.parametrize(("most", "kept"), [(4096, 1024), (512, 512)])
def test_short_factors_hold_up_to_the_original_positions(most: int, kept: int) -> None:
    factors: dict[str, Any] = {"short_factor": [2.0] * 32, "long_factor": [5.0] * 32}
    found = rope("longrope", most=most, **factors, original_max_position_embeddings=1024)
    assert (found.positions, found.factors[0], found.long_factors[0]) == (kept, 2.0, 5.0)
    assert found.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)) if most > 1024 else 1.0)
    np.testing.assert_allclose(inverse_frequencies(found), PLAIN / 2, rtol=1e-6)


def test_what_no_family_has() -> None:
    with pytest.raises(UnsupportedModelError, match="got: strange"):
        rope("strange")
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor other than 1"):
        rope("default", partial_rotary_factor=0.5)
