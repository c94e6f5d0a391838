"""What a family is, and how one is found: `model_type` of a Hugging Face config is the name of a file in `families`.

A family is a table: how to read its configuration, where each weight of the Graph comes from, what may be left aside.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping

import numpy as np

import ingot.convert.families as families_package
from ingot.configs.mixers import LinearAttentionConfig, Mamba2Config
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section, nearest
from ingot.convert.hf_config import windows_by_type
from ingot.convert.hf_rope import ROPE_NULLABLE, refuse_kinds_of_layers
from ingot.convert.refused import MISSING, ONLY_TABLES, reason
from ingot.convert.rope import inverse_frequencies
from ingot.convert.weight_shapes import weight_shapes
from ingot.convert.weights import Drop, Filling, Row, Take, filled, rename
from ingot.convert.wrapped import WRAPPERS, text_section
from ingot.errors import ConfigError, UnsupportedModelError

# Keys of a config.json that say nothing about the numbers of a causal language model at inference.
WITHOUT_EFFECT = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "ingot_version",
    "residual_dropout",
    "decoder_start_token_id",
    "dropout",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "init_std",
    "initializer_range",
    "is_decoder",
    "label2id",
    "layerdrop",
    "max_length",
    "model_type",
    "n_ctx",
    "n_special",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "predict_special_tokens",
    "pretraining_tp",
    "resid_pdrop",
    "return_dict",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_cache",
)

# Keys that change the numbers, or the files, in ways that no family here has.
REFUSED = ("add_cross_attention", "is_encoder_decoder", "rope_interleaved", "use_bidirectional_attention")

# Their values that say something of images alone, which no text model here reads.
HARMLESS = {"use_bidirectional_attention": ("vision",)}

# Keys that change the numbers of the families that read them, and would change those of others.
REFUSED_UNLESS_READ = ("sliding_window",)

# Keys that may be null in every family, which is the same as absent; all others only where the family says so.
NULLABLE = ("rope_parameters", "rope_scaling", *ROPE_NULLABLE)


_MOST_LAYERS = 10_000
_MOST_POSITIONS = (1 << 31) - 1
_LARGEST_HEAD = 1 << 16
_MOST_EXPERTS = 1 << 18  # of all layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """name            the model_type
    models          what people call the models of this type, for the documents
    read            (config.json, names of the tensors or None for random weights) → ModelConfig
    rows            one per weight of `weight_shapes.py`; "{i}" stands for the layer
    drops           tensors that some files hold and nothing needs
    drafts          the beginning of the names of tensors that only draft tokens (multi-token prediction); "{n}" stands
                    for the number of layers. "": the family has no such tensors
    choosers        a part of the names of tensors that only choose tokens for sparse attention. "": the family has no
                    such tensors
    in_out          stacks of experts are stored [experts, in, out], but quantised ones [experts, out, in]
    optional_prefix some files leave this away from every name
    other_names     tensors that some files call otherwise: usual name → other name
    layer_ropes     whether kinds of layers have rotations of their own
    nullable        keys that may be null, beside those of NULLABLE: what a null means is the reader's to say
    aliases         other names of keys, with which transformers overwrites them: alias → key
    tiny            a config.json of a tiny model, for tests
    """

    name: str
    models: str
    read: Callable[[Section, Collection[str] | None], ModelConfig]
    rows: tuple[Row, ...]
    drops: tuple[Drop, ...] = ()
    drafts: str = ""
    choosers: str = ""
    in_out: bool = False
    optional_prefix: str = ""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_ropes: bool = False
    nullable: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tiny: Mapping[str, object]

    def table(self, model: ModelConfig, names: Collection[str]) -> tuple[list[Row], list[Drop]]:
        """Rows and drops with "{i}", heads and experts written out, spelled like the tensor `names` of the source.

        Rows of the weights that the model has, and of an lm_head, of which files of tied models may hold a copy.
        """
        layers = model.num_layers
        filling = filling_of(model, names)
        rows, drops = list(self.rows), list(self.drops)
        if self.optional_prefix and not any(name.startswith(self.optional_prefix) for name in names):
            rows = [Row(row.name, rename(row.expr, self.optional_prefix, "")) for row in rows]
            drops = [Drop(drop.name.replace(self.optional_prefix, "")) for drop in drops]
        for usual, other in self.other_names.items():
            if usual not in names and other in names:
                rows = [Row(row.name, rename(row.expr, usual, other)) for row in rows]
        for row in [row for row in rows if "{i}" in row.name]:
            rows.remove(row)
            rows += [Row(row.name.replace("{i}", str(i)), rename(row.expr, "{i}", str(i))) for i in range(layers)]
        wanted = {*weight_shapes(model), "lm_head/weight"}
        rows = [Row(row.name, filled(row.expr, filling)) for row in rows if row.name in wanted]
        drops = [Drop(drop.name.replace("{i}", str(i))) for drop in drops for i in range(layers)]
        return rows, drops + [Drop(name) for name in (*self.drafting(names, layers), *self.choosing(names))]

    def drafting(self, names: Collection[str], layers: int) -> list[str]:
        """Those that only draft tokens: nothing here reads them."""
        start = self.drafts.replace("{n}", str(layers))
        return [name for name in names if start and name.startswith(start)]

    def choosing(self, names: Collection[str]) -> list[str]:
        """Those that only choose tokens for sparse attention: up to `sparse_beyond` tokens all are chosen."""
        return [name for name in names if self.choosers and self.choosers in name]


def filling_of(model: ModelConfig, names: Collection[str]) -> Filling:
    """What the model and the names of the source's tensors say of expressions in a table."""
    filling = Filling(heads=model.heads, experts=0 if model.moe is None else model.moe.experts, names=names)
    if isinstance(mamba := model.mixer, Mamba2Config):
        inner = mamba.heads * mamba.head_dim
        sizes = {"gate": inner, "mixed": inner + 2 * mamba.groups * mamba.state_dim, "head": mamba.heads}
        return dataclasses.replace(filling, key_groups=1, key_sizes=sizes)
    if not isinstance(mixer := model.mixer, LinearAttentionConfig):
        sizes = {"queries": model.heads // model.kv_heads * model.head_dim, "kv_head": model.head_dim}
        return dataclasses.replace(filling, key_groups=model.kv_heads, key_sizes=sizes)
    served = mixer.heads // mixer.key_heads
    sizes = {"key": mixer.key_dim, "value": served * mixer.value_dim, "head": served}
    return dataclasses.replace(filling, key_groups=mixer.key_heads, key_sizes=sizes)


def weights_and_biases(parts: Mapping[str, str]) -> dict[str, str]:
    """{part of ours: part of the source} → the same of the weight and the bias of each."""
    return {f"{ours}/{kind}": f"{theirs}.{kind}" for ours, theirs in parts.items() for kind in ("weight", "bias")}


def takes(names: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows that take tensors as they are: name in the Graph → name in the files."""
    return tuple(Row(ours, Take(theirs)) for ours, theirs in names.items())


@functools.cache
def family_names() -> tuple[str, ...]:
    """Every supported model_type, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(families_package.__path__)))


