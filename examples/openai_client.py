"""Talk to `ingot serve` with OpenAI's client (pip install openai): one answer as a whole, one as a stream.

ingot serve --engine_dir ENGINE --port 8000
python examples/openai_client.py http://127.0.0.1:8000/v1
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="any")  # a key counts where the server has --api_key
model = client.models.list().data[0].id

whole = client.completions.create(model=model, prompt="The prince", max_tokens=24, temperature=0)
print(f"{model}: {whole.choices[0].text!r}")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Who is Natasha?"}],
    max_tokens=24,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")
client.close()
