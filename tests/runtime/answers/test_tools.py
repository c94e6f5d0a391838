"""What a request says of its tools: read, or refused with the place; and the grammar that its answers keep to."""

from pathlib import Path
from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError, UsageError
from ingot.runtime.answers.answer_formats import AnswerFormats, known_formats
from ingot.runtime.answers.formats import REASONING_FORMATS, WIRE_FORMATS
from ingot.runtime.answers.tool_grammar import ToolGrammar
from ingot.runtime.answers.tool_rules import with_tools
from ingot.runtime.answers.tools import read_tools
from ingot.runtime.chat_template import CHATML
from ingot.runtime.guided.guides import Guides
from tests.runtime.answers.samples import RESPONSE_TOKENS, RESPONSES, SAMPLES, SCHEMAS, TOKENS, TOOLS, without_text
from tests.runtime.byte_tokenizer import whole_byte_tokenizer

LONG = {"type": "object", "properties": {"a": {"enum": ["x", "y" * 17_000], "description": "z" * 20_000}}}
WIRES = {each.name: each for each in WIRE_FORMATS}
END = 256


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([{"type": "function"}], None, "a tool must be a function"),
        ([{"type": "web_search"}], None, "a tool must be a function"),
        ([tool("a b")], None, "the name of a tool"),
        ([tool(), tool()], None, "two tools have one name"),
        ([tool(paramters={})], None, "unknown field"),
        ([tool(parameters={"type": "string"})], None, "the JSON schema of an object"),
        ([tool(strict="yes")], None, "true or false"),
        ([], "required", "there are no tools"),
        ([tool()], "any", "cannot be read"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "a tool that the request does not have"),
        ([tool()], {"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": [tool()]}}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_tools(tools, choice)


def test_choices() -> None:
    both = [tool("f"), tool("g", strict=True)]
    assert read_tools(both, "none").tools == ()
    assert not read_tools([tool()], "auto").constrained
    assert read_tools(both, "auto").constrained, "one of them is strict"
    assert read_tools([tool()], None, False).constrained, "one call at most is a promise"
    named = read_tools(both, {"type": "function", "function": {"name": "f"}})
    assert ([each.name for each in named.callable], named.needs, named.named, named.parallel) == (
        ["f"],
        True,
        True,
        False,
    )
    some = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    for allowed in ({"type": "allowed_tools", "allowed_tools": some}, {"type": "allowed_tools", **some}):
        use = read_tools(both, allowed)
        assert ([each.name for each in use.callable], len(use.tools), use.needs) == (["f"], 2, False)
        assert use.constrained


