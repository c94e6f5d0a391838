"""How long `ingot plan` simulates a cluster: CPU seconds for each way to divide the devices into replicas.

python -m tests.programs.plan_speed --ranks 1024 --rate 50 --seconds 600

The model has the shape of Llama 3.1 70B in FP8, on GPUs of the data sheet of an H200.
"""

import argparse
import dataclasses
import time

import numpy as np

from ingot.plan import Limits
from ingot.planner.clock import stages_clock
from ingot.planner.simulate import ReplicaOptions, Served, simulate
from tests.programs.published_points import M70, devices, stage_costs

TOKENS_PER_BLOCK = 32


def served(ranks: int, stages: int, rate: float, seconds: float, lengths: tuple[int, int], *, singly: bool) -> Served:
    """What requests see that come at random. singly: each step by itself."""
    clock = stages_clock(stage_costs(M70, "fp8", 1, stages), devices()["h200"], 1)
    count, longest = max(1, round(rate * seconds)), sum(lengths)
    limits = Limits(
        max_batch_size=256, max_input_len=lengths[0], max_seq_len=longest, max_num_tokens=2048, max_logit_rows=256
    )
    options = ReplicaOptions(
        limits=limits, num_blocks=(256 * -(-longest // TOKENS_PER_BLOCK),), tokens_per_block=TOKENS_PER_BLOCK
    )
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count)).tolist()
    clock = dataclasses.replace(clock, decode=None) if singly else clock
    return simulate([lengths] * count, arrivals, clock, options, replicas=ranks // stages)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1000, 500), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--singly", action="store_true", help="simulate each step by itself")
    given = parser.parse_args()
    print("| stages | replicas | requests | steps | TTFT p50 ms | TPOT p50 ms | CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    for stages in given.stages:
        begin = time.process_time()
        found = served(given.ranks, stages, given.rate, given.seconds, tuple(given.lengths), singly=given.singly)
        taken = time.process_time() - begin
        ttft, tpot = 1e3 * np.median(found.ttft), 1e3 * np.median(found.tpot)
        counts = f"{given.ranks // stages} | {len(found.ttft):,} | {found.steps:,}"
        print(f"| {stages} | {counts} | {ttft:.1f} | {tpot:.2f} | {taken:.1f} |", flush=True)


if __name__ == "__main__":
    main()
