"""OpenAI's responses with the official client: the same tokens as ever, continued by id or by
items."""

import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from chat_tokenizers import CHATML, QWEN3, byte_tokenizer
from endpoint_rig import SECTION, Rig, Speaker, closed, serve, tiny_policy

from jaxrl_async.endpoint.sampling_request import CallerLimits
from jaxrl_async.endpoint.service import EndpointLimits
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import EpisodeLimits, Request, SamplingParams

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
WANTS_TOOL, SAYS = f"<think>\nlet me see\n</think>\n\nI add. {CALL}", "It is 3."


@pytest.fixture
def scripted() -> Iterator[Rig]:
    tokenizer = byte_tokenizer(QWEN3)
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=4096,
        max_length=10**6,
    )
    rig = serve(Speaker(tokenizer, [], step=40), tokenizer, terms=terms)
    yield rig
    closed(rig)


def session_of(rig: Rig):
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=rig.tokenizer.eos_ids,
        max_new_tokens=4096,
        max_length=10**6,
    )
    member = SessionMember(prompt=make_prompt(1), label="g1")
    return rig.sessions.open(rig.sampler, member, limits, SessionLimits())


def prompts(rig: Rig) -> list[list[int]]:
    return [r.token_ids.tolist() for r in rig.sampler.requests]


def answered(rig: Rig, client: openai.OpenAI, stream: bool, **fields):
    """A response, whole or put together by the client from its events."""
    if not stream:
        return client.responses.create(model="m", **fields)
    if "max_output_tokens" in fields:  # the client's own helper takes complete responses only
        return list(client.responses.create(model="m", stream=True, **fields))[-1].response
    with client.responses.stream(model="m", **fields) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    return final


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["id", "items"])
def test_a_tool_is_called_and_answered(scripted: Rig, stream: bool, by: str):
    """In a session, whose episode is one sequence: nothing sampled was tokenised again."""
    scripted.sampler.texts = [WANTS_TOOL, SAYS]
    session = session_of(scripted)
    fields = {"instructions": "Be brief.", "tools": TOOLS}
    with openai.OpenAI(base_url=scripted.openai.base_url, api_key=session.key) as client:
        first = answered(scripted, client, stream, input="1+2?", **fields)
        assert first.status == "completed" and first.output_text == "I add."
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        thought, _, call = first.output
        assert thought.content[0].text == "let me see"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if by == "id":
            more = {"previous_response_id": first.id, "input": [result]}
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            more = {"input": [{"role": "user", "content": "1+2?"}, *items, result], "store": False}
        second = answered(scripted, client, stream, **more, **fields)
    assert second.output_text == SAYS and second.usage.input_tokens == len(prompts(scripted)[1])
    one, two = prompts(scripted)
    sampled = [*scripted.tokenizer.encode(WANTS_TOOL).tolist(), scripted.tokenizer.eos_ids[0]]
    assert two[: len(one) + len(sampled)] == one + sampled
    text = scripted.tokenizer.decode_all(two)
    assert "Be brief." in text and "<tool_response>" in text and '"name": "add"' in text
    session.finish()
    episode = session.episode()
    assert (episode.starts, episode.num_turns) == ((0,), 2)