class Texts:
    """A tokenizer of bytes, with control tokens or without."""

    def __init__(self, folder: Path, tokens: list[str]) -> None:
        self.tokenizer, self.guides = whole_byte_tokenizer(folder, tokens), Guides(folder, {END})

    def takes(self, text: str, grammar: str) -> bool:
        """Whether the whole text is one of the grammar."""
        matcher = self.guides.matcher(StructuredOutputs(grammar=grammar))
        for token in [*self.tokenizer.encode(text), END]:
            mask = matcher.allowed()
            if not mask[token // 32] >> token % 32 & 1:
                return False
            matcher.consume(token)
        return True


@pytest.fixture(scope="module", params=["letters", "tokens"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    pytest.importorskip("llguidance", reason="needs llguidance")
    return Texts(tmp_path_factory.mktemp("texts"), TOKENS if request.param == "tokens" else [])


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", SAMPLES)
def test_grammars_take_what_the_templates_write(texts: Texts, name: str) -> None:
    sample, before = SAMPLES[name], "" if without_text(name) else "I look.\n"
    for choice in ("required", "auto"):
        grammar = ToolGrammar(WIRES[name], read_tools(TOOLS, choice), texts.guides.wire).text()
        assert texts.takes(sample, grammar)
        assert texts.takes("Just so.", grammar) is (choice == "auto" and name != "harmony")
        assert texts.takes(before + sample, grammar) is (choice == "auto" or not before)
        for wrong in ("get_wether", "get_weather2"):
            assert not texts.takes(sample.replace("get_weather", wrong), grammar)
        assert not texts.takes(sample.replace("3", "x").replace("C", '"', 0), grammar)
    single = ToolGrammar(WIRES[name], read_tools(TOOLS, "required", False), texts.guides.wire).text()
    assert texts.takes(sample, single) is (name == "harmony")


@pytest.mark.parametrize(("name", "begin", "end", "rest"), RESPONSES)
def test_marks_of_an_answer_stand_before_enforced_calls(
    tmp_path: Path, name: str, begin: str, end: str, rest: str
) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    texts = Texts(tmp_path, [*TOKENS, *RESPONSE_TOKENS])
    form = next(each for each in REASONING_FORMATS if each.name == name)
    whole = f"{begin}I look.{end}{SAMPLES[name]}{rest}"
    for choice in ("required", "auto"):
        grammar = ToolGrammar(WIRES[name], read_tools(TOOLS, choice), texts.guides.wire, form).text()
        assert texts.takes(whole, grammar)
        assert texts.takes(f"\n{whole}", grammar)
        assert texts.takes(whole.removeprefix(begin), grammar), "the prompt has the first mark"
        assert texts.takes(SAMPLES[name] + rest, grammar)
        assert texts.takes(f"{begin}Just so.{end}{rest}", grammar) is (choice == "auto")
        assert not texts.takes(whole.replace(end, ""), grammar), "the answer has no end"
        assert not texts.takes(whole.replace("get_weather", "get_wether"), grammar)
    other = ToolGrammar(WIRES[name], read_tools(TOOLS), texts.guides.wire, form).text('"yes"')
    assert texts.takes(f"{begin}yes{end}{rest}", other)
    assert not texts.takes(f"{begin}no{end}{rest}", other)


def test_required_parameters_must_be_there(texts: Texts) -> None:
    parameters = {**SCHEMAS["get_weather"], "required": ["city", "days"]}
    use = read_tools([tool("f", parameters=parameters)], "required")
    coder = "<tool_call>\n<function=f>\n<parameter=city>\nx\n</parameter>\n{}</function>\n</tool_call>"
    gemma = "<start_function_call>call:f{{city:<escape>x<escape>{}}}<end_function_call>"
    for name, text, rest in (
        ("qwen3_coder", coder, "<parameter=days>\n3\n</parameter>\n"),
        ("pythonic", '[f(city="x"{})]', ", days=3"),
        ("function_gemma", gemma, ",days:3"),
    ):
        whole, half = text.format(rest), text.format("")
        grammar = ToolGrammar(WIRES[name], use, texts.guides.wire).text()
        assert (texts.takes(whole, grammar), texts.takes(half, grammar)) == (True, False), name


def test_references_of_a_parameter_are_of_the_whole_schema(texts: Texts) -> None:
    properties = {
        "n": {"type": "integer"},
        "l": {"type": "array", "items": {"$ref": "#"}},
        "m": {"$ref": "#/properties/n"},
    }
    schema = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    use = read_tools([tool("f", parameters=schema)], "required")
    coder = "<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=l>\n{}\n</parameter>\n</function>"
    coder = f"<tool_call>\n{coder}\n</tool_call>"
    for name, text in (("qwen3_coder", coder), ("pythonic", "[f(n=1, l={})]")):
        grammar = ToolGrammar(WIRES[name], use, texts.guides.wire).text()
        assert texts.takes(text.format('[{"n": 2, "l": [{"n": 3}], "m": 4}]'), grammar)
        assert not texts.takes(text.format('[{"l": []}]'), grammar), "n is required"
        assert not texts.takes(text.format('[["n"]]'), grammar)


def test_choices_of_a_parameter_and_names_are_text(texts: Texts) -> None:
    schema = {"type": "object", "properties": {"<tool_call>": {"enum": ["<think>", "b"]}}, "required": ["<tool_call>"]}
    use = read_tools([tool("f", parameters=schema)], "required")
    grammar = ToolGrammar(WIRES["glm47"], use, texts.guides.wire).text()
    assert '"<tool_call>"' in grammar, "a name that reads like a token is none"
    assert '("<think>" | "b")' in grammar


def formats(texts: Texts, name: str) -> AnswerFormats:
    return AnswerFormats.find([], texts.tokenizer, name, "none")


def test_promises_become_a_grammar_and_nothing_else_does(texts: Texts) -> None:
    params, found = SamplingParams(), formats(texts, "hermes")
    assert with_tools(params, read_tools([tool()]), found, texts.guides) is params
    required = with_tools(params, read_tools([tool()], "required"), found, texts.guides)
    assert isinstance(required.structured_outputs, StructuredOutputs)
    either = SamplingParams(structured_outputs={"json": {"type": "integer"}})
    grammar = with_tools(either, read_tools([tool()]), found, texts.guides).structured_outputs
    assert isinstance(grammar, StructuredOutputs)
    assert grammar.grammar is not None
    assert texts.takes("12", grammar.grammar)
    assert texts.takes('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', grammar.grammar)
    assert not texts.takes("x", grammar.grammar)
    with pytest.raises(RequestError, match="cannot have another form"):
        with_tools(either, read_tools([tool()], "required"), found, texts.guides)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("none", {}, "how this model writes calls"),
        ("hermes", {"type": "object", "properties": {"a": {"not": {}}}}, "parameters of f"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "without quotes"),
        ("gemma4", {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}}, "cannot be held"),
        ("hermes", LONG, "parameters of f, schema $.properties.a.enum"),
        ("qwen3_coder", LONG, "parameters of f, schema $.properties.a.enum"),
    ],
)
def test_what_cannot_be_enforced_is_refused(texts: Texts, name: str, parameters: dict[str, Any], words: str) -> None:
    use = read_tools([tool("f", parameters=parameters)], "required")
    with pytest.raises(RequestError) as caught:
        with_tools(SamplingParams(), use, formats(texts, name), texts.guides)
    assert words in str(caught.value)


