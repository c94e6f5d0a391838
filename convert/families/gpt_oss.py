"""gpt-oss: experts with biases and a clamped gate, attention sinks, and windows in every other layer."""

import dataclasses
import math
from collections.abc import Collection

from ingot.configs.model import ModelConfig, RopeConfig, YarnScaling
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window, windows_by_type
from ingot.convert.hf_moe import read_experts
from ingot.convert.hf_rope import require_growing_waves
from ingot.convert.weights import Row, Take, Transpose, Unpair
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GptOssForCausalLM; defaults are those of transformers."""
    if section.text("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            "hidden_act of the experts is not supported",
            where=section.place("hidden_act"),
            expected="silu",
            got=section.text("hidden_act", "silu"),
        )
    model = llama.read_llama(
        section, positions=131072, kv_heads=8, head_dim=64, eps=1e-5, theta=150000.0, has_attention_bias=False
    )
    rope = model.rope
    assert rope is not None, "a llama rotates"
    if not section.has("rope_parameters") and not section.has("rope_scaling"):
        require_growing_waves(section, rope.theta)
        rope = _usual_rope(rope, model.max_positions)
    bias = section.boolean("attention_bias", True)
    window = read_window(section, 128)
    usual = [bool(window) and layer % 2 == 0 for layer in range(model.num_layers)]
    moe = read_experts(section, experts=128, per_token=4, intermediate_size=model.intermediate_size, normalized=True)
    return dataclasses.replace(
        model,
        rope=rope,
        qkv_bias=bias,
        attention_out_bias=bias,
        attention_sinks=True,
        windows=windows_by_type(section, model.num_layers, window, usual),
        moe=dataclasses.replace(
            moe,
            biases=True,
            gate_limit=section.number("swiglu_limit", 7.0, above=0),
            gate_alpha=section.number("swiglu_alpha", 1.702, above=0),
        ),
    )


def _usual_rope(plain: RopeConfig, positions: int) -> RopeConfig:
    """The rotation where the configuration says nothing of it."""
    scaling = YarnScaling(factor=32.0, original_positions=4096, truncate=False)
    most = max(positions, int(scaling.factor * scaling.original_positions))
    return dataclasses.replace(plain, yarn=scaling, scale=0.1 * math.log(scaling.factor) + 1, positions=most)


_LAYER = "model.layers.{i}"
_EXPERTS = f"{_LAYER}.mlp.experts"
_ROWS = (
    *takes(
        {
            "layers.{i}/attn/sinks/weight": f"{_LAYER}.self_attn.sinks",
            "layers.{i}/moe/router/weight": f"{_LAYER}.mlp.router.weight",
            "layers.{i}/moe/router/bias": f"{_LAYER}.mlp.router.bias",
            "layers.{i}/moe/down/bias": f"{_EXPERTS}.down_proj_bias",
        }
    ),
    Row("layers.{i}/moe/down/weight", Transpose(Take(f"{_EXPERTS}.down_proj"))),
    # rows alternate gate and up
    Row("layers.{i}/moe/gate_up/weight", Unpair(Transpose(Take(f"{_EXPERTS}.gate_up_proj")), heads=0)),
    Row("layers.{i}/moe/gate_up/bias", Transpose(Unpair(Transpose(Take(f"{_EXPERTS}.gate_up_proj_bias")), heads=1))),
)

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="gpt_oss",
    models="gpt-oss-20b and 120b",
    read=read,
    rows=llama.FAMILY.rows + _ROWS,
    in_out=True,
    nullable=("layer_types",),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "gpt_oss",
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "swiglu_limit": 1.5,
    },
)
