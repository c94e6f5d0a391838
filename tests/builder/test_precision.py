"""Which precision and activations a product gets: options, the head's own, then patterns, the last one first."""

from typing import Any

import pytest

from ingot.builder.precision import ProductChoice, choose_products, table_dtype
from ingot.configs.build import BuildConfig
from ingot.configs.recipe import LayerRule
from ingot.dtypes import DType, Precision
from ingot.errors import UsageError

NAMES = ["layers.0/qkv", "layers.0/down", "layers.1/qkv", "layers.1/down", "lm_head"]


def choose(precision: str, *layers: LayerRule, head: str | None = None, activations: str = "auto") -> dict[str, str]:
    config = BuildConfig(lm_head_precision=head, activations=activations, layers=layers)
    chosen = choose_products(config, Precision.parse(precision), {}, NAMES)
    return {name: f"{each.precision} {each.activations}" for name, each in chosen.items()}


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "w8", "w4g32", "w4g64", "w4g128"])
def test_names_come_back(name: str) -> None:
    assert str(Precision.parse(name)) == name


@pytest.mark.parametrize("name", ["w4", "w8g32", "w4g16", "f32g32", "int8", ""])
def test_what_is_no_precision(name: str) -> None:
    with pytest.raises(ValueError, match="is not a precision"):
        Precision.parse(name)


def test_the_head_keeps_eight_bits() -> None:
    assert choose("w4g128") == {**dict.fromkeys(NAMES, "w4g128 auto"), "lm_head": "w8 auto"}
    assert choose("w4g128", head="w4g32")["lm_head"] == "w4g32 auto"
    assert choose("w8")["lm_head"] == "w8 auto"
    assert choose("bf16", head="w8") == {**dict.fromkeys(NAMES, "bf16 bf16"), "lm_head": "w8 auto"}


def test_the_last_pattern_that_fits_counts() -> None:
    rules = (
        LayerRule(pattern="layers.*", precision="w8", activations="int8"),
        LayerRule(pattern="*/down", precision="bf16"),
        LayerRule(pattern="layers.1/down", precision="w4g64", activations="bf16"),
    )
    assert choose("w4g128", *rules) == {
        "layers.0/qkv": "w8 int8",
        "layers.0/down": "bf16 bf16",
        "layers.1/qkv": "w8 int8",
        "layers.1/down": "w4g64 bf16",
        "lm_head": "w8 auto",
    }


def test_patterns_that_fit_nothing_name_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"(?s)fits no matmul.*'layers.0/dwon'.*did you mean 'layers.0/down'"):
        choose("w8", LayerRule(pattern="layers.0/dwon", precision="bf16"))


def test_fp8_needs_weights_of_fp8() -> None:
    """In rows, or in groups of 128 columns; what else there is keeps floats."""
    assert choose("f8g128", activations="fp8") == {**dict.fromkeys(NAMES, "f8g128 fp8"), "lm_head": "w8 bf16"}
    rule = LayerRule(pattern="*/down", activations="fp8")
    assert choose("f8", rule)["layers.1/down"] == "f8 fp8"
    assert choose("f8", rule, activations="bf16")["layers.1/qkv"] == "f8 bf16"
    for precision in ("bf16", "w8", "f8g32"):
        with pytest.raises(
            UsageError, match=r"(?s)FP8 activations are supported only with FP8 weights.*got: " + precision
        ):
            choose(precision, activations="fp8")
        with pytest.raises(
            UsageError, match=r"(?s)FP8 activations are supported only with FP8 weights.*where: \*/down"
        ):
            choose(precision, rule)


@pytest.mark.parametrize("option", [{"tp_size": 2}, {"sum_parts": 2}, {"gemm_library": False}])
def test_fp8_is_refused_where_bits_must_not_depend_on_the_batch(option: dict[str, Any]) -> None:
    for given in ({"activations": "fp8"}, {"layers": (LayerRule(pattern="*", activations="fp8"),)}):
        with pytest.raises(
            UsageError, match=r"FP8 activations cannot be combined with --(tp_size|sum_parts|gemm_plugin)"
        ):
            BuildConfig(**option, **given)


def test_int8_needs_quantised_weights() -> None:
    with pytest.raises(UsageError, match="int8 activations are not supported for float weights"):
        choose("bf16", activations="int8")
    with pytest.raises(UsageError, match="int8 activations are not supported for float weights"):
        choose("w8", LayerRule(pattern="lm_head", precision="bf16", activations="int8"))
    assert choose("bf16", head="w8", activations="int8")["lm_head"] == "w8 int8"


def test_tables_have_eight_bits_in_quantised_engines() -> None:
    tables = [table_dtype(Precision.parse(name)) for name in ("f32", "bf16", "w8", "w4g32")]
    assert tables == [DType.F32, DType.BF16, DType.W8, DType.W8]
    assert ProductChoice(precision=Precision.parse("w8"), activations="auto").precision.group == 0
