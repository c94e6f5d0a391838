"""The rows: one for each wire format. Templates are looked up from the top: what is rarer stands higher."""

from ingot.runtime.answers.wire_format import (
    BareKeys,
    Elements,
    Harmony,
    JsonArguments,
    JsonCalls,
    Parameters,
    Python,
    ReasoningFormat,
    WireFormat,
)

_FUNCTION = ("<function=", "</function>")
_PARAMETER = Parameters(begin="<parameter=", after_key=">\n", end="\n</parameter>\n", trim=True)
_NAMED_PARAMETER = Parameters(begin='<parameter name="', after_key='">', end="</parameter>\n")
_M3 = "]<]minimax[>["
_DSML = Parameters(
    begin='<｜DSML｜parameter name="',
    after_key='" string="',
    after_type='">',
    end="</｜DSML｜parameter>\n",
    types=("true", "false"),
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

WIRE_FORMATS = (
    WireFormat(name="harmony", signs=(("<|channel|>", "<|start|>"),), coding=Harmony()),
    WireFormat(
        name="kimi_k2",
        signs=(("<|tool_calls_section_begin|>",),),
        coding=JsonArguments(),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        around=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
        prefix="functions.",
        after_name=":",
        number_end="<|tool_call_argument_begin|>",
        numbered_ids=True,
    ),
    WireFormat(
        name="kimi_k3",
        signs=(("<|open|>", "<|close|>", "<|sep|>"),),
        coding=Parameters(
            begin='<|open|>argument key="', after_key='" type="', after_type='"<|sep|>', end="<|close|>argument<|sep|>"
        ),
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        around=(('<|open|>call tool="', "<|close|>call<|sep|>"),),
        after_name='" index="',
        number_end='"<|sep|>',
    ),
    WireFormat(
        name="deepseek_v4",
        signs=(("<｜DSML｜tool_calls",), ("｜DSML｜", "}}tool_calls>")),
        coding=_DSML,
        section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        around=(('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),),
        after_name='">\n',
    ),
    WireFormat(
        name="deepseek_v32",
        signs=(("｜DSML｜",),),
        coding=_DSML,
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        around=(('<｜DSML｜invoke name="', "</｜DSML｜invoke>\n"),),
        after_name='">\n',
    ),
    WireFormat(
        name="deepseek_v3",
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        coding=JsonArguments(before="```json\n", after="\n```"),
        around=(("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),),
        after_name="\n",
        section=_DEEPSEEK,
        between="\n",
    ),
    WireFormat(
        name="deepseek_v31",
        signs=(("<｜tool▁calls▁begin｜>",),),
        coding=JsonArguments(),
        around=(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
        after_name="<｜tool▁sep｜>",
        section=_DEEPSEEK,
    ),
    WireFormat(
        name="minimax_m3",
        signs=((f"{_M3}<",), (_M3, "invoke name=")),
        coding=Elements(mark=_M3, item="item"),
        section=(f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
        around=((f'{_M3}<invoke name="', f"{_M3}</invoke>\n"),),
        after_name='">',
    ),
    WireFormat(
        name="minimax_m2",
        signs=(("<minimax:tool_call>",),),
        coding=_NAMED_PARAMETER,
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        around=(('<invoke name="', "</invoke>\n"),),
        after_name='">\n',
    ),
    WireFormat(
        name="seed_oss",
        signs=(("<seed:tool_call>",),),
        coding=Parameters(begin="<parameter=", after_key=">", end="</parameter>\n"),
        around=(("<seed:tool_call>\n", "</seed:tool_call>"), ("<function=", "</function>\n")),
        after_name=">\n",
        between="\n",
    ),
    WireFormat(
        name="glm47",
        signs=(("</arg_key><arg_value>",),),
        coding=Parameters(begin="<arg_key>", after_key="</arg_key><arg_value>", end="</arg_value>"),
        around=(("<tool_call>", "</tool_call>"),),
    ),
    WireFormat(
        name="glm4",
        signs=(("<arg_key>", "<arg_value>"),),
        coding=Parameters(begin="<arg_key>", after_key="</arg_key>\n<arg_value>", end="</arg_value>\n"),
        around=(("<tool_call>", "</tool_call>"),),
        after_name="\n",
        between="\n",
    ),
    WireFormat(
        name="qwen3_coder",
        signs=(("<function=", "<parameter="),),
        coding=_PARAMETER,
        around=(("<tool_call>\n", "\n</tool_call>"), _FUNCTION),
        after_name=">\n",
        between="\n",
    ),
    WireFormat(
        name="gemma4",
        signs=(("<|tool_call>", "<tool_call|>"),),
        coding=BareKeys(quote='<|"|>'),
        around=(("<|tool_call>", "<tool_call|>"),),
        prefix="call:",
        after_name="{",
    ),
    WireFormat(
        name="function_gemma",
        signs=(("<start_function_call>",),),
        coding=BareKeys(quote="<escape>"),
        around=(("<start_function_call>call:", "<end_function_call>"),),
        after_name="{",
    ),
    WireFormat(
        name="mistral_v11",
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        coding=JsonArguments(),
        around=(("[TOOL_CALLS]", ""),),
        after_name="[ARGS]",
        call_id="[CALL_ID]",
    ),
    WireFormat(name="mistral", signs=(("[TOOL_CALLS]",),), coding=JsonCalls(listed=True), section=("[TOOL_CALLS]", "")),
    WireFormat(
        name="nemotron", signs=(("<TOOLCALL>",),), coding=JsonCalls(listed=True), section=("<TOOLCALL>", "</TOOLCALL>")
    ),
    WireFormat(
        name="command",
        signs=(("<|START_ACTION|>",),),
        coding=JsonCalls(name="tool_name", arguments="parameters", listed=True),
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    WireFormat(
        name="phi4_mini",
        signs=(("functools",), ("<|tool|>", "<|/tool|>")),
        coding=JsonCalls(listed=True),
        section=("functools", ""),
    ),
    WireFormat(
        name="granite", signs=(("<|tool_call|>",),), coding=JsonCalls(listed=True), section=("<|tool_call|>", "")
    ),
    WireFormat(
        name="hunyuan",
        signs=(("<tool_calls>[",), ("<tool_calls>", "<answer>"), ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
        coding=JsonCalls(listed=True),
        section=("<tool_calls>", "</tool_calls>"),
    ),
    WireFormat(
        name="minimax_m1",
        signs=(("<tool_calls>",),),
        coding=JsonCalls(),
        section=("<tool_calls>\n", "\n</tool_calls>"),
        between="\n",
    ),
    WireFormat(
        name="olmo3",
        signs=(("<function_calls>",),),
        coding=Python(listed=False),
        section=("<function_calls>", "</function_calls>"),
        between="\n",
    ),
    WireFormat(
        name="llama4_pythonic",
        signs=(("<|python_start|>",),),
        coding=Python(),
        section=("<|python_start|>", "<|python_end|>"),
        bare=True,
    ),
    WireFormat(
        name="hermes",
        signs=(("<tool_call>",),),
        coding=JsonCalls(),
        around=(("<tool_call>\n", "\n</tool_call>"),),
        between="\n",
    ),
    WireFormat(
        name="llama3_json",
        signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        coding=JsonCalls(arguments="parameters"),
        section=("<|python_tag|>", ""),
        between="; ",
        whole=True,
    ),
    WireFormat(name="pythonic", signs=(("[func_name1(",),), coding=Python(), whole=True),
)

REASONING_FORMATS = (
    ReasoningFormat(
        name="harmony",
        signs=(("<|channel|>", "<|start|>"),),
        begin="<|channel|>analysis<|message|>",
        end="<|channel|>final<|message|>",
    ),
    ReasoningFormat(
        name="kimi_k3",
        signs=(("<|open|>", "<|close|>", "<|sep|>"),),
        begin="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        rest="<|close|>message<|sep|>",
    ),
    ReasoningFormat(
        name="apriel",
        signs=(("[BEGIN FINAL RESPONSE]",),),
        begin="Here are my reasoning steps:\n",
        end="[BEGIN FINAL RESPONSE]\n",
        answer=("", "\n[END FINAL RESPONSE]"),
    ),
    ReasoningFormat(
        name="granite",
        signs=(("Here is my thought process:", "Here is my response:"),),
        begin="Here is my thought process:",
        end="Here is my response:",
    ),
    ReasoningFormat(
        name="command",
        signs=(("<|START_THINKING|>",),),
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(name="gemma4", signs=(("<|channel>",),), begin="<|channel>thought\n", end="<channel|>"),
    ReasoningFormat(name="mistral", signs=(("[THINK]",),), begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="seed_oss", signs=(("<seed:think>",),), begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(name="minimax_m3", signs=(("<mm:think>",),), begin="<mm:think>", end="</mm:think>"),
    ReasoningFormat(
        name="hunyuan",
        signs=(("<think>", "<answer>"),),
        begin="<think>\n",
        end="\n</think>\n",
        answer=("<answer>\n", "\n</answer>"),
    ),
    ReasoningFormat(name="think", signs=(("<think>",), ("</think>",)), begin="<think>\n", end="\n</think>\n\n"),
)
