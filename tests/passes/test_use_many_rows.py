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


def test_warpgroups_multiply_codes_of_every_format_and_experts_of_floats_too() -> None:
    """With a gate and without; float32 has no such instructions."""
    (use,) = many_row_passes(find_target("cuda/sm90"), wanted=True)
    own = [f"{op}.{each}.sm80" for each in FORMATS for op in ("matmul", "moe_gate_up", "moe_down")]
    own += [f"{op}.{each}.sm80" for each in ("bf16", "f16") for op in ("moe_gate_up", "moe_down")]
    others = ("moe_gate_up.f32.sm80", "head_matmul.bf16.sm80")
    for gated in (0, 1):
        steps = [dataclasses.replace(step(each), attrs={"gated": gated}) for each in own]
        program, _ = use(dataclasses.replace(PROGRAM, steps=(*steps, *map(step, others))))
        found = [each.kernel for each in program.steps]
        assert found == [*(each.replace("sm80", "sm90a") for each in own), *others]


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
