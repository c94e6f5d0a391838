"""Odd configurations of every family: what transformers computes for one is what ingot computes, or ingot refuses it.

Nulls, absent keys, both values of a switch, every activation, kinds of layers and of rotary positions. What ingot reads
as the same model must have the same logits in transformers, for the same weights; one of each such class is converted
and run.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2CLS

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.claim import require_rows
from ingot.convert.convert import convert
from ingot.convert.family import REFUSED, WITHOUT_EFFECT, family_names, find_family, read_model
from ingot.convert.weight_shapes import weight_shapes
from ingot.dtypes import DType
from ingot.errors import IngotError
from tests.families import covering_families, covering_first
from tests.tiny import TinyModel, random_model, save_model
from tests.tiny_foreign import store, twin

Config = dict[str, Any]

IDS = np.random.default_rng(3).integers(0, 61, (1, 24))
TOLERANCE = 1e-5  # of the range of the logits
ABSENT = object()
CHOOSERS = ("index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq", "index_topk_pattern")
NOT_TRIED = {
    ("bloom", "slow_but_exact"),  # transformers refuses a null there, which is as good as absent; true is tried below
    # transformers stumbles over them even where they are null
    *(("gemma4_text", "rope_scaling"), ("gemma4_unified_text", "rope_scaling"), ("cohere2_moe", "rope_parameters")),
    ("bamba", "partial_rotary_factor"),  # which transformers ignores beside rope_parameters, and ingot refuses
    *(("mellum", key) for key in ("rope_scaling", "rope_theta")),  # transformers ignores them, ingot refuses
    ("mistral4", "partial_rotary_factor"),  # queries have other dimensions, which never rotate
    # of weights that convert drops: where they are others, so are all random weights
    *((name, key) for name in ("deepseek_v32", "glm_moe_dsa") for key in CHOOSERS),
}

# Keys of a twin that the model's own code does not know.
OF_TWINS = {"deepseek": ("shared_expert_intermediate_size", "sliding_window")}
OTHER_NAMES = ("gelu_fast", "gelu_python_tanh")  # transformers knows no family that reads them as another function
# silu, where config.json may say so; bloom and mpt have gelu, whatever it says
ONE_ACTIVATION = (
    *("bamba", "bloom", "chatglm", "falcon_h1", "gpt_oss", "granitemoehybrid", "lfm2", "lfm2_moe", "mpt"),
)
UNSTABLE = ("qwen3_5_moe_text", "qwen3_next")  # whose delta rule blows up last bits in some of these configurations
NO_ROTATION = ("kimi_linear", "nemotron_h")  # transformers checks the form of what it never computes with
NO_KINDS = ("bamba", "falcon_h1", "gpt_neo", "nemotron_h")  # transformers stumbles over layer_types, or over its null

# Sizes that ingot wants to be told: a model of transformers' default size is a surprise.
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_embd",
    "n_head",
    "n_layer",
}
# Keys that not every tiny configuration has, nor transformers writes.
OTHERS: Config = {
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 0.25,
    "rotary_emb_base": 1e4,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 1e4,
    "use_sliding_window": False,
    "layer_types": None,
    "qkv_bias": False,
    "use_qk_norm": True,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
}
FACTORS = {"short_factor": [2.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
STRETCHED = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1e300}
ROTATIONS: dict[str, Config] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
    },
    "longrope": FACTORS,
    "su": FACTORS,
    "proportional": {"factor": 2.0},
}


def base_of(name: str) -> Config:
    """The family's tiny model, its rotary positions as usual."""
    return {key: value for key, value in find_family(name).tiny.items() if key != "rope_parameters"}


