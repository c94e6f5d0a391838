"""What a caller asks → Requests, or the reason why not. Nothing runs before every request of a call has passed."""

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.configs.sampling import MAX_SEED, SamplingParams, check_integer
from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.plan import Limits
from ingot.runtime.guided.guides import Guides
from ingot.runtime.guided.matcher import Matcher
from ingot.runtime.logits_rules import NO_RULES, Rules, read_processors
from ingot.runtime.request import MAX_PRIORITY, NO_REASONING, ReasoningRules, Request
from ingot.step_io import Int32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What requests are checked against. max_positions: of the model; end_ids: tokens that end a sequence; pad_id:
    fills up output rows."""

    vocab_size: int
    limits: Limits
    max_positions: int
    end_ids: frozenset[int]
    pad_id: int


def read_prompts(batch_input_ids: object, vocab_size: int) -> list[Int32]:
    """Lists, numpy or torch arrays, one of token ids per prompt → int32 arrays. Raises RequestError."""
    if isinstance(batch_input_ids, (str, bytes, Mapping)) or not isinstance(batch_input_ids, Iterable):
        raise RequestError(
            "batch_input_ids must be a list of prompts, each a list of token ids", got=repr(batch_input_ids)[:100]
        )
    try:
        prompts = list(batch_input_ids)
    except TypeError as error:  # an array without dimensions
        raise RequestError("batch_input_ids cannot be read", got=str(error)) from error
    return [read_ids(ids, vocab_size, f"prompt {index}") for index, ids in enumerate(prompts)]


def read_ids(ids: object, vocab_size: int, where: str) -> Int32:
    """One prompt or token sequence, int32 [n], n >= 1, all within the vocabulary. Raises RequestError."""
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError("token ids cannot be read", where=where, got=str(error)) from error
    if array.dtype == object and array.ndim == 1 and all(type(each) is int for each in array):
        array = np.clip(array, -1, vocab_size).astype(np.int64)  # numbers of more than 64 bits are outside, too
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise RequestError(
            "token ids must be a flat list of whole numbers",
            where=where,
            got=f"{array.dtype} of shape {list(array.shape)}",
            hint="batch_input_ids holds one such list per prompt",
        )
    if array.size == 0:
        raise RequestError("there are no tokens", where=where, hint="start from the model's BOS token")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise RequestError(
            "a token id is outside the vocabulary", where=where, expected=f"0 to {vocab_size - 1}", got=str(outside[0])
        )
    return array.astype(np.int32)


def read_end_ids(end_id: int | Sequence[int] | None, info: ModelInfo) -> frozenset[int] | None:
    """None: nothing said; -1: none at all; otherwise the given id or ids."""
    if end_id is None:
        return None
    plain = _plain(end_id)
    ids = list(plain) if _is_list(plain) else [plain]
    if ids == [-1]:
        return frozenset()
    for token in ids:
        check_integer("end_id", token, 0, info.vocab_size - 1)
    return frozenset(int(token) for token in ids)


def _plain(value: object) -> Any:
    """Numbers and arrays of numpy and torch as Python's numbers and lists; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def read_priority(priority: int, cache_salt: str | None) -> tuple[int, str]:
    """When a call's requests start, and with whom they share blocks. Raises RequestError."""
    check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError("cache_salt must be text", got=repr(cache_salt)[:100])
    return int(priority), cache_salt or ""


def read_pad_id(pad_id: int) -> int:
    """Any int32; it need not be a token."""
    check_integer("pad_id", pad_id, -(2**31), 2**31 - 1)
    return int(pad_id)


