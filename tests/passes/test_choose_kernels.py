"""Kernels are chosen by name: the target's first of op and dtype."""

import pytest

from ingot.builder.passes.choose_kernels import ChooseKernels
from ingot.builder.passes.set_precision import SetPrecision
from ingot.builder.precision import ProductChoice
from ingot.builder.select import choose_kernel, plan_ops
from ingot.dtypes import DType, Precision
from ingot.errors import NoKernelError
from ingot.plugins.ref.target import RefTarget
from ingot.plugins.target import EnginePart
from tests.passes.test_set_precision import small_graph


class ListTarget(RefTarget):
    """Offers what it is told."""

    name = "list"

    def __init__(self, *names: str) -> None:
        self._names = names

    def kernels(self) -> tuple[str, ...]:
        return self._names

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        return "it is made of paper"


def choose(*names: str, weights: DType = DType.F32, activations: str = "bf16") -> list[str]:
    target, graph = ListTarget(*names), small_graph()
    choice = ProductChoice(precision=Precision(dtype=weights), activations=activations)
    products = {node.name: choice for node in graph.plugins("Matmul")}
    SetPrecision(products=products, tables=weights, kv=DType.F32, target=target).run(graph)
    assert ChooseKernels(target=target).run(graph).fired == 3
    return [node.attrs["kernel"] for node in graph.nodes]


def test_the_first_of_op_and_dtype() -> None:
    best = ["embedding.f32.b", "rms_norm.f32.a", "matmul.f32.b", "matmul.f32.a", "matmul.bf16.b", "embedding.bf16.a"]
    assert choose(*best) == ["embedding.f32.b", "rms_norm.f32.a", "matmul.f32.b"]
    assert choose(*best, weights=DType.BF16) == ["embedding.bf16.a", "rms_norm.f32.a", "matmul.bf16.b"]


def test_a_missing_dtype_names_the_others() -> None:
    with pytest.raises(NoKernelError, match=r"list has no kernel for op matmul in bf16(.|\n)*matmul in f32") as error:
        choose("embedding.bf16.a", "rms_norm.f32.a", "matmul.f32.a", weights=DType.BF16)
    assert error.value.hint == NoKernelError.NEXT


def test_a_missing_type_of_the_kv_cache_names_its_option() -> None:
    with pytest.raises(NoKernelError, match=r"rope_kv_write in f8(.|\n)*in bf16, f32(.|\n)*another --kv_cache_dtype"):
        choose_kernel(ListTarget("rope_kv_write.f32.a", "rope_kv_write.bf16.a"), "rope_kv_write", "f8")


def test_a_missing_op() -> None:
    with pytest.raises(
        NoKernelError, match=r"op rms_norm in f32(.|\n)*no kernel for rms_norm at all(.|\n)*add a kernel"
    ):
        choose("embedding.f32.a", "matmul.f32.a")


def test_a_target_without_kernels() -> None:
    with pytest.raises(NoKernelError, match=r"no kernels in this installation(.|\n)*made of paper"):
        choose()


def test_plugins_and_their_ops() -> None:
    assert plan_ops("RmsNorm") == ("rms_norm",)
    assert plan_ops("Matmul") == ("matmul",)
    assert plan_ops("PagedAttention") == ("rope_kv_write", "paged_attention")


def test_int8_activations_have_kernels_of_their_own() -> None:
    names = ["embedding.w8.a", "rms_norm.f32.a", "matmul.w8.a", "matmul.w8a8.a"]
    assert choose(*names, weights=DType.W8)[-1] == "matmul.w8.a"
    assert choose(*names, weights=DType.W8, activations="int8")[-1] == "matmul.w8a8.a"
