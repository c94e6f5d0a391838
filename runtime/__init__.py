"""The runtime room: Engine → Session → in-flight batching → tokens."""

from ingot.runtime.model_runner import ModelRunner

__all__ = ["ModelRunner"]