def read_words(name: str, words_list: object, num_prompts: int, vocab_size: int) -> list[list[tuple[int, ...]]]:
    """Per prompt a list of token sequences → the same as tuples; None: none."""
    if words_list is None:
        return [[] for _ in range(num_prompts)]
    if not isinstance(words_list, (list, tuple)) or len(words_list) != num_prompts:
        raise RequestError(
            f"{name} must hold, for each prompt, a list of token sequences",
            expected=f"a list of {num_prompts} lists, e.g. [[[13], [2, 4]], ...]",
            got=repr(words_list)[:100],
        )
    read: list[list[tuple[int, ...]]] = []
    for index, words in enumerate(words_list):
        if words is not None and not isinstance(words, (list, tuple)):
            raise RequestError(
                f"{name} of a prompt must be a list of token sequences", where=f"prompt {index}", got=repr(words)[:100]
            )
        named = [read_ids(word, vocab_size, f"{name}: {n} of prompt {index}") for n, word in enumerate(words or ())]
        read.append([tuple(word.tolist()) for word in named])
    return read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What `ModelRunner.generate` takes about choosing tokens, with TensorRT-LLM's names; None: unsaid."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    random_seed: int | Sequence[int] | None = None
    num_return_sequences: int | None = None
    min_length: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def params_per_prompt(num_prompts: int, config: SamplingParams | None, own: Arguments) -> list[SamplingParams]:
    """One SamplingParams per prompt, from `config` or from the other arguments, never from both."""
    if config is not None:
        if not isinstance(config, SamplingParams):
            raise RequestError("sampling_config must be SamplingParams", got=type(config).__name__)
        if any(getattr(own, field.name) is not None for field in dataclasses.fields(own)):
            raise RequestError("sampling_config and other sampling arguments exclude each other", hint="give one")
        _refuse_texts(config)
        return [config] * num_prompts
    for name, minimum in (("max_new_tokens", 1), ("num_return_sequences", 1), ("min_length", 0)):
        if getattr(own, name) is not None:
            check_integer(name, getattr(own, name), minimum)
    seed = _plain(own.random_seed)
    seeds = list(seed) if _is_list(seed) else [seed] * num_prompts
    if len(seeds) != num_prompts:
        raise RequestError("random_seed must be one seed, or one per prompt", got=f"{len(seeds)} for {num_prompts}")
    for each in seeds:
        if each is not None:
            check_integer("random_seed", each, 0, MAX_SEED)
    if own.max_new_tokens is not None and (own.min_length or 0) > own.max_new_tokens:
        raise RequestError(
            "min_length is more than max_new_tokens", expected=f"at most {own.max_new_tokens}", got=str(own.min_length)
        )
    greedy = own.temperature is None and own.top_k is None and own.top_p is None
    default_temperature = 0.0 if greedy else 1.0
    return [
        SamplingParams(
            max_tokens=own.max_new_tokens,
            min_tokens=own.min_length or 0,
            temperature=default_temperature if own.temperature is None else own.temperature,
            top_k=0 if own.top_k is None else own.top_k,
            top_p=1.0 if own.top_p is None else own.top_p,
            repetition_penalty=1.0 if own.repetition_penalty is None else own.repetition_penalty,
            presence_penalty=0.0 if own.presence_penalty is None else own.presence_penalty,
            frequency_penalty=0.0 if own.frequency_penalty is None else own.frequency_penalty,
            seed=seed,
            n=own.num_return_sequences or 1,
        )
        for seed in seeds
    ]


def _refuse_texts(params: SamplingParams) -> None:
    """ModelRunner knows no texts."""
    ways = {"stop": "stop_words_list", "bad_words": "bad_words_list"}
    for name, way in ways.items():
        if getattr(params, name):
            raise RequestError(
                f"ModelRunner has no tokenizer for {name}", hint=f"pass token ids as {way}, or use ingot.LLM"
            )
    if params.include_stop_str or not params.skip_special_tokens:
        raise RequestError(
            "include_stop_str and skip_special_tokens are about text, and ModelRunner returns token ids",
            hint="leave them out, or use ingot.LLM",
        )


def make_requests(
    prompt: Int32,
    params: SamplingParams,
    info: ModelInfo,
    *,
    where: str,
    default_max_tokens: int | None = None,
    end_ids: frozenset[int] | None = None,
    stop_words: Sequence[tuple[int, ...]] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    want_context_logits: bool = False,
    want_generation_logits: bool = False,
    want_log_probs: bool = False,
    priority: int = 0,
    cache_salt: str = "",
    guides: Guides | None = None,
    reasoning: ReasoningRules | None = None,
    resumed: Sequence[int] | Int32 = (),
) -> list[Request]:
    """The params.n requests of one prompt, checked against the engine's limits. Raises RequestError.

    default_max_tokens  where params.max_tokens is None; lowered to what fits; None: as many as fit
    end_ids             None: the engine's, unless params.ignore_eos
    stop_words, bad_words  token sequences; those of params.stop and params.bad_words need a tokenizer
    guides          of the engine, for params.structured_outputs
    reasoning       what is known of it; None: nothing, so that it has no budget
    resumed         tokens that were generated elsewhere
    """
    if params.thinking_token_budget is not None and reasoning is None:
        raise RequestError(
            "thinking_token_budget: this request has no reasoning that could be ended",
            hint="it is for chats of models whose template shows how they reason",
        )
    max_new_tokens = _max_new_tokens(len(prompt), params.max_tokens, default_max_tokens, info, where)
    ends = (frozenset() if params.ignore_eos else info.end_ids) if end_ids is None else end_ids
    if len(resumed):
        _require_resumable(resumed, params, max_new_tokens, ends | frozenset(params.stop_token_ids))
    rules = _rules(params, bad_words, max_new_tokens, info.vocab_size, where)
    logprobs, prompt_logprobs = (
        _num_probs(name, getattr(params, name), info.vocab_size, where) for name in ("logprobs", "prompt_logprobs")
    )
    grammars = _grammars(params, guides)
    return [
        Request(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=float(params.temperature),
            top_k=max(int(params.top_k), 0),
            top_p=float(params.top_p),
            seed=_seed(params.seed, index),
            rules=rules,
            logprobs=logprobs,
            # of equal prompts one computes all positions, the others find its blocks
            prompt_logprobs=prompt_logprobs if index == 0 else None,
            end_ids=ends | frozenset(params.stop_token_ids),
            stop_words=stop_words,
            want_context_logits=want_context_logits and index == 0,
            want_generation_logits=want_generation_logits,
            want_log_probs=want_log_probs,
            priority=priority,
            cache_salt=cache_salt.encode(),
            grammar=grammars[index],
            reasoning=reasoning or NO_REASONING,
            resumed=resumed,
        )
        for index in range(params.n)
    ]


