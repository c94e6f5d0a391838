"""TTFT and TPOT of a trace's requests, with one server that does all and with prompts on another server, in turn.

python -m tests.programs.apart_tails --trace FILE [--rate 3] [--num_requests 60] [--rounds 2] [--length_scale 1]

Both forms have the same cores. One server has all of them; else the prefill server has the first half, and the decode
server the others. The model has random weights, of the shape below, and the shipped tokenizer. Prints milliseconds: the
median, the 90th and the 99th percentile of the requests of all rounds.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.bench.load_test import OnlineOptions, bench_online
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.runtime.server.served import ServeProcess

SHAPE = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816, '
    '"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2560, '
    '"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"}'
)
LONGEST = 4096
SHARES = (50, 90, 99)


def make_engine(folder: Path) -> Path:
    """An engine in w8."""
    (folder / "config.json").write_text(SHAPE)
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder / "c")
    config = BuildConfig(target="cpu", precision="w8", max_input_len=LONGEST // 2, max_seq_len=LONGEST, autotune=False)
    build(config, folder / "c", folder / "e")
    return folder / "e"


def on(cpus: list[int]) -> tuple[str, ...]:
    """What a command begins with that runs on these CPUs alone."""
    return ("taskset", "--cpu-list", ",".join(map(str, cpus)))


@contextlib.contextmanager
def together(engine: Path, cpus: list[int]) -> Iterator[str]:
    """The address of one server."""
    with ServeProcess(engine, before=on(cpus)) as server:
        yield server.url


@contextlib.contextmanager
def apart(engine: Path, cpus: list[int]) -> Iterator[str]:
    """The address of the decode server."""
    half = len(cpus) // 2
    with ServeProcess(engine, ("--role", "prefill"), on(cpus[:half])) as prefill:
        options = ("--role", "decode", "--prefill_url", prefill.url)
        with ServeProcess(engine, options, on(cpus[half:])) as decode:
            yield decode.url


FORMS = {"one server": together, "prefill apart": apart}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--num_requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--length_scale", type=float, default=1.0)
    given = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        sys.exit("prefill apart needs two CPUs")
    samples: dict[tuple[str, str], list[float]] = {(form, name): [] for form in FORMS for name in ("ttft", "tpot")}
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder))
        for _ in range(given.rounds):
            for form, start in FORMS.items():
                with start(engine, cpus) as url:
                    options = OnlineOptions(
                        url=url,
                        rates=(given.rate,),
                        num_requests=given.num_requests,
                        trace=given.trace,
                        length_scale=given.length_scale,
                        max_input=LONGEST // 2,
                        max_output=LONGEST // 4,
                        ignore_eos=True,
                    )
                    (run,) = bench_online(options, lambda what, done, total: None).runs
                    if run.failed:
                        sys.exit(f"{form}: {run.failed} of {run.requests} requests failed")
                for name in ("ttft", "tpot"):
                    samples[form, name] += run.samples[name]
    for (form, name), values in samples.items():
        found = "  ".join(f"{np.percentile(values, share):8.1f}" for share in SHARES)
        print(f"{form:14} {name}  {found}  of {len(values)}")


if __name__ == "__main__":
    main()
