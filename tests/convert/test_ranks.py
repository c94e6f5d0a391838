"""Ranks that a model has too few layers or heads for: convert refuses what build would refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import BuildDefaults, ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.errors import UsageError


def options(folder: Path, family: str, more: dict[str, Any], **defaults: Any) -> ConvertOptions:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**find_family(family).tiny, **more}))
    return ConvertOptions(
        config=folder / "config.json",
        random_weights=1,
        output_dir=folder / f"checkpoint{len(defaults)}",
        build_defaults=BuildDefaults(**defaults),
    )


@pytest.mark.parametrize(
    ("family", "more", "size", "words"),
    [
        ("llama", {"num_hidden_layers": 3}, {"pp_size": 4}, "pp_size 3: each stage(.|\n)*got: 3 layers"),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2}, {"tp_size": 4}, "at least 4 x"),
    ],
)
def test_convert_refuses_what_build_refuses(
    tmp_path: Path, family: str, more: dict[str, Any], size: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        convert(options(tmp_path, family, more, **size))
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    convert(options(tmp_path, family, more))
    with pytest.raises(UsageError, match="is too large for"):
        build(BuildConfig(target="ref", dry_run=True, **size), tmp_path / "checkpoint0", tmp_path / "engine")
    fewer = {name: number // 2 for name, number in size.items()}
    convert(options(tmp_path, family, more, **fewer))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "nemotron_h", "gemma3n_text", "olmo2", "deepseek_v3"])
def test_what_build_takes_is_not_refused(tmp_path: Path, family: str) -> None:
    """The most stages and ranks that a build takes of models whose layers differ."""
    convert(options(tmp_path, family, {}))
    taken: dict[str, list[int]] = {"tp_size": [], "pp_size": []}
    for option, sizes in taken.items():
        for size in (2, 4, 8):
            given: dict[str, Any] = {option: size}
            config = BuildConfig(target="ref", dry_run=True, **given)
            try:
                build(config, tmp_path / "checkpoint0", tmp_path / "engine")
            except UsageError:
                break
            sizes.append(size)
    assert taken["tp_size"] or taken["pp_size"]
    for option, sizes in taken.items():
        for size in sizes:
            convert(options(tmp_path / f"{option}{size}", family, {}, **{option: size}))
