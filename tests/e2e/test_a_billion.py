"""A shape of 1.1 billion weights in every precision: what it computes, how large it is, what it takes to run. Slow."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.dtypes import Precision
from ingot.engine import open_engine
from tests.e2e.command import ingot
from tests.oracle.plan_float64 import ATTENDED, compare_with_float64

pytestmark = [pytest.mark.slow, pytest.mark.long]

LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 22, 2048, 5632, 32000, 32, 4
SHAPE = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = [
    ("f32", "auto"),
    ("bf16", "auto"),
    *((precision, activations) for precision in ("w8", "w4g128", "w4g64", "w4g32") for activations in ("int8", "bf16")),
]
POSITIONS = 64
ROUNDING = 4 * math.sqrt(INNER) * 2.0**-24  # of sums of INNER numbers in float32, in parts of the largest logit
ALLOWANCE = 150 << 20  # bytes beside engine and KV cache
TABLES = 4 << 20  # bytes of norms, frequencies, plan, and of pieces that begin on a multiple of 2 MiB

GENERATE = f"""
import sys
import numpy as np
from ingot.runtime.model_runner import ModelRunner

runner = ModelRunner.from_dir(sys.argv[1])
prompts = np.random.default_rng(0).integers(3, {VOCAB}, (4, 64)).tolist()
runner.generate(prompts, max_new_tokens=8, end_id=-1)
print(runner.stats()["blocks_total"] * runner.engine.plan.block_bytes)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("billion")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    random = ("--config", folder / "config.json", "--random_weights", 1)
    ingot("convert", *random, "--output_dir", folder / "c").succeeds()
    yield folder / "c"
    shutil.rmtree(folder)


def bits(precision: Precision, columns: int) -> float:
    """Of one weight: itself, its part of a multiplier, and of the scale and the sum of its row."""
    if not precision.dtype.is_quantised:
        return 8 * precision.dtype.itemsize
    shared = 8 / precision.group if precision.group else 0
    return (4 if precision.group else 8) + shared + 64 / columns


def expected_bytes(precision: Precision) -> float:
    """Of all products and of the table."""
    head = Precision.parse("w8") if precision.group else precision
    qkv = (HEADS + 2 * KV_HEADS) * HIDDEN // HEADS
    layer = (qkv + HIDDEN + 2 * INNER) * HIDDEN * bits(precision, HIDDEN) + HIDDEN * INNER * bits(precision, INNER)
    table = 8 + 32 / HIDDEN if precision.dtype.is_quantised else bits(precision, HIDDEN)
    return (LAYERS * layer + VOCAB * HIDDEN * (bits(head, HIDDEN) + table)) / 8


def most_resident(engine: Path) -> tuple[int, int]:
    """(bytes that a process had resident at most while it generated, seen from outside; bytes of its KV cache)."""
    process = subprocess.Popen([sys.executable, "-c", GENERATE, str(engine)], stdout=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        with contextlib.suppress(OSError, KeyError):  # the process may end at any moment
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            most = max(most, int(dict(line.split(":", 1) for line in status)["VmRSS"].split()[0]) * 1024)
        time.sleep(0.002)
    assert process.stdout is not None
    with process.stdout as out:
        return most, int(out.read())


@pytest.mark.parametrize(("precision", "activations"), KINDS)
def test_a_billion_weights(precision: str, activations: str, checkpoint: Path) -> None:
    engine = checkpoint.with_name("engine")
    options = ("--precision", precision, "--activations", activations, "--max_batch_size", 4, "--max_seq_len", 512)
    build = ("build", "--checkpoint_dir", checkpoint, "--output_dir", engine, *options, "--no_autotune")
    ingot(*build).succeeds()
    size, wanted = (engine / "rank0.engine").stat().st_size, expected_bytes(Precision.parse(precision))
    resident, kv = most_resident(engine)
    with open_engine(engine) as opened:
        ids = np.random.default_rng(3).integers(0, VOCAB, POSITIONS).astype(np.int32)
        figures = compare_with_float64(opened, ids)
    print(
        f"\n{precision} {activations}: {size:,} bytes, {size / wanted - 1:+.2%} of what the bits say; resident "
        f"{(resident - size - kv) / 2**20:+.1f} MiB beside engine and KV; {figures}"
    )
    assert wanted < size < wanted * 1.001 + TABLES
    assert resident < size + kv + ALLOWANCE
    assert figures.error < ROUNDING
    assert figures.doubt < ROUNDING
    assert figures.attended < ATTENDED
