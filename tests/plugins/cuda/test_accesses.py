"""Every access of every kernel to memory on the emulated GPU: inside what is allocated, and without races in shared
memory. Small cases: each access is looked at."""

import ctypes
import os
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import TargetError
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from tests.plugins.cuda import test_draws as draws
from tests.plugins.cuda import test_experts as experts
from tests.plugins.cuda import test_fp8_experts as fp8_experts
from tests.plugins.cuda import test_fp8_products as fp8_products
from tests.plugins.cuda import test_kernels
from tests.plugins.cuda import test_latent as latent
from tests.plugins.cuda import test_own_products as own_products
from tests.plugins.cuda import test_states as states
from tests.plugins.cuda import test_wide_experts as wide_experts
from tests.plugins.cuda.decode_steps import BLOCKS, SEQUENCES, compare_decode, wide_group
from tests.plugins.cuda.emulation import Emulation
from tests.plugins.cuda.planted import plant
from tests.plugins.cuda.test_paged_attention import check
from tests.spanning import often, spanning, values


@pytest.fixture
def checked(gpu: ctypes.CDLL, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The emulated GPU, with kernels that check."""
    monkeypatch.setenv("PATH", str(emulation.checked) + os.pathsep + os.environ["PATH"])
    return gpu


ATTENTION = [
    (dtype, heads, dim, splits)
    for dtype, heads, dim in (
        *((DType.BF16, 4, 12), (DType.BF16, 4, 16), (DType.BF16, 24, 12), (DType.BF16, 24, 88), (DType.F32, 4, 16)),
        *((DType.BF16, 4, 260), (DType.BF16, 24, 260), (DType.I8, 4, 12), (DType.I8, 4, 88), (DType.I8, 4, 260)),
        *((DType.F8, 4, 88), (DType.F8, 4, 80), (DType.I8, 4, 16), (DType.I8, 24, 64), (DType.F8, 24, 96)),
    )
    for splits in (7, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads", "dim", "splits"), spanning(ATTENTION, *values(4)))
def test_attention(checked: ctypes.CDLL, dtype: DType, heads: int, dim: int, splits: int) -> None:
    """Also splits without tokens, groups that go through the tile of prefill, and dims that are padded."""
    parts = [(100, 1), (3, 1), (0, 7)][: 3 if splits == 1 else 2]
    check(checked, dtype, parts, heads=heads, kv_heads=1, dim=dim, splits=splits)


@pytest.mark.slow
def test_other_kernels(checked: ctypes.CDLL) -> None:
    cases = [*test_kernels._norms(), *test_kernels._elementwise(), *test_kernels._columns()]
    for case in (*cases, *test_kernels._embeddings(DType.BF16), *test_kernels._matmuls(DType.BF16)):
        test_kernels._check(checked, case)


@pytest.mark.slow
def test_experts(checked: ctypes.CDLL) -> None:
    experts.check(checked, experts.DOWN, "bf16", 4)
    experts.check_routes(checked, 2)
    wide_experts.check(checked, experts.GATE_UP, "bf16", 20, (72, 304), 5)
    wide_experts.check(checked, experts.DOWN, "w4tsg16", 110, (33, 72), 1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w3t", "w4ts", "w5ks", "w6k", "w8t", "f8"])
def test_kept_codes(checked: ctypes.CDLL, precision: str) -> None:
    own_products.check_numbers(checked, precision, 3)
    own_products.check_numbers(checked, precision, 20)
    own_products.check_numbers(checked, precision, 20, "sm90a")


@pytest.mark.slow
@pytest.mark.parametrize("units", fp8_products.UNITS)
def test_inputs_in_fp8(checked: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, units: str) -> None:
    """Steps and panels that end inside of a tile, with parts of K; likewise of experts."""
    fp8_products.take(monkeypatch, units)
    for group, rows, shape, which in ((128, 3, (33, 1100, 0), 3), (0, 17, (66, 176, 1), 2), (128, 66, (40, 304, 0), 5)):
        fp8_products.check(checked, units, group, rows, shape, which)
    fp8_experts.check(checked, units, experts.GATE_UP, 0, 20, (36, 150), 5)
    fp8_experts.check(checked, units, experts.DOWN, 128, 110, (33, 150), 1)


@pytest.mark.slow
def test_layers_with_states(checked: ctypes.CDLL) -> None:
    """Prompts in tiles that other warps prepare, whole and not, and states that are left in place."""
    states.check(checked, "causal_conv", states.CONVOLUTIONS[1])
    for name in ("by_dim", "odd", "mamba"):
        states.check(checked, "linear_attention", states.LINEARS[name], steps=1)


@pytest.mark.slow
def test_latent_attention(checked: ctypes.CDLL) -> None:
    latent.check(checked, DType.BF16, 20, latent.SMALL, [(40, 1), (3, 1)], splits=3)
    latent.check(checked, DType.BF16, 5, latent.SMALL, [(0, 7)])


@pytest.mark.slow
@pytest.mark.parametrize(("rotary", "norm"), [(16, "head"), (10, "wide")])
def test_rope(checked: ctypes.CDLL, rotary: int, norm: str) -> None:
    test_kernels.test_rope_and_cache(checked, DType.BF16, 0, rotary, norm)


@pytest.mark.slow
def test_draws(checked: ctypes.CDLL) -> None:
    draws.test_random_draws_are_those_of_the_specification(checked, 40, 0.9)


def test_draws_with_rules(checked: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    draws.test_every_rule_is_applied_on_the_device(checked, monkeypatch, 33)


SYNC = "    __syncthreads();"
FAULTS = {  # what → (file, the right text, the wrong one)
    "no barrier after a load": ("decode_attention.cuh", f"<Shape::kStages - 1>();\n{SYNC}", "<Shape::kStages - 1>();"),
    "no barrier before a load": ("decode_attention.cuh", f"view);\n{SYNC}\n  }}", "view);\n  }"),
    "a block before the pool": ("paged_attention.cuh", "/ kBlockTokens];", "/ kBlockTokens] - (1 << 24);"),
}


PROMPT_FAULTS = {  # the same, in the kernel of prompts; head_dim
    "no barrier before a tile": (
        "prefill_attention.cuh",
        "      __syncthreads();  // the tile is here",
        "      // ",
        12,
    ),
    "no barrier before keys": (
        "prefill_attention.cuh",
        "      __syncthreads();  // the keys are here",
        "      // ",
        100,
    ),
    "no barrier before values": (
        "prefill_attention.cuh",
        "      __syncthreads();  // the values are",
        "      // ",
        100,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", often(PROMPT_FAULTS, ("no barrier before a tile", "no barrier before values")))
def test_faults_of_prompts_are_seen(
    checked: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    *planted, dim = PROMPT_FAULTS[fault]
    plant(monkeypatch, tmp_path, *map(str, planted))
    with pytest.raises(TargetError, match="LAUNCH_FAILED"):
        check(checked, DType.BF16, [(0, 70)], heads=2, kv_heads=1, dim=int(dim))
    assert "a race" in capfd.readouterr().err


CODE_FAULTS = {  # the same over codes, and waits: file, the right text, the wrong one, query heads of a KV head, dims
    "no wait of a warp": ("decode_codes.cuh", "copy_wait<kStages - 1>();", "", 4, 64),
    "a warp does not meet after a wait": ("decode_codes.cuh", "__syncwarp();  // what", "// what", 4, 64),
    "a warp does not meet before a load": ("decode_codes.cuh", "__syncwarp();  // all lanes", "// all lanes", 4, 64),
    "no barrier before sums": ("decode_codes.cuh", "__syncthreads();  // all warps", "// all warps", 4, 64),
    "no barrier after queries": ("decode_codes.cuh", "__syncthreads();  // the queries", "// the queries", 4, 64),
    "no wait of a thread": ("prefill_pages.cuh", "copy_wait<kKeys && kValues ? 0 : 1>();", "", 24, 64),
    "a wait for the wrong copies": ("prefill_pages.cuh", "kValues ? 0 : 1>", "kValues ? 0 : 2>", 24, 96),
    "scales in the place of others": ("prefill_attention.cuh", "kCodesAhead ? 4 : kStages", "kStages", 24, 64),
    "no barrier before a tile": (*PROMPT_FAULTS["no barrier before a tile"][:3], 24, 64),
    "no barrier before keys": (*PROMPT_FAULTS["no barrier before keys"][:3], 24, 96),
    "no barrier before values": (*PROMPT_FAULTS["no barrier before values"][:3], 24, 96),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", often(CODE_FAULTS, ("no wait of a warp", "no wait of a thread")))
def test_faults_over_codes_are_seen(
    checked: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Without a wait, copies that come late give other bits than those that come at once."""
    file, right, wrong, heads, dim = CODE_FAULTS[fault]
    plant(monkeypatch, tmp_path, file, right, wrong)
    with pytest.raises((TargetError, AssertionError), match=r"LAUNCH_FAILED|not equal"):
        check(checked, DType.I8, [(300, 1), (3, 1)], heads=heads, kv_heads=1, dim=dim)
    assert ("a race" in capfd.readouterr().err) == (not fault.startswith("no wait"))


WIDE_FAULTS = (  # where a barrier stands in wide_attention.cuh
    "// the keys are here, and everybody",
    "// everybody is done with the keys, and",
    "// the values and their weights",
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", WIDE_FAULTS)
def test_faults_of_wide_heads_are_seen(
    checked: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """The barrier is missing."""
    plant(monkeypatch, tmp_path, "wide_attention.cuh", f"__syncthreads();  {fault}", fault)
    with pytest.raises(TargetError, match="LAUNCH_FAILED"):
        check(checked, DType.BF16, [(0, 40)], heads=2, kv_heads=1, dim=260)
    assert "a race" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("fault", often(FAULTS, ("no barrier before a load", "a block before the pool")))
def test_faults_are_seen(
    checked: ctypes.CDLL, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """Faults that a GPU may forgive for a long time. Each is planted in a copy of the sources."""
    plant(monkeypatch, tmp_path, *FAULTS[fault])
    with pytest.raises(TargetError, match="LAUNCH_FAILED"):
        test_attention(checked, DType.BF16, 4, 12, 7)
    assert ("not allocated" if "pool" in fault else "a race") in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("group", often((3, 32), (3,)))
def test_a_whole_session(checked: ctypes.CDLL, tmp_path: Path, group: int) -> None:
    """Prompts, and graphs with idle rows."""
    config = BuildConfig(
        target="cuda/sm90", precision="bf16", tokens_per_block=16, max_batch_size=SEQUENCES, max_num_tokens=48
    )
    build(config, wide_group(tmp_path, group), tmp_path / "e")
    engine = open_engine(tmp_path / "e")
    options = SessionOptions(num_blocks=(BLOCKS,))
    session = find_target("cuda/sm90").open_session(engine.plan, engine.weights, options)
    compare_decode(session, engine, (5, 7, 2), 2e-2)
    session.close()
