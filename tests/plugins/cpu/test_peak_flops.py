"""The limits that kernels are compared with: arithmetic of each ISA, by the names of kernels."""

import pytest

from ingot.plugins.cpu.native import core_count, kernel_table, offered_isas, peak_flops, peak_name

pytestmark = pytest.mark.native

KINDS = (
    "f32.avx2",
    "int8.avx2",
    "int8.avxvnni",
    "f32.avx512",
    "int8.avx512",
    "bf16.avx512bf16",
    "bf16.amx",
    "int8.amx",
)
OFFERED = offered_isas()


def test_every_kernel_has_an_arithmetic() -> None:
    kernels = [name for name in kernel_table() if not name.endswith("emu")]
    assert {peak_name(name) for name in kernels} <= set(KINDS)
    assert peak_name("matmul.w4a8.avx2") == "int8.avx2"
    assert peak_name("moe_down.w8a8.avxvnni") == "int8.avxvnni"
    assert peak_name("matmul.w4.avx512") == peak_name("paged_attention.int8.avx512") == "f32.avx512"
    assert peak_name("matmul.w8.amx") == "bf16.amx"
    assert peak_name("moe_down.bf16.avx512bf16") == "bf16.avx512bf16"


@pytest.mark.parametrize("name", KINDS)
def test_what_the_machine_has_is_measured_and_all_else_refused(name: str) -> None:
    if name.split(".")[1] in OFFERED:
        assert 0 < peak_flops(name, 1) < 1e14
    else:
        with pytest.raises(ValueError, match="no arithmetic"):
            peak_flops(name)


@pytest.mark.skipif(not OFFERED, reason="this machine lacks avx2")
def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="threads"):
        peak_flops("f32.avx2", 0)
    for name in ("", "avx2", "f32.sse", "bf16.avx2"):
        with pytest.raises(ValueError, match="no arithmetic"):
            peak_flops(name, core_count())
