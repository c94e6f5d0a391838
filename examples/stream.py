"""Stream the texts of several prompts at once: each step of the engine computes a token of all of them.

python examples/stream.py ENGINE "First prompt" "Second prompt"
"""

import asyncio
import sys

from ingot import LLM, SamplingParams

engine, *prompts = sys.argv[1:]
prompts = prompts or ["The prince", "Natasha"]
params = SamplingParams(max_tokens=24, temperature=0.7, top_k=40, seed=1)


async def stream(llm: LLM, prompt: str) -> None:
    """Print what each result adds to the one before."""
    text = ""
    async for result in llm.generate_async(prompt, params):
        new = result.outputs[0].text[len(text) :]
        text += new
        print(f"[{prompt}] {new!r}", flush=True)


async def main() -> None:
    with LLM(engine) as llm:
        await asyncio.gather(*(stream(llm, prompt) for prompt in prompts))
        print("prefill tokens and decode rows of each step:", llm.runner.step_log())


asyncio.run(main())