def test_a_long_description_is_no_text_of_the_answer(texts: Texts) -> None:
    described = {"type": "object", "properties": {"a": {"type": "string", "description": "z" * 20_000}}}
    use = read_tools([tool("f", parameters=described)], "required")
    assert with_tools(SamplingParams(), use, formats(texts, "hermes"), texts.guides).structured_outputs is not None


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ("hermes", None)),
        ("<tool_call>\\n<function= <parameter= <think>", ("qwen3_coder", "think")),
        ("[TOOL_CALLS] [ARGS] [THINK]", ("mistral_v11", "mistral")),
        ("[TOOL_CALLS]", ("mistral", None)),
        ("<tool_call> <arg_key> <arg_value> <think>", ("glm4", "think")),
        ("<|start|>assistant<|channel|>", ("harmony", "harmony")),
        ("'<|open|>' '<|close|>' '<|sep|>'", ("kimi_k3", "kimi_k3")),
        ("<{{ dsml }}tool_calls> ｜DSML｜ </think>", ("deepseek_v4", "think")),
        ("'｜DSML｜' ~ 'invoke' ~ 'tool_calls>' </think>", ("deepseek_v4", "think")),
        ("'｜DSML｜' ~ 'function_calls>'", ("deepseek_v32", None)),
        ("<tool_calls> <tool_call> <tool_sep> <arg_key> <arg_value>", ("hy_v3", None)),
        ("List of tools: [ keep_past_thinking </think>", ("lfm2", "think")),
        ("<|python_tag|> <function=", ("functionary", None)),
        ("<tool_call> <think> <response>", ("hermes", "ernie45")),
        ("function call<|role_sep|> <|function_call|>", ("gigachat31", None)),
        ("<|tool|>x<|/tool|> <|tool_call|>", ("phi4_mini", None)),
        ("<|tool_call>call: <tool_call|> <|channel>", ("gemma4", "gemma4")),
        ("<｜tool▁calls▁begin｜>```json</think>", ("deepseek_v3", "think")),
        ("{{ messages }}", (None, None)),
    ],
)
def test_templates_show_the_formats(template: str, expected: tuple[str | None, str | None]) -> None:
    assert known_formats([template]) == expected


def test_formats_by_name(texts: Texts) -> None:
    assert AnswerFormats.find([CHATML], texts.tokenizer, "none").names == (None, None)
    assert AnswerFormats.find([CHATML], texts.tokenizer, "glm4", "think").names == ("glm4", "think")
    with pytest.raises(UsageError, match="no such format"):
        AnswerFormats.find([], texts.tokenizer, "hermes2")


def test_the_prompt_tells_whether_it_ends_inside_the_reasoning(texts: Texts) -> None:
    found = AnswerFormats.find([], texts.tokenizer, None, "think")
    for text, expected in (
        ("hi<think>\n", "inside"),
        ("<think>a</think>hi, and how are you?", "open"),
        ("<think>a</think>hi<think>", "inside"),
        ("hi<think>\n\n</think>\n\n", "closed"),
        ("hi", "open"),
    ):
        assert found.state(texts.tokenizer.encode(text)) == expected, text
    found = AnswerFormats.find([], texts.tokenizer, None, "kimi_k3")
    for tag, expected in (("think", "inside"), ("response", "closed")):
        assert found.state(texts.tokenizer.encode(f"hi<|open|>{tag}<|sep|>")) == expected
