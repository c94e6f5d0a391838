"""Conversations → prompts, with vLLM's and transformers' names, by the templates that the server uses."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from ingot.configs.sampling import check_flag
from ingot.errors import RequestError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import RESERVED, ChatTemplates, with_object
from ingot.runtime.template_text import TemplateText, plain
from ingot.runtime.thinking_switch import without_idle_switches
from ingot.runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTokenizer:
    """A tokenizer and the chat templates of its model, behind the names of transformers. formats: of its answers."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, formats: AnswerFormats) -> None:
        self._tokenizer, self._templates, self.formats = tokenizer, templates, formats

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **chat_template_kwargs: object,
    ) -> str | list[int]:
        """The prompt of one conversation: token ids, or with tokenize=False its text. Raises RequestError."""
        check_flag("tokenize", tokenize)
        text = self.render(conversation, tools, add_generation_prompt, chat_template_kwargs, continue_final_message)
        return self.encode_rendered(text) if tokenize else plain(text)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        arguments: Mapping[str, object],
        continue_final_message: bool = False,
    ) -> TemplateText:
        """The text of a prompt. Raises RequestError."""
        check_flag("continue_final_message", continue_final_message)
        check_flag("add_generation_prompt", add_generation_prompt)
        reasons = self.formats.reasoning is not None
        arguments = without_idle_switches(arguments, self._templates.variables, reasons=reasons)
        for name in arguments.keys() - self._templates.variables - RESERVED:
            raise RequestError(
                f"chat_template_kwargs: the chat template has no variable {name!r}",
                where=self._templates.source,
                hint="leave it out",
            )
        read = [_read_message(message, f"message {place}") for place, message in enumerate(messages)]
        return self._templates.render(
            read,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
        )

    def require_tools(self) -> None:
        """Raises RequestError where the template would leave tools out of the prompt."""
        self._templates.require_tools()

    def encode_rendered(self, text: TemplateText) -> list[int]:
        """Token ids of what `render` gave. Templates of models write their own BOS; the built-in one has none."""
        return self._tokenizer.encode(text, add_special_tokens=self._templates.built_in)


def read_conversations(messages: object) -> list[Sequence[Message]]:
    """One conversation, a list of messages, or a list of conversations → a list of conversations."""
    expected = 'a list like [{"role": "user", "content": "Hi"}], or a list of such lists'
    if not _is_list(messages) or not messages:
        raise RequestError("messages cannot be read", expected=expected, got=repr(messages)[:100])
    if isinstance(messages[0], Mapping):
        return [messages]
    for place, conversation in enumerate(messages):
        if not _is_list(conversation) or not conversation:
            raise RequestError(
                "a conversation must be a list of messages",
                where=f"conversation {place}",
                expected=expected,
                got=repr(conversation)[:100],
            )
    return list(messages)


def read_template_arguments(given: object) -> Mapping[str, object]:
    """chat_template_kwargs. Raises RequestError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError("chat_template_kwargs must be a dictionary of names", got=repr(given)[:100])
    return given


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_SPEAKING = ("system", "user", "tool")  # roles whose messages are their content


def _read_message(message: Any, where: str) -> dict[str, Any]:
    """As templates expect it: text in one piece, `developer` under its old name."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            "a message must be a dictionary with a role",
            where=where,
            expected='{"role": "user", "content": "Hi"}',
            got=repr(message)[:100],
        )
    read = dict(message)
    if _is_list(read.get("tool_calls")):
        for place, call in enumerate(read["tool_calls"]):
            _check_call(call, f"{where}.tool_calls[{place}]")
        read["tool_calls"] = [with_object(call) for call in read["tool_calls"]]
    if read["role"] == "developer":
        read["role"] = "system"
    if _is_list(read.get("content")):
        read["content"] = "\n".join(_read_part(part, where) for part in read["content"])
    elif not isinstance(read.get("content"), str | None):
        raise RequestError("content of a message must be text", where=where, got=repr(read["content"])[:100])
    elif read.get("content") is None and read["role"] in _SPEAKING:
        raise RequestError(
            "a message has no content",
            where=where,
            expected='{"role": "user", "content": "Hi"}; only an assistant may have called tools instead',
            got=repr(message)[:100],
        )
    return read


def _check_call(call: Any, where: str) -> None:
    """A call of an earlier answer. Raises RequestError."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            "a call of an earlier answer must name its function",
            where=where,
            expected='{"type": "function", "id": ..., "function": {"name": ..., "arguments": JSON text}}',
            got=repr(call)[:100],
        )
    if not isinstance(function.get("arguments"), str | Mapping | None):
        raise RequestError(
            "arguments of an earlier call must be JSON text or a dictionary",
            where=f"{where}.function.arguments",
            got=repr(function["arguments"])[:100],
        )


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            "a part of a message must be text: the engine reads nothing else",
            where=where,
            expected='{"type": "text", "text": "Hi"}',
            got=repr(part)[:100],
        )
    return str(part["text"])
