"""Which matmuls go to kernels of many rows: what the plan says, and why others keep theirs."""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.builder.passes.use_many_rows import UseManyRows
from ingot.builder.pipeline import many_row_passes
from ingot.plugins.registry import find_target
from ingot.weight_formats import FORMATS
from tests.passes.test_use_library import PROGRAM, step

GATED = dataclasses.replace(step("matmul.bf16.sm80"), attrs={"gated": 1})
WITH_GATE = dataclasses.replace(PROGRAM, steps=(*PROGRAM.steps, GATED))


def run(target: str, *, wanted: bool) -> tuple[list[str], PassReport]:
    (use,) = many_row_passes(find_target(target), wanted=wanted)
    program, report = use(WITH_GATE)
    return [each.kernel for each in program.steps], report


def test_warpgroups_multiply_codes_and_gated_floats() -> None:
    kernels, report = run("cuda/sm90", wanted=True)
    assert kernels == ["matmul.bf16.sm80", "matmul.w8.sm90a", "add.f32.sm80", "matmul.bf16.sm90a"]
    assert (report.name, report.fired) == ("use_many_rows", 2)
    assert report.refused == {"no kernel of many rows is faster than matmul.bf16.sm80": 1}


def test_warpgroups_multiply_codes_of_every_format_but_those_of_experts() -> None:
    (use,) = many_row_passes(find_target("cuda/sm90"), wanted=True)
    names = [f"{op}.{each}.sm80" for each in FORMATS for op in ("matmul", "moe_gate_up")]
    program, _ = use(dataclasses.replace(PROGRAM, steps=tuple(map(step, names))))
    found = [each.kernel for each in program.steps]
    assert found[::2] == [f"matmul.{each}.sm90a" for each in FORMATS]
    assert found[1::2] == names[1::2]


def test_a_build_may_want_the_same_bits_in_any_batch() -> None:
    kernels, report = run("cuda/sm90", wanted=False)
    assert kernels == [each.kernel for each in WITH_GATE.steps]
    assert report.fired == 0
    assert report.refused["the build asks for the same bits in any batch"] == 2


def test_only_one_architecture_has_them() -> None:
    for name in ("ref", "cpu/avx2", "cuda/sm80", "cuda/sm100", "tensorrt-rtx/sm89"):
        assert many_row_passes(find_target(name), wanted=True) == ()


def test_the_kernels_are_those_of_the_target() -> None:
    target = find_target("cuda/sm90")
    (use,) = many_row_passes(target, wanted=True)
    assert isinstance(use, UseManyRows)
    assert {*use.kernels, *use.kernels.values(), *use.gated, *use.gated.values()} <= set(target.kernels())
