"""The interpreter itself: warps that wait for some others of their block, by signals and by barriers of a number."""

import pytest

from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.test_ptx_machine import run

# Each thread of the first warp writes a word, the second warp reads them.
MAKE = "setp.eq.u32 %p2, %r1, 0;\nmov.u32 %r7, 32;\n@%p2 mbarrier.init.shared.b64 [room+128], %r7;\nbar.sync 0;\n"
PART = "setp.ge.u32 %p3, %r1, 32;\n@%p3 bra $READS;\n"
WRITE = "st.shared.u32 [%r4], %r1;\n"
ARRIVE = "mbarrier.arrive.shared.b64 _, [room+128];\n"
WAIT = "$W:\nmbarrier.try_wait.parity.shared.b64 %p4, [room+128], 0;\n@!%p4 bra $W;\n"
READ = "sub.u32 %r5, %r4, 128;\nld.shared.u32 %r6, [%r5];\nst.global.u32 [%rd4], %r6;\n"
SIGNALLED = MAKE + PART + WRITE + ARRIVE + "ret;\n$READS:\n" + WAIT + READ
COPY = (
    "mul.wide.u32 %rd6, %r1, 4;\nadd.s64 %rd5, %rd2, %rd6;\ncp.async.ca.shared.global [%r4], [%rd5], 4, 4;\n"
    "cp.async.mbarrier.arrive.noinc.shared.b64 [room+128];\n"
)
COPIED = SIGNALLED.replace(WRITE + ARRIVE, COPY)
PASSED = PART + WRITE + "barrier.arrive 1, 64;\nret;\n$READS:\nbarrier.sync 1, 64;\n" + READ


def test_what_is_right_passes() -> None:
    assert run(SIGNALLED)[32:].tolist() == list(range(32))
    assert run("st.global.u32 [%rd4], %r1;\n" + COPIED)[32:].tolist() == list(range(32))
    assert run(PASSED)[32:].tolist() == list(range(32))


def test_a_signal_is_given_again_and_again() -> None:
    """The second warp answers by another one, so that the first may write anew."""
    twice = (
        MAKE.replace("bar.sync", "@%p2 mbarrier.init.shared.b64 [room+136], %r7;\nbar.sync")
        + "mov.u32 %r8, 0;\n"
        + PART
        + "$WRITES:\nadd.u32 %r9, %r1, %r8;\nst.shared.u32 [%r4], %r9;\n"
        + ARRIVE
        + "$V:\nmbarrier.try_wait.parity.shared.b64 %p4, [room+136], %r8;\n@!%p4 bra $V;\n"
        + "add.u32 %r8, %r8, 1;\nsetp.lt.u32 %p5, %r8, 2;\n@%p5 bra $WRITES;\nret;\n$READS:\n"
        + WAIT.replace(", 0;", ", %r8;")
        + READ
        + "mbarrier.arrive.shared.b64 _, [room+136];\n"
        + "add.u32 %r8, %r8, 1;\nsetp.lt.u32 %p5, %r8, 2;\n@%p5 bra $READS;\n"
    )
    assert run(twice)[32:].tolist() == list(range(1, 33))
    with pytest.raises(KernelError, match=r"a race|for ever"):
        run(twice.replace("@!%p4 bra $V;\n", ""))


FAULTS = {
    "no wait": (SIGNALLED.replace(WAIT, ""), "reads what"),
    "a wait that is tried once": (SIGNALLED.replace("@!%p4 bra $W;\n", ""), "reads what"),
    "a wait for the time before": (SIGNALLED.replace(", 0;\n@!", ", 1;\n@!"), "reads what|for ever"),
    "a write behind the signal": (
        SIGNALLED.replace(WRITE + ARRIVE, ARRIVE + WRITE),
        "reads what another thread writes",
    ),
    "one lane signals for its warp": (
        SIGNALLED.replace("%r7, 32", "%r7, 1").replace(ARRIVE, "@%p2 " + ARRIVE),
        "reads what another thread writes",
    ),
    "too many arrivals": (SIGNALLED.replace("%r7, 32", "%r7, 16"), "takes 16 more"),
    "too few arrivals": (SIGNALLED.replace("%r7, 32", "%r7, 33"), "for ever"),
    "a signal that is made meanwhile": (SIGNALLED.replace("bar.sync 0;\n", ""), "while another thread makes it"),
    "a signal that nobody makes": (SIGNALLED.replace("@%p2 mbarrier.init", "@!%p1 mbarrier.init"), "write at once"),
    "another signal": (SIGNALLED.replace("_, [room+128]", "_, [room+136]"), "nobody has made"),
    "a misaligned signal": (SIGNALLED.replace("[room+128]", "[room+132]"), "no multiple of 8"),
    "a signal behind shared memory": (SIGNALLED.replace("[room+128]", "[room+256]"), "bytes of shared memory"),
    "a signal before the copies": (
        COPIED.replace("cp.async.mbarrier.arrive.noinc.shared.b64 [room+128];\n", ARRIVE),
        "still being copied",
    ),
    "a barrier that the reader only passes": (
        PASSED.replace("arrive", "X").replace("sync", "arrive").replace("X", "sync"),
        "reads what another thread writes|nobody wrote",
    ),
    "a barrier that takes more": (PASSED.replace(", 64", ", 96"), "for ever"),
    "a barrier that takes fewer": (PASSED.replace(", 64", ", 32"), "reads what"),
    "a barrier of two sizes": (PASSED.replace("sync 1, 64", "sync 1, 32"), "takes 64 threads elsewhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    body, words = FAULTS[fault]
    with pytest.raises(KernelError, match=words):
        run(body)


def test_one_lane_may_signal_for_its_warp_behind_a_barrier_of_it() -> None:
    body = SIGNALLED.replace("%r7, 32", "%r7, 1").replace(ARRIVE, "bar.warp.sync -1;\n@%p2 " + ARRIVE)
    assert run(body)[32:].tolist() == list(range(32))
