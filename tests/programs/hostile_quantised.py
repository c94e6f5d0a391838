"""Hostile quantised checkpoints: sound ones of every format are damaged at random, and each must be refused in words
or be read right.

    python -m tests.programs.hostile_quantised [CASE ...] [--count N] [--seed N] [--fixtures DIR] [--seconds N]

A process converts them one by one. Faults: it ends or hangs, an error is not ingot's own, memory grows by more than a
bound, or a file is read with other logits: those of the sound one where only its description was changed, those of
onnxruntime against an engine of `ref` where numbers were.
"""

import argparse
import dataclasses
import multiprocessing
import multiprocessing.connection
import random
import shutil
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import to_float32
from ingot.errors import IngotError
from ingot.runtime.memory import peak_memory
from ingot.tensor_file import read_header, read_rows
from tests import gguf_files
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.quantised.test_formats import CASES, product_weights
from tests.graph_logits import logits_of_graph
from tests.programs.damaged_files import (
    OF_GGUF,
    OF_SAFETENSORS,
    Edit,
    edit_blocks,
    edit_entry,
    edit_field,
    edit_file,
    edit_numbers,
    edit_settings,
)

SOUND = ("checkpoint_format", "desc_act", "sym", "zero_point", "quant_method", "format", "bits")
"""Settings whose other values say that the same bits mean other numbers."""
SOUND_DTYPES = ("dtype F16 becomes BF16", "dtype BF16 becomes F16")
"""Floats of as many bits, which nothing else in a file contradicts."""
OF_THE_MODEL = ("llama.context_length", "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon")
"""Numbers in a GGUF header that make it another model."""

MOST_MEMORY = 400 << 20  # bytes that a conversion may add to the process
SECONDS = 60  # of one conversion
LARGEST = 2.0**60  # of a number: float32 does not hold the squares of larger ones, and programs differ then
IDS = np.random.default_rng(3).integers(0, write.VOCAB, (1, 9))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """name: a case of the tests, `gguf N`, or the name of a fixture in a folder."""

    name: str
    fixtures: Path | None = None

    def write(self, folder: Path) -> None:
        """The sound checkpoint."""
        folder.mkdir()
        if self.name in CASES:
            settings, packer, _ = CASES[self.name]
            write.write_model(folder, settings, packer)
        elif self.name.startswith("gguf ") and self.name[5:].isdigit():
            write_llama(folder, int(self.name[5:]))
        else:
            assert self.fixtures is not None, f"{self.name} is no case of the tests"
            for file in (self.fixtures / self.name).iterdir():
                if file.name in ("config.json", "model.safetensors", "model.gguf", "hf_quant_config.json"):
                    shutil.copyfile(file, folder / file.name)

    @property
    def gguf(self) -> bool:
        return self.name.startswith("gguf")


