"""The same calls in every wire format, as the templates of its models write them."""

from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {"tz": {"type": "string"}}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
CALLS = [("get_weather", {"city": 'Zür"ich', "days": 3}), ("get_time", {"tz": "CET"})]

_WEATHER, _TIME = '{"city": "Zür\\"ich", "days": 3}', '{"tz": "CET"}'
_LISTED = f'[{{"name": "get_weather", "arguments": {_WEATHER}}}, {{"name": "get_time", "arguments": {_TIME}}}]'
_PYTHON = ('get_weather(city="Zür\\"ich", days=3)', 'get_time(tz="CET")')


def _invoked(mark: str, text: str = "", json: str = "") -> str:
    """The calls as elements whose tags begin with `mark`; text, json: attributes of parameters."""
    return (
        f'<{mark}invoke name="get_weather">\n<{mark}parameter name="city"{text}>Zür"ich</{mark}parameter>\n'
        f'<{mark}parameter name="days"{json}>3</{mark}parameter>\n</{mark}invoke>\n'
        f'<{mark}invoke name="get_time">\n<{mark}parameter name="tz"{text}>CET</{mark}parameter>\n</{mark}invoke>\n'
    )


def _glm(line: str) -> str:
    return (
        f'<tool_call>get_weather{line}<arg_key>city</arg_key>{line}<arg_value>Zür"ich</arg_value>{line}'
        f"<arg_key>days</arg_key>{line}<arg_value>3</arg_value>{line}</tool_call>{line}"
        f"<tool_call>get_time{line}<arg_key>tz</arg_key>{line}<arg_value>CET</arg_value>{line}</tool_call>"
    )


def _hy_v3() -> str:
    calls = _glm("\n").replace("get_weather", "get_weather<tool_sep>").replace("get_time", "get_time<tool_sep>")
    return f"<tool_calls>\n{calls}\n</tool_calls>"


def _around(begin: str, end: str = "", between: str = "", arguments: str = "arguments") -> str:
    """Each call as an object, and what stands around it."""
    calls = (("get_weather", _WEATHER), ("get_time", _TIME))
    return between.join(f'{begin}{{"name": "{name}", "{arguments}": {each}}}{end}' for name, each in calls)


def _deepseek(begin: str, between: str, end: str, join: str) -> str:
    calls = (
        f"<｜tool▁call▁begin｜>{begin}get_weather{between}{_WEATHER}{end}<｜tool▁call▁end｜>{join}"
        f"<｜tool▁call▁begin｜>{begin}get_time{between}{_TIME}{end}<｜tool▁call▁end｜>"
    )
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def _dsml(section: str) -> str:
    calls = _invoked("｜DSML｜", ' string="true"', ' string="false"').replace("</｜", "</｜")
    return f"<｜DSML｜{section}>\n{calls}</｜DSML｜{section}>"


def m3(*calls: str) -> str:
    """Calls of MiniMax M3: "<" is the begin of a tag that its mark stands before."""
    return f"<tool_call>\n{''.join(calls)}</tool_call>".replace("<", "]<]minimax[>[<")


def _k3() -> str:
    def argument(key: str, kind: str, value: str) -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    def call(name: str, index: int, arguments: str) -> str:
        return f'<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>'

    weather = argument("city", "string", 'Zür"ich') + argument("days", "integer", "3")
    calls = call("get_weather", 1, weather) + call("get_time", 2, argument("tz", "string", "CET"))
    return f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>"


_HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {_WEATHER}}}\n</tool_call>'
_CODER = (
    '<function=get_weather>\n<parameter=city>\nZür"ich\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>',
    "<function=get_time>\n<parameter=tz>\nCET\n</parameter>\n</function>",
)
_SEED = tuple(
    each.replace(">\nZ", ">Z").replace(">\n3", ">3").replace(">\nC", ">C").replace("\n</par", "</par")
    for each in _CODER
)

