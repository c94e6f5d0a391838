"""Score texts: the logits of every prompt position in one batch, and from them each text's perplexity.

python examples/logits.py ENGINE "A text" "Another text"
"""

import sys

import numpy as np

from ingot.runtime import ModelRunner
from ingot.runtime.tokenizer import Tokenizer

engine, *texts = sys.argv[1:]
texts = texts or ["The prince looked at her.", "her at looked prince The."]
tokenizer = Tokenizer.from_dir(engine)
prompts = [tokenizer.encode(text) for text in texts]

with ModelRunner.from_dir(engine) as runner:
    out = runner.generate(prompts, max_new_tokens=1, return_dict=True, output_context_logits=True)

for text, ids, logits in zip(texts, prompts, out["context_logits"], strict=True):
    rows = logits[:-1].astype(np.float64)  # row t predicts token t + 1
    log_sum = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
    losses = log_sum - rows[np.arange(len(rows)), ids[1:]]
    print(f"perplexity {np.exp(losses.mean()):8.1f}  {text}")
