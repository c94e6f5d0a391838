"""Tokenizers of single bytes, some of them halves of characters."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ingot.runtime.tokenizer import Tokenizer

HALVES = "Ã©ä½ł"  # the bytes of é and 你 in the alphabet of byte-level tokenizers


def byte_tokenizer(folder: Path, vocab: int) -> Tokenizer:
    """`vocab` tokens: the first symbols of the byte alphabet, from "!" on, and the halves of é and 你."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {symbol: place for place, symbol in enumerate(alphabet[: vocab - len(HALVES)])}
    table |= {symbol: len(table) + place for place, symbol in enumerate(HALVES)}
    hf = tokenizers.Tokenizer(models.BPE(table, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_dir(folder)


def whole_byte_tokenizer(folder: Path, tokens: Sequence[str]) -> Tokenizer:
    """All bytes, <eos>, and these control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<eos>"])
    hf.add_tokens(list(tokens))
    hf.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_dir(folder)
