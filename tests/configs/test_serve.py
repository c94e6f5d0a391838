"""What `ingot serve` refuses before it starts, and which addresses others can reach."""

import math
from typing import Any

import pytest

from ingot.configs.serve import ServeConfig
from ingot.errors import UsageError


@pytest.mark.parametrize(
    "values",
    [
        *(
            {name: bad}
            for name in ("request_timeout", "body_timeout", "write_timeout", "stall_timeout")
            for bad in (0.0, -1.0, math.nan)
        ),
        {"drain_timeout": -1.0},
        {"drain_timeout": math.nan},
        {"api_keys": ("",)},
        {"api_keys": (" key",)},
        {"otlp_endpoint": "collector"},
        {"model_names": ("",)},
        {"model_names": ("a", " b")},
        {"model_names": ("a", "b", "a")},
        {"api_keys": ("a\nb",)},
        {"api_keys": ("a\x7f",)},
        *(
            {"cors_origins": ("https://good.example", origin)}
            for origin in (
                "",
                "chat.example",
                "https://",
                "https://chat.example/",
                "https://chat.example/page",
                "https://Chat.example",
                "HTTPS://chat.example",
                "https://*.example",
                "https://chat.example:443",
                "http://chat.example:80",
                "https://user@chat.example",
                "https://chat.example?x",
                "https://b\u00fccher.example",
                "Null",
                "https://a b",
                "https://chat.example:",
                "//chat.example",
            )
        ),
    ],
)
def test_values_that_mean_nothing(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeConfig(**values)


def test_public_addresses() -> None:
    ServeConfig(drain_timeout=0)
    for host, public in (
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("", True),
        ("some.host", True),
    ):
        assert ServeConfig(host=host).is_public == public


def test_origins_that_browsers_send() -> None:
    for origin in (
        "*",
        "null",
        "https://chat.example",
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:3000",
        "chrome-extension://abcdef",
        "tauri://localhost",
        "https://chat.example:80",
        "https://xn--bcher-kva.example",
    ):
        assert ServeConfig(cors_origins=(origin,)).cors_origins == (origin,)
