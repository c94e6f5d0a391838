"""Hold a conversation: every answer becomes part of the next prompt, whose beginning is not computed again.

python examples/chat.py ENGINE "First question" "Second question"
"""

import sys

from ingot import LLM, SamplingParams

engine, *questions = sys.argv[1:]
params = SamplingParams(max_tokens=32, temperature=0.7, top_k=40, seed=1)
messages = [{"role": "system", "content": "You answer in one sentence."}]

with LLM(engine) as llm:
    for question in questions or ["Who is the prince?", "Where does he live?"]:
        messages.append({"role": "user", "content": question})
        (result,) = llm.chat(messages, params)
        answer = result.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"user: {question}\nassistant: {answer}")
    print("prompt tokens found in the cache:", llm.stats()["prefix_hit_tokens"])
