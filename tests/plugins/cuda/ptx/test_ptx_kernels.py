"""The PTX of every kernel, as nvcc makes it, against the references: values, bounds, alignment, races, and what a slab
of a product costs. Nearly all of them are slow: each waits for nvcc. Of formats of weights that are contained in
others (w4t in w4ts, w8t in w8ts, w2t in w3t, w3k in w6k, w4ks in w5ks), and of types and formats that differ in a
conversion alone, the kernels are long; the emulated GPU runs the same sources in CI, with more shapes."""

import dataclasses
import functools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plugins.cuda.compiler import Compiler, Specialisation
from tests.plugins.cuda import test_draws as draws
from tests.plugins.cuda import test_experts, test_kernels, test_latent, test_states
from tests.plugins.cuda import test_paged_attention as attention
from tests.plugins.cuda.emulated.units import units_of
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.ptx import costs
from tests.plugins.cuda.ptx.costs import row_cost
from tests.plugins.cuda.ptx.launches import Interpreted, assert_waits, ptx_of
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.parse import parse
from tests.plugins.cuda.test_accesses import CODE_FAULTS, FAULTS
from tests.spanning import often

_LATER = functools.partial(pytest.param, marks=pytest.mark.slow)
_LONG = (pytest.mark.slow, pytest.mark.long)
BLOCKS = {64: costs.BLOCK}  # head_dim → tokens per block: PTX of few kinds is compiled


def but_long(cases: Iterable[object], long: Collection[object]) -> list[object]:
    """For pytest.mark.parametrize."""
    return [pytest.param(each, marks=_LONG) if each in long else each for each in cases]


def names(interpreted: Interpreted) -> set[str]:
    return {name for name, _ in interpreted.counted}


