"""The tokenizer of a model directory: tokenizer.json is carried along, older files converted, or refused."""

from pathlib import Path

from ingot.configs.read import Section
from ingot.convert import byte_level, sentencepiece
from ingot.errors import CheckpointError

_OTHERS = ("*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json", "spiece.model")


def make_tokenizer(folder: Path) -> dict[str, object] | None:
    """The tokenizer.json that a directory lacks, or None if it has one, or no tokenizer at all.

    Raises CheckpointError where a tokenizer is there that ingot cannot carry over: running with token ids alone would
    be a surprise.
    """
    if (folder / "tokenizer.json").is_file():
        return None
    settings = folder / "tokenizer_config.json"
    section = Section.from_file(settings) if settings.is_file() else Section({}, str(settings))
    if (folder / "tokenizer.model").is_file():
        return sentencepiece.tokenizer_json(folder / "tokenizer.model", section)
    if (folder / byte_level.VOCAB_FILE).is_file() and (folder / byte_level.MERGES_FILE).is_file():
        return byte_level.tokenizer_json(folder, section)
    others = [file for pattern in _OTHERS for file in sorted(folder.glob(pattern))]
    if others:
        raise CheckpointError(
            "the tokenizer is in a format that ingot does not convert",
            where=str(others[0]),
            expected="tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
            hint=sentencepiece.HINT,
        )
    return None
