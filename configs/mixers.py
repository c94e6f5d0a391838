"""What layers can have instead of attention, or beside it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionConfig:
    """Layers with the gated delta rule instead of attention: a state [key_dim, value_dim] per head, behind a causal
    convolution of conv_width tokens. Each key head serves as many heads.

    low_rank  above 0: each dim of a key has a decay of its own (Kimi Delta Attention); decays and the output's gate are
              products through so many numbers, and the gate is a sigmoid; 0: one decay for each head, and a SiLU
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    low_rank: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config:
    """Layers with Mamba 2 instead of attention: a state [state_dim, head_dim] per head, behind a causal convolution of
    conv_width tokens. Heads of a group have the same input and output vectors.

    bias, out_bias         of the products before and behind
    norm_groups            how many parts of the columns are normed by themselves, behind the gate; 0: there is no norm
    in_scale               factor of the input
    part_scales            factors of the gate, the values, the input vectors, the output vectors and the steps, before
                           the convolution and the steps' own bias; empty: none
    least_step, most_step  bounds of the steps, the latter 0 for none
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    norm_groups: int
    in_scale: float = 1.0
    part_scales: tuple[float, ...] = ()
    least_step: float = 0.0
    most_step: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvConfig:
    """Layers with a gated causal convolution of `width` tokens instead of attention."""

    width: int
    bias: bool


Mixer = LinearAttentionConfig | ShortConvConfig | Mamba2Config
