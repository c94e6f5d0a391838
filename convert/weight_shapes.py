"""ModelConfig → the weights that its Graph reads, by name, with the shapes in which they are stored."""

from ingot.configs.model import ModelConfig, MoeConfig, Norm, QkNorm

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight that the Graph of this model reads, with its stored shape."""
    hidden = config.hidden_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {}

    def norm(path: str, *, present: bool = True) -> None:
        if not present:
            return
        shapes[f"{path}/weight"] = (hidden,)
        if config.norm is Norm.LAYER and config.norm_bias:
            shapes[f"{path}/bias"] = (hidden,)

    def linear(path: str, size_in: int, size_out: int, *, bias: bool) -> None:
        shapes[f"{path}/weight"] = (size_in, size_out) if config.linear_in_out else (size_out, size_in)
        if bias:
            shapes[f"{path}/bias"] = (size_out,)

    shapes["embed/weight"] = (config.vocab_size, hidden)
    if config.rope is None:
        shapes["positions/weight"] = (config.max_positions, hidden)
    projections = {"qkv": query + 2 * kv} if config.fused_qkv else {"q": query, "k": kv, "v": kv}
    for layer in range(config.num_layers):
        path = f"layers.{layer}"
        norm(f"{path}/attn_norm", present=config.pre_norms)
        for name, size in projections.items():
            linear(f"{path}/attn/{name}", hidden, size, bias=config.qkv_bias)
        for name, size in {"q": query, "k": kv}.items() if config.qk_norm else ():
            shapes[f"{path}/attn/{name}_norm/weight"] = (config.head_dim if config.qk_norm is QkNorm.HEAD else size,)
        linear(f"{path}/attn/out", query, hidden, bias=config.attention_out_bias)
        norm(f"{path}/attn_post_norm", present=config.post_norms)
        norm(f"{path}/mlp_norm", present=config.pre_norms and not config.shared_norm)
        moe = config.moe_of(layer)
        for name, sizes in _mlp_sizes(config).items() if moe is None else ():
            linear(f"{path}/mlp/{name}", *sizes, bias=config.mlp_bias)
        shapes |= {} if moe is None else _expert_shapes(moe, hidden, f"{path}/moe")
        norm(f"{path}/mlp_post_norm", present=config.post_norms)
    norm("norm")
    return shapes | _head_shapes(config)


def _head_shapes(config: ModelConfig) -> dict[str, Shape]:
    """A Linear in every family, never a Conv1D."""
    table = {} if config.tied_embeddings else {"lm_head/weight": (config.vocab_size, config.hidden_size)}
    return {**table, **({"lm_head/bias": (config.vocab_size,)} if config.head_bias else {})}


def _mlp_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of an MLP: how wide their inputs are, and their results."""
    hidden, inner = config.hidden_size, config.intermediate_size
    names = ("gate_up",) if config.fused_gate_up else ("gate", "up") if config.gated_mlp else ("up",)
    width = 2 * inner if config.fused_gate_up else inner
    return {**{name: (hidden, width) for name in names}, "down": (inner, hidden)}


def _expert_shapes(moe: MoeConfig, hidden: int, path: str) -> dict[str, Shape]:
    """The weights of one layer's experts, stacked; gate_up holds the rows [gate | up] of each."""
    return {
        f"{path}/router/weight": (moe.experts, hidden),
        f"{path}/gate_up/weight": (moe.experts, 2 * moe.intermediate_size, hidden),
        f"{path}/down/weight": (moe.experts, hidden, moe.intermediate_size),
    }