def outcome(case: Case, sound: Path, number: int, seed: int) -> tuple[str, str]:
    """(how it ended: refused, read, unchanged or a fault; what was changed, or how it went wrong). sound: the case as
    it was written."""
    draw = random.Random(f"{case.name} {seed} {number}")
    edit = draw.choice(OF_GGUF if case.gguf else OF_SAFETENSORS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(sound, folder / "model")
        before = {each.name: each.read_bytes() for each in (folder / "model").iterdir()}
        what = edit(folder / "model", draw)
        if all((folder / "model" / name).read_bytes() == each for name, each in before.items()):
            return "unchanged", what
        try:
            convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
        except IngotError as error:
            return ("refused", what) if str(error).strip() else ("fault", f"{what}: refused without a word")
        except Exception as error:  # the fault that is looked for
            last = traceback.extract_tb(error.__traceback__)[-1]
            return "fault", f"{what}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"
        with np.errstate(all="ignore"):
            of_numbers = edit in (edit_numbers, edit_blocks, edit_file)
            wrong = differs(sound, folder, of_numbers=of_numbers, other_meaning=_has_other_meaning(edit, what))
        return ("fault", f"{what}: {wrong}") if wrong else ("read", what)


def _has_other_meaning(edit: Edit, what: str) -> bool:
    """Whether a file that was changed in this way is a sound one of other numbers."""
    if edit is edit_settings:
        return any(key in what.partition(" = ")[0] for key in SOUND)
    if edit is edit_field:
        return what.startswith(OF_THE_MODEL)
    return edit is edit_entry and what.endswith(SOUND_DTYPES)


def differs(sound: Path, folder: Path, *, of_numbers: bool, other_meaning: bool) -> str:
    """What is wrong with the logits of a checkpoint that was read; "" where nothing is."""
    try:
        found = logits_of_graph(folder / "checkpoint", IDS % 8)
    except Exception as error:  # onnxruntime has errors of many kinds
        return f"onnxruntime does not take the graph: {str(error)[:200]}"
    if of_numbers and _largest(folder / "checkpoint") > LARGEST:
        return ""
    if of_numbers:
        build(BuildConfig(target="ref", precision="f32"), folder / "checkpoint", folder / "engine")
        expected, bound = engine_logits(folder / "engine", IDS % 8), 1e-3
    else:
        convert(ConvertOptions(model_dir=sound, output_dir=folder / "sound"))
        expected, bound = logits_of_graph(folder / "sound", IDS % 8), 0.0
    if found.shape != expected.shape:
        return "" if not of_numbers else f"logits {found.shape}, expected {expected.shape}"
    if not np.isfinite(expected).all():
        return ""
    off = float(np.abs(found - expected).max() / max(float(np.ptp(expected)), 1e-30))
    return "" if off <= bound or other_meaning else f"logits are off by {off:.1e} of their range"


def _largest(checkpoint: Path) -> float:
    """Of all floats that are stored, and of the values of all products."""
    stored = [tensor for file in checkpoint.glob("*.safetensors") for tensor in read_header(file).values()]
    floats = [each for each in stored if each.dtype_name in ("F32", "F16", "BF16")]
    values = (to_float32(read_rows(each), each.dtype) for each in floats)
    return max(float(np.abs(each).max(initial=0)) for each in (*values, *product_weights(checkpoint)))


def _work(pipe: multiprocessing.connection.Connection, seed: int) -> None:
    """Answers cases with their outcomes. Memory is that of the largest moment so far."""
    with tempfile.TemporaryDirectory() as folder:
        while (asked := pipe.recv()) is not None:
            case, number = asked
            sound = Path(folder) / case.name.replace("/", "_")
            if not sound.exists():
                case.write(sound)
                convert(ConvertOptions(model_dir=sound, output_dir=Path(folder) / "first"))
            before = peak_memory()
            found = outcome(case, sound, number, seed)
            pipe.send((*found, peak_memory() - before))


class Worker:
    """A process that is begun anew where one has ended."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._seed, self._seconds = seed, seconds
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._seed), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, case: Case, number: int) -> tuple[str, str]:
        """As `outcome`, where time and memory are faults too."""
        self._pipe.send((case, number))
        try:
            if self._pipe.poll(self._seconds):
                how, what, grown = self._pipe.recv()
                if grown > MOST_MEMORY:
                    return "fault", f"{what}: takes {grown >> 20} MiB more memory"
                return how, what
            problem = f"takes more than {self._seconds:.0f} s"
        except EOFError:
            problem = "the process ends"
        self._process.kill()
        self._process.join()
        self._begin()
        return "fault", f"number {number}: {problem}"

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def cases(names: list[str], fixtures: Path | None) -> list[Case]:
    """Those of these names, else all."""
    own = [*CASES, *(f"gguf {kind}" for kind in sorted(gguf_files.BLOCKS))]
    theirs = [] if fixtures is None else sorted(each.name for each in fixtures.iterdir() if each.is_dir())
    theirs = [name for name in theirs if name != "gpt-oss-mxfp4-experts"]  # no whole model
    return [Case(name=name, fixtures=fixtures) for name in names or [*own, *theirs]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="formats by their names in the tests; default: all")
    parser.add_argument("--count", type=int, default=20, help="damaged checkpoints of each case")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.add_argument("--fixtures", type=Path, help="a folder of further checkpoints")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time that one may take")
    options = parser.parse_args()
    worker, failed = Worker(options.seed, options.seconds), False
    for case in cases(options.cases, options.fixtures):
        found = [worker.ask(case, number) for number in range(options.count)]
        counts = Counter(how for how, _ in found)
        print(f"{case.name}: " + ", ".join(f"{count} {how}" for how, count in sorted(counts.items())), flush=True)
        for number, (how, what) in enumerate(found):
            if how == "fault":
                failed = True
                print(f"  number {number}: {what}"[:600], flush=True)
    worker.end()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