def _require_resumable(
    resumed: Sequence[int] | Int32, params: SamplingParams, max_new_tokens: int, end_ids: frozenset[int]
) -> None:
    """Raises RequestError where another server cannot have generated these tokens and have more to generate."""
    if params.n > 1:
        raise RequestError("resume_token_ids: one sequence at a time goes on", expected="n = 1", got=str(params.n))
    if params.temperature > 0 and params.seed is None:
        raise RequestError(
            "resume_token_ids: draws go on only with the seed that they began with",
            expected="a seed, or temperature 0",
            hint="send a seed with requests that may have to go on elsewhere",
        )
    if params.prompt_logprobs is not None:
        raise RequestError("resume_token_ids and prompt_logprobs exclude each other")
    if len(resumed) >= max_new_tokens:
        raise RequestError(
            "resume_token_ids: the answer has as many tokens as it may have",
            expected=f"fewer than {max_new_tokens}",
            got=str(len(resumed)),
        )
    if ended := [token for token in resumed[params.min_tokens :] if token in end_ids]:
        raise RequestError("resume_token_ids: the answer has ended already", got=f"end token {ended[0]}")


def _grammars(params: SamplingParams, guides: Guides | None) -> list[Matcher | None]:
    """One for each completion, compiled once."""
    asked = params.structured_outputs
    if asked is None:
        return [None] * params.n
    assert isinstance(asked, StructuredOutputs), "SamplingParams has read it"
    if guides is None:
        raise RequestError("structured_outputs: this caller has no grammars", hint="use LLM, ModelRunner or the server")
    first = guides.matcher(asked)
    return [first, *(first.clone() for _ in range(params.n - 1))]


def _rules(
    params: SamplingParams, bad_words: Sequence[tuple[int, ...]], max_new_tokens: int, vocab_size: int, where: str
) -> Rules:
    if params.min_tokens > max_new_tokens:
        raise RequestError(
            "more tokens are asked for at least than at most",
            where=where,
            expected=f"at most {max_new_tokens}",
            got=str(params.min_tokens),
        )
    for token in params.logit_bias or ():
        check_integer("logit_bias: a token id", token, 0, vocab_size - 1)
    for token in params.stop_token_ids:
        check_integer("stop_token_ids", token, 0, vocab_size - 1)
    rules = Rules(
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=tuple((int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()),
        bad_words=tuple(bad_words),
        min_tokens=int(params.min_tokens),
        processors=read_processors(params.logits_processors),
    )
    return NO_RULES if rules == NO_RULES else rules


def _num_probs(name: str, wanted: int | None, vocab_size: int, where: str) -> int | None:
    if wanted is not None and wanted > vocab_size:
        raise RequestError(
            f"{name} is more than there are tokens", where=where, expected=f"at most {vocab_size}", got=str(wanted)
        )
    return vocab_size if wanted == -1 else wanted


def _max_new_tokens(num_prompt: int, given: int | None, default: int | None, info: ModelInfo, where: str) -> int:
    limits = info.limits
    longer = "" if limits.max_seq_len > info.max_positions else ", or build the engine with a larger --max_seq_len"
    if num_prompt > limits.max_input_len:
        raise RequestError(
            "the prompt is longer than the engine allows",
            where=where,
            expected=f"at most {limits.max_input_len} tokens (max_input_len)",
            got=f"{num_prompt} tokens",
            hint="shorten it"
            + (
                ", or build the engine with a larger --max_input_len"
                if limits.max_input_len < info.max_positions
                else ""
            ),
        )
    room = limits.max_seq_len - num_prompt
    if room < 1:
        raise RequestError(
            "the prompt leaves no room for a new token",
            where=where,
            expected=f"at most {limits.max_seq_len - 1} tokens (max_seq_len counts prompt and new tokens)",
            got=f"{num_prompt} tokens",
            hint=f"shorten it{longer}",
        )
    if given is None:
        return room if default is None else min(default, room)
    if given > room:
        raise RequestError(
            "prompt and new tokens together are more than the engine allows",
            where=where,
            expected=f"at most {limits.max_seq_len} tokens (max_seq_len), here {room} new ones",
            got=f"{num_prompt} + {given}",
            hint=f"ask for at most {room} new tokens{longer}",
        )
    return int(given)


def _seed(seed: int | None, index: int) -> int:
    """Seed of the index-th completion of a prompt: seed + index, or random if no seed was given."""
    return secrets.randbits(64) if seed is None else (int(seed) + index) % 2**64
