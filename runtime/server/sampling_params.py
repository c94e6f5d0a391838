"""What a request of the protocol asks the executor for: sampling parameters and prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.configs.generation import GenerationDefaults
from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.answers.answer_formats import AnswerReading
from ingot.runtime.answers.tools import ToolUse, read_tools
from ingot.runtime.chat_template import RESERVED, ChatTemplates
from ingot.runtime.server.answer_format import structured_outputs
from ingot.runtime.server.api_error import ApiError, in_one_line
from ingot.runtime.server.protocol import ChatMessage, ChatRequest, CompletionRequest, Generate, TokenizeRequest
from ingot.runtime.text_stream import TextRequest, TextStream
from ingot.runtime.thinking_switch import find_switch, without_idle_switches
from ingot.runtime.tokenizer import Tokenizer

MAX_SCORES = 1 << 20  # probabilities in one answer
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in completions


def completion_params(asked: CompletionRequest, defaults: GenerationDefaults) -> SamplingParams:
    """OpenAI's parameters of a completion."""
    if asked.echo and asked.logprobs is not None and asked.n > 1 and asked.stream:
        raise ApiError(
            400, "a stream with echo and logprobs can have only one completion", param="n", code="unsupported_value"
        )
    prompt_logprobs = asked.logprobs if asked.echo else None
    if asked.suffix is not None:
        _check_suffix(asked)
    return _params(asked, defaults, logprobs=asked.logprobs, prompt_logprobs=prompt_logprobs)


def _check_suffix(asked: CompletionRequest) -> None:
    """Text that fills a gap needs text around it. Raises ApiError."""
    if any(not isinstance(each, str) for each in asked.prompts()):
        raise ApiError(400, "suffix needs a prompt that is text", param="suffix", code="invalid_value")
    if asked.echo:
        raise ApiError(400, "echo cannot be combined with suffix", param="echo", code="unsupported_value")


