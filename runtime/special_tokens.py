"""bos_token and its like, by the files beside a tokenizer.json, which itself does not say who is who.

tokenizer_config.json    alone where it lists `added_tokens_decoder`, as tokenizers saved since 2023 do
special_tokens_map.json  else has the last word, as in transformers
"""

from collections.abc import Mapping
from pathlib import Path

from ingot.configs.read import read_object


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Name → text. Raises ConfigError."""
    config = read_settings(directory / "tokenizer_config.json")
    legacy = {} if "added_tokens_decoder" in config else read_settings(directory / "special_tokens_map.json")
    tokens: dict[str, str] = {}
    for name, value in {**config, **legacy}.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def read_settings(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty where there is no such file. Raises ConfigError."""
    return read_object(path) if path.is_file() else {}
