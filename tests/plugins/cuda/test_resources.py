"""What kernels take of a GPU is what was recorded; nothing spills. nvcc compiles for GPUs that it does not see."""

import dataclasses
import json
from pathlib import Path

import pytest

from ingot.plugins.cuda import compiler
from ingot.plugins.cuda.compiler import Compiler, MachineCode, Resources, find_compiler, read_report
from tests.plugins.cuda.kept_code import kept_on_disk
from tests.plugins.cuda.resources import (
    ARCHITECTURES,
    CODES_OF_KV,
    FILE,
    LARGE,
    OF_FP8,
    PROMPTS,
    USUAL,
    WIDE,
    label,
    measure,
    recorded,
)


def test_nothing_that_was_recorded_spills() -> None:
    kernels = [(name, what) for report in recorded().values() for name, what in report.items()]
    assert {name.split()[0] for name in recorded()} == set(ARCHITECTURES)
    assert [name for name, what in kernels if what["spill_stores"] or what["spill_loads"] or what["stack"]] == []
    most = {"attention_prefill": 255}  # two blocks of 128 threads fill a multiprocessor's registers
    assert [name for name, what in kernels if what["registers"] > most.get(name, 240)] == []
    assert max(what["shared"] for _, what in kernels) <= 16 << 10


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a"])
def test_kernels_take_what_was_recorded(architecture: str) -> None:
    """Another release of nvcc may allot other registers, but must not spill. Of older GPUs the usual kernels and
    those of FP8 alone: each compilation takes half a minute."""
    nvcc = find_compiler()
    if nvcc is None:
        pytest.skip("this machine lacks nvcc (pip install nvidia-cuda-nvcc)")
    for each in (USUAL, WIDE, *CODES_OF_KV, *PROMPTS) if architecture == "sm_90a" else (USUAL, OF_FP8):
        found, expected = measure(each, architecture), recorded()[label(each, architecture)]
        assert found.keys() == expected.keys()
        if nvcc.version == json.loads(FILE.read_text())["nvcc"]:
            assert found == expected, "run: python -m tests.plugins.cuda.resources"
        assert [name for name, what in found.items() if what["spill_stores"] or what["spill_loads"]] == []


def test_a_report_is_read() -> None:
    text = """ptxas info    : Compiling entry function 'one' for 'sm_89'
ptxas info    : Function properties for one
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 37 registers, used 1 barriers, 128 bytes smem, 388 bytes cmem[0]
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 9 registers
"""
    one, two = read_report(text)["one"], read_report(text)["two"]
    assert (one.registers, one.stack, one.spill_stores, one.spill_loads, one.shared) == (37, 8, 4, 12, 128)
    assert (two.registers, two.stack, two.shared) == (9, 0, 0)


def test_machine_code_is_compiled_once(tmp_path: Path) -> None:
    """For the next process too; anew when a source, a macro or the compiler is another one."""
    compiled: list[compiler._Work] = []
    code = MachineCode(
        image=b"cubin", kernels={"k": Resources(registers=1, stack=2, spill_stores=3, spill_loads=4, shared=5)}
    )

    def compile_once(work: compiler._Work) -> MachineCode:
        compiled.append(work)
        return code

    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cu").write_text("one")
    nvcc = Compiler(path=Path("nvcc"), origin="", version="13", architectures=())
    work = compiler._Work(
        compiler=nvcc, sources=sources, specialisation=USUAL, architecture="sm_90a", progress=lambda *said: None
    )
    for _ in range(2):
        assert kept_on_disk(tmp_path / "kept", compile_once)(work) == code
    assert len(compiled) == 1
    others = [dataclasses.replace(work, architecture="sm_80"), dataclasses.replace(work, specialisation=LARGE)]
    for each in [*others, dataclasses.replace(work, compiler=dataclasses.replace(nvcc, version="14"))]:
        kept_on_disk(tmp_path / "kept", compile_once)(each)
    (sources / "a.cu").write_text("two")
    kept_on_disk(tmp_path / "kept", compile_once)(work)
    assert len(compiled) == 5
