"""What the CPU targets promise, and the functions beside the sessions."""

import ast
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot import _cpu
from ingot.configs.runtime import ISA_BASES, isa_includes
from ingot.errors import TargetError, UsageError
from ingot.plugins.cpu import native as cpu
from ingot.plugins.registry import find_op, find_target, fit_targets, targets
from tests.plugins.cpu.one_step import runnable_isa

pytestmark = pytest.mark.native

STUB = Path(ingot.__file__).parent / "_cpu.pyi"


@pytest.mark.slow
def test_without_the_compiled_module_help_works_and_the_error_says_how_to_compile() -> None:
    program = (
        "import sys; sys.modules['ingot._cpu'] = None\n"
        "from ingot.cli import app; code = app.run(['help', 'targets'])\n"
        "from ingot.plugins.cpu.native import _cpu\n"
        "try: _cpu.cores()\n"
        "except Exception as error: print(error)\n"
        "sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "A target is a kind of machine" in result.stdout
    assert "the compiled module of ingot is missing" in result.stdout
    assert "make native" in result.stdout


def test_levels_are_a_tree_and_the_module_has_the_same() -> None:
    levels = tuple((name, base or None) for name, base, _ in _cpu.isa_levels())
    assert dict(levels) == ISA_BASES
    names = tuple(name for name, _ in levels)
    assert cpu.preferred_isas() == names
    assert tuple(target.name for target in targets(["cpu"])) == tuple(f"cpu/{name}" for name in names)
    assert isa_includes("amx") == ("amx", "avx512bf16", "avx512", "avx2")
    assert isa_includes("avxvnni") == ("avxvnni", "avx2")


@pytest.mark.parametrize("level", ISA_BASES)
def test_each_target_lists_its_kernels_best_first(level: str) -> None:
    names, order = find_target(f"cpu/{level}").kernels(), isa_includes(level)
    levels = [name.split(".")[2] for name in names]
    assert set(levels) == set(order)
    assert levels == sorted(levels, key=order.index)
    assert {name.split(".")[0] for name in names} <= set(cpu_ops())
    assert "rms_norm.f32.avx2" in names


def cpu_ops() -> list[str]:
    """Every op, the test's own view of what exists."""
    names = {name.split(".")[0] for name in cpu.kernel_table()}
    return [name for name in names if find_op(name)]


def _of_level(level: str) -> set[str]:
    return {name.rsplit(".", 1)[0] for name in cpu.kernel_table() if name.endswith(f".{level}")}


def test_every_level_has_the_same_kernels() -> None:
    assert _of_level("avx2") == _of_level("avx512")


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "like", "problem"),
    [
        ("rms_norm.f32.avx9", "layer_norm.f32.avx2", ""),
        ("cube.f32.avx9", "add.f32.avx2", ""),  # an op without attributes, as docs/how-to/add.md says
        ("rms_norm.f32.avx9", "add.f32.avx2", "takes another struct than its op"),
        ("matmul.w8.avx9", "moe_down.w8.avx2", "takes another struct than its op"),
        ("rmsnorm.f32.avx9", "rms_norm.f32.avx2", "computes an op that has no binding with its struct"),
        ("sample.f32.avx9", "sample.f32.avx2", ""),
    ],
)
def test_a_kernel_with_another_struct_than_its_op_is_refused(name: str, like: str, problem: str) -> None:
    """Of its own kernels the module asks this when it is loaded, and fails to load."""
    assert _cpu.registration_problem(name, like) == (f"kernel {name} {problem}" if problem else "")


@pytest.mark.native
def test_every_kernel_of_avx512_has_a_twin() -> None:
    runnable_isa("rms_norm.f32.avx512emu")  # skips where there are none
    assert _of_level("avx512emu") == _of_level("avx512")


def test_attention_runs_on_tiles_where_the_target_has_them() -> None:
    def first(level: str, dtype: str) -> str:
        return next(name for name in find_target(level).kernels() if name.startswith(f"paged_attention.{dtype}."))

    assert first("cpu/amx", "bf16") == "paged_attention.bf16.amx"
    assert first("cpu/amx", "int8") == "paged_attention.int8.avx512bf16"
    assert first("cpu/avx512bf16", "bf16") == "paged_attention.bf16.avx512bf16"
    assert first("cpu/avx512", "bf16") == "paged_attention.bf16.avx512"
    assert cpu.peak_name("paged_attention.bf16.amx") == "bf16.amx"


