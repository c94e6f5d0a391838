"""Which file says what bos_token is: the same one as in transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import AutoTokenizer

from ingot.errors import ConfigError
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.special_tokens import read_special_tokens
from ingot.runtime.tokenizer import Tokenizer

TOKENS = ["<map>", "<config>", "<json>"]
NAMES = ("bos_token", "eos_token", "pad_token")
CONFIGS: list[dict[str, Any]] = [
    {},
    {"bos_token": "<config>", "eos_token": {"content": "<config>", "__type": "AddedToken"}},
    {"bos_token": "<config>", "pad_token": None},
]
MAPS: list[dict[str, Any] | None] = [
    None,
    {"bos_token": "<map>", "pad_token": {"content": "<map>"}},
    {"bos_token": None, "eos_token": "<map>"},
]
LISTED = {"0": {"content": "<map>", "special": True}}


def write(folder: Path, config: dict[str, Any], legacy: dict[str, Any] | None) -> None:
    """Three tokens, one text of settings each, and a template that shows who is who."""
    hf = tokenizers.Tokenizer(models.WordLevel({token: place for place, token in enumerate(TOKENS)}, "<json>"))
    hf.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in TOKENS])
    hf.save(str(folder / "tokenizer.json"))
    template = "".join(f"[{{{{ {name} }}}}]" for name in NAMES)
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    if legacy is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(legacy))


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("config", "legacy"), list(itertools.product(CONFIGS, MAPS)))
def test_who_is_who(tmp_path: Path, config: dict[str, Any], legacy: dict[str, Any] | None, lists: bool) -> None:
    write(tmp_path, {**config, "add_bos_token": True, **({"added_tokens_decoder": LISTED} if lists else {})}, legacy)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = {name: getattr(theirs, name) for name in NAMES if getattr(theirs, name) is not None}
    assert read_special_tokens(tmp_path) == expected
    conversation = [{"role": "user", "content": "x"}]
    text = theirs.apply_chat_template(conversation, tokenize=False)
    assert ChatTemplates.from_dir(tmp_path).render(conversation) == text
    bos = [TOKENS.index(expected["bos_token"])] if "bos_token" in expected else []
    assert Tokenizer.from_dir(tmp_path).encode("<json>") == [*bos, 2]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["[", "[]"])
def test_what_is_no_settings(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, {}, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"no(t valid)? JSON(.|\\n)*{name}"):
        read_special_tokens(tmp_path)
