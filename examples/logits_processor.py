"""Change the logits before a token is drawn: this text is written without the letter "e".

python examples/logits_processor.py ENGINE "A prompt"
"""

import sys

import numpy as np

from ingot import LLM, SamplingParams

engine, *prompts = sys.argv[1:]

with LLM(engine) as llm:
    tokens = range(llm.tokenizer.vocab_size)
    with_e = [token for token in tokens if "e" in llm.tokenizer.token_text(token).lower()]

    def without_e(logits: np.ndarray) -> np.ndarray:
        """logits: float32 [vocab]"""
        logits[with_e] = -np.inf
        return logits

    params = SamplingParams(max_tokens=24, temperature=0, logits_processors=[without_e])
    for result in llm.generate(prompts or ["A man"], params):
        print(f"{result.prompt!r} → {result.outputs[0].text!r}")
