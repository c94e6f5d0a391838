"""transformers with a static cache and torch.compile on this GPU, and how fast large products are here.

python transformers_speed.py CONFIG.json CONTEXT OUTPUT BATCHES PROMPTS → a line of JSON; one on stderr where it cannot.

Tokens per second from the first decoded token on ("decode N"), of prompts until their first token ("prefill N").
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE, ROUNDS = 8192, 5  # of the product; timed rounds


def best(torch: Any, work: Callable[[], object]) -> float:
    """Seconds of the median of some rounds, after two that do not count."""
    times = []
    for index in range(2 + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times += [time.perf_counter() - start] if index >= 2 else []
    return sorted(times)[ROUNDS // 2]


def products(torch: Any) -> float:
    """Operations per second of a large product in bf16."""
    one, other = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return float(2 * SIZE**3 / best(torch, lambda: one @ other))


class Timed:
    """A model with random weights; its step is compiled once per number of sequences."""

    def __init__(self, torch: Any, transformers: Any, config: Path) -> None:
        self._torch, self._transformers = torch, transformers
        fields = json.loads(config.read_text())
        kind = fields.pop("model_type")
        self._config = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device("cuda"):
            self._model = transformers.AutoModelForCausalLM.from_config(self._config, dtype=torch.bfloat16).eval()
        self._step = torch.compile(self._model.forward, mode="reduce-overhead", fullgraph=True)

    def decode(self, batch: int, context: int, output: int) -> float | None:
        """Tokens per second of all sequences; None where memory does not suffice."""
        torch = self._torch
        try:
            cache = self._cache(context + output + 8)
            ids = torch.randint(0, self._config.vocab_size, (batch, context), device="cuda")
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = ids[:, :1].clone()
            places = [torch.tensor([context + index], device="cuda") for index in range(output)]

            def steps() -> None:
                for place in places:
                    self._step(token, past_key_values=cache, cache_position=place, use_cache=True)

            return float(batch * output / best(torch, steps))
        except torch.cuda.OutOfMemoryError:
            return None

    def prefill(self, length: int) -> float:
        """Prompt tokens per second."""
        ids = self._torch.randint(0, self._config.vocab_size, (1, length), device="cuda")
        return float(length / best(self._torch, lambda: self._model(ids, use_cache=True, logits_to_keep=1)))

    def _cache(self, length: int) -> Any:
        return self._transformers.StaticCache(config=self._config, max_cache_len=length)


def main() -> int:
    """Exit code."""
    try:
        import torch

        if not torch.cuda.is_available():
            print(f"torch {torch.__version__} sees no GPU", file=sys.stderr)
            return 1
        import transformers
    except ImportError as error:
        print(f"transformers is not here: {error}", file=sys.stderr)
        return 1
    config, context, output = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    batches, prompts = ([int(each) for each in text.split(",")] for text in sys.argv[4:6])
    with torch.inference_mode():
        timed = Timed(torch, transformers, config)
        speeds = {f"decode {batch}": timed.decode(batch, context, output) for batch in batches}
        speeds |= {f"prefill {length}": timed.prefill(length) for length in prompts}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({"speeds": speeds, "products_per_second": products(torch), **versions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
