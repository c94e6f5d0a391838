"""Which matmuls a library computes: what the plan says, and why others stay with the target's own kernels."""

from ingot.builder.passes.base import PassReport
from ingot.builder.passes.use_library import UseLibrary
from ingot.builder.pipeline import library_passes
from ingot.builder.program import Draft, Program
from ingot.plan import Attr
from ingot.plugins.registry import find_target

PLAIN: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "bf16", "group": 0}


def step(kernel: str) -> Draft:
    op = kernel.split(".")[0]
    return Draft(name=kernel, op=op, kernel=kernel, inputs=(0, "w", None, None), outputs=(1,), attrs=PLAIN)


PROGRAM = Program(steps=tuple(map(step, ("matmul.bf16.sm80", "matmul.w8.sm80", "add.f32.sm80"))), values=(), logits=1)


def run(*, wanted: bool) -> tuple[list[str], PassReport]:
    (use,) = library_passes(find_target("cuda/sm90"), wanted=wanted)
    program, report = use(PROGRAM)
    return [each.kernel for each in program.steps], report


def test_floats_go_to_the_library_and_codes_do_not() -> None:
    kernels, report = run(wanted=True)
    assert kernels == ["matmul.bf16.sm80.cublaslt", "matmul.w8.sm80", "add.f32.sm80"]
    assert (report.name, report.fired) == ("use_library", 1)
    assert report.refused == {"the library has no matmul.w8.sm80": 1}


def test_a_build_may_want_own_kernels() -> None:
    kernels, report = run(wanted=False)
    assert kernels == [each.kernel for each in PROGRAM.steps]
    assert report.fired == 0
    assert report.refused["the build asks for own kernels"] == 1


def test_only_targets_with_a_library_have_the_pass() -> None:
    for name in ("ref", "cpu/avx2", "tensorrt-rtx/sm89"):
        assert library_passes(find_target(name), wanted=True) == ()


def test_the_kernels_are_those_of_the_target() -> None:
    target = find_target("cuda/sm80")
    (use,) = library_passes(target, wanted=True)
    assert isinstance(use, UseLibrary)
    assert set(use.kernels) | set(use.kernels.values()) <= set(target.kernels())
