"""ingot: ahead-of-time compiler and runtime for large language models."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.configs.sampling import SamplingParams
    from ingot.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

# Loaded when they are first asked for: `ModelRunner` needs no tokenizer and no builder.
_LAZY = {"LLM": "ingot.llm", "SamplingParams": "ingot.configs.sampling"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
