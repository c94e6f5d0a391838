"""What an architecture of llama.cpp is: how its settings read as a config.json, and where its weights lie."""

import dataclasses
from collections.abc import Callable, Mapping

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.header import GgufTensor
from ingot.convert.weights import Expr

Stored = Mapping[str, GgufTensor]
Config = dict[str, object]


def _as_it_is(model: ModelConfig, stored: Stored) -> ModelConfig:
    return model


def _no_rows(model: ModelConfig) -> Mapping[str, Expr]:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """config   (settings, without the architecture's name in front; tensors) → config.json, with its model_type
    paired   rows of q and k rotate in pairs of neighbours
    names    modules of the Graph that llama.cpp calls otherwise than `rows.py` says: ours → llama.cpp's
    rows     weights of the Graph that are made in another way
    adapt    the configuration of what llama.cpp's converter has prepared
    choosers a part of the names of tensors that only choose tokens for sparse attention. "": there are no such tensors
    scales   ends of names of scales that are weights of the model, whatever type stands beside them
    """

    config: Callable[[Section, Stored], Config]
    paired: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: Callable[[ModelConfig], Mapping[str, Expr]] = _no_rows
    adapt: Callable[[ModelConfig, Stored], ModelConfig] = _as_it_is
    choosers: str = ""
    scales: tuple[str, ...] = ()
