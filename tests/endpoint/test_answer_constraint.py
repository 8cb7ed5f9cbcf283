"""From a call's fields to what its answer must match."""

import json

import pytest

from jaxrl_async.endpoint.answer_constraint import ToolChoice, turn_constraint
from jaxrl_async.endpoint.anthropic_messages import messages_call
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.openai_chat import chat_call
from jaxrl_async.endpoint.responses_call import responses_call
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.sampler.grammar import SPACES
from jaxrl_async.types import Constraint

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WRITTEN = json.dumps(SCHEMA)
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
SUB = {"type": "function", "function": {"name": "sub"}}
PLAIN = TurnMarks(calls="hermes")
MAY = TurnMarks(calls="hermes", thinking="may")
JSON = Constraint(kind="json_schema", text=WRITTEN)


def chat(**fields):
    return chat_call({"messages": HI, **fields})


def text_of(call):
    shaping = getattr(call, "chat", call).options.shaping
    return None if shaping is None else shaping.constraint


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "strict": True, "schema": SCHEMA}}},
            JSON,
        ),
        ({"guided_json": WRITTEN}, JSON),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json_object": True}}, Constraint(kind="json_object")),
        ({"structured_outputs": {"choice": ["a", "b"]}},
         Constraint(kind="choice", text='["a", "b"]')),
        ({"guided_choice": ["a"]}, Constraint(kind="choice", text='["a"]')),
        ({"guided_regex": "a+"}, Constraint(kind="regex", text="a+")),
        ({"structured_outputs": {"grammar": "start: /a/"}},
         Constraint(kind="lark", text="start: /a/")),
    ],
)  # fmt: skip
def test_a_format_becomes_a_constraint(fields, constraint):
    assert text_of(chat(**fields)) == constraint


def test_each_protocol_has_its_own_format():
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    assert text_of(responses_call({"input": "Hi", "text": {"format": form}})) == JSON
    body = {"messages": HI, "max_tokens": 3}
    form = {"type": "json_schema", "schema": SCHEMA}
    assert text_of(messages_call({**body, "output_config": {"format": form}})) == JSON
    assert text_of(messages_call({**body, "output_format": form})) == JSON


def choice_of(value, **more):
    return chat(tools=[ADD, SUB], tool_choice=value, **more).choice


def test_choices_of_tools():
    named = {"type": "function", "function": {"name": "sub"}}
    allowed = {"mode": "required", "tools": [named]}
    assert choice_of("auto") == ToolChoice()
    assert choice_of("none").mode == "none"
    assert choice_of("required") == ToolChoice(mode="required")
    assert choice_of(named) == ToolChoice(mode="required", names=("sub",), parallel=False)
    assert choice_of({"type": "allowed_tools", "allowed_tools": allowed}) == ToolChoice(
        mode="required", names=("sub",)
    )
    assert choice_of("auto", parallel_tool_calls=False) == ToolChoice(parallel=False)
    body = {"input": "Hi", "tools": [{"type": "function", "name": "sub", "strict": True}]}
    call = responses_call({**body, "tool_choice": {"type": "function", "name": "sub"}})
    assert call.chat.choice == ToolChoice(mode="required", names=("sub",), parallel=False)
    assert call.chat.ignored == ("tools.strict",)
    body = {"messages": HI, "max_tokens": 3, "tools": [{"name": "f", "input_schema": {}}]}
    for value, choice in [
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "any", "disable_parallel_tool_use": True},
         ToolChoice(mode="required", parallel=False)),
        ({"type": "tool", "name": "f"}, ToolChoice(mode="required", names=("f",))),
        ({"type": "none"}, ToolChoice(mode="none")),
    ]:  # fmt: skip
        assert messages_call({**body, "tool_choice": value}).choice == choice


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [SUB], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": [SUB], "tool_choice": "sometimes"},
    ],
)
def test_a_choice_of_no_tool_is_refused(fields):
    with pytest.raises(CallRefused) as refused:
        chat(**fields)
    assert refused.value.field == "tool_choice"


def test_without_tools_and_thinking_the_turn_is_the_text():
    assert turn_constraint(JSON, (), ToolChoice(), PLAIN) == JSON
    assert turn_constraint(None, [ADD], ToolChoice(), PLAIN) is None


def lines(*given) -> list[str]:
    constraint = turn_constraint(*given)
    assert constraint.kind == "turn"
    return constraint.text.splitlines()


def schema_of(line: str, name: str):
    before, _, text = line.partition(" %json ")
    assert before == f"{name}:"
    found = json.loads(text)
    assert found.pop("x-guidance") == {"whitespace_pattern": SPACES}
    return found


