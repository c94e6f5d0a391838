"""What a model is, whatever its family called it: the one description that `convert/decoder.py` reads."""

import dataclasses
import enum

from ingot.configs.mixers import Mixer


class Norm(enum.Enum):
    RMS = "rms"
    LAYER = "layer"


class QkNorm(enum.Enum):
    """What the RMS norms of queries and keys run over, before the rotation."""

    HEAD = "head"  # each head by itself, one weight for all
    WIDTH = "width"  # all heads together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Frequencies by wavelength, in tokens: beyond original_positions / low_freq_factor they are divided by `factor`,
    below original_positions / high_freq_factor they stay, between them they are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Frequencies by how often they rotate in original_positions: up to beta_slow times they are divided by `factor`,
    from beta_fast times on they stay, and between lies a ramp over the pairs. truncate: it begins and ends at whole
    pairs."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary positions: pair i of the first `rotary_dim` dimensions rotates by position * theta^(-2 i / rotary_dim).

    linear_factor  divides every frequency
    factors        divide one frequency each; empty: none
    long_factors   what `factors` could be instead, for texts of any length
    scale          of cosines and sines
    interleaved    pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2)
    turning_pairs  the first ones, which rotate; the others stand still; 0: all rotate
    backwards      all rotate by the negative angle
    positions      that the rotation is made for, where they are not the model's; 0: they are
    """

    theta: float
    rotary_dim: int
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    scale: float = 1.0
    positions: int = 0
    interleaved: bool = False
    turning_pairs: int = 0
    backwards: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlibiConfig:
    """Scores fall with the distance: slopes[head] * (token - position) is added to each.

    bf16  slopes times tokens are rounded to bf16 instead, and scaled as scores are
    """

    slopes: tuple[float, ...]
    bf16: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamsConfig:
    """`count` residual streams, of which layers compute one, `active`, and the others follow (AltUp).

    narrow  inner width of a product that is added beside attention (LAuReL)
    scaled  what ends a layer reads the computed stream, each column by a factor of its own
    """

    count: int
    active: int
    narrow: int
    scaled: bool


class RouterScore(enum.Enum):
    """How a router's logits become the shares of the experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # of each by itself


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """A mixture of experts: each token's MLP is a weighted sum of a few of many gated MLPs.

    per_token          experts that a token takes: those of the largest shares, equal ones by lower number
    intermediate_size  of one expert
    gated              experts, the shared one too, have a gate, as in ModelConfig's gated_mlp
    latent_size        experts read a product of the input, so wide, and another product widens what they make; 0: not
    normalized         the weights are the shares over their sum; else the shares themselves
    score              what the shares are
    select_bias        each expert has a number that is added to its share where experts are chosen, and only there
    groups, group_top  a token takes experts of `group_top` of so many groups: those whose `group_best` best shares
                       (with the bias) have the largest sums
    sum_offset, least_sum  the first is added to the sum of the shares, which counts as the second at least
    scale              factor of the weights
    shared_size        inner width of a gated MLP that every token takes beside its experts; 0: there is none
    shared_gate, shared_scale  its result is multiplied by the sigmoid of a product of its own, and by a number
    biases             router, gates, ups and downs of the experts add a bias
    gate_limit         above 0: experts compute down(g * sigmoid(gate_alpha * g) * (u + 1)) instead, where g is the gate
                       within this limit from above, u the up within it on both sides
    dense_layers       have a plain MLP instead
    beside_mlp         the layers have a plain MLP too: experts and router read the residual stream through norms of
                       their own, both results are normed, and their sum is the branch
    expert_scale       what each expert makes has a factor of its own
    """

    experts: int
    per_token: int
    intermediate_size: int
    normalized: bool
    gated: bool = True
    latent_size: int = 0
    score: RouterScore = RouterScore.SOFTMAX
    select_bias: bool = False
    groups: int = 1
    group_top: int = 1
    group_best: int = 2
    sum_offset: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    shared_size: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    biases: bool = False
    gate_limit: float = 0.0
    gate_alpha: float = 1.0
    dense_layers: tuple[int, ...] = ()
    beside_mlp: bool = False
    expert_scale: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: all heads read one latent of `kv_rank` numbers for each token, of which each makes
    keys of key_dim and values of value_dim; and a key of rope_dim numbers, which rotates with the position.

    q_rank  of the latent that queries are made of; 0: they are products of the layer's input
    """

    q_rank: int
    kv_rank: int
    key_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    rope                     None: positions are learned, one row per position; unless scores fall with the distance
    alibi                    they do so
    streams                  there are several residual streams
    mlp_cuts                 share of the gates of each layer's MLP that are cut off before the activation, if they are
                             normally distributed: a gate keeps what it is above that bound; 0: all stay as they are
    still_layers             do not rotate queries and keys
    local_rope               of the layers with a window, where it differs from `rope`
    gated_mlp                down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))
    moe                      experts instead of the MLP, but in its dense_layers
    fused_qkv                one weight holds the rows [q | k | v]
    fused_gate_up            one weight holds the rows [gate | up]
    windows                  tokens that each layer sees, its own included; 0: all; empty: all in every layer
    score_cap, logit_cap     cap * tanh(. / cap) of the scores and the logits; 0: none
    embedding_scale, embedding_norm  factor of the token embeddings; they are normed
    stored_rows              of the token table, where it has more than the vocabulary; 0: it has not
    embedding_size           of a row of the token table, where products widen it and narrow what lm_head reads; else 0
    pre_norms, post_norms    a norm before each branch, and one after it, before it joins the residual stream
    sum_norms, last_norm     a norm after each residual sum, whose result is the stream, and one before lm_head
    parallel_branches        attention and MLP both read what the layer was given
    shared_norm              through one norm, which is the attention's
    inner_norms              a norm before the last product of attention, and one before that of a plain MLP
    norm_weights, norm_bias  norms have weights, else they multiply with 1; layer norms add a bias
    norm_offset              is added to the factors of RMS norms
    linear_in_out            matrices are stored [in, out] (Conv1D) instead of [out, in]
    residual_scale, logit_scale  factors of a branch before it joins the residual stream, and of the logits
    attention_scale          factor of the scores q . k
    scale_by_inverse_layer   layer i divides its scores by i + 1 too
    tied_embeddings, head_bias  lm_head is the token table; it adds a bias
    mixer, mixer_layers      what these layers have instead of attention
    mlp_layers               have an MLP or experts and nothing else, and all others neither; None: each layer has both
    value_norm               values are normed head by head, without a weight
    full_kv_heads, full_head_dim  of the layers without a window, where they differ; 0: they do not
    full_keys_as_values      these layers have no product for values: keys, before norm and rotation, serve as such
    sharing_layers           so many last layers take keys and values of the last one before them with such a window
    sharing_width            inner width of their MLP; 0: the model's
    layer_input              a layer's end has a branch with an embedding of the token of its own, so wide; 0: none has
    layer_input_rows         of the tables of these embeddings
    layer_scale              what a layer leaves is multiplied by a number of its own
    latent                   keys and values are products of a latent; head_dim is that of queries
    query_growth             queries are multiplied by 1 + query_growth * log(1 + floor(position / growth_positions))
    sparse_beyond            attention chooses among more tokens than this (sparse attention): no more positions are
                             kept, and up to there it is exact; 0: it never chooses
    mixer_beside             they have it beside attention: both read the same norm, and are added
    mixer_scale, attention_in_scale, attention_out_scale  factors of what a mixer adds, attention reads and adds
    gate_scale, mlp_scale    factors of the gate of an MLP, before its activation, and of what an MLP adds
    output_gate              attention is multiplied with the sigmoid of another product, before its output product
    gate_without_bias        that product has no bias, whatever q, k and v have
    attention_sinks          each head has a score that takes part in its softmax, and no value
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm: Norm
    norm_eps: float
    activation: str
    gated_mlp: bool
    rope: RopeConfig | None
    attention_scale: float
    alibi: AlibiConfig | None = None
    streams: StreamsConfig | None = None
    mlp_cuts: tuple[float, ...] = ()
    embedding_norm: bool = False
    stored_rows: int = 0
    moe: MoeConfig | None = None
    scale_by_inverse_layer: bool = False
    local_rope: RopeConfig | None = None
    still_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    qk_norm: QkNorm | None = None
    embedding_size: int = 0
    pre_norms: bool = True
    post_norms: bool = False
    sum_norms: bool = False
    last_norm: bool = True
    parallel_branches: bool = False
    shared_norm: bool = False
    inner_norms: bool = False
    norm_weights: bool = True
    norm_bias: bool = True
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    linear_in_out: bool = False
    tied_embeddings: bool = False
    head_bias: bool = False
    mixer: Mixer | None = None
    mixer_layers: tuple[int, ...] = ()
    mlp_layers: tuple[int, ...] | None = None
    mixer_beside: bool = False
    mixer_scale: float = 1.0
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    gate_scale: float = 1.0
    mlp_scale: float = 1.0
    output_gate: bool = False
    gate_without_bias: bool = False
    attention_sinks: bool = False
    latent: LatentConfig | None = None
    query_growth: float = 0.0
    growth_positions: int = 0
    sparse_beyond: int = 0
    value_norm: bool = False
    full_kv_heads: int = 0
    full_head_dim: int = 0
    full_keys_as_values: bool = False
    sharing_layers: int = 0
    sharing_width: int = 0
    layer_input: int = 0
    layer_input_rows: int = 0
    layer_scale: bool = False

    @property
    def learned_positions(self) -> bool:
        """Whether there is a row for each position."""
        return self.rope is None and self.alibi is None

    def window_of(self, layer: int) -> int:
        """Tokens that a layer sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    def kv_heads_of(self, layer: int) -> int:
        """Heads of keys and values."""
        return self.kv_heads if self.window_of(layer) else self.full_kv_heads or self.kv_heads

    def head_dim_of(self, layer: int) -> int:
        """Elements of a head."""
        return self.head_dim if self.window_of(layer) else self.full_head_dim or self.head_dim

    def keys_as_values(self, layer: int) -> bool:
        """Whether the layer has no product for values."""
        return self.full_keys_as_values and not self.window_of(layer)

    def writer_of(self, layer: int) -> int:
        """The layer whose keys and values it attends to: its own number, or that of an earlier one."""
        first = self.num_layers - self.sharing_layers
        if layer < first:
            return layer
        return max(each for each in range(first) if self.window_of(each) == self.window_of(layer))

    def intermediate_of(self, layer: int) -> int:
        """Inner width of a layer's plain MLP."""
        return self.sharing_width if self.sharing_width and self.writer_of(layer) != layer else self.intermediate_size

    def mixer_of(self, layer: int) -> Mixer | None:
        """What a layer has instead of attention or beside it, None where it has attention alone."""
        return self.mixer if layer in self.mixer_layers else None

    def has_attention(self, layer: int) -> bool:
        """Whether a layer keeps keys and values."""
        return self.mixes(layer) and (self.mixer_beside or self.mixer_of(layer) is None)

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention, or what stands in its place."""
        return self.mlp_layers is None or layer not in self.mlp_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of a layer, None where it has a plain MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe
