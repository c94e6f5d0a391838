"""Typed reads: what is wrong is named by file and key."""

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.configs.model import Llama3Scaling, ModelConfig, Norm, RopeConfig
from ingot.configs.read import Section, parse_json, read_record, write_record
from ingot.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    number: float
    colour: Colour = Colour.RED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    inner: Inner | None
    name: str | None = None
    flag: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Either:
    one: Inner | Other | None = None


def section(**values: object) -> Section:
    return Section(values, "config.json")


def test_values_and_defaults() -> None:
    values = section(a=3, b=2.5, c=True, d="x", e=None, f={"g": 7}, h=4)
    assert (values.integer("a"), values.number("b"), values.boolean("c"), values.text("d")) == (3, 2.5, True, "x")
    assert values.integer("e", 9) == 9
    assert values.number("h") == 4.0
    assert not values.has("e")
    assert values.section("f").integer("g") == 7
    assert values.section("absent").integer("g", 1) == 1
    assert values.unread() == ()


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda s: s.integer("text"), "config.json:text.*whole number"),
        (lambda s: s.integer("yes"), "whole number(.|\n)*got: True"),
        (lambda s: s.integer("real"), "whole number(.|\n)*got: 2.5"),
        (lambda s: s.integer("small", minimum=1), "at least 1(.|\n)*got: 0"),
        (lambda s: s.number("text"), "finite number"),
        (lambda s: s.number("infinite"), "finite number"),
        (lambda s: s.number("nan"), "finite number"),
        (lambda s: s.number("small", above=0), "finite number above 0"),
        (lambda s: s.boolean("small"), "true or false"),
        (lambda s: s.text("small"), "a string"),
        (lambda s: s.section("small"), "an object"),
        (lambda s: s.integer("null"), "null is missing"),
        (lambda s: s.integer("smal"), "config.json:smal(.|\n)*did you mean 'small'"),
        (lambda s: s.section("nested").integer("deep"), "config.json:nested.deep"),
    ],
)
def test_a_wrong_value_is_named(read: Callable[[Section], object], expected: str) -> None:
    values = section(
        text="1", yes=True, real=2.5, small=0, infinite=float("inf"), nan=float("nan"), null=None, nested={"deep": "x"}
    )
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        read(values)


def test_what_nobody_reads_is_known() -> None:
    values = section(known=1, other=2, nested={"known": 1, "extra": 2})
    values.integer("known")
    values.section("nested").integer("known")
    assert values.unread() == ("nested.extra", "other")


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    values = section(vocab_sise=1)
    values.has("vocab_size")
    with pytest.raises(ConfigError, match=r"unknown key(.|\n)*vocab_sise(.|\n)*did you mean 'vocab_size'"):
        values.refuse_unknown()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1, "a": 2}', "not valid JSON(.|\n)*config.json(.|\n)*key 'a' appears twice"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "no JSON object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        Section.from_file(tmp_path / "config.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read(.|\n)*absent\.json"):
        Section.from_file(tmp_path / "absent.json")


def test_records() -> None:
    values = section(count=3, inner={"number": 1, "colour": "green"})
    assert read_record(Outer, values) == Outer(count=3, inner=Inner(number=1.0, colour=Colour.GREEN))
    assert read_record(Outer, section(count=3, inner=None, name="n", flag=True)) == Outer(
        count=3, inner=None, name="n", flag=True
    )


def test_of_several_records_the_one_with_these_keys_is_read() -> None:
    assert read_record(Either, section(one={"width": 3})) == Either(one=Other(width=3))
    assert read_record(Either, section(one={"number": 1, "colour": "red"})).one == Inner(number=1.0, colour=Colour.RED)
    with pytest.raises(ConfigError, match=r"unknown key(.|\n)*more"):
        read_record(Either, section(one={"number": 1, "colour": "red", "more": 1}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "config.json:count"),
        ({"count": 1, "flags": True}, "unknown key(.|\n)*did you mean 'flag'"),
        ({"count": 1, "inner": {}}, "config.json:inner.number"),
        ({"count": 1, "inner": {"number": 1, "colour": "gren"}}, "red or green(.|\n)*did you mean 'green'"),
        ({"count": 1, "inner": {"number": 1, "more": 1}}, "unknown key(.|\n)*config.json:inner.more"),
    ],
)
def test_wrong_records(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_record(Outer, section(**values))


def test_a_model_survives_its_json() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
    model = ModelConfig(
        family="llama",
        vocab_size=1,
        hidden_size=2,
        intermediate_size=3,
        num_layers=4,
        heads=5,
        kv_heads=5,
        head_dim=6,
        max_positions=7,
        norm=Norm.LAYER,
        norm_eps=1e-5,
        activation="gelu_tanh",
        gated_mlp=True,
        rope=RopeConfig(theta=1e4, rotary_dim=6, llama3=scaling),
        attention_scale=0.1,
        tied_embeddings=True,
    )
    assert read_record(ModelConfig, Section(write_record(model), "config.json:model")) == model


def test_json_values_other_than_objects_pass() -> None:
    assert parse_json(b"[1, null]", "x") == [1, None]
