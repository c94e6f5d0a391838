"""Stream text of several prompts at once: every step of the executor carries tokens of all of them.

python examples/stream.py ENGINE "First prompt" "Second prompt"
"""

import sys

from ingot.configs.sampling import SamplingParams
from ingot.runtime import ModelRunner
from ingot.runtime.generate_text import stream_text
from ingot.runtime.text_stream import TextRequest
from ingot.runtime.tokenizer import Tokenizer

engine, *prompts = sys.argv[1:]
params = SamplingParams(max_tokens=24, temperature=0.7, top_k=40, seed=1)
requests = [TextRequest(prompt=prompt, params=params) for prompt in prompts or ["The prince", "Natasha"]]

with ModelRunner.from_dir(engine) as runner:
    for event in stream_text(runner, Tokenizer.from_dir(engine), requests):
        print(f"[{event.index}] {event.text!r}")
    print("prefill tokens and decode rows of each step:", runner.step_log())