def whole(interpreted: Interpreted) -> set[str]:
    """The same, whether a block takes a pair or half of one."""
    return {name.removesuffix("_half") for name in names(interpreted)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", but_long((DType.F32, DType.BF16, DType.F16), (DType.F16,)))
def test_tables_and_epilogues(interpreted: Interpreted, dtype: DType) -> None:
    for case in [*test_kernels._embeddings(dtype)][::3] + [*test_kernels._matmuls(dtype)][::2]:
        test_kernels._check(interpreted.driver, case)
    product = {"product_f32"} if dtype is DType.F32 else {"product_8", "product_16"}
    assert whole(interpreted) == {"embed", "epilogue", *product}


EXPERTS = [(op, each) for op in (test_experts.GATE_UP, test_experts.DOWN) for each in ("f16", *test_experts.PRECISIONS)]
IN_CI = [(test_experts.GATE_UP, "w4tsg16"), (test_experts.DOWN, "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "precision"), [each if each in IN_CI else pytest.param(*each, marks=_LONG) for each in EXPERTS]
)
def test_products_of_experts(interpreted: Interpreted, op: str, precision: str) -> None:
    """In tiles of each size, some of them without rows."""
    test_experts.check(interpreted.driver, op, precision, 3)
    dtype = precision.partition("g")[0]
    kind = f"{dtype}_" if DType(dtype).is_quantised else ""
    kernels = {"experts_f32"} if precision == "f32" else {f"experts_{kind}{rows}" for rows in (8, 64, 128)}
    assert names(interpreted) >= {"group_by_expert", *kernels}


@pytest.mark.slow
def test_routes(interpreted: Interpreted) -> None:
    test_experts.check_routes(interpreted.driver)
    assert names(interpreted) == {"moe_route"}


@pytest.mark.slow
def test_norms_and_elementwise_kernels(interpreted: Interpreted) -> None:
    test_kernels.test_norms_and_elementwise_kernels(interpreted.driver)
    expected = {"residual_norm", "epilogue", "gather_rows", "soft_cap", "scale_rows", "rope_table", "gate_rows"}
    streams = {"take_columns", "mix_streams", "add_to_streams", "match_magnitude", "cut_below"}
    assert names(interpreted) == expected | streams | {"gather_columns", "join_columns"}


@pytest.mark.slow  # as the others that wait for nvcc; some of every kind stay in make test
def test_values_that_are_made(interpreted: Interpreted) -> None:
    for norm, rotary, value_norm, keys_as_values, dim in test_kernels.MADE[:2]:
        test_kernels.test_values_that_are_made(interpreted.driver, norm, rotary, value_norm, keys_as_values, dim)
    assert names(interpreted) == {"rotate_and_make_values"}


def test_queries_alone(interpreted: Interpreted) -> None:
    test_kernels.check_queries(interpreted.driver, "head", 16)
    assert names(interpreted) == {"rotate_and_store"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "attrs", often(test_states.CONVOLUTIONS, test_states.CONVOLUTIONS[1:2]), ids=lambda attrs: str(attrs["channels"])
)
def test_convolutions(interpreted: Interpreted, attrs: dict[str, Any]) -> None:
    test_states.check(interpreted.driver, "causal_conv", attrs)
    assert names(interpreted) == {"causal_conv", "leave_inputs"}


@pytest.mark.slow
@pytest.mark.parametrize("name", often(test_states.LINEARS, ("odd_values",)))
def test_linear_attention(interpreted: Interpreted, name: str) -> None:
    test_states.check(interpreted.driver, "linear_attention", test_states.LINEARS[name])
    assert names(interpreted) == test_states.kernels_of(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "size"),
    [
        _LATER(DType.F32, 3, test_latent.SMALL),
        (DType.BF16, 20, test_latent.SMALL),
        _LATER(DType.F16, 40, test_latent.SMALL),
        _LATER(DType.BF16, 40, test_latent.WIDE),
    ],
)
def test_latent_attention(interpreted: Interpreted, dtype: DType, heads: int, size: tuple[int, int]) -> None:
    """Prompts, and contexts in parts."""
    test_latent.check(interpreted.driver, dtype, heads, size, [(0, 3), (33, 1), (15, 2)])
    if dtype is DType.F32:
        assert names(interpreted) == {"latent_rows"}
        return
    test_latent.check(interpreted.driver, dtype, heads, size, [(70, 1), (3, 1)], splits=3)
    assert names(interpreted) == {"latent_attention", "latent_combine"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "rotary", "interleaved", "growth"),
    [(DType.BF16, 5, 8, 1, 0.3), (DType.F32, 3, 6, 0, 0.1), (DType.F16, 4, 8, 0, 0.0)],
)
def test_rows_of_latents(
    interpreted: Interpreted, dtype: DType, heads: int, rotary: int, interleaved: int, growth: float
) -> None:
    test_latent.check_rows(
        interpreted.driver, dtype, heads=heads, rotary=rotary, interleaved=interleaved, growth=growth
    )
    assert names(interpreted) == {"write_latent"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", but_long((DType.F32, DType.BF16, DType.F16), (DType.F16,)))
def test_products_of_heads(interpreted: Interpreted, dtype: DType) -> None:
    test_latent.check_heads(interpreted.driver, dtype, every=3)
    kernels = {"heads_f32"} if dtype is DType.F32 else {"heads_8", "heads_64", "heads_128"}
    assert names(interpreted) >= kernels


def test_gated_norms(interpreted: Interpreted) -> None:
    test_states.check_norms(interpreted.driver)
    assert names(interpreted) == {"gated_norm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "interleaved", "rotary", "norm"),
    [
        (DType.BF16, 0, 16, ""),
        _LATER(DType.F16, 1, 16, "head"),
        (DType.F32, 0, 10, "wide"),
        *(_LATER(*each) for each in ((DType.I8, 0, 16, ""), (DType.I8, 1, 10, "wide"), (DType.F8, 0, 16, ""))),
    ],
)
def test_rope_and_cache(interpreted: Interpreted, dtype: DType, interleaved: int, rotary: int, norm: str) -> None:
    test_kernels.test_rope_and_cache(interpreted.driver, dtype, interleaved, rotary, norm)
    assert names(interpreted) == {"rotate_and_store"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "window"),
    [
        _LATER(DType.BF16, 4, 2, 64, 0),
        _LATER(DType.BF16, 3, 1, 256, 0),
        _LATER(DType.BF16, 5, 1, 72, 33),
        _LATER(DType.BF16, 2, 2, 12, 33),
        _LATER(DType.BF16, 8, 1, 512, 33),
        _LATER(DType.I8, 4, 2, 64, 0),
        _LATER(DType.I8, 2, 2, 12, 33),
        _LATER(DType.I8, 8, 1, 260, 33),
        _LATER(DType.F8, 4, 2, 64, 0),
        _LATER(DType.F8, 4, 1, 80, 33),
        _LATER(DType.I8, 12, 1, 96, 33),
        (DType.F16, 4, 2, 16, 0),
        (DType.F32, 4, 2, 16, 33),
    ],
)
def test_attention(interpreted: Interpreted, dtype: DType, heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Prefill and decode: scattered pages, padded heads, windows behind which memory is gone."""
    parts = [(0, 65), (32, 1), (70, 2)]
    attention.check(
        interpreted.driver,
        dtype,
        parts,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block=BLOCKS.get(dim, 16),
        window=window,
    )
    expected = {"attention_rows"} if dtype is DType.F32 else {"attention_prefill", "attention_decode"}
    assert names(interpreted) - {"attention_combine"} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "extras"),
    [
        _LATER(DType.BF16, 64, attention.EXTRAS[0]),
        (DType.BF16, 12, attention.EXTRAS[3]),
        (DType.F32, 16, attention.EXTRAS[2]),
        *(pytest.param(DType.BF16, 64, each, marks=pytest.mark.slow) for each in attention.EXTRAS[1:3]),
    ],
)
def test_sinks_slopes_and_queries_that_grow(
    interpreted: Interpreted, dtype: DType, dim: int, extras: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": dim, "block": BLOCKS.get(dim, 16), **extras}
    attention.check(interpreted.driver, dtype, [(0, 33), (70, 1)], **sizes)
    if dtype is not DType.F32:
        attention.check(interpreted.driver, dtype, [(130, 1), (3, 1)], **sizes, splits=3)
        assert names(interpreted) == {"attention_prefill", "attention_decode", "attention_combine"}


@pytest.mark.slow
@pytest.mark.parametrize("dim", often((64, 12), (12,)))
def test_splits(interpreted: Interpreted, dim: int) -> None:
    """Some of them without tokens."""
    parts, block = [(100, 1), (3, 1)], BLOCKS.get(dim, 16)
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 1, "dim": dim, "block": block, "splits": 7}
    attention.check(interpreted.driver, DType.BF16, parts, softcap=1.5, **sizes)
    assert {"attention_decode", "attention_combine"} <= names(interpreted)


@pytest.mark.slow
def test_draws(interpreted: Interpreted) -> None:
    """With every kind of rule; and plain ones of a vocabulary that threads share."""
    random = np.random.default_rng(33)
    logits = (random.standard_normal((5, 33)) * 3).astype(np.float32)
    found, expected = draws._draw(interpreted.driver, logits, [draws._drawing(random, 33) for _ in range(6)])
    for name in ("ids", "token_ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-5, atol=2e-5)
    assert names(interpreted) == {"draw_tokens", "epilogue"}


@pytest.mark.slow
def test_draws_with_rules(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    draws.test_every_rule_is_applied_on_the_device(interpreted.driver, monkeypatch, 33)


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.7), (40, 0.9)])
def test_more_draws(interpreted: Interpreted, top_k: int, top_p: float) -> None:
    draws.test_random_draws_are_those_of_the_specification(interpreted.driver, top_k, top_p)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 64, 1000])
def test_more_windows(interpreted: Interpreted, window: int) -> None:
    attention.test_windows(interpreted.driver, DType.BF16, window)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (14, 2), (24, 1), (64, 1), (6, 2)])
def test_more_groups(interpreted: Interpreted, heads: int, kv_heads: int) -> None:
    attention.test_groups_of_heads(interpreted.driver, heads, kv_heads)


@pytest.mark.slow  # each fault is a compilation; in make test, test_ptx_machine shows that faults are seen
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    """Those that the emulated GPU sees, in the PTX that nvcc makes of the wrong sources."""
    plant(monkeypatch, tmp_path, *FAULTS[fault])
    with pytest.raises(
        KernelError, match="outside all memory|into" if "pool" in fault else "a race|still being copied"
    ):
        test_splits(interpreted, 12)


@pytest.mark.slow
@pytest.mark.parametrize("fault", CODE_FAULTS)
def test_faults_over_codes_are_seen(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    file, right, wrong, heads, dim = CODE_FAULTS[fault]
    plant(monkeypatch, tmp_path, file, right, wrong)
    with pytest.raises(KernelError, match=r"a race|still being copied|never written"):
        attention.check(interpreted.driver, DType.I8, [(300, 1), (3, 1)], heads=heads, kv_heads=1, dim=dim)


ROW_BUDGETS = {  # instructions of all warps for a row; how many of them store
    "embed": (1000, 16),
    "residual_norm": (2700, 8 * (2 + 2 + 1)),  # the sum, the result, a warp's part of the mean
    "rotate_and_store": (2700, 8 * 2 + 2 * 2 + 2),  # 8 warps of queries, 2 of keys, 2 of values
    "epilogue": (9300, 64),
    "gather_rows": (600, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ROW_BUDGETS)
def test_a_row_costs_no_more_instructions(nvcc: Compiler, kernel: str) -> None:
    """And no store moves fewer than four columns."""
    cost, (most, stores) = row_cost(nvcc, kernel), ROW_BUDGETS[kernel]
    assert cost["st"] == stores
    assert cost.total() <= most


@pytest.mark.slow
def test_every_kernel_of_a_captured_step_waits(nvcc: Compiler) -> None:
    """For the kernel before it. Those over codes are checked where other tests launch them, as all that they launch."""
    types = Specialisation(
        weight=DType.BF16, kv=DType.BF16, head_dim=16, tokens_per_block=16, experts=True, states=True
    )
    wide = dataclasses.replace(types, head_dim=512, experts=False, states=False, alone=True)
    for specialisation in (types, wide):
        for unit in units_of(specialisation.macros):
            for name, kernel in parse(ptx_of(nvcc, specialisation, unit)).items():
                assert_waits(name, kernel)
