"""Gemma 3n, its text model: several residual streams, narrow products beside attention, MLPs whose small gates are cut
off, and as in Gemma 4 keys and values that layers share, and an embedding of the token for each layer."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, StreamsConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma2, gemma3_text, gemma4_text, llama
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.weights import Drop
from ingot.errors import ConfigError, UnsupportedModelError

_EVERY = 5  # each so many-th layer sees all tokens
_STREAMS, MOST_STREAMS = 4, 16
_CUT_LAYERS, _CUT = 10, 0.95


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma3nForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section,
        positions=32768,
        kv_heads=2,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        one_rope=False,
        intermediate_key="intermediate_size" if isinstance(section.raw("intermediate_size"), int) else "",
        intermediate=_intermediate(section),
    )
    layers = model.num_layers
    usual = [(layer + 1) % _EVERY != 0 for layer in range(layers)]
    windows = windows_by_type(section, layers, read_window(section, 512), usual)
    rope, local = gemma3_text.read_ropes(section, model, theta=1e6, local_theta=1e4, local_key="rope_local_base_freq")
    rows = min(model.vocab_size, section.integer("vocab_size_per_layer_input", 262144, minimum=1))
    width, table_rows = gemma4_text.read_layer_input(section, rows)
    if not width:
        raise UnsupportedModelError(
            "hidden_size_per_layer_input 0 is not supported",
            where=section.place("hidden_size_per_layer_input"),
            expected="1 or more",
            got="0",
        )
    return dataclasses.replace(
        model,
        post_norms=True,
        qk_norm=QkNorm.HEAD,
        value_norm=True,
        embedding_scale=model.hidden_size**0.5,
        attention_scale=1.0,
        windows=windows,
        rope=rope,
        local_rope=local if any(windows) else None,
        sharing_layers=gemma4_text.read_sharing_layers(section, layers, windows, 15),
        layer_input=width,
        layer_input_rows=table_rows,
        vocab_size=rows,  # other ids are parts of images and sounds
        stored_rows=model.vocab_size if model.vocab_size > rows else 0,
        logit_cap=gemma2.read_cap(section, "final_logit_softcapping", 30.0),
        streams=_streams(section),
        mlp_cuts=_cuts(section, layers),
    )


def _intermediate(section: Section) -> int | None:
    """The one width of all layers, where they are listed."""
    if isinstance(section.raw("intermediate_size"), int):
        return None
    sizes = set(section.numbers("intermediate_size") or (16384,))
    if len(sizes) != 1 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UnsupportedModelError(
            "intermediate_size with different widths is not supported",
            where=section.place("intermediate_size"),
            expected="one width for all layers",
            got=repr(section.raw("intermediate_size"))[:200],
        )
    return int(sizes.pop())


def _streams(section: Section) -> StreamsConfig:
    section.number("altup_coef_clip", 120.0)  # of training
    count = section.integer("altup_num_inputs", _STREAMS, minimum=2)
    active = section.integer("altup_active_idx", 0)
    if count > MOST_STREAMS or active:
        raise UnsupportedModelError(
            f"{'altup_active_idx' if active else 'altup_num_inputs'} has a value that is not supported",
            where=section.place("altup_active_idx" if active else "altup_num_inputs"),
            expected=f"the first of at most {MOST_STREAMS} streams as the active one",
            got=f"stream {active} of {count}",
        )
    return StreamsConfig(
        count=count,
        active=active,
        narrow=section.integer("laurel_rank", 64, minimum=1),
        scaled=section.boolean("altup_correct_scale", True),
    )


def _cuts(section: Section, layers: int) -> tuple[float, ...]:
    """The share of normally distributed gates that each layer cuts off; empty where none does."""
    usual = [_CUT if layer < _CUT_LAYERS and layers > _CUT_LAYERS else 0.0 for layer in range(layers)]
    shares = section.numbers("activation_sparsity_pattern") or tuple(usual)
    if len(shares) != layers or not all(0 <= share < 1 for share in shares):
        raise ConfigError(
            "activation_sparsity_pattern has a wrong value",
            where=section.place("activation_sparsity_pattern"),
            expected=f"{layers} numbers from 0 to below 1",
            got=repr(section.raw("activation_sparsity_pattern"))[:200],
        )
    return shares if any(shares) else ()


_LAYER = "model.layers.{i}"
_ALTUP = f"{_LAYER}.altup"
_ROWS = {
    "layers.{i}/streams/router/weight": f"{_ALTUP}.modality_router.weight",
    "layers.{i}/streams/router_norm/weight": f"{_ALTUP}.router_norm.weight",
    "layers.{i}/streams/predict/weight": f"{_ALTUP}.prediction_coefs.weight",
    "layers.{i}/streams/correct/weight": f"{_ALTUP}.correction_coefs.weight",
    "layers.{i}/input/scale/weight": f"{_ALTUP}.correct_output_scale",
    "layers.{i}/narrow/in/weight": f"{_LAYER}.laurel.linear_left.weight",
    "layers.{i}/narrow/out/weight": f"{_LAYER}.laurel.linear_right.weight",
    "layers.{i}/narrow/norm/weight": f"{_LAYER}.laurel.post_laurel_norm.weight",
    **{f"streams/in/{i}/weight": f"model.altup_projections.{i - 1}.weight" for i in range(1, MOST_STREAMS)},
    **{f"streams/out/{i}/weight": f"model.altup_unembed_projections.{i - 1}.weight" for i in range(1, MOST_STREAMS)},
}

FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="gemma3n_text",
    models="the text model of Gemma 3n",
    read=read,
    rows=(*gemma2.FAMILY.rows, *QK_NORMS, *takes(gemma4_text.INPUTS | _ROWS)),
    drops=(*gemma2.FAMILY.drops, Drop(f"{_ALTUP}.correct_output_scale")),  # where nothing reads it
    layer_ropes=True,
    nullable=("layer_types", "activation_sparsity_pattern"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 16,
        "head_dim": 8,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "final_logit_softcapping": 30.0,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.7, 0.0, 0.0],
        "tie_word_embeddings": True,
    },
)