def find_family(model_type: str, keys: Collection[str] = ()) -> Family:
    """The table in `families/<model_type>.py`. Raises UnsupportedModelError if there is none; keys: those of
    config.json, which may tell what the model is made of."""
    if model_type not in family_names():
        known = model_type in MISSING or model_type in ONLY_TABLES
        guess = None if known else nearest(model_type, family_names())
        raise UnsupportedModelError(
            f"models of type {model_type!r} are not supported: {reason(model_type, keys)}",
            expected=", ".join((*family_names(), *WRAPPERS)),
            hint=f"{guess or 'convert another model;'} a new family is one file, convert/families/<model_type>.py",
        )
    family = importlib.import_module(f"ingot.convert.families.{model_type}").FAMILY
    assert isinstance(family, Family), f"families/{model_type}.py must define FAMILY"
    assert family.name == model_type, f"families/{model_type}.py defines {family.name}"
    return family


def read_model(section: Section, names: Collection[str] | None) -> tuple[Family, ModelConfig, tuple[str, ...]]:
    """config.json → family, configuration, and keys that no one understands.

    Raises UnsupportedModelError or ConfigError; what transformers would use and ingot would not is always refused.
    """
    if not section.has("model_type"):
        raise ConfigError(
            "config.json does not say what model it is",
            where=section.place("model_type"),
            expected=", ".join((*family_names(), *WRAPPERS)),
        )
    section, of_wrapper = text_section(section, names)
    family = find_family(section.text("model_type"), [key for key in section.values() if not section.is_null(key)])
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):  # before lists of that length are made
        if section.integer(key, 0) > _MOST_LAYERS:
            raise ConfigError(
                f"{key} is too large",
                where=section.place(key),
                expected=f"at most {_MOST_LAYERS:,}",
                got=str(section.raw(key)),
            )
    for key in REFUSED:
        _refuse(section, key, unless=HARMLESS.get(key, ()))
    for key in WITHOUT_EFFECT:
        section.has(key)
    if not family.layer_ropes:
        refuse_kinds_of_layers(section)
    config = family.read(section, names)
    _refuse_uneven_heads(config, section)
    if config.rope is not None and config.rope.positions:
        config = dataclasses.replace(config, max_positions=config.rope.positions)
    _refuse_out_of_range(config, section)
    _refuse_nulls(section, family)
    _refuse_aliases(section, family)
    unread = section.unread()
    for key in REFUSED_UNLESS_READ:
        if key in unread:
            _refuse(section, key, even_falsy=True)
    if "layer_types" in unread:
        _refuse_other_layers(section, config)
    return family, config, (*of_wrapper, *section.unread())


