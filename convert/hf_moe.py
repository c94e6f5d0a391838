"""How config.json and the files of Hugging Face spell a mixture of experts."""

import dataclasses
from collections.abc import Collection, Sequence

from ingot.configs.model import MoeConfig
from ingot.configs.read import Section
from ingot.convert.hf_config import require_values
from ingot.convert.weights import Concat, Expr, OneOf, PerExpert, Row, Take
from ingot.errors import ConfigError

# What other mixtures have: key → the value that asks for nothing.
_OTHERS: dict[str, object] = {
    "shared_expert_intermediate_size": 0,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "moe_num_shared_experts": 0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}


def read_experts(
    section: Section,
    *,
    experts: int,
    per_token: int,
    intermediate_size: int,
    normalized: bool,
    dense_layers: tuple[int, ...] = (),
    known: Collection[str] = (),
    count_key: str = "num_experts",
    taken_key: str = "num_experts_per_tok",
) -> MoeConfig:
    """The experts of a model. experts, per_token: the family's defaults; transformers 5 writes num_local_experts where
    4 wrote num_experts. known: keys of _OTHERS that the family reads. count_key, taken_key: its own names of numbers.

    Raises UnsupportedModelError for shared experts and the like.
    """
    require_values(section, {key: harmless for key, harmless in _OTHERS.items() if key not in known})
    names = dict.fromkeys(("num_local_experts", "num_experts", count_key))
    keys = [key for key in names if section.has(key) or section.is_null(key)]
    counts = [section.integer(key, minimum=1) for key in keys] or [experts]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"{keys[0]} contradicts {keys[1]}",
            where=section.place(keys[0]),
            expected=f"{counts[1]}, the value of {keys[1]}",
            got=str(counts[0]),
        )
    taken = section.integer(taken_key, per_token, minimum=1)
    if taken > counts[0]:
        raise ConfigError(
            f"{taken_key} is more than the number of experts",
            where=section.place(taken_key),
            expected=f"at most {counts[0]}",
            got=str(taken),
        )
    return MoeConfig(
        experts=counts[0],
        per_token=taken,
        intermediate_size=intermediate_size,
        normalized=normalized,
        dense_layers=dense_layers,
    )


def dense_layers(section: Section, layers: int, *, usual: int, agree: bool = True) -> tuple[int, ...]:
    """Layers with a plain MLP, as mlp_layer_types says; where it is absent or null the first `usual` ones. agree:
    raise ConfigError where first_k_dense_replace says something else, for no one knows which of the two holds."""
    kinds = ("dense",) * min(usual, layers) + ("sparse",) * (layers - usual)
    if section.has("mlp_layer_types"):
        kinds = section.words("mlp_layer_types")
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            "mlp_layer_types does not say what each layer's MLP is",
            where=section.place("mlp_layer_types"),
            expected=f"dense or sparse for each of {layers} layers",
            got=f"{len(kinds)} entries: {', '.join(sorted(set(kinds)))}"[:200],
        )
    dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if agree and section.has("first_k_dense_replace"):
        first = section.integer("first_k_dense_replace")
        if dense != tuple(range(min(first, layers + 1))):
            raise ConfigError(
                "first_k_dense_replace contradicts mlp_layer_types",
                where=section.place("first_k_dense_replace"),
                expected=f"the layers {list(dense)}",
                got=str(first),
            )
    return dense


def with_gated_shared_expert(section: Section, moe: MoeConfig, size: int) -> MoeConfig:
    """The mixture with an expert for all tokens, behind a gate of its own. size: the family's default."""
    shared = section.integer("shared_expert_intermediate_size", size, minimum=1)
    return dataclasses.replace(moe, shared_size=shared, shared_gate=True)


def read_groups(
    section: Section, experts: int, per_token: int, usual: tuple[int, int] = (1, 1), best: int = 2
) -> tuple[int, int]:
    """(groups of the experts, groups that a token takes experts of) of a family that ranks them by their `best` best.
    usual: the family's defaults."""
    keys = zip(("n_group", "topk_group"), usual, strict=True)
    groups, top = (section.integer(key, default, minimum=1) for key, default in keys)
    if groups > 1 and (experts % groups or experts < best * groups):
        raise ConfigError(
            f"n_group does not divide the experts into equal groups of {best} or more",
            where=section.place("n_group"),
            expected=f"a divisor of {experts}, at most {experts // best}",
            got=str(groups),
        )
    if top > groups or per_token > experts // groups * top:
        raise ConfigError(
            "topk_group is out of range",
            where=section.place("topk_group"),
            expected=f"{-(-per_token * groups // experts)} to {groups}",
            got=str(top),
        )
    return groups, top


def expert_rows(
    *blocks: str, gate: str, up: str, down: str, router: Sequence[str] = ("gate.weight",), bias: Sequence[str] = ()
) -> tuple[Row, ...]:
    """Where the weights of a layer's experts come from: from one tensor per expert, or from all experts' stacked.

    blocks          what the layer's MLP may be called
    gate, up, down  names of one expert's matrices
    router, bias    what the router's matrix, and the bias that only selects, may be called
    """

    def per_expert(*names: str) -> list[Expr]:
        parts = [tuple(Take(f"{block}.experts.{{e}}.{name}.weight") for name in names) for block in blocks]
        return [PerExpert(each[0] if len(each) == 1 else Concat(each)) for each in parts]

    def stacked(name: str) -> list[Expr]:
        return [Take(f"{block}.experts.{name}") for block in blocks]

    path = "layers.{i}/moe"
    return (
        Row(f"{path}/router/weight", _one_of(blocks, router)),
        *([Row(f"{path}/router/select/bias", _one_of(blocks, bias))] if bias else ()),
        Row(f"{path}/gate_up/weight", OneOf((*per_expert(gate, up), *stacked("gate_up_proj")))),
        Row(f"{path}/down/weight", OneOf((*per_expert(down), *stacked("down_proj")))),
    )


def select_bias_row(name: str) -> Row:
    """Where the bias comes from that only selects, of a family whose table is made of one without."""
    return Row("layers.{i}/moe/router/select/bias", Take(name))


def shared_rows(*blocks: str, scale: str = "") -> tuple[Row, ...]:
    """Where the weights of the expert that all tokens share come from.

    blocks  what it may be called
    scale   the matrix of its gate, if it has one
    """
    path = "layers.{i}/moe/shared"
    rows = [
        Row(f"{path}/{name}/{kind}", _one_of(blocks, (f"{name}_proj.{kind}",)))
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    ]
    return (*rows, *([Row(f"{path}/scale/weight", Take(scale))] if scale else ()))


def _one_of(blocks: Sequence[str], names: Sequence[str]) -> Expr:
    return OneOf(tuple(Take(f"{block}.{name}") for block in blocks for name in names))
