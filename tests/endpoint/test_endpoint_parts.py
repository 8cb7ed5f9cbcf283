"""What needs no server: texts in parts, stop strings, conversations, fields."""

from dataclasses import replace

import numpy as np
import pytest
from chat_tokenizers import LLAMA3, QWEN3, THINKING_FIRST, byte_tokenizer
from endpoint_rig import KEY, Speaker, served_by
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.endpoint_section import EndpointSection
from jaxrl_async.data.chat import chat_format
from jaxrl_async.endpoint.answer_constraint import ANY_TOOL
from jaxrl_async.endpoint.body_fields import BodyFields, parsed_json
from jaxrl_async.endpoint.call_messages import read_messages
from jaxrl_async.endpoint.chat_deltas import ChatDeltas
from jaxrl_async.endpoint.conversations import MAX_REMEMBERED, Conversations
from jaxrl_async.endpoint.generation import GeneratedAnswer
from jaxrl_async.endpoint.http_answers import chat_answer, visible_turn
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.run_serving import RunServing
from jaxrl_async.endpoint.service import EndpointLimits, EndpointService
from jaxrl_async.endpoint.text_flow import TextFlow
from jaxrl_async.run.optional_parts import Serving
from jaxrl_async.types import Completion, StopReason

TOKENIZER = byte_tokenizer(QWEN3)
CHAT = chat_format(TOKENIZER, None)
OTHERS = [chat_format(byte_tokenizer(text), None) for text in (LLAMA3, THINKING_FIRST)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


def split(data, ids) -> list:
    """The ids in parts of any lengths."""
    parts, left = [], list(ids)
    while left:
        count = data.draw(st.integers(1, len(left)))
        parts.append(left[:count])
        left = left[count:]
    return parts


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.data(), IDS, st.text("he asked ünd€ " + "🙂", max_size=12))
def test_a_text_in_parts_is_the_text(data, random_ids, text):
    ids = [*random_ids, *TOKENIZER.encode(text).tolist()]
    whole = TOKENIZER.decode(ids)
    letters = st.sampled_from(
        [whole[i:j] for i in range(len(whole)) for j in (i + 1, i + 3)] or ["x"]
    )
    stops = data.draw(st.lists(letters.filter(lambda s: "�" not in s), max_size=2))
    flow, at_once, sent = TextFlow(TOKENIZER.decode, stops), TextFlow(TOKENIZER.decode, stops), ""
    at_once.feed(ids)
    for part in split(data, ids):
        flow.feed(part)
        assert flow.sendable().startswith(sent), "what was sent stays"
        sent = flow.sendable()
    assert (flow.count, flow.stop, flow.whole()) == (at_once.count, at_once.stop, at_once.whole())
    assert flow.whole().startswith(sent) and not any(s in flow.whole() for s in stops)
    if not stops:
        assert flow.whole() == whole
    if flow.count is not None:
        assert flow.stop in TOKENIZER.decode(ids[: flow.count])


WRITTEN = st.lists(
    st.sampled_from(
        [
            "<think>\n", "\n</think>\n\n", "because", " so ", "\n", "a < b", "{", "[1]", "ü🙂",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>",
            "  ", '{"name": "add", "parameters": {"a": 1}}', "<", "<t", "<think", "</think",
        ]
    ),
    max_size=7,
)  # fmt: skip


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.data(), WRITTEN, st.booleans(), st.sampled_from([CHAT, *OTHERS]), st.booleans())
def test_a_chat_answer_in_parts_is_the_answer(data, pieces, has_tools, chat, knows_marks):
    ids = TOKENIZER.encode("".join(pieces))
    tools = TOOLS if has_tools else ()
    marks = chat.marks if knows_marks else replace(chat.marks, texts=None)
    deltas, so_far, found = ChatDeltas(reads_tools=has_tools, marks=marks), [], []

    def turn(ids):
        message = chat.message(np.array(ids, np.int32), tools)
        return visible_turn(message, TOKENIZER.decode(ids), tools={"add"} if has_tools else None)

    for part in split(data, ids.tolist()):
        so_far += part
        found += deltas.grow(turn(so_far), 0)
    done = Completion(
        request_id="r", token_ids=ids, logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32), stop=StopReason.LENGTH,
    )  # fmt: skip
    answer = GeneratedAnswer(completion=done, text=TOKENIZER.decode(ids), stop=None)
    reply = chat_answer(answer, turn(ids), ANY_TOOL)
    assert has_tools or (
        not reply.tool_calls
        and reply.content.count("<tool_call>") + (reply.reasoning or "").count("<tool_call>")
        == "".join(pieces).count("<tool_call>")
    )
    found += deltas.end(reply)
    assert "".join(d.content for d in found) == reply.content
    assert "".join(d.reasoning for d in found) == (reply.reasoning or "")
    assert tuple(d.call[1] for d in found if d.call is not None) == reply.tool_calls


@pytest.mark.parametrize(
    ("text", "tools"),
    [("<p>a < b</p>" * 9, False), ('{"a": [1]}' * 9, False), ("if a <t or b <tool:" * 9, True)],
)
def test_a_stream_holds_back_only_what_may_become_a_mark(text, tools):
    deltas = ChatDeltas(reads_tools=tools, marks=CHAT.marks)
    sent = "".join(d.content for d in deltas.grow({"role": "assistant", "content": text}, 0))
    assert sent == text
    held = "".join(d.content for d in deltas.grow({"content": f"{text}<tool_"}, 0))
    assert (sent + held == f"{text}<tool_") != tools, "with tools it may become a call"