def _refuse_uneven_heads(config: ModelConfig, section: Section) -> None:
    for kv_heads in (config.kv_heads, config.full_kv_heads or 1):
        if config.heads % kv_heads:
            raise ConfigError(
                "the number of query heads is not a multiple of the number of key heads",
                where=f"{section.where}: num_attention_heads, num_key_value_heads",
                expected="num_attention_heads that num_key_value_heads divides",
                got=f"{config.heads} query heads, {kv_heads} key and value heads",
                hint="compare config.json with the model's page, or download it again",
            )


def _refuse_nulls(section: Section, family: Family) -> None:
    """Raise ConfigError for a null that transformers does not take either: its default would be a guess."""
    for key in section.nulls_read():
        if key.rpartition(".")[2] not in (*NULLABLE, *family.nullable):
            raise ConfigError(
                f"{key} is null",
                where=section.place(key),
                hint="write what the model was trained with, or leave the key out to get the family's default",
            )


def _refuse_other_layers(section: Section, config: ModelConfig) -> None:
    """Raise where layer_types says something else than the layers of a family that does not look at it."""
    if windows_by_type(section, config.num_layers, max(config.windows, default=0), ()) != config.windows:
        raise UnsupportedModelError(
            "layer_types names other layers than this family has",
            where=section.place("layer_types"),
            expected="sliding_attention" if config.windows else "full_attention",
            got=repr(section.raw("layer_types"))[:200],
            hint="leave layer_types out if the family's own are right",
        )


def _refuse_aliases(section: Section, family: Family) -> None:
    """Raise ConfigError where a second name of a key says something else than the key."""
    for alias, key in family.aliases.items():
        if section.is_null(alias) or section.raw(alias) not in (None, section.raw(key)):
            raise ConfigError(
                f"{alias} contradicts {key}",
                where=section.place(alias),
                expected=f"{section.raw(key)!r}, the value of {key}",
                got=repr(section.raw(alias))[:200],
                hint=f"leave {alias} out if {key} is right",
            )


def _refuse_out_of_range(config: ModelConfig, section: Section) -> None:
    """Raise ConfigError for numbers that no model has, and those that float32 arithmetic cannot follow."""
    experts = config.moe.experts if config.moe else 0
    for what, most, count in (
        ("the model has too many positions", _MOST_POSITIONS, config.max_positions),
        ("the heads of the model are too large", _LARGEST_HEAD, max(config.head_dim, config.full_head_dim)),
        ("the layers have too many experts", _MOST_EXPERTS, experts * config.num_layers),
    ):
        if count > most:
            raise ConfigError(what, where=section.where, expected=f"at most {most:,}", got=f"{count:,}")
    with np.errstate(all="ignore"):
        for owner in (config, *([config.moe] if config.moe else ())):
            for field in dataclasses.fields(owner):
                value = getattr(owner, field.name)
                if isinstance(value, float) and not np.isfinite(np.float32(value)):
                    raise ConfigError(
                        f"{field.name}, which ingot reads from the file, is not a finite float32 number",
                        where=section.where,
                        expected="at most 3.4e38 in size",
                        got=f"{value:g}",
                    )
        for cap in (config.score_cap, config.logit_cap):
            if cap and not np.float32(cap):
                raise ConfigError(
                    "a soft cap of the logits or scores is too small",
                    where=section.where,
                    expected="0 for no cap, or at least 1.4e-45, the smallest float32 number",
                    got=f"{cap:g}",
                )
        for rope in (config.rope, config.local_rope):
            speeds = np.array([1.0], np.float32) if rope is None else inverse_frequencies(rope) * np.float32(rope.scale)
            speeds = -speeds if rope and rope.backwards else speeds
            speeds = speeds[: rope.turning_pairs if rope and rope.turning_pairs else None]
            if not (np.isfinite(speeds).all() and (speeds > 0).all()):
                raise ConfigError(
                    "the frequencies of the rotary positions are infinite or zero",
                    where=section.where,
                    got=repr(rope)[:200],
                    hint="check rope_theta and the scaling of the rotary positions",
                )


def _refuse(section: Section, key: str, *, even_falsy: bool = False, unless: Collection[str] = ()) -> None:
    """Raise UnsupportedModelError where the key asks for something; even_falsy: where it is there. unless: harmless."""
    if (section.raw(key) and section.raw(key) not in unless) or even_falsy:
        raise UnsupportedModelError(
            f"{key} has a value that is not supported", where=section.place(key), got=repr(section.raw(key))[:200]
        )
