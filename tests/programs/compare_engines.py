"""Which of two engines is faster here: rounds in turn, medians, and how far the ratio of neighbouring rounds spreads.

python -m tests.programs.compare_engines ENGINE_A ENGINE_B [--input_len 512] [--output_len 32] [--batch_size 1]

Each round generates with A and then with B from new random prompts; what else the machine does hits both alike.
"""

import argparse
import statistics

from ingot.bench.timing import Round, random_prompts, time_requests
from ingot.runtime import ModelRunner

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("engines", nargs=2, metavar="ENGINE")
parser.add_argument("--input_len", type=int, default=512, help="tokens of each prompt")
parser.add_argument("--output_len", type=int, default=32, help="generated tokens, at least 2")
parser.add_argument("--batch_size", type=int, default=1, help="requests at once")
parser.add_argument("--rounds", type=int, default=7, help="after one that does not count")
parser.add_argument("--threads", type=int, help="every core unless given")
options = parser.parse_args()


def prefill_speed(measured: Round) -> float:
    """Prompt tokens per second of all requests, until each has its first token."""
    tokens: int = options.batch_size * options.input_len
    return tokens / max(times.ttft for times in measured.requests)


def decode_speed(measured: Round) -> float:
    """Generated tokens per second of all requests, after all have their first token."""
    begin, tokens = max(times.ttft for times in measured.requests), 0
    for times in measured.requests:
        tokens += sum(each > begin for each in times.tokens)
    return tokens / (measured.seconds - begin)


rows: dict[str, list[list[float]]] = {"prefill": [[], []], "decode": [[], []]}
runners = [ModelRunner.from_dir(engine, threads=options.threads) for engine in options.engines]
for number in range(options.rounds + 1):
    for which, runner in enumerate(runners):
        prompts = random_prompts(options.batch_size, options.input_len, runner.model_info.vocab_size, number, which)
        measured = time_requests(runner, prompts, options.output_len)
        if number > 0:
            rows["prefill"][which].append(prefill_speed(measured))
            rows["decode"][which].append(decode_speed(measured))
for runner in runners:
    runner.close()
print(f"A {options.engines[0]}\nB {options.engines[1]}")
print(
    f"{options.batch_size} x {options.input_len} tokens in, {options.output_len} out, {options.rounds} rounds in turn"
)
print("| tokens/s | A | B | B / A | of half the rounds |\n|---|---|---|---|---|")
for name, (first, second) in rows.items():
    ratios = sorted(b / a for a, b in zip(first, second, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    medians = [statistics.median(each) for each in (first, second)]
    print(
        f"| {name} | {medians[0]:.1f} | {medians[1]:.1f} | {statistics.median(ratios):.2f} | {low:.2f} - {high:.2f} |"
    )