def keys_read(base: Config) -> set[str]:
    """Those of config.json that the family looks at."""
    values = twin(base)
    others = {key: each for key, each in OTHERS.items() if (base["model_type"], key) not in NOT_TRIED}
    full = {**dict.fromkeys(others, 1), **AutoConfig.for_model(values.pop("model_type"), **values).to_dict(), **base}
    full = {key: value for key, value in full.items() if key not in OF_TWINS.get(base["model_type"], ())}
    section = Section({**full, **others, **base}, "config.json")
    read_model(section, None)
    left_out = {
        *WITHOUT_EFFECT,
        *REFUSED,
        "model_type",
        *(key for kind, key in NOT_TRIED if kind == base["model_type"]),
    }
    return (set(full) | set(others)) - set(section.unread()) - left_out


def switches(base: Config) -> Iterator[Config]:
    """Null, absent, both values of what is true or false, and kinds of layers."""
    counts = [base[key] for key in ("n_layer", "n_layers", "num_hidden_layers", "num_layers") if key in base]
    layers = int(counts[0]) if counts else len(base["layers_block_type"])
    read = sorted(keys_read(base))
    yield {}
    for key in read:
        yield {key: None}
        if key in base and key not in SIZES:
            yield {key: ABSENT}
        if isinstance({**OTHERS, **base}.get(key), bool):
            yield from ({key: True}, {key: False})
    for kinds in (["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"]):
        types = {"layer_types": (kinds * layers)[:layers]}
        yield from (types, {**types, "use_sliding_window": False}, {**types, "use_sliding_window": True})
        yield from ({**types, "sliding_window": 7}, {**types, "sliding_window": None})
        yield {**types, "layer_types": kinds * (layers + 1)}
    yield from ({"sliding_window": size} for size in (0, 1))
    yield from ({"mlp_only_layers": only} for only in ([0], list(range(layers))))
    yield from ({"decoder_sparse_step": step} for step in (2, layers + 1))
    yield from ({key: None} for key in ("num_experts", "num_local_experts"))
    yield from ({key: 1} for key in ("num_hidden_layers", "n_group", "n_shared_experts"))
    yield {"routed_scaling_factor": 1.0}


@functools.cache
def one_name_of_each() -> tuple[str, ...]:
    """A name of each function of ingot, and one that ingot does not have."""
    llama = base_of("llama")
    return tuple(
        {of_ingot({**llama, "hidden_act": word}): word for word in ACT2CLS if word not in OTHER_NAMES}.values()
    )


def activations(base: Config) -> Iterator[Config]:
    """Every name that transformers knows, and one that it does not. Names of one function are tried in one family, for
    all read the same table; a key that ingot does not read has one value that would be another model."""
    known = tuple(ACT2CLS) if base["model_type"] == "llama" else one_name_of_each()
    for key in ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"):
        if of_ingot({**base, key: "silu"}) == of_ingot({**base, key: "gelu"}) is not None:
            yield {key: "relu"}
        else:
            yield from ({key: word} for word in (*known, "gelu_strange"))


def rotations(base: Config) -> Iterator[Config]:
    """Every kind in both spellings; of each, keys that are null or absent."""
    if "rope_theta" not in keys_read(base) and "rotary_emb_base" not in keys_read(base):
        return
    for kind, values in ROTATIONS.items():
        for outer in ("rope_parameters", "rope_scaling"):
            yield {outer: {"rope_type": kind, **values}}
            yield {outer: {"rope_type": kind, "rope_theta": 500.0, **values}, "rope_theta": None}
            yield {outer: {"type": kind, **values}}
        for key in (*values, "rope_theta", "partial_rotary_factor", "attention_factor", "mscale"):
            yield {"rope_scaling": {"rope_type": kind, **values, key: None}}
        for key in values if kind != "su" else ():  # transformers 5 wants more of "su" than its own files hold
            yield {"rope_parameters": {"rope_type": kind, **{each: values[each] for each in values if each != key}}}
    kinds = {"full_attention": {"rope_type": "yarn", **ROTATIONS["yarn"]}, "sliding_attention": {"rope_theta": 50.0}}
    yield from ({"rope_parameters": {**kinds, "truncate": truncate}} for truncate in (True, False))


Changes = Callable[[Config], Iterator[Config]]