@pytest.mark.full
def test_events_of_a_stream_are_numbered_and_are_the_whole(scripted: Rig):
    scripted.sampler.texts = [WANTS_TOOL]
    events = list(
        scripted.openai.responses.create(model="m", input="1+2?", tools=TOOLS, stream=True)
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    texts = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    final = events[-1]
    assert final.type == "response.completed" and events[-1].response.id == events[0].response.id
    thought, message, call = final.response.output
    assert texts == {
        "reasoning_text": thought.content[0].text,
        "output_text": message.content[0].text,
        "function_call_arguments": call.arguments,
    }
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert done == final.response.output


@pytest.mark.full
def test_a_guest_continues_by_id_alone(scripted: Rig):
    scripted.sampler.texts = ["One.", "Two.", "Other.", "Anew."]
    ask = scripted.openai.responses.create
    first = ask(model="m", input="Count")
    second = ask(model="m", input="More", previous_response_id=first.id)
    other = ask(model="m", input="Else", previous_response_id=first.id)
    assert [r.output_text for r in (first, second, other)] == ["One.", "Two.", "Other."]
    one, two, three = prompts(scripted)
    sampled = [*scripted.tokenizer.encode("One.").tolist(), scripted.tokenizer.eos_ids[0]]
    assert two[: len(one) + len(sampled)] == three[: len(one) + len(sampled)] == one + sampled
    assert second.previous_response_id == first.id
    assert scripted.endpoint.counts().continued == 2
    ask(model="m", input="Count", store=False)
    for unknown in ("resp_0123_7", "resp_x", "nonsense"):
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            ask(model="m", input="More", previous_response_id=unknown)


@pytest.mark.full
def test_a_session_that_continues_by_id_records_the_whole_conversation(scripted: Rig):
    """Its reward functions and teachers read the conversation and what it answered before."""
    scripted.sampler.texts, session = ["one", "two"], session_of(scripted)
    client = openai.OpenAI(
        base_url=f"{scripted.endpoint.address}/v1", api_key=session.key, max_retries=0
    )
    with client:
        first = client.responses.create(model="m", instructions="Be brief.", input="q1")
        client.responses.create(
            model="m", instructions="Be brief.", input="q2", previous_response_id=first.id
        )
    session.finish()
    episode = session.episode()
    assert [(m["role"], m["content"]) for m in episode.opened] == [
        ("system", "Be brief."),
        ("user", "q1"),
    ]
    assert [(m["role"], m["content"]) for m in episode.messages] == [
        ("assistant", "one"),
        ("user", "q2"),
        ("assistant", "two"),
    ]


@pytest.mark.full
def test_unnamed_responses_do_not_crowd_out_a_named_conversation():
    tokenizer = byte_tokenizer(QWEN3)
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=4096,
        max_length=10**6,
    )
    speaker = Speaker(tokenizer, ["Named."] + ["Unnamed."] * 3 + ["Again."], step=40)
    rig = serve(speaker, tokenizer, EndpointLimits(max_guests=2), terms=terms)
    ask, named = rig.openai.responses.create, {"x-session-id": "talk"}
    first = ask(model="m", input="Hi", extra_headers=named)
    unnamed = [ask(model="m", input="Hi") for _ in range(3)]
    again = ask(model="m", input="More", previous_response_id=first.id, extra_headers=named)
    assert again.output_text == "Again." and rig.endpoint.counts().continued == 1
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):  # still bounded
        ask(model="m", input="More", previous_response_id=unnamed[0].id)
    speaker.texts = ["Passing."] * 3 + ["Kept."]
    for _ in range(3):
        ask(model="m", input="Hi", store=False)  # nothing can follow: they take no slot
    assert ask(model="m", input="More", previous_response_id=unnamed[-1].id).output_text == "Kept."
    closed(rig)


@pytest.mark.full
def test_an_answer_that_is_cut_off_is_incomplete(scripted: Rig):
    scripted.sampler.texts = ["a long answer"] * 2
    for stream in (False, True):
        cut = answered(scripted, scripted.openai, stream, input="Hi", max_output_tokens=4)
        sampled = scripted.tokenizer.encode("a long answer")[:4]
        assert cut.status == "incomplete" and cut.output_text == scripted.tokenizer.decode(sampled)
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.usage.output_tokens == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": "x", "odd": 1}]}, "input[0].odd"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "x", "include": ["web_search_call.results"]}, "include[0]"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "n": 2}, "n"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(scripted: Rig, body, field):
    reply = scripted.http.post("/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


@pytest.mark.full
def test_what_a_coding_agent_sends_is_taken(scripted: Rig):
    """Fields that ask for nothing that changes the answer."""
    scripted.sampler.texts = ["Done."]
    body = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "Permissions."}]},
            {"type": "message", "role": "user", "content": [
                {"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
        "tools": [{**TOOLS[0], "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "p",
    }  # fmt: skip
    reply = scripted.http.post("/v1/responses", json=body)
    assert reply.status_code == 200 and '"type":"response.completed"' in reply.text
    text = scripted.tokenizer.decode_all(np.array(prompts(scripted)[0]))
    offsets = [text.index(part) for part in ("coding agent", "Permissions", "Fix it", "add")]
    assert offsets[:3] == sorted(offsets[:3]) and "<tool_response>" in text


@pytest.mark.exhaustive
def test_a_response_returns_what_the_sampler_samples():
    with Sampler(tiny_policy(), section=SECTION, seed=5) as sampler:
        rig = serve(sampler, byte_tokenizer(CHATML))
        try:
            fields = {"input": "Hi", "max_output_tokens": 12, "temperature": 0.8}
            whole = rig.openai.responses.create(model="m", extra_body={"seed": 7}, **fields)
            prompt = rig.tokenizer.encode(
                "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            ).astype(np.int32)
            request = Request(
                request_id="direct", token_ids=prompt, max_new_tokens=12,
                stop_token_ids=rig.tokenizer.eos_ids, key=(7, 0),
                sampling=SamplingParams(temperature=0.8),
            )  # fmt: skip
            (done,) = sampler.generate([request])
            expected = rig.service.served.chat.message(done.token_ids, ())
            assert whole.output_text == expected["content"]
            assert whole.usage.output_tokens == len(done.token_ids)
            streamed = answered(rig, rig.openai, True, extra_body={"seed": 7}, **fields)
            assert streamed.output_text == whole.output_text
        finally:
            closed(rig)
