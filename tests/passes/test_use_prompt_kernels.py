"""Which attention has kernels of its own for prompts: what the plan says, and why others keep theirs."""

import dataclasses

import numpy as np
import pytest

from ingot.builder.passes.base import PassReport
from ingot.builder.passes.use_prompt_kernels import use_prompt_kernels
from ingot.builder.pipeline import plan_passes
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr, CacheGroup, Plan
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.estimate import _nowhere
from ingot.plugins.cuda.plan_facts import all_specialisations
from ingot.plugins.cuda.target import CudaTarget
from ingot.plugins.ops.paged_attention import OP as ATTENTION
from ingot.plugins.registry import find_target
from tests.builder.test_schedule import LAYER, plan_of
from tests.plugins.cpu.one_step import Input, one_step_plan, plain_batch


def plan(dtype: DType, head_dim: int) -> Plan:
    """One attention call."""
    made = plan_of(LAYER)
    cache = dataclasses.replace(made.caches[0], dtype=dtype, head_dim=head_dim)
    attrs: dict[str, Attr] = {"layer": 0, "heads": 4, "kv_heads": cache.kv_heads, "window": 0}
    kernel = f"paged_attention.{dtype.value}.sm80"
    steps = [
        dataclasses.replace(each, kernel=kernel, attrs=attrs) if each.op == "paged_attention" else each
        for each in made.steps
    ]
    return dataclasses.replace(made, caches=(cache,), steps=tuple(steps))


def run(target: str, dtype: DType = DType.BF16, head_dim: int = 64) -> tuple[str, PassReport]:
    found = find_target(target)
    assert isinstance(found, CudaTarget)
    made, report = use_prompt_kernels(plan(dtype, head_dim), found.prompt_kernel)
    return next(each.kernel for each in made.steps if each.op == "paged_attention"), report


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_warpgroups_attend_to_prompts(dtype: DType, head_dim: int) -> None:
    kernel, report = run("cuda/sm90", dtype, head_dim)
    assert kernel == f"paged_attention.{dtype.value}.sm90a"
    assert kernel in find_target("cuda/sm90").kernels()
    assert (report.name, report.fired, report.refused) == ("use_prompt_kernels", 1, {})


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim"),
    [
        *((f"cuda/{sm}", DType.BF16, 64) for sm in ("sm80", "sm89", "sm100", "sm120")),
        *(("cuda/sm90", DType.BF16, dim) for dim in (12, 72, 96, 256, 512)),
        *(("cuda/sm90", dtype, 64) for dtype in (DType.I8, DType.F32)),
    ],
)
def test_other_heads_caches_and_architectures_keep_the_kernel(target: str, dtype: DType, head_dim: int) -> None:
    kernel, report = run(target, dtype, head_dim)
    assert kernel == f"paged_attention.{dtype.value}.sm80"
    reason = f"faster than {kernel} over a cache in {dtype.value} for heads of {head_dim} dims"
    assert report.refused == {f"no kernel for prompts is {reason}": 1}


def test_the_machine_code_is_compiled_for_what_the_plan_names() -> None:
    given = plan(DType.BF16, 64)
    for made, found in ((given, False), (use_prompt_kernels(given, lambda kernel, _: kernel[:-4] + "sm90a")[0], True)):
        (first,) = all_specialisations(made)
        assert (first.warpgroups, first.wide) == (found, False)


def test_it_runs_for_cuda_targets() -> None:
    def names(target: str) -> list[str]:
        return [getattr(each, "func", each).__name__ for each in plan_passes(find_target(target))]

    assert names("cuda/sm90")[-2:] == ["use_prompt_kernels", "choose_tiles"]
    for target in ("ref", "cpu/avx2", "tensorrt-rtx/sm89"):
        assert "use_prompt_kernels" not in names(target)


def test_heads_that_no_warpgroups_take_are_refused() -> None:
    """The name of the kernel says that they do."""
    by_type: dict[Attr | type, Attr] = {int: 1, float: 1.0}
    attrs = {key: by_type.get(value, 0) if isinstance(value, type) else value for key, value in ATTENTION.attrs.items()}
    cache = CacheGroup(layers=(0, 1), kv_heads=1, head_dim=12, tokens_per_block=16, dtype=DType.BF16)
    inputs: list[Input] = [np.zeros((1, 24), np.float32), None, None]
    attrs |= {"heads": 2, "head_dim": 12}
    made, _ = one_step_plan("paged_attention.bf16.sm90a", inputs, attrs, plain_batch(1), cache)
    with pytest.raises(EngineError, match=r"no warpgroups attend to prompts with such heads(.|\n)*heads of 12 dims"):
        bind(made, _nowhere(made))
