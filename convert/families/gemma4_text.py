"""Gemma 4, its text model: layers with a window and layers without differ in heads, the latter may make values of keys;
the last layers may share keys and values of earlier ones; a branch with an embedding of the token ends each layer."""

import dataclasses
from collections.abc import Collection, Sequence

from ingot.configs.model import ModelConfig, MoeConfig, QkNorm, RopeConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma2, llama
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import read_experts
from ingot.convert.hf_rope import read_frequencies
from ingot.errors import ConfigError

_EVERY = 6  # each so many-th layer sees all tokens
_ROPES = {"full_attention": ("proportional", 1e6, 0.25), "sliding_attention": ("default", 1e4, 1.0)}
_KINDS = ("default", "linear", "llama3")


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma4ForCausalLM; defaults are those of transformers."""
    model = read_plain(section, positions=131072, window=512)
    width, rows = read_layer_input(section, model.vocab_size)
    return dataclasses.replace(model, layer_input=width, layer_input_rows=rows, moe=_experts(section))


def read_plain(section: Section, *, positions: int, window: int) -> ModelConfig:
    """The model without embeddings of its layers and without experts. positions, window: defaults in transformers,
    which lets the last layer see all tokens whatever layer_types says."""
    model = llama.read_llama(
        section,
        positions=positions,
        kv_heads=4,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        one_rope=False,
    )
    layers = model.num_layers
    usual = [(layer + 1) % _EVERY != 0 for layer in range(layers)]
    windows = windows_by_type(section, layers, read_window(section, window), usual)
    windows = (*windows[:-1], 0) if any(windows[:-1]) else ()
    keys_as_values = section.boolean("attention_k_eq_v", False)
    kv_heads, head_dim = _full_heads(section, model, windows, keys_as_values=keys_as_values)
    sharing = read_sharing_layers(section, layers, windows)
    wide = section.boolean("use_double_wide_mlp", False)
    return dataclasses.replace(
        model,
        post_norms=True,
        qk_norm=QkNorm.HEAD,
        value_norm=True,
        embedding_scale=model.hidden_size**0.5,
        attention_scale=1.0,
        windows=windows,
        rope=_rope(section, "full_attention", head_dim, model.max_positions),
        local_rope=_rope(section, "sliding_attention", model.head_dim, model.max_positions) if windows else None,
        full_kv_heads=kv_heads,
        full_head_dim=head_dim,
        full_keys_as_values=keys_as_values,
        sharing_layers=sharing,
        sharing_width=2 * model.intermediate_size if wide and sharing else 0,
        layer_scale=True,
        logit_cap=gemma2.read_cap(section, "final_logit_softcapping", 0.0),
    )


def _full_heads(
    section: Section, model: ModelConfig, windows: Sequence[int], *, keys_as_values: bool
) -> tuple[int, int]:
    """(key heads, head size) of the layers without a window: per_layer_config names them layer by layer, older files
    for all at once."""
    full = [layer for layer in range(model.num_layers) if not (windows and windows[layer])]
    given = section.section("per_layer_config")
    dim = section.integer("global_head_dim", 512, minimum=1)
    kv_heads = section.integer("num_global_key_value_heads", model.kv_heads, minimum=1)
    if not section.has("per_layer_config"):
        return kv_heads if keys_as_values else model.kv_heads, dim
    found = set()
    for layer in range(model.num_layers):
        own = given.section(str(layer))
        sizes = (
            own.integer("num_key_value_heads", model.kv_heads, minimum=1),
            own.integer("head_dim", model.head_dim, minimum=1),
        )
        if layer in full:
            found.add(sizes)
        elif sizes != (model.kv_heads, model.head_dim):
            found |= {sizes, (0, 0)}
    if len(found) != 1:
        raise ConfigError(
            "layers of one kind have heads of different sizes",
            where=section.place("per_layer_config"),
            expected="the same for all layers without a window, and for the others what config.json says itself",
            got=repr(section.raw("per_layer_config"))[:200],
        )
    return found.pop()


def read_sharing_layers(section: Section, layers: int, windows: Sequence[int], usual: int = 0) -> int:
    """Last layers that share keys and values: of each kind among them one comes before."""
    count = section.integer("num_kv_shared_layers", usual)
    kinds = [bool(each) for each in windows] or [False] * layers
    if count and (count >= layers or set(kinds[: layers - count]) != set(kinds)):
        raise ConfigError(
            "num_kv_shared_layers is too large: no layer is left whose keys and values can be shared",
            where=section.place("num_kv_shared_layers"),
            expected=f"fewer than {layers}, so that layers of each kind are left",
            got=str(count),
        )
    return count


def _rope(section: Section, kind: str, head_dim: int, positions: int) -> RopeConfig:
    """The rotation of one kind of layers. `proportional` lets the first pairs of a whole head rotate."""
    if section.has("rope_scaling") or section.is_null("rope_scaling"):
        raise ConfigError(
            "rope_scaling is an older key, which transformers ignores for this model",
            where=section.place("rope_scaling"),
            expected="rope_parameters, by kind of layer",
        )
    rope = section.section("rope_parameters").section(kind)
    usual, theta, part = _ROPES[kind]
    if section.has("rope_parameters"):
        usual, theta, part = rope.text("rope_type"), rope.number("rope_theta", above=0), 1.0
    part = rope.number("partial_rotary_factor", part, above=0)
    if usual != "proportional":
        return read_frequencies(rope, section, theta, head_dim, positions, flags=rope, kinds=_KINDS)
    pairs = int(part * head_dim // 2)
    if head_dim % 2 or not 1 <= pairs <= head_dim // 2:
        raise ConfigError(
            "partial_rotary_factor does not give a whole number of rotary pairs",
            where=rope.place("partial_rotary_factor"),
            expected=f"a multiple of {2 / head_dim:g}, at most 1; and an even head size",
            got=f"{part:g}, which is {part * head_dim / 2:g} pairs of a head of {head_dim}",
        )
    rotary = pairs if pairs < head_dim // 2 else 0
    factor = rope.number("factor", 1.0, above=0)
    return RopeConfig(theta=theta, rotary_dim=head_dim, linear_factor=factor, turning_pairs=rotary)


def read_layer_input(section: Section, vocab_size: int) -> tuple[int, int]:
    """(width of the embeddings of each layer, rows of their table), 0 without."""
    width = section.integer("hidden_size_per_layer_input", 256)
    rows = section.integer("vocab_size_per_layer_input", 262144, minimum=1)
    if width and rows < vocab_size:
        raise ConfigError(
            "vocab_size_per_layer_input is less than vocab_size",
            where=section.place("vocab_size_per_layer_input"),
            expected=f"at least vocab_size, {vocab_size}",
            got=str(rows),
        )
    return (width, rows) if width else (0, 0)


def _experts(section: Section) -> MoeConfig | None:
    """Experts beside the MLP, in every layer or none."""
    if not section.boolean("enable_moe_block", False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            section.raw(key)
        return None
    moe = read_experts(
        section,
        experts=section.integer("num_experts", minimum=1),
        per_token=section.integer("top_k_experts", minimum=1),
        intermediate_size=section.integer("moe_intermediate_size", minimum=1),
        normalized=True,
        taken_key="top_k_experts",
    )
    return dataclasses.replace(moe, beside_mlp=True, expert_scale=True)


_LAYER = "model.layers.{i}"
_BRANCHES = {
    "layers.{i}/mlp_branch_norm/weight": f"{_LAYER}.post_feedforward_layernorm_1.weight",
    "layers.{i}/moe_norm/weight": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
    "layers.{i}/moe_branch_norm/weight": f"{_LAYER}.post_feedforward_layernorm_2.weight",
    "layers.{i}/moe/router/weight": f"{_LAYER}.router.proj.weight",
    "layers.{i}/moe/router_norm/weight": f"{_LAYER}.router.scale",
    "layers.{i}/moe/gate_up/weight": f"{_LAYER}.experts.gate_up_proj",
    "layers.{i}/moe/down/weight": f"{_LAYER}.experts.down_proj",
    "layers.{i}/moe/down/scale": f"{_LAYER}.router.per_expert_scale",
}
INPUTS = {
    "layer_input/table/weight": "model.embed_tokens_per_layer.weight",
    "layer_input/project/weight": "model.per_layer_model_projection.weight",
    "layer_input/norm/weight": "model.per_layer_projection_norm.weight",
    "layers.{i}/input/gate/weight": f"{_LAYER}.per_layer_input_gate.weight",
    "layers.{i}/input/out/weight": f"{_LAYER}.per_layer_projection.weight",
    "layers.{i}/input/norm/weight": f"{_LAYER}.post_per_layer_input_norm.weight",
    "layers.{i}/scale": f"{_LAYER}.layer_scalar",
}
_UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")  # of layers that share

FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="gemma4_text",
    models="the text model of Gemma 4",
    read=read,
    rows=gemma2.FAMILY.rows + QK_NORMS + takes(_BRANCHES | INPUTS),
    layer_ropes=True,
    nullable=(
        *("layer_types", "final_logit_softcapping", "use_bidirectional_attention", "num_global_key_value_heads"),
    ),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 16,
        "head_dim": 8,
        "global_head_dim": 12,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
