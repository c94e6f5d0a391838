"""A request that stops the engine thread for a while: how tests, ours and others', see what a stuck step looks like."""

import time

from ingot.configs.sampling import SamplingParams
from ingot.runtime.text_stream import TextRequest
from ingot.step_io import Float32


def stalling_request(vocab_size: int, seconds: float) -> TextRequest:
    """Its only step sleeps, and every request that shares the step waits with it."""

    def sleep(logits: Float32) -> Float32:
        time.sleep(seconds)
        return logits

    return TextRequest(
        prompt=[vocab_size - 1],
        params=SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logits_processors=[sleep]),
    )
