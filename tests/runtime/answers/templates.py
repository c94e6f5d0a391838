"""A chat template for each wire format: how its models see tools, calls and what these gave. Written after descriptions
of the formats, not taken from the models.

    system tools   user text   assistant reasoning text calls   tool text   ...   assistant
"""

import dataclasses
import json

_CHATML = (
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<|im_start|>tool\n",
    "<|im_end|>\n",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """call: jinja that writes one, of `name`, `arguments`, `loop` and `call`. turns: what begins one of the system, the
    user, the assistant, a tool; what ends each. section: around all calls. thinks, says: around reasoning, content."""

    call: str
    turns: tuple[str, ...] = _CHATML
    section: tuple[str, str] = ("", "")
    between: str = ""
    thinks: tuple[str, str] | None = None
    says: tuple[str, str] = ("", "")
    tools: str = "{{ tool | tojson }}\n"
    before: str = ""

    @property
    def template(self) -> str:
        """The whole of it."""
        system, user, assistant, tool, end = map(_text, self.turns)
        thinks = "" if self.thinks is None else _around(self.thinks, "{{ message.reasoning_content }}")
        return (
            f"{self.before}{{% if tools %}}{system}{{% for tool in tools %}}{self.tools}{{% endfor %}}{end}"
            "{% endif %}"
            "{% for message in messages %}{% if message.role == 'assistant' %}"
            f"{assistant}{{% if message.reasoning_content %}}{thinks}{{% endif %}}"
            f"{{% if message.content %}}{_around(self.says, '{{ message.content }}')}{{% endif %}}"
            f"{{% if message.tool_calls %}}{_text(self.section[0])}{{% for call in message.tool_calls %}}"
            "{% set name, arguments = call.function.name, call.function.arguments %}"
            f"{{% if not loop.first %}}{_text(self.between)}{{% endif %}}{self.call}"
            f"{{% endfor %}}{_text(self.section[1])}{{% endif %}}{end}"
            f"{{% elif message.role == 'tool' %}}{tool}{{{{ message.content }}}}{end}"
            f"{{% else %}}{user}{{{{ message.content }}}}{end}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
        )


def _text(text: str) -> str:
    """That a template writes as it is."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _around(marks: tuple[str, str], body: str) -> str:
    return _text(marks[0]) + body + _text(marks[1])


def _json(name: str = "name", arguments: str = "arguments", rest: str = "") -> str:
    """A call whose name is inside the object."""
    return f'{{{{ "{{" }}}}"{name}": "{{{{ name }}}}", "{arguments}": {{{{ arguments | tojson }}}}{rest}{{{{ "}}" }}}}'


def _each(begin: str, after_key: str, end: str, *, kind: str = "") -> str:
    """Arguments one by one: texts as they are, all else as JSON. kind: jinja behind the key."""
    value = "{{ value if value is string else value | tojson }}"
    head = f"{_text(begin)}{{{{ key }}}}{kind}{_text(after_key)}"
    return f"{{% for key, value in arguments.items() %}}{head}{value}{_text(end)}{{% endfor %}}"


def _dsml(section: str) -> Family:
    kind = '" string="{{ "true" if value is string else "false" }}'
    each = _each('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>\n", kind=kind)
    return Family(
        call=f'{_text("<｜DSML｜invoke name=")}"{{{{ name }}}}">\n{each}{_text("</｜DSML｜invoke>")}\n',
        section=(f"\n\n<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"),
        turns=_DEEPSEEK,
        thinks=("<think>", "</think>"),
    )


def _bare(quote: str) -> str:
    """A macro that writes a value without quotes around keys."""
    return (
        f"{{% macro bare(value) %}}{{% if value is string %}}{_around((quote, quote), '{{ value }}')}"
        "{% elif value is mapping %}{{ '{' }}{% for key, each in value.items() %}{{ ',' if not loop.first }}"
        "{{ key }}:{{ bare(each) }}{% endfor %}{{ '}' }}{% elif value is iterable %}[{% for each in value %}"
        "{{ ',' if not loop.first }}{{ bare(each) }}{% endfor %}]"
        "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    )


_PYTHON = (
    "{{ name }}({% for key, value in arguments.items() %}{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}"
    "{% endfor %})"
)
_DEEPSEEK = ("", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜end▁of▁sentence｜>")
_LLAMA = (
    "<|start_header_id|>system<|end_header_id|>\n\n",
    "<|start_header_id|>user<|end_header_id|>\n\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|start_header_id|>ipython<|end_header_id|>\n\n",
    "<|eot_id|>",
)
_GLM = ("<|system|>\n", "<|user|>\n", "<|assistant|>\n", "<|observation|>\n", "")
_MISTRAL = ("[AVAILABLE_TOOLS]", "[INST]", "", "[TOOL_RESULTS]", "</s>")
_GEMMA = ("<|turn>system\n", "<|turn>user\n", "<|turn>model\n", "<|tool_response>", "<turn|>\n")
_IM_ROLES = ("system|>tool_declare", "user|>user", "assistant|>assistant", "system|>tool")
_IM = (*(f"<|im_{each}<|im_middle|>" for each in _IM_ROLES), "<|im_end|>")
_MINIMAX = ("]~b]system\n", "]~b]user\n", "]~b]ai\n", "]~b]tool\n", "[e~[\n")
_ROLES = ("<|start_of_role|>", "<|end_of_role|>")
_GRANITE = (*(f"{each}".join(_ROLES) for each in ("tools", "user", "assistant", "tool_response")), "<|end_of_text|>\n")
_COMMAND = (
    *(f"<|START_OF_TURN_TOKEN|><|{each}_TOKEN|>" for each in ("SYSTEM", "USER", "CHATBOT", "SYSTEM")),
    "<|END_OF_TURN_TOKEN|>",
)
_K3 = (*(f"<|open|>message role={each}<|sep|>" for each in ("system", "user", "assistant", "tool")), "<|end_of_msg|>")
_CODER = (
    f"<tool_call>\n<function={{{{ name }}}}>\n{_each('<parameter=', '>' + chr(10), chr(10) + '</parameter>' + chr(10))}"
    "</function>\n</tool_call>"
)
_SEED = (
    f"<seed:tool_call>\n<function={{{{ name }}}}>\n{_each('<parameter=', '>', '</parameter>' + chr(10))}"
    "</function>\n</seed:tool_call>"
)
_HARMONY = (
    "<|start|>developer<|message|>",
    "<|start|>user<|message|>",
    "<|start|>assistant",
    "<|start|>functions<|channel|>commentary<|message|>",
    "<|end|>",
)
_K3_KIND = (
    '" type="{{ "string" if value is string else "boolean" if value is boolean else "integer" if value is integer else '
    '"object" if value is mapping else "array" }}'
)
_GIGACHAT = (
    "system<|role_sep|>\n",
    "user<|role_sep|>\n",
    "assistant<|role_sep|>\n",
    "function result<|role_sep|>\n",
    "<|message_sep|>\n\n",
)
_THINK = ("<think>\n", "\n</think>\n\n")
_M3 = "]<]minimax[>["


def _lines(before: str, *, line: str) -> str:
    """GLM's: name, keys and values, a line for each or none."""
    each = _each("<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}")
    return f"<tool_call>{{{{ name }}}}{before}{each}</tool_call>"


def _invoke() -> str:
    each = _each('<parameter name="', '">', "</parameter>\n")
    return f'<invoke name="{{{{ name }}}}">\n{each}</invoke>\n'


def _elements(mark: str) -> str:
    """A macro that writes a value as elements; what is null is left out."""
    tag, end = f"{_text(mark)}<", f"{_text(mark)}</"
    fields = f"{tag}{{{{ key }}}}>{{{{ elements(each) }}}}{end}{{{{ key }}}}>"
    return (
        "{% macro elements(value) %}{% if value is mapping %}{% for key, each in value.items() if each is not none %}"
        f"{fields}{{% endfor %}}{{% elif value is iterable and value is not string %}}{{% for each in value %}}"
        f"{tag}item>{{{{ elements(each) }}}}{end}item>{{% endfor %}}"
        "{% elif value is not none %}{{ value | tojson if value is boolean else value }}{% endif %}{% endmacro %}"
    )


def _deepseek(head: str, tail: str, between: str) -> Family:
    return Family(
        call=f"<｜tool▁call▁begin｜>{head}{{{{ arguments | tojson }}}}{tail}<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        between=between,
        turns=_DEEPSEEK,
        thinks=("<think>\n", "\n</think>\n\n"),
    )


FAMILIES = {
    "hermes": Family(call=f"<tool_call>\n{_json()}\n</tool_call>", between="\n", thinks=_THINK),
    "qwen3_coder": Family(call=_CODER, between="\n", thinks=_THINK),
    "seed_oss": Family(call=_SEED, between="\n", thinks=("<seed:think>", "</seed:think>")),
    "llama3_json": Family(
        call=_json(arguments="parameters"),
        between="; ",
        turns=_LLAMA,
        before='{# Respond with {"name": function name, "parameters": dictionary of argument name and its value} #}',
    ),
    "pythonic": Family(
        call=_PYTHON, section=("[", "]"), between=", ", turns=_LLAMA, before="{# as [func_name1(key=value)] #}"
    ),
    "llama4_pythonic": Family(
        call=_PYTHON, section=("<|python_start|>[", "]<|python_end|>"), between=", ", turns=_LLAMA
    ),
    "olmo3": Family(
        call=_PYTHON, section=("<function_calls>", "</function_calls>"), between="\n", thinks=("<think>", "</think>")
    ),
    "lfm2": Family(
        call=_PYTHON,
        section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        between=", ",
        thinks=("<think>", "</think>"),
    ),
    "xlam": Family(
        call=_json(),
        section=("[", "]"),
        between=", ",
        turns=_LLAMA,
        before='{# a list: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}] #}',
    ),
    "functionary": Family(call="<function={{ name }}>{{ arguments | tojson }}</function>", turns=_LLAMA),
    "internlm2": Family(call=f"<|action_start|><|plugin|>\n{_json(arguments='parameters')}<|action_end|>"),
    "gigachat31": Family(call=f"<|function_call|>{_json()}", turns=_GIGACHAT),
    "gigachat3": Family(call=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_json()}", turns=_GIGACHAT),
    "granite_20b": Family(call=f"<function_call> {_json()}", between="\n", turns=_GRANITE),
    "hy_v3": Family(
        call=f"<tool_call>{{{{ name }}}}<tool_sep>\n"
        f"{_each('<arg_key>', '</arg_key>' + chr(10) + '<arg_value>', '</arg_value>' + chr(10))}</tool_call>\n",
        section=("<tool_calls>\n", "</tool_calls>"),
        thinks=("<think>", "</think>"),
    ),
    "mistral": Family(
        call=_json(rest=', "id": "{{ call.id }}"'), section=("[TOOL_CALLS][", "]"), between=", ", turns=_MISTRAL
    ),
    "mistral_v11": Family(
        call="[TOOL_CALLS]{{ name }}[ARGS]{{ arguments | tojson }}", turns=_MISTRAL, thinks=("[THINK]", "[/THINK]")
    ),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{{ name }}\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("{{ name }}<｜tool▁sep｜>", "", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": Family(
        call="<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ arguments | tojson }}<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        turns=_IM,
        thinks=("<think>", "</think>"),
    ),
    "kimi_k3": Family(
        call=f'<|open|>call tool="{{{{ name }}}}" index="{{{{ loop.index }}}}"<|sep|>'
        f"{_each('<|open|>argument key=' + chr(34), chr(34) + '<|sep|>', '<|close|>argument<|sep|>', kind=_K3_KIND)}"
        "<|close|>call<|sep|>",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>"),
        turns=_K3,
        thinks=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        says=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "glm4": Family(call=_lines("\n", line="\n"), between="\n", turns=_GLM, thinks=("<think>", "</think>\n")),
    "glm47": Family(call=_lines("", line=""), turns=_GLM, thinks=("<think>", "</think>")),
    "harmony": Family(
        call=" to=functions.{{ name }}<|channel|>commentary json<|message|>{{ arguments | tojson }}",
        turns=_HARMONY,
        between="<|call|><|start|>assistant",
        thinks=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        says=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    ),
    "phi4_mini": Family(
        call=_json(),
        section=("functools[", "]"),
        between=", ",
        turns=("<|tool|>", "<|user|>", "<|assistant|>", "<|tool_response|>", "<|end|>"),
    ),
    "granite": Family(call=_json(), section=("<|tool_call|>[", "]"), between=", ", turns=_GRANITE),
    "hunyuan": Family(
        call=_json(),
        section=("<tool_calls>[", "]</tool_calls>"),
        between=", ",
        thinks=("<think>\n", "\n</think>\n"),
        says=("<answer>\n", "\n</answer>"),
    ),
    "nemotron": Family(
        call=_json(),
        section=("<TOOLCALL>[", "]</TOOLCALL>"),
        between=", ",
        turns=("<SPECIAL_10>System\n", "<SPECIAL_11>User\n", "<SPECIAL_11>Assistant\n", "<TOOL_RESPONSE>", "\n"),
        thinks=_THINK,
    ),
    "command": Family(
        call=_json("tool_name", "parameters", rest=', "tool_call_id": "{{ loop.index0 }}"'),
        section=("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
        between=",\n",
        turns=_COMMAND,
        thinks=("<|START_THINKING|>", "<|END_THINKING|>"),
        says=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "gemma4": Family(
        call="<|tool_call>call:{{ name }}{{ bare(arguments) }}<tool_call|>",
        before=_bare('<|"|>'),
        turns=_GEMMA,
        thinks=("<|channel>thought\n", "\n<channel|>"),
    ),
    "function_gemma": Family(
        call="<start_function_call>call:{{ name }}{{ bare(arguments) }}<end_function_call>",
        before=_bare("<escape>"),
        turns=(
            "<start_of_turn>developer\n",
            "<start_of_turn>user\n",
            "<start_of_turn>model\n",
            "<start_function_response>",
            "<end_of_turn>\n",
        ),
    ),
    "minimax_m1": Family(
        call=_json(),
        section=("<tool_calls>\n", "\n</tool_calls>"),
        between="\n",
        turns=(
            "<beginning_of_sentence>system\n",
            "<beginning_of_sentence>user\n",
            "<beginning_of_sentence>ai\n",
            "<beginning_of_sentence>tool\n",
            "<end_of_sentence>\n",
        ),
        thinks=_THINK,
    ),
    "minimax_m2": Family(
        call=_invoke(), section=("\n<minimax:tool_call>\n", "</minimax:tool_call>"), turns=_MINIMAX, thinks=_THINK
    ),
    "minimax_m3": Family(
        call=f'{_text(_M3)}<invoke name="{{{{ name }}}}">{{{{ elements(arguments) }}}}{_text(f"{_M3}</invoke>")}\n',
        before=_elements(_M3),
        section=(f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
        turns=_MINIMAX,
        thinks=("<mm:think>", "</mm:think>"),
    ),
}