def test_the_grammar_of_a_turn():
    call = 'call0: "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0 "}"'
    forced = lines(None, [ADD], ToolChoice(mode="required", parallel=False), PLAIN)
    assert forced[:4] == [
        "start: (calls)",
        "calls: call",
        'call: "<tool_call>" "\\n" (call0) "\\n" "</tool_call>"',
        call,
    ]
    assert schema_of(forced[4], "arguments0") == SCHEMA and len(forced) == 5
    assert lines(JSON, [ADD], ToolChoice(mode="required", parallel=False), PLAIN) == forced
    named = lines(None, [SUB, ADD], ToolChoice(mode="required", names=("add",)), PLAIN)
    assert named[1] == 'calls: call ("\\n" call){0,63}' and named[3:] == forced[3:]
    either = lines(JSON, [ADD], ToolChoice(), MAY)
    assert either[0] == "start: think? (text | calls)"
    assert either[1] == 'think: "<think>" rest' and either[2].endswith(r"<+\/think>\n*/")
    assert schema_of(either[3], "text") == SCHEMA
    opened = TurnMarks(calls="hermes", thinking="open")
    assert lines(JSON, (), ToolChoice(), opened)[0] == "start: rest (text)"
    pattern = Constraint(kind="regex", text=r"a/b\/c" + "\n")
    assert lines(pattern, (), ToolChoice(), opened)[2:] == [
        "text: TEXT",
        "TEXT: WANTED",
        r"WANTED: /a\/b\/c\n/",
    ]
    choice = Constraint(kind="choice", text='["a", "b\\"c"]')
    assert lines(choice, (), ToolChoice(), opened)[4] == r'WANTED: "a" | "b\"c"'
    bare = lines(None, [SUB], ToolChoice(mode="required"), TurnMarks(calls="bare"))
    assert bare[1:3] == ["calls: call", "call: call0"]
    assert bare[3] == 'call0: "{\\"name\\": \\"sub\\", \\"parameters\\": " arguments0 "}"'
    assert schema_of(bare[4], "arguments0") == {"type": "object"}
    with pytest.raises(CallRefused, match="cannot be combined"):
        turn_constraint(Constraint(kind="lark", text="start: /a/"), [ADD], ToolChoice(), PLAIN)


def test_marks_that_are_tokens_are_named_by_their_ids():
    tokens = {"<think>": 7, "</think>": 8, "<tool_call>": 9, "</tool_call>": 10}
    marks = TurnMarks(calls="hermes", thinking="may", tokens=tokens)
    found = lines(Constraint(kind="regex", text="a"), [SUB], ToolChoice(), marks)
    assert found[1] == "think: <[7]> rest" and found[2].endswith(r"<*/ <[8]> /\n+/?")
    assert 'call: <[9]> "\\n" (call0) "\\n" <[10]>' in found
    spelled = r"\s*<think>(?s:.*)|(?s:.*)<tool_call>(?s:.*)"
    assert f"TEXT: WANTED & ~/{spelled}/" in found


def test_a_schema_may_have_a_rule_of_its_own_for_white_space():
    own = {"x-guidance": {"whitespace_flexible": False}, "type": "object"}
    text = Constraint(kind="json_schema", text=json.dumps(own))
    (line,) = (x for x in lines(text, [ADD], ToolChoice(), PLAIN) if x.startswith("text:"))
    assert json.loads(line.removeprefix("text: %json ")) == own


GOOD = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    '<think>\n1 < 2 </p>\n</think>\n\n<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
    '{"a": 3}',
    '<think>because</think>{"a": 3}',
    '<think><table></td></thin></</t<</think>{"a": 3}',
]
BAD = [
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "mul", "arguments": {}}\n</tool_call>',
    '{"a": "x"}',
    '<think>a</think>b</think>{"a": 3}',
    "Hello",
]


@pytest.mark.parametrize(
    ("text", "is_good"), [*((t, True) for t in GOOD), *((t, False) for t in BAD)]
)
def test_the_librarys_own_matcher_takes_what_the_parser_reads(text, is_good):
    assert matches(turn_constraint(JSON, [ADD, SUB], ToolChoice(), MAY), text) == is_good


def matches(constraint, text):
    llguidance = pytest.importorskip("llguidance", reason="the extra [structured] is missing")
    grammar = llguidance.LLMatcher.grammar_from_lark(constraint.text)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and matcher.is_accepting()


NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/count"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize("arguments", [{**SCHEMA, "additionalProperties": False}, REFERS])
@pytest.mark.parametrize(
    ("schema", "text", "is_good"),
    [
        (NAMED, '{"name": "Bob", "age": 3}', True),
        (NAMED, '{"name":"add","age":3}', True),
        (NAMED, '{"name": "Bob"}', False),
        (SCHEMA, '{"a": 3}', True),
        (SCHEMA, '{"a":3}', True),
        *((s, '{"name": "add", "parameters": {"a": 1}}', True) for s in (NAMED, SCHEMA)),
        *((s, '{"name": "add", "parameters": {"a": "x"}}', False) for s in (NAMED, SCHEMA)),
        *((s, '{"name": "mul", "parameters": {"a": 1}}', False) for s in (NAMED, SCHEMA)),
    ],
)
def test_a_text_in_json_may_begin_as_a_bare_call_does(arguments, schema, text, is_good):
    """Before, only calls could begin with {" where both were possible."""
    tool = {"type": "function", "function": {"name": "add", "parameters": arguments}}
    bare = TurnMarks(calls="bare")
    constraint = turn_constraint(Constraint.schema(schema), [tool], ToolChoice(), bare)
    assert matches(constraint, text) == is_good
