"""transformers with a static cache and torch.compile on this GPU, and how fast large products are here.

    python transformers_speed.py products                               {"operations_per_second": ...}
    python transformers_speed.py decode CONFIG.json BATCH CONTEXT OUTPUT  {"tokens_per_second": ...}, after the prompt
    python transformers_speed.py prefill CONFIG.json LENGTH             {"tokens_per_second": ...}, of the prompt

A line of JSON, or {"missing": why}. It takes what transformers calls the cache, and whether it wants positions, from
the signature of the model: both changed within its version 5.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE, ROUNDS = 8192, 5  # of the product; timed rounds


def best(torch: Any, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the median of some rounds, after two that do not count. before: done ahead of each, untimed."""
    times = []
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for index in range(2 + ROUNDS):
        before()
        wait()
        start = time.perf_counter()
        work()
        wait()
        times += [time.perf_counter() - start] if index >= 2 else []
    return sorted(times)[ROUNDS // 2]


def products(torch: Any, device: str = "cuda", size: int = SIZE) -> float:
    """Operations per second of a large product in bf16."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * size**3 / best(torch, lambda: one @ other))


class Timed:
    """A model with random weights, drawn on the device."""

    def __init__(
        self, torch: Any, transformers: Any, config: Path, device: str = "cuda", compiled: bool = True
    ) -> None:
        self._torch, self._transformers, self._device = torch, transformers, device
        fields = json.loads(config.read_text())
        kind = fields.pop("model_type")
        self._config = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(self._config, dtype=torch.bfloat16).eval()
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._wants_positions = "cache_position" in known
        forward = self._model.forward
        self._step = torch.compile(forward, mode="reduce-overhead", fullgraph=True) if compiled else forward

    def decode(self, batch: int, context: int, output: int) -> float:
        """Tokens per second of all sequences. Every round begins anew behind the same prompt: a static cache counts
        its tokens itself."""
        torch = self._torch
        cache = self._transformers.StaticCache(config=self._config, max_cache_len=context + output + 8)
        ids = torch.randint(0, self._config.vocab_size, (batch, context), device=self._device)
        token = ids[:, :1].clone()
        places = [torch.tensor([context + index], device=self._device) for index in range(output)]

        def prompt() -> None:
            cache.reset()
            self._model(ids, **{self._cache_name: cache}, use_cache=True, logits_to_keep=1)

        def steps() -> None:
            for place in places:
                given = {self._cache_name: cache, "position_ids": place[None].expand(batch, 1)}
                if self._wants_positions:
                    given["cache_position"] = place
                self._step(token, use_cache=True, **given)

        return float(batch * output / best(torch, steps, prompt))

    def prefill(self, length: int) -> float:
        """Prompt tokens per second."""
        ids = self._torch.randint(0, self._config.vocab_size, (1, length), device=self._device)
        return float(length / best(self._torch, lambda: self._model(ids, use_cache=True, logits_to_keep=1)))


def measure(arguments: list[str]) -> dict[str, object]:
    """What there is to say; never raises."""
    try:
        import torch

        if not torch.cuda.is_available():
            return {"missing": f"torch {torch.__version__} sees no GPU"}
        with torch.inference_mode():
            if arguments[0] == "products":
                return {"operations_per_second": products(torch), "torch": torch.__version__}
            import transformers

            timed = Timed(torch, transformers, Path(arguments[1]))
            numbers = [int(each) for each in arguments[2:]]
            speed = timed.decode(*numbers) if arguments[0] == "decode" else timed.prefill(*numbers)
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            return {"tokens_per_second": speed, **versions}
    except ImportError as error:
        return {"missing": f"transformers is not here: {error}"}
    except Exception as error:  # whatever it is, the other measurements go on
        return {"missing": f"transformers failed: {type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
