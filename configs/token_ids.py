"""The token ids that begin, end and pad texts, as generation_config.json or config.json spell them."""

import dataclasses
from pathlib import Path

from ingot.configs.read import Section
from ingot.errors import ConfigError

KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST = (1 << 31) - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """eos may be several; None and () where the model does not say."""

    eos: tuple[int, ...]
    bos: int | None
    pad: int | None


def read_token_ids(directory: Path) -> TokenIds:
    """From generation_config.json; a directory without it has none."""
    path = directory / "generation_config.json"
    return token_ids(Section.from_file(path) if path.is_file() else Section({}, str(path)))


def token_ids(section: Section) -> TokenIds:
    """Raises ConfigError for what is not an id; -1 is how old files say that there is none."""
    bos, eos, pad = (_ids(section, key) for key in KEYS)
    for key, ids in (("bos_token_id", bos), ("pad_token_id", pad)):
        if len(ids) > 1:
            raise _wrong(section, key, "a token id")
    return TokenIds(eos=eos, bos=bos[0] if bos else None, pad=pad[0] if pad else None)


def check_vocabulary(ids: TokenIds, vocab_size: int, where: str) -> None:
    """Raise ConfigError for tokens that the model does not have. A pad token may be one: nobody reads it."""
    for key, tokens in (("eos_token_id", ids.eos), ("bos_token_id", () if ids.bos is None else (ids.bos,))):
        if outside := [token for token in tokens if token >= vocab_size]:
            raise ConfigError(
                f"{key} is not in the vocabulary of the model",
                where=f"{where}:{key}",
                expected=f"at most {vocab_size - 1}",
                got=", ".join(map(str, outside[:5])),
                hint="check the token ids against vocab_size in config.json",
            )


def _ids(section: Section, key: str) -> tuple[int, ...]:
    value = section.raw(key)
    many = value if isinstance(value, list) else [] if value is None or value == -1 else [value]
    if not all(type(each) is int and 0 <= each <= _MOST for each in many):
        raise _wrong(section, key, "a token id or a list of them")
    return tuple(many)


def _wrong(section: Section, key: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{key} has a wrong value", where=section.place(key), expected=expected, got=repr(section.raw(key))[:200]
    )