def chat_params(asked: ChatRequest, defaults: GenerationDefaults) -> SamplingParams:
    """Without a limit: as many tokens as the engine allows."""
    if None not in (asked.max_tokens, asked.max_completion_tokens) and asked.max_tokens != asked.max_completion_tokens:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens are two names of one limit, and differ",
            param="max_completion_tokens",
            code="invalid_value",
        )
    if asked.echo and not asked.continue_final_message:
        raise ApiError(
            400,
            "echo needs continue_final_message: true; it repeats the message that the answer goes on from",
            param="echo",
            code="unsupported_value",
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    return _params(asked, defaults, logprobs=logprobs)


def most_tokens(asked: Generate) -> int | None:
    """The limit that the request gives, under either name. 0 asks for the prompt alone."""
    either = asked.max_completion_tokens if isinstance(asked, ChatRequest) else None
    return asked.max_tokens if either is None else either


def text_requests(
    asked: Generate,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    reading: AnswerReading | None = None,
) -> list[TextRequest]:
    """One per prompt. Where the request gives no limit: OpenAI's for completions, what fits for chats."""
    if asked.resume_token_ids:
        _require_resumable(asked, len(prompts))
    default = _COMPLETION_TOKENS if isinstance(asked, CompletionRequest) else None
    return [
        TextRequest(
            prompt=prompt,
            params=params,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            default_max_tokens=default,
            reading=reading,
            keep_last=_keep_last(asked),
            resumed=asked.resume_token_ids,
        )
        for prompt in prompts
    ]


def _require_resumable(asked: Generate, prompts: int) -> None:
    """Raises ApiError where more than text goes on: what a client has seen of that, this server does not know."""
    beside = {
        "more than one prompt": prompts > 1,
        "echo": isinstance(asked, CompletionRequest | ChatRequest) and asked.echo,
        "tools": isinstance(asked, ChatRequest) and bool(asked.tools),
    }
    for what, given in beside.items():
        if given:
            raise ApiError(
                400,
                f"resume_token_ids cannot be combined with {what}",
                param="resume_token_ids",
                code="unsupported_value",
            )


def _keep_last(asked: Generate) -> int | None:
    if asked.truncate_prompt_tokens == 0:
        raise ApiError(
            400,
            "truncate_prompt_tokens must be at least 1, or -1",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return asked.truncate_prompt_tokens


def tool_use(asked: ChatRequest | TokenizeRequest) -> ToolUse:
    """The tools of a conversation. Raises ApiError."""
    try:
        if isinstance(asked, TokenizeRequest):
            return read_tools(asked.tools)
        return read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    except RequestError as error:
        raise ApiError(400, in_one_line(error), param=error.where, code="invalid_value") from None


def check_logprobs(groups: Sequence[Sequence[TextStream]]) -> None:
    """An answer's probabilities are kept until they are sent. Raises ApiError."""
    entries = 0
    for first, *others in groups:
        asked = first.request
        prompt = 0 if asked.prompt_logprobs is None else asked.num_prompt * (asked.prompt_logprobs + 1)
        generated = 0 if asked.logprobs is None else asked.max_new_tokens * (asked.logprobs + 1)
        entries += (prompt + generated) * (1 + len(others))
    if entries > MAX_SCORES:
        raise ApiError(
            400,
            f"logprobs: tokens x n x (logprobs + 1) may be at most {MAX_SCORES} over all prompts; got {entries}; "
            "ask for fewer logprobs, or give max_tokens",
            param="logprobs",
            code="invalid_value",
        )


def template_arguments(
    asked: ChatRequest | TokenizeRequest, templates: ChatTemplates, *, reasons: bool
) -> dict[str, Any]:
    """chat_template_kwargs, and reasoning_effort under the name that the template has for it. Raises ApiError.

    reasons: as in `without_idle_switches`.
    """
    arguments = without_idle_switches(asked.chat_template_kwargs, templates.variables, reasons=reasons)
    switch, effort = find_switch(templates.variables), asked.reasoning_effort
    if effort is None:
        return arguments
    value: object = effort
    if "reasoning_effort" in templates.variables:
        name = "reasoning_effort"
    elif switch is not None:
        name, value = switch.name, switch.off if effort == "none" else switch.on
    elif effort == "none" and not reasons:
        return arguments
    else:
        raise ApiError(
            400,
            "reasoning_effort: the chat template has neither levels of reasoning nor a switch for it",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    if arguments.setdefault(name, value) != value:
        raise ApiError(
            400,
            f"reasoning_effort and chat_template_kwargs.{name} differ; give one",
            param="reasoning_effort",
            code="invalid_value",
        )
    return arguments


def chat_prompt(
    messages: Sequence[ChatMessage],
    templates: ChatTemplates,
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool,
    arguments: dict[str, Any],
    special_tokens_in_content: bool,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a conversation."""
    for name in arguments.keys() - templates.variables - RESERVED:
        raise ApiError(
            400,
            f"chat_template_kwargs: the chat template has no variable {name[:100]!r}",
            param=f"chat_template_kwargs.{name[:100]}",
            code="unknown_parameter",
        )
    if tools:
        templates.require_tools()
    return templates.encode(
        [message.for_template() for message in messages],
        tokenizer,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        arguments=arguments,
        special_tokens_in_content=special_tokens_in_content,
    )


def _params(
    asked: Generate, defaults: GenerationDefaults, *, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """What the request says, then generation_config.json, then SamplingParams' own defaults.

    The executor knows no sequence without tokens: where the prompt alone is asked for, one is drawn, and left out.
    """
    max_tokens = most_tokens(asked)
    if max_tokens == 0 and asked.min_tokens:
        raise ApiError(400, "min_tokens: at most max_tokens, which is 0", param="min_tokens", code="invalid_value")
    if asked.prompt_logprobs is not None:
        if asked.stream:
            raise ApiError(
                400, "prompt_logprobs needs stream: false", param="prompt_logprobs", code="unsupported_value"
            )
        if prompt_logprobs not in (None, asked.prompt_logprobs):
            raise ApiError(
                400,
                "with echo, prompt_logprobs and logprobs must be equal",
                param="prompt_logprobs",
                code="invalid_value",
            )
        prompt_logprobs = asked.prompt_logprobs
    temperature, top_k, top_p = defaults.resolve(asked.temperature, asked.top_k, asked.top_p)
    values: dict[str, Any] = dict(defaults.others)
    for name in ("min_p", "repetition_penalty"):
        if getattr(asked, name) is not None:
            values[name] = getattr(asked, name)
    bias = None if asked.logit_bias is None else {int(token): value for token, value in asked.logit_bias.items()}
    return SamplingParams(
        max_tokens=1 if max_tokens == 0 else max_tokens,
        min_tokens=asked.min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=None if asked.seed is None else asked.seed % 2**64,
        n=asked.n,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        bad_words=asked.bad_words or None,
        ignore_eos=asked.ignore_eos,
        logit_bias=bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_str=asked.include_stop_str_in_output,
        skip_special_tokens=asked.skip_special_tokens,
        structured_outputs=structured_outputs(asked),
        thinking_token_budget=asked.thinking_token_budget if isinstance(asked, ChatRequest) else None,
        **values,
    )
