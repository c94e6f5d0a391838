"""BuildConfig: what cannot be built is refused with its reason."""

from typing import Any

import pytest

from ingot.configs.build import BuildConfig
from ingot.errors import UsageError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precision": "w8a8"}, "precision w8a8 cannot be built: ingot quantize --recipe w8a8"),
        ({"activations": "int4"}, "unknown activations"),
        ({"lm_head_precision": "auto"}, "unknown lm_head_precision"),
        ({"precision": "int3"}, r"unknown precision(.|\n)*auto, f32, bf16, f16"),
        ({"kv_cache_dtype": "f64"}, r"unknown kv_cache_dtype(.|\n)*int8, fp8"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number, at least 1"),
        ({"max_seq_len": 1}, "max_seq_len must be a whole number, at least 2"),
        ({"max_num_tokens": True}, "max_num_tokens must be"),
        ({"max_num_tokens": 2**21}, r"max_num_tokens 2097152 is too large(.|\n)*at most 2097151"),
        ({"max_batch_size": 10**12}, "max_batch_size 1000000000000 is too large"),
        ({"tokens_per_block": 8}, r"tokens_per_block(.|\n)*multiple of 16 from 16 to 256"),
        ({"tokens_per_block": 24}, "tokens_per_block"),
        ({"tokens_per_block": 512}, "tokens_per_block"),
        ({"max_output_len": 0}, "max_output_len must be"),
        ({"max_output_len": 5, "max_seq_len": 9}, "max_output_len and max_seq_len set the same limit"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BuildConfig(**given)


def test_accepted() -> None:
    assert BuildConfig(tokens_per_block=256, precision="bf16", kv_cache_dtype="f32", max_batch_size=1).target == "cpu"