USER = {"role": "user", "content": "1+2?"}


def answered(conversations: Conversations, messages, text: str, tools=()):
    """Sample a text for these messages; return the prompt, and the messages with the answer."""
    prompt = conversations.prompt(CHAT, read_messages(messages), tools)
    sampled = np.append(TOKENIZER.encode(text), TOKENIZER.eos_ids[0]).astype(np.int32)
    message = CHAT.message(sampled, tools)
    conversations.remember(prompt, sampled, message)
    return prompt, [*messages, message], [*prompt.token_ids, *sampled]


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled():
    conversations = Conversations()
    call = '<tool_call>\n{"name":"add",  "arguments":{"b":2,"a":1}}\n</tool_call>'
    _, messages, tokens = answered(conversations, [USER], call, TOOLS)
    rewritten = {**messages[-1], "content": None}
    rewritten["tool_calls"] = [
        {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a":1, "b":2}'}}
    ]
    result = {"role": "tool", "tool_call_id": "x1", "content": "3"}
    prompt, messages, more = answered(conversations, [USER, rewritten, result], "3", TOOLS)
    assert prompt.continued and prompt.token_ids[: len(tokens)].tolist() == tokens
    prompt = conversations.prompt(CHAT, read_messages([*messages, USER]), TOOLS)
    assert prompt.continued and prompt.token_ids[: len(more)].tolist() == more
    for other in (
        [*messages[:3], {**messages[3], "content": "4"}, USER],
        [{**USER, "content": "?"}, *messages[1:], USER],
    ):
        assert not conversations.prompt(CHAT, read_messages(other), TOOLS).continued
    assert not conversations.prompt(CHAT, read_messages([*messages, USER]), ()).continued


def test_reasoning_may_be_left_out_but_not_changed():
    conversations = Conversations()
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    _, messages, _ = answered(conversations, [USER], text, TOOLS)
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    bare = {k: v for k, v in messages[-1].items() if k != "reasoning_content"}
    assert conversations.prompt(CHAT, read_messages([USER, messages[-1], result]), TOOLS).continued
    assert conversations.prompt(CHAT, read_messages([USER, bare, result]), TOOLS).continued
    other = {**messages[-1], "reasoning_content": "ha"}
    assert not conversations.prompt(CHAT, read_messages([USER, other, result]), TOOLS).continued


def test_old_answers_are_forgotten():
    conversations, answer = Conversations(), {"role": "assistant", "content": "I"}
    sampled = np.ones(MAX_REMEMBERED // 4, np.int32)
    for i in range(6):
        messages = ({"role": "user", "content": str(i)},)
        conversations.remember(conversations.prompt(Plain(), messages, ()), sampled, answer)
    more = ({"role": "user", "content": "more"},)
    known = [
        conversations.prompt(Plain(), ({"role": "user", "content": str(i)}, answer, *more), ())
        for i in range(6)
    ]
    assert [k.continued for k in known] == [False, False, False, True, True, True]


class Plain:
    """A chat format in which every conversation is one token."""

    def opening(self, messages, tools):
        return np.array([7], np.int32)

    def continuation(self, before, messages, tools):
        return np.array([8], np.int32)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b"[" * 3000 + b"]" * 3000, b'"\\udc00"', b"1" * 10_000]
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(CallRefused):
        parsed_json(body)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
        ),
    ),
    st.sampled_from(["messages", "tools", "n", "stop", "temperature", "stream_options", "seed"]),
)
def test_any_value_of_a_field_is_taken_or_refused_by_name(value, field):
    from jaxrl_async.endpoint.openai_chat import chat_call

    try:
        chat_call({"messages": [USER], field: value})
    except CallRefused as refused:
        assert refused.field is not None and refused.field.startswith(field)


def test_a_field_that_nobody_reads_is_refused():
    fields = BodyFields({"read": 1, "unread": 2, "label": "x", "off": 0, "none": None}, "inner")
    fields.whole("read", 0)
    with pytest.raises(CallRefused, match=r"inner\.unread"):
        fields.close(frozenset({"label"}), {"off": (0,)})


def test_a_guests_conversation_is_forgotten_once_it_has_idled():
    now = [0.0]
    tokenizer = byte_tokenizer(QWEN3)
    served, limits = served_by(Speaker(tokenizer, []), tokenizer), EndpointLimits(guest_idle_s=10)
    service = EndpointService(served, limits, guest_keys=(KEY,), clock=lambda: now[0])
    first = service.caller(KEY, "talk").conversations
    now[0] = 10.0
    assert service.caller(KEY, "talk").conversations is first
    now[0] = 20.5
    assert service.caller(KEY, "talk").conversations is not first


def test_the_endpoint_of_a_run_has_all_that_the_core_reads():
    made = RunServing(EndpointSection())
    read = {*Serving.__annotations__, *(n for n in vars(Serving) if not n.startswith("_"))}
    assert {"needed", "open", "close"} <= read
    assert made.needed and not [name for name in read if not hasattr(made, name)]
    made.close()
