"""Look into an Engine without loading its weights: what each step computes, and where the bytes are.

python examples/inspect_engine.py ENGINE
"""

import sys
from collections import Counter

from ingot.engine import read_manifest, read_plan

manifest, plan = read_manifest(sys.argv[1]), read_plan(sys.argv[1])
print(f"{manifest.target}, {manifest.precision}, {len(plan.steps)} steps, {plan.weight_bytes:,} bytes of weights")

sizes = {weight.name: weight.nbytes for weight in plan.weights}
by_kernel: Counter[str] = Counter()
for step in plan.steps:
    by_kernel[step.kernel] += sum(sizes.get(name, 0) for name in step.inputs)
for kernel, nbytes in by_kernel.most_common():
    print(f"{nbytes:12,}  {kernel}")