SAMPLES = {
    "hermes": f'{_HERMES}\n<tool_call>\n{{"name": "get_time", "arguments": {_TIME}}}\n</tool_call>',
    "qwen3_coder": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _CODER),
    "seed_oss": "\n".join(f"<seed:tool_call>\n{each}\n</seed:tool_call>" for each in _SEED),
    "llama3_json": f'{{"name": "get_weather", "parameters": {_WEATHER}}}; '
    f'{{"name": "get_time", "parameters": {_TIME}}}',
    "pythonic": f"[{', '.join(_PYTHON)}]",
    "llama4_pythonic": f"<|python_start|>[{', '.join(_PYTHON)}]<|python_end|>",
    "olmo3": "<function_calls>" + "\n".join(_PYTHON) + "</function_calls>",
    "mistral": f"[TOOL_CALLS]{_LISTED}",
    "mistral_v11": f"[TOOL_CALLS]get_weather[ARGS]{_WEATHER}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{_TIME}",
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("", "<｜tool▁sep｜>", "", ""),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{_WEATHER}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
    f"<|tool_call_argument_begin|>{_TIME}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": _k3(),
    "glm4": _glm("\n"),
    "glm47": _glm(""),
    "hy_v3": _hy_v3(),
    "functionary": f"<function=get_weather>{_WEATHER}</function><function=get_time>{_TIME}</function>",
    "lfm2": f"<|tool_call_start|>[{', '.join(_PYTHON)}]<|tool_call_end|>",
    "internlm2": _around("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    "gigachat31": _around("<|function_call|>"),
    "gigachat3": _around("<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "granite_20b": _around("<function_call> ", between="\n"),
    "xlam": _LISTED,
    "phi4_mini": f"functools{_LISTED}",
    "granite": f"<|tool_call|>{_LISTED}",
    "hunyuan": f"<tool_calls>{_LISTED}</tool_calls>",
    "nemotron": f"<TOOLCALL>{_LISTED}</TOOLCALL>",
    "command": "<|START_ACTION|>[\n    "
    + _LISTED[1:-1].replace('"name"', '"tool_name"').replace('"arguments"', '"parameters"')
    + "\n]<|END_ACTION|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Zür"ich<|"|>,days:3}<tool_call|>'
    '<|tool_call>call:get_time{tz:<|"|>CET<|"|>}<tool_call|>',
    "function_gemma": '<start_function_call>call:get_weather{city:<escape>Zür"ich<escape>,days:3}<end_function_call>'
    "<start_function_call>call:get_time{tz:<escape>CET<escape>}<end_function_call>",
    "minimax_m1": f'<tool_calls>\n{{"name": "get_weather", "arguments": {_WEATHER}}}\n'
    f'{{"name": "get_time", "arguments": {_TIME}}}\n</tool_calls>',
    "minimax_m2": f"<minimax:tool_call>\n{_invoked('')}</minimax:tool_call>",
    "minimax_m3": m3(
        '<invoke name="get_weather"><city>Zür"ich</city><days>3</days></invoke>\n',
        '<invoke name="get_time"><tz>CET</tz></invoke>\n',
    ),
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_WEATHER}",
}
_PLAIN_TOKENS = """]<]minimax[>[
<tool_call> </tool_call> <|channel|> <|message|> <|start|> <|end|> <|constrain|> <arg_key> </arg_key>
<arg_value> </arg_value> <|"|> <|tool_call> <tool_call|> [TOOL_CALLS] [ARGS] [CALL_ID] <｜tool▁calls▁begin｜>
<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜> <|open|> <|sep|> <|close|>
<minimax:tool_call> </minimax:tool_call> <|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|>
<|tool_call_end|> <|tool_calls_section_end|> <|tool_call|> <|START_ACTION|> <|END_ACTION|>
<seed:tool_call> </seed:tool_call> <|python_start|> <|python_end|> ｜DSML｜ <think> </think> <tool_sep>
<tool_calls> </tool_calls> <|tool_call_start|> <|tool_call_end|> <|action_start|> <|plugin|> <|action_end|>
<|function_call|> <|role_sep|> <|message_sep|>"""
TOKENS = _PLAIN_TOKENS.split()
"""Control tokens of these models."""
RESPONSE_TOKENS = ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]
RESPONSES = [
    ("kimi_k3", "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ("command", *RESPONSE_TOKENS, ""),
]
"""Formats that mark text before calls: name, its begin, its end, what ends the answer."""


def without_text(name: str) -> bool:
    """Whether an answer in this format is calls and nothing else, or says text in a way of its own."""
    return name in ("llama3_json", "pythonic", "xlam", "harmony")
