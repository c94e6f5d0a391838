"""Which kernel draws tokens: the best one of the target, by name in the plan, and nothing else in a session."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from ingot.builder.passes.choose_draw_kernel import ChooseDrawKernel
from ingot.builder.program import Program
from ingot.errors import BuildError, EngineError
from ingot.plan_check import check_plan
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cuda.sampling import draw_kernel
from ingot.plugins.registry import find_target, targets
from ingot.plugins.target import SessionOptions
from tests.builder.test_schedule import LAYER, plan_of
from tests.runtime.tiny_plan import make_model

PROGRAM = Program(steps=(), values=(), logits=0)


@pytest.mark.native
@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        ("cpu/avx2", "sample.f32.avx2"),
        ("cpu/avxvnni", "sample.f32.avx2"),
        ("cpu/avx512", "sample.f32.avx512"),
        ("cpu/amx", "sample.f32.avx512"),
        ("cuda/sm90", "sample.f32.sm80"),
        ("tensorrt-rtx", "sample.f32.sm80"),
        ("ref", "sample.f32.ref"),
    ],
)
def test_the_best_one_of_the_target(target: str, kernel: str) -> None:
    made, report = ChooseDrawKernel(target=find_target(target))(PROGRAM)
    assert (made.draw_kernel, report.name, report.fired) == (kernel, "choose_draw_kernel", 1)


def test_every_target_has_one() -> None:
    for target in targets():
        if target.kernels():  # the compiled module may be missing
            assert ChooseDrawKernel(target=target)(PROGRAM)[0].draw_kernel, target.name


def test_a_target_without_a_kernel_is_refused() -> None:
    class Dumb:
        name = "dumb"

        def kernels(self) -> tuple[str, ...]:
            return ("matmul.f32.dumb",)

    target: Any = Dumb()
    with pytest.raises(BuildError, match="dumb has no kernel that draws tokens"):
        ChooseDrawKernel(target=target)(PROGRAM)


def test_logits_and_kernel_go_together() -> None:
    with pytest.raises(EngineError, match=r"draw_kernel(.|\n)*none for logits"):
        check_plan(dataclasses.replace(plan_of(LAYER), draw_kernel=""))


@pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("", "logits and a kernel that draws from them, or neither"),
        ("sample.f32.nobody", "this build of ingot has no kernel sample.f32.nobody"),
        ("add.f32.avx2", "kernel add.f32.avx2 draws no tokens"),
        ("sample.f32.avx512", "kernel sample.f32.avx512 needs avx512, this machine offers avx2"),
    ],
)
def test_cpu_sessions_take_what_the_plan_names(kernel: str, problem: str) -> None:
    target = find_target("cpu/avx2")
    model = make_model(target)
    odd = dataclasses.replace(model.plan, draw_kernel=kernel)
    with pytest.raises(EngineError, match=re.escape(problem)):
        target.open_session(odd, np.asarray(model.weights), SessionOptions(num_blocks=odd.in_each(4), threads=1))


def test_gpu_sessions_take_what_the_plan_names() -> None:
    assert draw_kernel(dataclasses.replace(plan_of(LAYER), draw_kernel="sample.f32.sm80")) == "draw_tokens"
    with pytest.raises(EngineError, match=r"draw_kernel(.|\n)*expected: sample.f32.sm80(.|\n)*got: sample.f32.avx2"):
        draw_kernel(dataclasses.replace(plan_of(LAYER), draw_kernel="sample.f32.avx2"))
