"""Messages → the text of a prompt, by the jinja2 templates that a checkpoint brings; the same bytes as transformers.

    chat_template.jinja, additional_chat_templates/*.jinja       first, as transformers looks for them
    tokenizer_config.json: chat_template, one text or a list of {name, template}
    chat_template.json

Templates run in jinja2's immutable sandbox: they see messages, tools, special tokens and arguments, and change nothing.
What they write themselves is marked (`template_text`): content of messages never becomes a control token.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from ingot.errors import ConfigError, RequestError, UsageError
from ingot.runtime.special_tokens import read_settings, read_special_tokens
from ingot.runtime.template_text import TemplateText, as_content, as_html, by_template, concatenate, escaped, plain
from ingot.runtime.tokenizer import Tokenizer

CHATML = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\nThese tools can be called:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ 'A call is JSON between two marks, one call after the other:\\n<tool_call>\\n"
    '{"name": "the name of a tool", "arguments": {"the name of a parameter": "its value"}}'
    "\\n</tool_call><|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | default('', true) }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if not loop.first or message['content'] }}"
    "{{ '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson "
    "+ '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; the first is the one in use
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))  # templates make tokens of them; others: text
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))  # no arguments

Message = Mapping[str, Any]


class ChatTemplates:
    """The templates of a model by name; "default" is used, or "tool_use" with tools.

    source     where they come from, in words
    built_in   True: the model has none, and chatml stands in
    variables  what they ask for: messages and arguments; another argument would change nothing
    texts      the templates themselves, by name
    """

    def __init__(
        self, texts: Mapping[str, str], special_tokens: Mapping[str, str], *, source: str, built_in: bool = False
    ) -> None:
        self.source, self.built_in, self.texts = source, built_in, dict(texts)
        self._special_tokens = {name: by_template(text) for name, text in special_tokens.items()}
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self.variables: set[str] = set()
        for name, text in texts.items():
            try:
                self._compiled[name] = environment.from_string(text)
                self.variables |= jinja2.meta.find_undeclared_variables(environment.parse(text))
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} is not valid jinja2", where=source, got=f"line {error.lineno}: {error}"
                ) from error

    @classmethod
    def from_dir(cls, directory: Path, given: str | None = None) -> "ChatTemplates":
        """given: a file, "chatml", or None for what the directory has, and else chatml. Raises UsageError and
        ConfigError."""
        tokens = read_special_tokens(directory)
        if given == "chatml":
            return cls({"default": CHATML}, tokens, source="the built-in chatml template", built_in=True)
        if given is not None:
            try:
                return cls({"default": Path(given).read_text(encoding="utf-8")}, tokens, source=given)
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    "the chat template cannot be read", where=given, expected="a file, or chatml", got=str(error)
                ) from error
        texts, source = _find(directory)
        if not texts:
            return cls({"default": CHATML}, tokens, source="the built-in chatml template", built_in=True)
        return cls(texts, tokens, source=source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        """The prompt's text. Raises RequestError where the template refuses the messages.

        continue_final_message  end with the content of the last message, so that the answer goes on from there
        arguments  further variables of the template, e.g. enable_thinking
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message opens no answer of its own", hint="set add_generation_prompt to false, too"
            )
        for name in arguments or ():
            if name in RESERVED:
                raise RequestError(f"chat_template_kwargs must not set {name!r}", hint="it has a field of its own")
        try:
            text = self._choose(tools).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=None if tools is None else as_content(list(tools)),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **{name: as_content(value) for name, value in (arguments or {}).items()}},
            )
        except jinja2.TemplateError as error:
            raise RequestError("the chat template refuses these messages", got=str(error)) from error
        except Exception as error:  # templates are programs of others: a MemoryError of theirs is none of ours
            raise RequestError("the chat template cannot render these messages", got=repr(error)[:200]) from error
        found = text if isinstance(text, TemplateText) else TemplateText(text)
        return _up_to_content(found, messages[-1]) if continue_final_message else found

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        special_tokens_in_content: bool = False,
    ) -> list[int]:
        """The prompt's token ids. Templates of models write their own BOS; the built-in one has none to write.

        special_tokens_in_content  True: what reads like a control token is one, also in content
        """
        text = self.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
        )
        return tokenizer.encode(plain(text) if special_tokens_in_content else text, add_special_tokens=self.built_in)

    def require_tools(self) -> None:
        """Raises RequestError where the templates would leave tools out of the prompt."""
        if "tools" not in self.variables:
            raise RequestError(
                "tools: the chat template has no place for them", where=self.source, hint="use another chat template"
            )

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError where control tokens that the template writes would be taken for content."""
        try:
            text = self.render([{"role": "user", "content": "a"}])
        except RequestError:
            return
        if tokenizer.encode(text) != tokenizer.encode(plain(text)):
            raise ConfigError(
                "the chat template makes control tokens in a way in which they cannot be told from content",
                where=self.source,
                expected="texts that are added, joined, replaced, formatted with %, or printed",
                hint="change the template, or, where all messages are trusted, start with --special_tokens_in_content",
            )

    def _choose(self, tools: object) -> jinja2.Template:
        for name in (*(["tool_use"] if tools is not None else []), "default"):
            if name in self._compiled:
                return self._compiled[name]
        raise RequestError(
            "the model has several chat templates and none is the default",
            expected=", ".join(self._compiled),
            hint="start the server with --chat_template FILE",
        )


def _up_to_content(text: TemplateText, message: Message) -> TemplateText:
    """As transformers do it: up to where the content of the last message ends, with its white space if it is there."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise RequestError("continue_final_message needs a last message of the assistant with text")
    whole = plain(text)
    place = whole.rfind(content.strip())
    if place < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the last message, so that its end cannot be found"
        )
    kept = content.lstrip()
    end = place + len(kept if whole.startswith(kept, place) else content.strip())
    return text[:end]


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Without keys that hold nothing; reasoning under every name that templates look for."""
    kept = {as_content(key): as_content(value) for key, value in message.items() if value is not None}
    if kept.get("role") in _ROLES:
        kept["role"] = by_template(kept["role"])
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def with_object(call: Any) -> Any:
    """A call of an earlier answer as templates write it, with `tojson`: clients send its arguments as JSON text, or
    none for an empty object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments", ""), str):
        return call
    try:
        arguments = json.loads(function.get("arguments", "").strip() or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _find(directory: Path) -> tuple[dict[str, str], str]:
    """Name → text, and where they stand."""
    texts: dict[str, str] = {}
    main = directory / "chat_template.jinja"
    if main.is_file():
        texts["default"] = main.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        texts[path.stem] = path.read_text(encoding="utf-8")
    if texts:
        return texts, str(main)
    for path in (directory / "tokenizer_config.json", directory / "chat_template.json"):
        texts = _named(read_settings(path).get("chat_template"), path)
        if texts:
            return texts, f"{path}:chat_template"
    return {}, ""


def _named(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
        if len(pairs) == len(value) and all(isinstance(part, str) for pair in pairs for part in pair):
            return {str(name): str(text) for name, text in pairs}
    raise ConfigError(
        "the chat template is neither text nor a list of names with texts",
        where=f"{path}:chat_template",
        got=repr(value)[:100],
    )


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which marks what the model wrote: the text itself, unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    @staticmethod
    def _same(caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """`dict` inside templates, without the attributes of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` inside templates; names that begin with _ lead to Python's insides."""

    def __init__(*args: Any, **values: Any) -> None:
        self, args = args[0], args[1:]
        given = dict(*args, **values)
        for name in given:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class _Marking(jinja2.compiler.CodeGenerator):
    """Compiles templates so that their own text is marked as theirs."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self._write_text(node.value)
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self._write_text(node.data)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.by_template({''.join(group)!r})"

    def _write_text(self, text: str) -> None:
        self.write(f"environment.by_template({text!r})")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Marking
    concat = staticmethod(concatenate)
    by_template = staticmethod(by_template)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # a text in a folded list would be nobody's
    )
    environment.filters.update(tojson=_to_json, join=_join, safe=_safe, e=_escape, escape=_escape)
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    """As jinja2's own, with the marks."""
    found = value if attribute is None else map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return concatenate((d,)).join(map(str, found))


def _safe(value: Any) -> str:
    return escaped(value if isinstance(value, str) else str(value))


def _escape(value: Any) -> str:
    return escaped(as_html(value))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
