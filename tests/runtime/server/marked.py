"""The tokenizer of the shipped model with other tokens: what its last ones were is what a test wants them to be."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers


def mark_tokenizer(path: Path, marks: Sequence[str]) -> None:
    """tokenizer.json: its last tokens become control tokens of these texts."""
    document = json.loads(path.read_text())
    model = document["model"]
    names = {token: text for text, token in model["vocab"].items()}
    for token, mark in enumerate(marks, len(names) - len(marks)):
        del model["vocab"][names[token]]
        model["vocab"][mark] = token
    model["merges"] = [each for each in model["merges"] if "".join(each) in model["vocab"]]
    path.write_text(json.dumps(document))
    hf = tokenizers.Tokenizer.from_file(str(path))
    hf.add_tokens(list(marks))
    hf.save(str(path))
