"""transformers on PyTorch, the greedy loop of its generate() without the bookkeeping."""

import time

import torch
import transformers

from tests.peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def prepare(job: Job) -> None:
    """Nothing: it reads the checkpoint as it is."""


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """One batch, one cache."""
    torch.set_num_threads(job.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=_DTYPES[job.weights]).eval()

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        ids, cache = torch.tensor(prompts), transformers.DynamicCache(config=model.config)
        start = time.perf_counter()
        first = start
        for index in range(tokens):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            if index == 0:
                first = time.perf_counter()
        return first - start, time.perf_counter() - first

    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    with torch.inference_mode():
        return version, time_regimes(generate, regimes_of(job))


if __name__ == "__main__":
    serve(prepare, measure)
