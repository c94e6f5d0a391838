"""The interpreter itself: small kernels with a fault each, and instructions against what they are meant to compute."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.plugins.cuda.ptx.arithmetic import dtype_of, find
from tests.plugins.cuda.ptx.launches import assert_waits
from tests.plugins.cuda.ptx.machine import Machine
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.parse import Kernel, parse

PROLOGUE = """
\tmov.u32 %r1, %tid.x;
\tld.param.u64 %rd1, [param_0];
\tcvta.to.global.u64 %rd2, %rd1;
\tmul.wide.u32 %rd3, %r1, 4;
\tadd.s64 %rd4, %rd2, %rd3;
\tshl.b32 %r2, %r1, 2;
\tmov.u32 %r3, room;
\tadd.s32 %r4, %r3, %r2;
\txor.b32 %r5, %r4, 4;
\tsetp.lt.u32 %p1, %r1, 16;
"""
OWN = "st.shared.u32 [%r4], %r1;\n"  # each thread writes its place; %r5 is that of its neighbour
READ = "ld.shared.u32 %r6, [%r5];\n"


def kernel_of(body: str) -> Kernel:
    """Of one parameter and 256 bytes of shared memory a block."""
    text = (
        ".visible .entry kernel(\n\t.param .u64 param_0\n)\n{\n\t.reg .pred %p<9>;\n\t.reg .b32 %r<99>;\n"
        "\t.reg .f32 %f<9>;\n\t.reg .b64 %rd<9>;\n"
        f"\t.shared .align 16 .b8 room[256];\n{PROLOGUE}{body}\n\tret;\n}}\n"
    )
    return parse(text)["kernel"]


def run(body: str, *, threads: int = 64, blocks: int = 1, given: int = 64) -> npt.NDArray[np.uint32]:
    """The 32-bit integers in global memory after the kernel."""
    memory = np.zeros(given + 64, np.uint32)
    memory = memory[-memory.ctypes.data % 256 // 4 :][:given]
    machine = Machine()
    machine.memory.add(memory.ctypes.data, memory.view(np.uint8))
    machine.launch(kernel_of(body), (blocks, 1, 1), threads, 0, int(memory.ctypes.data).to_bytes(8, "little"))
    return memory


FAULTS = {
    "a read beside a write": (OWN + READ, "reads what another thread writes"),
    "a write beside a read": (OWN + "bar.sync 0;\n" + READ + OWN, "writes what another thread reads"),
    "the same place": ("st.shared.u32 [room], %r1;", "two threads write at once"),
    "a barrier of the warp alone": (
        OWN + "bar.warp.sync -1;\nadd.s32 %r5, %r4, 128;\nand.b32 %r5, %r5, 255;\n" + READ,
        "reads what another thread writes",
    ),
    "an atomic operation beside a write": (
        "mov.u32 %r7, 1;\n@%p1 st.shared.u32 [%r4], %r1;\n@%p1 atom.shared.add.u32 %r6, [%r5], %r7;",
        "changes what another thread writes",
    ),
    "what nobody wrote": (READ, "reads what nobody wrote"),
    "behind shared memory": ("st.shared.u32 [%r4+4], %r1;", "bytes of shared memory"),
    "behind an allocation": ("st.global.u32 [%rd4+4], %r1;", "bytes into 256 bytes of global memory"),
    "before an allocation": ("st.global.u32 [%rd4+-4], %r1;", "an address outside all memory"),
    "a misaligned access": ("ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd4];", "no multiple of 16"),
    "a race in global memory": ("st.global.u32 [%rd2], %r1;", "two threads write at once"),
    "a barrier that some do not reach": ("@%p1 bra $E;\nbar.sync 0;\nbra.uni $E;\n$E:\nbar.sync 0;", "whole warps"),
    "different barriers": (
        "setp.lt.u32 %p2, %r1, 32;\n@%p2 bra $A;\nbar.sync 0;\nbra.uni $E;\n$A:\nbar.sync 0;\n$E:\n",
        "wait at different barriers",
    ),
    "a barrier under a predicate": ("@%p1 bar.sync 0;", "not the same in all threads"),
    "a shuffle in divergent code": ("@%p1 bra $E;\nshfl.sync.bfly.b32 %r6|%p2, %r1, 1, 31, -1;\n$E:\n", "not together"),
    "a copy that is not waited for": (
        "mul.lo.s32 %r6, %r1, 16;\nmov.u64 %rd5, %rd2;\nsetp.eq.u32 %p2, %r1, 0;\n"
        "@%p2 cp.async.cg.shared.global [%r3], [%rd5], 16, 16;\ncp.async.commit_group;\n"
        "cp.async.wait_group 1;\nbar.sync 0;\n@%p1 ld.shared.u32 %r6, [room];",
        "still being copied",
    ),
    "a copy that only its thread waited for": (
        "mov.u64 %rd5, %rd2;\nsetp.eq.u32 %p2, %r1, 0;\n"
        "@%p2 cp.async.cg.shared.global [%r3], [%rd5], 16, 16;\ncp.async.commit_group;\n"
        "cp.async.wait_group 0;\n@%p1 ld.shared.u32 %r6, [room];",
        "reads what another thread writes",
    ),
    "a copy to what others read": (
        OWN + "bar.sync 0;\n" + READ + "setp.eq.u32 %p2, %r1, 0;\nmov.u64 %rd5, %rd2;\n"
        "@%p2 cp.async.cg.shared.global [%r3], [%rd5], 16, 16;",
        "writes what another thread reads",
    ),
    "a word that is not waited for": (
        "cp.async.ca.shared.global [%r4], [%rd4], 4, 4;\ncp.async.commit_group;\n"
        "cp.async.wait_group 1;\nbar.sync 0;\n" + READ,
        "still being copied",
    ),
    "a word from a misaligned place": (
        "add.s64 %rd5, %rd2, 2;\ncp.async.ca.shared.global [%r4], [%rd5], 4, 4;",
        "no multiple of 4",
    ),
    "matrices from a part of a warp": (
        "@%p1 bra $E;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r3];\n$E:\n",
        "not together",
    ),
    "an unknown instruction": ("frobnicate.b32 %r6, %r1;", "does not know"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    body, words = FAULTS[fault]
    with pytest.raises(KernelError, match=words):
        run(body)


def test_what_is_right_passes() -> None:
    """Barriers, a barrier of a warp between neighbours, atomic operations, copies, loops of different lengths."""
    assert run(OWN + "bar.sync 0;\n" + READ + "st.global.u32 [%rd4], %r6;")[:4].tolist() == [1, 0, 3, 2]
    assert run(OWN + "bar.warp.sync -1;\n" + READ + "st.global.u32 [%rd4], %r6;")[62:].tolist() == [63, 62]
    assert run("atom.global.add.u32 %r6, [%rd2], %r1;", blocks=3)[0] == 3 * 63 * 32
    loop = "mov.u32 %r6, 0;\n$L:\nadd.s32 %r6, %r6, 2;\nsetp.le.u32 %p2, %r6, %r1;\n@%p2 bra $L;\n"
    assert run(loop + "bar.sync 0;\nst.global.u32 [%rd4], %r6;").tolist() == [2 * (i // 2 + 1) for i in range(64)]
    copy = (
        "st.global.u32 [%rd4], %r1;\nbar.sync 0;\nsetp.lt.u32 %p2, %r1, 16;\nmul.lo.s32 %r6, %r1, 16;\n"
        "add.s32 %r7, %r3, %r6;\nmul.wide.u32 %rd5, %r1, 16;\nadd.s64 %rd6, %rd2, %rd5;\n"
        "@%p2 cp.async.cg.shared.global [%r7], [%rd6], 16, 16;\ncp.async.commit_group;\ncp.async.wait_group 0;\n"
        "bar.sync 0;\n" + READ + "st.global.u32 [%rd4], %r6;"
    )
    assert run(copy)[:4].tolist() == [1, 0, 3, 2]
    words = (
        "st.global.u32 [%rd4], %r1;\ncp.async.ca.shared.global [%r4], [%rd4], 4, 4;\ncp.async.commit_group;\n"
        "cp.async.wait_group 0;\nbar.sync 0;\n" + READ + "st.global.u32 [%rd4], %r6;"
    )
    assert run(words)[:4].tolist() == [1, 0, 3, 2]


def test_threads_meet_where_their_ways_meet_wherever_that_stands() -> None:
    """First, some threads take a way that stands behind the place where they meet the others. Then, some leave a loop
    early, to a place that stands before the loop."""
    way = (
        "@%p1 bra $A;\nbra.uni $M;\n$M:\nbar.sync 0;\nst.global.u32 [%rd4], %r5;\nret;\n"
        "$A:\nmov.u32 %r5, 7;\nbra.uni $M;\n"
    )
    assert run(way)[:16].tolist() == [7] * 16
    loop = (
        "mov.u32 %r6, 0;\nbra.uni $L;\n$M:\nbar.sync 0;\nst.global.u32 [%rd4], %r6;\nret;\n"
        "$L:\nadd.s32 %r6, %r6, 2;\nsetp.gt.u32 %p2, %r6, %r1;\n@%p2 bra $M;\n"
        "bar.warp.sync -1;\nbra.uni $L;\n"
    )
    assert run(loop.replace("bar.warp.sync -1;\n", "")).tolist() == [2 * (i // 2 + 1) for i in range(64)]
    with pytest.raises(KernelError, match="not together"):
        run(loop)


def test_threads_that_have_ended_need_not_come_to_a_barrier() -> None:
    assert run("setp.lt.u32 %p2, %r1, 32;\n@%p2 ret;\nbar.sync 0;\nst.global.u32 [%rd4], %r1;")[63] == 63


def test_a_barrier_with_a_number_may_stand_at_several_places() -> None:
    """Writers at one, readers at the other."""
    body = (
        OWN + "setp.lt.u32 %p2, %r1, 32;\n@%p2 bra $A;\nbar.sync 1, 64;\nbra.uni $E;\n$A:\nbar.sync 1, 64;\n$E:\n"
        "xor.b32 %r5, %r4, 128;\n" + READ + "st.global.u32 [%rd4], %r6;"
    )
    assert run(body).tolist() == [i ^ 32 for i in range(64)]
    with pytest.raises(KernelError, match="different barriers"):
        run(body.replace("bar.sync 1, 64;", "bar.sync 2, 64;", 1))


@pytest.mark.parametrize("way", ["bfly", "up", "down", "idx"])
def test_shuffles(way: str) -> None:
    clamp = 0 if way == "up" else 31
    found = run(f"shfl.sync.{way}.b32 %r6|%p2, %r1, 3, {clamp}, -1;\nst.global.u32 [%rd4], %r6;")[:32].tolist()
    lanes = range(32)
    expected = {
        "bfly": [lane ^ 3 for lane in lanes],
        "up": [lane - 3 if lane >= 3 else lane for lane in lanes],
        "down": [lane + 3 if lane < 29 else lane for lane in lanes],
        "idx": [3] * 32,
    }
    assert found == expected[way]


@pytest.mark.parametrize(
    ("op", "given", "expected"),
    [
        ("cvt.rzi.s32.f32", [[2.9, -2.9, 3e9, float("nan")]], [2, -2, 2**31 - 1, 0]),
        ("cvt.rni.f32.f32", [[0.5, 1.5, -2.5]], [0, 2, -2]),
        ("cvt.rn.bf16.f32", [[1.0, 1.00390625, 1.01171875]], [0x3F80, 0x3F80, 0x3F82]),
        ("cvt.rn.f16x2.e4m3x2", [[0x3880, 0x7E01]], [0x3C008000, 0x5F001800]),
        (
            "cvt.rn.satfinite.e4m3x2.f32",
            [[1.0, 500.0, -1e-3, float("nan")], [-0.0, 1.0625, 17.0, -464.0]],
            [0x3880, 0x7E38, 0x8158, 0x7FFE],
        ),
        ("cvt.sat.f32.f32", [[-1.0, 0.25, 7.0]], [0, 0.25, 1]),
        ("setp.geu.f32", [[1.0, float("nan"), 0.0], [1.0, 1.0, 1.0]], [True, True, False]),
        ("setp.gt.and.s32", [[3, 3, -1], [2, 2, 2], [True, False, True]], [True, False, False]),
        ("shr.s32", [[-8, -8], [1, 99]], [-4, -1]),
        ("shl.b32", [[1, 1], [31, 32]], [2**31, 0]),
        ("div.s32", [[-7, 7, 6], [2, -2, -3]], [-3, -3, -2]),
        ("rem.s32", [[-7, 7], [2, -2]], [-1, 1]),
        ("mul.wide.s32", [[-3, 2**31 - 1], [2**30, 2]], [-3 * 2**30, 2**32 - 2]),
        ("mul.hi.u32", [[2**31, 3], [6, 5]], [3, 0]),
        ("mad.lo.s32", [[7], [-2], [5]], [-9]),
        ("bfi.b32", [[0xF], [0], [8], [2]], [0x300]),
        ("bfe.u32", [[0xABCD], [4], [8]], [0xBC]),
        ("prmt.b32", [[0x33221100], [0x77665544], [0x6420]], [0x66442200]),
        ("lop3.b32", [[0b1100], [0b1010], [0b1001], [0xE8]], [0b1000]),
        ("clz.b32", [[1, 0, 2**31]], [31, 32, 0]),
        ("popc.b32", [[255, 0]], [8, 0]),
        ("copysign.f32", [[-1.0, 1.0], [3.0, -3.0]], [-3, 3]),
        ("fma.rm.f32", [[1 + 2.0**-23], [1 + 2.0**-23], [0.0]], [1 + 2.0**-22]),
        ("selp.b32", [[1, 1], [2, 2], [True, False]], [1, 2]),
    ],
)
def test_arithmetic(op: str, given: list[list[float]], expected: list[float]) -> None:
    operation = find(tuple(op.split(".")))
    assert operation is not None
    arrays = [np.array(x).astype(dtype_of(kind)) for x, kind in zip(given, operation.sources, strict=True)]
    with np.errstate(all="ignore"):
        found = np.asarray(operation.compute(*arrays)).astype(dtype_of(operation.result))
    assert found.tolist() == expected


def test_a_kernel_that_does_not_wait_for_the_one_before_it_is_seen() -> None:
    wait, store = "griddepcontrol.wait;\n", "st.global.u32 [%rd4], %r1;\n"
    assert_waits("right", kernel_of(wait + store))
    for body in (store, store + wait, wait):
        with pytest.raises(AssertionError, match="wrong"):
            assert_waits("wrong", kernel_of(body))
