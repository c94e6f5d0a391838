"""ModelConfig → the weights that its Graph reads, by name, with the shapes in which they are stored."""

from ingot.configs.model import ModelConfig, Norm, QkNorm
from ingot.convert.experts import beside_shapes, expert_shapes
from ingot.convert.latent import latent_shapes
from ingot.convert.layer_input import layer_input_shapes, shared_input_shapes
from ingot.convert.recurrent import recurrent_shapes
from ingot.convert.streams import shared_stream_shapes, stream_shapes

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight that the Graph of this model reads, with its stored shape."""
    hidden, normed = config.hidden_size, config.pre_norms or config.sum_norms
    shapes: dict[str, Shape] = {}

    def norm(path: str, *, present: bool = True, width: int = hidden) -> None:
        if not (present and config.norm_weights):
            return
        shapes[f"{path}/weight"] = (width,)
        if config.norm is Norm.LAYER and config.norm_bias:
            shapes[f"{path}/bias"] = (width,)

    def linear(path: str, size_in: int, size_out: int, *, bias: bool) -> None:
        shapes[f"{path}/weight"] = (size_in, size_out) if config.linear_in_out else (size_out, size_in)
        if bias:
            shapes[f"{path}/bias"] = (size_out,)

    narrow = config.embedding_size
    shapes["embed/weight"] = (config.stored_rows or config.vocab_size, narrow or hidden)
    shapes |= {"embed/out/weight": (hidden, narrow), "lm_head/in/weight": (narrow, hidden)} if narrow else {}
    norm("embed_norm", present=config.embedding_norm)
    if config.learned_positions:
        shapes["positions/weight"] = (config.max_positions, hidden)
    for layer in range(config.num_layers):
        path = f"layers.{layer}"
        norm(f"{path}/attn_norm", present=normed and config.mixes(layer))
        own = latent_shapes(config, config.latent, f"{path}/attn") if config.latent is not None else {}
        attends = config.has_attention(layer)
        shapes |= recurrent_shapes(config, layer) | (own if attends else {})
        for name, sizes in _attention_sizes(config, layer).items() if attends and not own else ():
            shapes |= _norms_of_heads(config, layer) if name == "out" else {}
            bias = config.attention_out_bias if name == "out" else config.qkv_bias
            linear(f"{path}/attn/{name}", *sizes, bias=bias and not (name == "gate" and config.gate_without_bias))
        width = config.heads * config.head_dim_of(layer)
        norm(f"{path}/attn/inner_norm", present=config.inner_norms and attends and not own, width=width)
        if config.attention_sinks and attends:
            shapes[f"{path}/attn/sinks/weight"] = (config.heads,)
        norm(f"{path}/attn_post_norm", present=config.post_norms and config.mixes(layer))
        if config.has_mlp(layer):
            norm(f"{path}/mlp_norm", present=normed and not config.shared_norm)
            moe = config.moe_of(layer)
            plain = moe is None or moe.beside_mlp
            width = config.intermediate_of(layer)
            norm(f"{path}/mlp/inner_norm", present=config.inner_norms and plain, width=width)
            for name, sizes in _mlp_sizes(config, layer).items() if plain else ():
                linear(f"{path}/mlp/{name}", *sizes, bias=config.mlp_bias)
            shapes |= {} if moe is None else expert_shapes(moe, hidden, f"{path}/moe", mlp_bias=config.mlp_bias)
            shapes |= {} if moe is None else beside_shapes(moe, hidden, path)
            norm(f"{path}/mlp_post_norm", present=config.post_norms)
        shapes |= layer_input_shapes(config, path) | stream_shapes(config, path)
    norm("norm", present=config.last_norm)
    return shapes | shared_input_shapes(config) | shared_stream_shapes(config) | _head_shapes(config)


def _head_shapes(config: ModelConfig) -> dict[str, Shape]:
    """A Linear in every family, never a Conv1D."""
    rows = config.stored_rows or config.vocab_size
    table = {} if config.tied_embeddings else {"lm_head/weight": (rows, config.embedding_size or config.hidden_size)}
    return {**table, **({"lm_head/bias": (config.vocab_size,)} if config.head_bias else {})}


def _attention_sizes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The matrices of an attention: how wide their inputs are, and their results."""
    dim = config.head_dim_of(layer)
    hidden, query, kv = config.hidden_size, config.heads * dim, config.kv_heads_of(layer) * dim
    sizes = {"qkv": query + 2 * kv} if config.fused_qkv else {"q": query, "k": kv, "v": kv}
    if config.writer_of(layer) != layer:
        sizes = {"q": query}
    elif config.keys_as_values(layer):
        del sizes["v"]
    sizes |= {"gate": query} if config.output_gate else {}
    return {**{name: (hidden, size) for name, size in sizes.items()}, "out": (query, hidden)}


def _norms_of_heads(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Weights of the norms of queries and keys."""
    heads = {"q": config.heads, "k": config.kv_heads_of(layer)} if config.qk_norm and config.norm_weights else {}
    if config.writer_of(layer) != layer:
        heads.pop("k", None)
    dim = config.head_dim_of(layer)
    return {
        f"layers.{layer}/attn/{name}_norm/weight": (dim * (1 if config.qk_norm is QkNorm.HEAD else count),)
        for name, count in heads.items()
    }


def _mlp_sizes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """The matrices of an MLP: how wide their inputs are, and their results."""
    hidden, inner = config.hidden_size, config.intermediate_of(layer)
    names = ("gate_up",) if config.fused_gate_up else ("gate", "up") if config.gated_mlp else ("up",)
    width = 2 * inner if config.fused_gate_up else inner
    return {**{name: (hidden, width) for name in names}, "down": (inner, hidden)}
