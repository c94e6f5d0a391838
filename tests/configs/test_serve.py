"""What `ingot serve` refuses before it starts, and which addresses others can reach."""

import math
from typing import Any

import pytest

from ingot.configs.serve import ServeConfig
from ingot.errors import UsageError


@pytest.mark.parametrize(
    "values",
    [
        *({name: bad} for name in ("request_timeout", "body_timeout", "write_timeout", "stall_timeout")
          for bad in (0.0, -1.0, math.nan)),
        {"drain_timeout": -1.0}, {"drain_timeout": math.nan}, {"api_keys": ("",)}, {"api_keys": (" key",)},
        {"otlp_endpoint": "collector"}, {"model_names": ("",)},
    ],
)  # fmt: skip
def test_values_that_mean_nothing(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeConfig(**values)


def test_public_addresses() -> None:
    ServeConfig(drain_timeout=0)
    for host, public in (
        ("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
        ("::", True), ("10.0.0.1", True), ("", True), ("some.host", True),
    ):  # fmt: skip
        assert ServeConfig(host=host).is_public == public
