"""Generate from token ids with ModelRunner: first greedy, then sampled.

python examples/generate.py ENGINE
"""

import sys

from ingot.runtime import ModelRunner

with ModelRunner.from_dir(sys.argv[1]) as runner:
    prompts = [[1, 168, 62], [1, 45]]
    greedy = runner.generate(prompts, max_new_tokens=12)  # int32 [prompt, sequence, token], prompt included
    for prompt, row in zip(prompts, greedy, strict=True):
        print("greedy ", prompt, "→", row[0, len(prompt) :].tolist())

    sampled = runner.generate(prompts[:1], max_new_tokens=12, temperature=0.8, top_k=40, random_seed=3)
    print("sampled", prompts[0], "→", sampled[0, 0, len(prompts[0]) :].tolist())
    print("blocks in use afterwards:", runner.stats()["blocks_used"])
