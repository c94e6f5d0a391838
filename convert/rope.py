"""RopeConfig → the frequencies of its rotations, rounded like the float32 formulae that models are trained with."""

import math

import numpy as np
import numpy.typing as npt

from ingot.configs.model import Llama3Scaling, RopeConfig, YarnScaling

Frequencies = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeConfig) -> Frequencies:
    """float32 [rotary_dim / 2], in radians per token, scaling included; negative ones rotate backwards."""
    return -_forwards(rope) if rope.backwards else _forwards(rope)


def _forwards(rope: RopeConfig) -> Frequencies:
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    frequencies = np.float32(1) / np.power(np.float32(rope.theta), exponent)
    frequencies = frequencies / np.float32(rope.linear_factor)
    if rope.turning_pairs:
        frequencies[rope.turning_pairs :] = 0
    if rope.factors:
        frequencies = np.float32(1) / (np.array(rope.factors, np.float32) * (np.float32(rope.theta) ** exponent))
    if rope.yarn:
        return _ramp(rope, rope.yarn)
    return _blend(frequencies, rope.llama3) if rope.llama3 else frequencies


def _blend(frequencies: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """Long waves are slowed down by the factor, short ones kept, those between blended by their wavelength."""
    rotations = np.float32(scaling.original_positions) / (np.float32(2 * np.pi) / frequencies)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    blended: Frequencies = (1 - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    return blended


def _ramp(rope: RopeConfig, scaling: YarnScaling) -> Frequencies:
    """The first pairs rotate as they did, the last ones `factor` times slower, those between in proportion."""
    low, high = (
        rope.rotary_dim * math.log(scaling.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    slowed = np.clip(
        (np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1
    )
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    waves = np.power(np.float32(rope.theta), exponent)
    kept = 1 - slowed
    blended: Frequencies = 1 / (np.float32(scaling.factor) * waves) * (1 - kept) + 1 / waves * kept
    return blended