def cases(name: str, *kinds: Changes) -> Iterator[tuple[Config, Config]]:
    """(what is changed, configuration), each once."""
    base, seen = base_of(name), list[Config]()
    for change in (change for kind in kinds for change in kind(base)):
        case = {key: value for key, value in {**base, **change}.items() if value is not ABSENT}
        if case not in seen:
            seen.append(case)
            yield change, case


def of_transformers(config: Config) -> tuple[Any, np.ndarray] | None:
    """(model, its logits), None where transformers cannot make or run the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # else they would be errors here, and look like refusals
        try:
            model = random_model(config)
            return model, TinyModel(folder=Path(), model=model).logits(IDS)
        except Exception:  # whatever it stumbles over
            return None


def of_ingot(config: Mapping[str, Any]) -> ModelConfig | None:
    try:
        return read_model(Section(config, "config.json"), None)[1]
    except IngotError:
        return None


def logits_of_graph(model: Any, config: Config, folder: Path) -> np.ndarray:
    """What the Checkpoint of this configuration computes."""
    save_model(model, folder / "model")
    store(folder / "model", config)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    session = onnxruntime.InferenceSession(folder / "checkpoint" / "model.onnx", providers=["CPUExecutionProvider"])
    logits: np.ndarray = session.run(None, {"input_ids": IDS})[0]
    return logits


def moved_by_last_bits(model: Any, logits: np.ndarray) -> float:
    """Four times how far transformers' own logits move, at the most of three tries, where the last bits of the token
    embeddings are others: two correct implementations differ by as much."""
    table = model.get_input_embeddings().weight
    kept, moves = table.detach().clone(), []
    for seed in range(3):
        signs = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed)).sign()
        with torch.no_grad():
            table.copy_(kept * (1 + float(np.finfo(np.float32).eps) * signs))
        moves.append(float(np.abs(TinyModel(folder=Path(), model=model).logits(IDS) - logits).max()))
    with torch.no_grad():
        table.copy_(kept)
    return 4 * max(moves)


def check(name: str, *kinds: Changes, folder: Path | None = None, part: int = 1) -> int:
    """How many different models the cases are. folder: convert and run one of each; part: one of so many cases."""
    classes: dict[ModelConfig, np.ndarray] = {}
    for number, (change, config) in enumerate(cases(name, *kinds)):
        if number and (number + family_names().index(name)) % part:
            continue
        model = of_ingot(config) if name not in NO_KINDS or "layer_types" not in change else None
        if model is None or (model.tied_embeddings and name in ("kimi_linear", "nemotron_h")):
            continue  # of tied ones transformers keeps two tables, and ingot refuses such files
        rows, _ = find_family(name).table(model, ())
        require_rows(rows, weight_shapes(model))  # as for random weights
        made = of_transformers(config)
        if made is None and name in NO_ROTATION and change.keys() & {"rope_parameters", "rope_scaling"}:
            continue
        assert made is not None, f"{change}: transformers refuses what ingot accepts"
        theirs = made[1]
        if model not in classes and folder is not None:
            ours = logits_of_graph(made[0], config, folder / str(len(classes)))
            off, most = np.abs(ours - theirs).max(), TOLERANCE * np.ptp(theirs)
            if off >= most and name in UNSTABLE:
                most = moved_by_last_bits(made[0], theirs)
            assert off < most, f"{change}: other logits"
        same = classes.setdefault(model, theirs)
        assert same.shape == theirs.shape, f"{change}: another model in transformers"
        assert np.abs(same - theirs).max() < TOLERANCE * np.ptp(theirs), f"{change}: another model in transformers"
    return len(classes)


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", family_names())
def test_nulls_absent_keys_switches_and_kinds_of_layers(name: str) -> None:
    """Each kind of change in several families."""
    assert check(name, switches, part=8) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [each if each in covering_families() else pytest.param(each, marks=pytest.mark.long) for each in family_names()],
)
def test_each_of_them_in_every_family(name: str) -> None:
    assert check(name, switches) >= 2


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", covering_first())
def test_activations(name: str, tmp_path: Path) -> None:
    """Ingot has five functions. All families have them from one place: those of one are converted and run."""
    count = 1 if name in ONE_ACTIVATION else 5
    assert check(name, activations, folder=tmp_path if name == "llama" else None) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "llama", "phi3"])  # all others read them as llama
def test_rotary_positions(name: str) -> None:
    assert check(name, rotations) >= 4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", family_names())
def test_all_of_them_as_checkpoints(name: str, tmp_path: Path) -> None:
    check(name, switches, rotations, folder=tmp_path)


@pytest.mark.daily(10)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"layer_types": ["full_attention"] * 2}),
        ("llama", {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}),
        ("mistral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": None, "layer_types": None}),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("qwen3_moe", {"decoder_sparse_step": 4}),
        ("gpt2", {"n_inner": None, "num_hidden_layers": 2}),
        ("falcon", {"new_decoder_architecture": False}),
        ("opt", {"enable_bias": False, "word_embed_proj_dim": None, "tie_word_embeddings": False}),
        ("opt", {"word_embed_proj_dim": 20, "do_layer_norm_before": False, "tie_word_embeddings": False}),
        ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "bias": False}),
        ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "ffn_hidden_size": 60}),
        ("falcon", {"alibi": True, "num_attention_heads": 12}),
        ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}),
        ("gpt_neo", {"attention_layers": ["local", "global"]}),
        ("bloom", {"n_head": 8, "tie_word_embeddings": False, "slow_but_exact": True}),
        ("mpt", {"n_heads": 12, "attn_config": {"softmax_scale": 0.5, "attn_impl": "triton"}}),
        ("falcon", {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
        ("granitemoehybrid", {"mamba_proj_bias": True}),
        ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True}),
        ("falcon_h1", {"mamba_rms_norm": False, "mamba_conv_bias": False, "mamba_d_ssm": None, "mamba_n_groups": 2}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": None}),
        ("bamba", {"mamba_n_groups": 4, "mamba_conv_bias": False, "rope_parameters": {"partial_rotary_factor": 1.0}}),
        (
            "cohere2_moe",
            {"mlp_layer_types": None, "layer_types": None, "first_k_dense_replace": 2, "sliding_window_pattern": 2},
        ),
        ("cohere2_moe", {"num_shared_experts": 0, "norm_topk_prob": False, "rms_norm_eps": 1e-3}),
        ("deepseek", {"n_shared_experts": None, "moe_layer_freq": 2, "norm_topk_prob": True}),
        ("deepseek", {"num_experts_per_tok": 1, "norm_topk_prob": True, "first_k_dense_replace": 0}),
        ("deepseek", {"n_routed_experts": None}),
    ],
)
def test_what_is_harmless_passes(name: str, change: Config, tmp_path: Path) -> None:
    config = {**base_of(name), **change}
    made = of_transformers(config)
    assert made is not None
    assert np.abs(logits_of_graph(made[0], config, tmp_path) - made[1]).max() < TOLERANCE * np.ptp(made[1])


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, {}) for name in covering_families()),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in family_names() if name not in covering_families()),
        *(("qwen3_moe", change) for change in ({"mlp_only_layers": [0, 1, 2]}, {"decoder_sparse_step": 4})),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_random_weights_have_the_shapes_of_files(name: str, change: Config, tmp_path: Path) -> None:
    config = {**base_of(name), **change}
    made = of_transformers(config)
    assert made is not None
    logits_of_graph(made[0], config, tmp_path)
    file = tmp_path / "model" / "config.json"
    convert(ConvertOptions(config=file, random_weights=1, output_dir=tmp_path / "random", dtype=DType.F32))
    ours, theirs = (Checkpoint.open(tmp_path / each).tensors() for each in ("random", "checkpoint"))
    assert {key: each.shape for key, each in ours.items()} == {key: each.shape for key, each in theirs.items()}
