"""Events of sequences as OpenAI's JSON, without an engine: which choice, which prompt, which token each part is of."""

import json
import types
from typing import Any

import pytest

from ingot.runtime.logprobs import Logprob
from ingot.runtime.request import FinishReason
from ingot.runtime.server.chat_format import ChatChunkBuilder
from ingot.runtime.server.json_pieces import Rows, dump, json_blocks
from ingot.runtime.server.openai_format import CompletionChunkBuilder, Counts, Echo, ResponseHead, usage
from ingot.runtime.text_stream import TextEvent

HEAD = ResponseHead(answer_id="a", created=1, model="m", fingerprint="f")
COUNTS = Counts(prompt=7, cached=3, generated=5, reasoning=2)
TOKENIZER: Any = types.SimpleNamespace(
    token_bytes=lambda token: chr(token).encode(),
    special_ids=frozenset(),
    halves_apart=True,
    decode=lambda tokens, skip_special_tokens: "".join(map(chr, tokens)),
)


def table(text: str, *others: str) -> dict[int, Logprob]:
    """The actual token, which is less likely than all others."""
    best = {ord(other): Logprob(-float(rank), rank, other) for rank, other in enumerate(others, 1)}
    return {ord(text): Logprob(-9.0, len(others) + 1, text), **best}


def written(document: Any) -> Any:
    return json.loads(b"".join(json_blocks(document)))


def test_totals() -> None:
    found = usage(COUNTS)
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (7, 5, 12)
    assert found["prompt_tokens_details"] == {"cached_tokens": 3}
    assert found["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_a_chats_end_token_is_no_token_of_its_text() -> None:
    writer = ChatChunkBuilder(HEAD, TOKENIZER, 1, 2)
    writer.add(0, TextEvent(index=0, text="x", token_ids=(120,), logprobs=(table("x", "p", "q", "r"),)))
    end: dict[str, Any] = {"end_token": True, "finish_reason": FinishReason.STOP, "stop_reason": 33}
    writer.add(0, TextEvent(index=0, text="y", token_ids=(121, 33), logprobs=(table("y"), table("!")), **end))
    (choice,) = written(writer.whole(COUNTS))["choices"]
    assert choice["message"]["content"] == "xy"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 33)
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries] == [("x", [120]), ("y", [121])]
    assert [best["token"] for best in entries[0]["top_logprobs"]] == ["p", "q"], "as many as asked for, the best ones"


def test_every_choice_begins_with_its_own_prompt() -> None:
    echoes = [Echo(text="ab", token_ids=[97, 98]), Echo(text="cd", token_ids=[99, 100])]
    writer = CompletionChunkBuilder(HEAD, TOKENIZER, 4, n=2, logprobs=True, echoes=echoes)
    for choice in range(4):
        prompt, sequence = divmod(choice, 2)
        own = (None, table("bd"[prompt])) if sequence == 0 else None
        writer.add(
            choice,
            TextEvent(
                index=prompt,
                sequence=sequence,
                text="x",
                token_ids=(120,),
                prompt_logprobs=own,
                logprobs=(table("x"),),
                finish_reason=FinishReason.LENGTH,
            ),
        )
    choices = written(writer.whole(COUNTS))["choices"]
    assert [each["text"] for each in choices] == ["abx", "abx", "cdx", "cdx"]
    assert [each["logprobs"]["tokens"] for each in choices] == [[*text] for text in ("abx", "abx", "cdx", "cdx")]
    assert {tuple(each["logprobs"]["text_offset"]) for each in choices} == {(0, 1, 2)}


@pytest.mark.parametrize("count", [0, 1, 64, 65, 200])
def test_long_lists_are_written_like_short_ones(count: int) -> None:
    document = {"rows": list(range(count)), "made": Rows({"place": i} for i in range(count)), "choices": iter([1, "é"])}
    expected = {"rows": list(range(count)), "made": [{"place": i} for i in range(count)], "choices": [1, "é"]}
    assert written(document) == expected == json.loads(dump(expected))
