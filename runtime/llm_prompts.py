"""What `LLM.generate` and its like take, with vLLM's names → TextRequests, or the reason why not."""

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ingot.configs.sampling import SamplingParams, check_flag
from ingot.configs.unknown import parameters, refuse_unknown
from ingot.errors import RequestError
from ingot.runtime.text_stream import TextRequest

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dictionary with "prompt" or "prompt_token_ids", and perhaps "cache_salt"."""

_FORMS = 'a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_TEXT_ONLY = "leave it out: the engine reads text only"
_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
_OTHER_FIELDS = {
    "multi_modal_data": _TEXT_ONLY,
    "multi_modal_uuids": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "prompt_embeds": "leave it out: the engine reads token ids",
    "encoder_prompt": "leave it out: the engine has a decoder only",
    "decoder_prompt": 'say "prompt": the engine has a decoder only',
    "text": 'say "prompt"',
    "messages": "use LLM.chat",
}
WAYS = {
    "inputs": "say prompts",
    "params": "say sampling_params",
    "lora_request": "leave it out: adapters do not exist in this version",
    "prompt_adapter_request": "leave it out: adapters do not exist in this version",
    "guided_options_request": "leave it out: guided decoding does not exist in this version",
    "tokenization_kwargs": "give token ids where the tokenizer should do something else",
    "truncate_prompt_tokens": "shorten the prompt: give token ids",
    "priority": "ModelRunner.generate has it",
    "max_tokens": "SamplingParams(max_tokens=...)",
    "temperature": "SamplingParams(temperature=...)",
    "streaming": "use generate_async",
    "chat_template_content_format": "leave it out: text parts are joined by line breaks",
    "mm_processor_kwargs": _TEXT_ONLY,
}
"""Arguments of other libraries' `generate` → ingot's way."""


def refuse_arguments(function: Callable[..., object], others: Mapping[str, object]) -> None:
    """Raise RequestError for arguments that `function` does not take."""
    refuse_unknown(function.__name__, others, parameters(function), WAYS, RequestError)


def read_requests(
    prompts: Prompt | Sequence[Prompt] | None,
    params: SamplingParams | Sequence[SamplingParams] | None,
    prompt_token_ids: object = None,
) -> list[TextRequest]:
    """One per prompt. prompt_token_ids: in place of prompts, the token ids of one or of several."""
    if (prompts is None) == (prompt_token_ids is None):
        raise RequestError(
            "give either prompts or prompt_token_ids",
            expected=f"{_FORMS}, or a list of these",
            got="neither" if prompts is None else "both",
        )
    each = _as_list("prompts", prompts) if prompts is not None else _as_list("prompt_token_ids", prompt_token_ids)
    return [
        read_request(prompt, one, index)
        for index, (prompt, one) in enumerate(zip(each, params_for(len(each), params), strict=True))
    ]


def read_request(prompt: object, params: SamplingParams, index: int = 0) -> TextRequest:
    """What one prompt asks for; its tokens are checked when its streams are made. Raises RequestError."""
    where = f"prompt {index}"
    if not isinstance(prompt, Mapping):
        return TextRequest(prompt=prompt, params=params)  # type: ignore[arg-type]
    refuse_unknown(
        f"{where}, a dictionary,",
        {str(key): value for key, value in prompt.items()},
        _FIELDS,
        _OTHER_FIELDS,
        RequestError,
    )
    given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            "a prompt has either text or token ids", where=where, expected=_FORMS, got=" and ".join(given) or "neither"
        )
    content, salt = prompt[given[0]], prompt.get("cache_salt")
    if isinstance(content, str) != (given[0] == "prompt"):
        expected = "text" if given[0] == "prompt" else "a list of token ids"
        raise RequestError(
            f'"{given[0]}" of a prompt must be {expected}',
            where=where,
            got=repr(content)[:100],
            hint='"prompt" holds text, "prompt_token_ids" token ids',
        )
    return TextRequest(prompt=content, params=params, cache_salt="" if salt is None else salt)


def params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """One for each of `count` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    chosen = _listed("sampling_params", params, "SamplingParams, or a list of them")
    if len(chosen) != count:
        raise RequestError(
            "sampling_params must be one for all prompts, or one for each", expected=str(count), got=str(len(chosen))
        )
    return [check_params(one) for one in chosen]


def check_params(value: object) -> SamplingParams:
    """`value`, if it is SamplingParams. Raises RequestError."""
    if not isinstance(value, SamplingParams):
        raise RequestError("sampling_params must be SamplingParams", got=repr(value)[:100])
    return value


def check_use_tqdm(value: object) -> None:
    """Raise RequestError for anything but None, True and False."""
    if callable(value):
        raise RequestError(
            "use_tqdm: the progress bar cannot be replaced", expected="True, False or None", got=repr(value)[:100]
        )
    if value is not None:
        check_flag("use_tqdm", value)


def _as_list(name: str, prompts: object) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    each = _listed(name, prompts, f"{_FORMS}, or a list of these")
    return [each] if each and all(isinstance(item, numbers.Integral) for item in each) else each


def _listed(name: str, value: object, expected: str) -> list[Any]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise RequestError(f"{name} cannot be read", expected=expected, got=repr(value)[:100])
    return list(value)