def test_activations_follow_the_kernel() -> None:
    activations = find_target("cpu/amx").activations
    assert activations("matmul.bf16.amx") == activations("matmul.w8.amx") == "bf16"
    assert activations("matmul.bf16.avx512bf16") == activations("moe_down.bf16.avx512bf16emu") == "bf16"
    assert (
        activations("matmul.f32.avx512") == activations("matmul.bf16.avx512") == activations("matmul.w4.avx2") == "f32"
    )
    assert activations("matmul.w8a8.amx") == activations("matmul.w4a8.avx2") == "int8"
    assert activations("matmul.f8.avx512bf16") == activations("moe_down.w4ks.avx512bf16emu") == "bf16_inputs"
    assert activations("matmul.f8.amx") == "bf16"


_FASTER = next(name for name in cpu.preferred_isas() if name.startswith("avx512"))  # of the CPU that runs this


def test_the_dot_product_of_bf16_is_preferred_where_it_is_faster() -> None:
    """On AMD's CPUs it does twice as many operations as float32, on Intel's half as many."""
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    preferred = ("avx512bf16", "avx512") if amd else ("avx512", "avx512bf16")
    assert cpu.preferred_isas() == ("amx", *preferred, "avxvnni", "avx2")


MACHINES = {  # what the CPU adds → the level that is preferred, what the machine is said to offer
    (): ("none", "none"),
    ("avx2",): ("avx2", "avx2"),  # Zen 3
    ("avx2", "avxvnni"): ("avxvnni", "avxvnni"),  # Alder Lake
    ("avx2", "avx512"): ("avx512", "avx512"),  # Ice Lake
    ("avx2", "avx512", "avx512bf16"): (_FASTER, "avx512bf16"),  # Zen 4, Cooper Lake
    ("avx2", "avxvnni", "avx512", "avx512bf16"): (_FASTER, "avx512bf16 and avxvnni"),  # Zen 5
    ("avx2", "avxvnni", "avx512", "avx512bf16", "amx"): ("amx", "amx and avxvnni"),  # Sapphire Rapids
}


@pytest.mark.parametrize("here", MACHINES)
def test_missing_says_what_and_what_next(here: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [(name, base, name in here) for name, base, _ in _cpu.isa_levels()]
    monkeypatch.setattr("ingot.plugins.cpu.native._cpu.isa_levels", lambda: levels)
    preferred, offers = MACHINES[here]
    assert cpu.detect_isa() == preferred
    for cap in (None, *ISA_BASES):
        usable = [name for name, _, there in levels if there and name in isa_includes(cap or name)]
        for level in ISA_BASES:
            reason = find_target(f"cpu/{level}").run_blocker(cap)
            assert (reason is None) == (level in usable)
            if reason is not None:
                assert f"needs {level.upper()}" in reason
                assert f"offers {offers}" in reason
                assert reason.endswith(" by --isa") == (len(usable) < len(here))
                fit = fit_targets([f"cpu/{level}"], where="e", isa=cap)
                with pytest.raises(TargetError) as caught:
                    fit.best()
                best = f"cpu/{usable[0]}" if usable else "ref"
                assert f"ingot build --target {best};" in str(caught.value.hint)
                assert str(caught.value).count("next:") == 1


def test_a_module_without_the_kernels_of_a_level_neither_builds_nor_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make quickstart` compiles it on a machine with AVX2 alone, taken to one with more."""
    names = [name for name in _cpu.kernel_names() if name.endswith(".avx2")]
    monkeypatch.setattr("ingot.plugins.cpu.target._cpu.kernel_names", lambda: names)
    monkeypatch.setattr("ingot.plugins.cpu.target.offered_isas", lambda: tuple(ISA_BASES))
    for level in ("avxvnni", "avx512", "avx512bf16", "amx"):
        target = find_target(f"cpu/{level}")
        assert "make wheel" in str(target.build_blocker())
        assert "make wheel" in str(target.run_blocker())
    assert find_target("cpu").name == "cpu/avx2"
    assert find_target("cpu/avx2").build_blocker() is None


def test_an_unknown_isa_is_a_wrong_option() -> None:
    with pytest.raises(UsageError, match="there is no ISA 'sse9'"):
        find_target("cpu/avx2").run_blocker("sse9")


@pytest.mark.parametrize("size", [0, 1, 15, 63, 64, 65, 127, 128, 1000, 100_003])
def test_crc32_is_zlibs(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert cpu.crc32(data) == zlib.crc32(data.tobytes())
    assert cpu.crc32(data, 0xDEADBEEF) == zlib.crc32(data.tobytes(), 0xDEADBEEF)


def test_read_bandwidth_is_a_speed() -> None:
    assert 1e8 < cpu.read_bandwidth(16 << 20) < 1e13


def test_the_stub_names_what_the_module_has() -> None:
    tree = ast.parse(STUB.read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    public = {name for name in dir(_cpu) if not name.startswith("_")}
    assert functions | classes.keys() == public
    methods = {node.name for node in classes["Session"].body if isinstance(node, ast.FunctionDef)} - {"__init__"}
    assert methods == {name for name in dir(_cpu.Session) if not name.startswith("_")}
