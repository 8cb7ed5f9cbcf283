"""What usual clients send, with the official SDKs before a policy with prescribed texts."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
from chat_tokenizers import QWEN3, byte_tokenizer
from endpoint_rig import KEY, Rig, Speaker, closed, serve, served_by

from jaxrl_async.endpoint.http_answers import AnswerFormat, prompt_row
from jaxrl_async.endpoint.http_server import Endpoint
from jaxrl_async.endpoint.sampling_request import CallerLimits, ShownLogprobs
from jaxrl_async.endpoint.service import EndpointLimits, EndpointService
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember
from jaxrl_async.errors import RequestRefused
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import (
    Constraint,
    EpisodeLimits,
    LogitShaping,
    LogprobRequest,
    PositionLogprobs,
    SamplingParams,
)

HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
JSON = {"type": "json_object"}
ANTHROPIC_TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    tokenizer = byte_tokenizer(QWEN3)
    terms = CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=4096,
        max_length=10**5,
    )
    rig = serve(Speaker(tokenizer, [], step=400), tokenizer, terms=terms)
    yield rig
    closed(rig)


@pytest.fixture(autouse=True)
def texts(rig: Rig) -> list[str]:
    rig.sampler.texts, rig.sampler.requests = [], []
    return rig.sampler.texts


def session_of(rig: Rig, label: str = "g1", **more):
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=rig.tokenizer.eos_ids,
        max_new_tokens=4096,
        max_length=10**5,
        **more,
    )
    member = SessionMember(prompt=make_prompt(1), label=label)
    return rig.sessions.open(rig.sampler, member, limits, SessionLimits())


def chat(rig: Rig, text: str = "Hello", client=None, **fields):
    rig.sampler.texts.append(text)
    client = client or rig.openai
    given = {"messages": HI, **fields}
    more = {k: given.pop(k) for k in list(given) if k in EXTRA}
    return client.chat.completions.create(model="m", extra_body=more, **given)


EXTRA = (
    "repetition_penalty", "min_tokens", "chat_template_kwargs", "continue_final_message",
    "add_generation_prompt", "guided_json", "structured_outputs", "prompt_logprobs",
    "logprob_token_ids", "top_k", "return_token_ids",
)  # fmt: skip


def prompt_of(rig: Rig, index: int = -1) -> str:
    return rig.tokenizer.decode_all(rig.sampler.requests[index].token_ids)


# ---- what a guest asks for reaches the sampler; a session's distribution stays the run's


@pytest.mark.full
def test_the_logits_of_a_guest_are_shaped(rig: Rig):
    fields = {
        "frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.5,
        "logit_bias": {"5": -1, "7": 2.5}, "min_tokens": 3,
        "response_format": {"type": "json_object"}, "temperature": 0.5,
    }  # fmt: skip
    chat(rig, **fields)
    shaping = LogitShaping(
        bias=((5, -1.0), (7, 2.5)),
        min_tokens=3,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
    )
    (request,) = rig.sampler.requests
    constraint = request.shaping.constraint
    assert constraint.kind == "turn" and '%json {"type": "object"' in constraint.text
    assert request.shaping == replace(shaping, constraint=constraint)
    assert request.sampling == SamplingParams(temperature=0.5)
    session = session_of(rig, "g7", takes_masks=True)
    own = rig.openai.with_options(api_key=session.key)
    chat(rig, client=own, **fields)
    request = rig.sampler.requests[-1]
    assert request.sampling == SamplingParams() and request.for_training
    constraint = request.shaping.constraint
    assert request.shaping == LogitShaping(constraint=constraint) and constraint is not None
    assert session.counts().overridden_calls == 1
    chat(rig, client=own, response_format={"type": "json_object"})
    assert session.counts().overridden_calls == 1, "a constraint overrides nothing"
    chat(rig, client=own, presence_penalty=0.0, temperature=1.0)
    assert rig.sampler.requests[-1].shaping is None
    assert session.counts().overridden_calls == 1
    chat(rig, client=own, frequency_penalty=0.1)
    assert session.counts().overridden_calls == 2
    session.finish()


@pytest.mark.full
def test_a_constrained_text_keeps_the_white_space_around_it(rig: Rig):
    reply = chat(rig, " yes \n", structured_outputs={"choice": [" yes \n", "no"]})
    assert reply.choices[0].message.content == " yes \n"
    text = "<think>\nso\n</think>\n\n yes "
    reply = chat(rig, text, structured_outputs={"choice": [" yes ", "no"]}, stream=True)
    whole = "".join(c.choices[0].delta.content or "" for c in reply if c.choices)
    assert whole == " yes "


def test_too_many_biases_are_refused_by_name(rig: Rig):
    for count in (512, 513):
        bias = {str(i): 1 for i in range(count)}
        if count == 512:
            chat(rig, logit_bias=bias)
            continue
        with pytest.raises(openai.BadRequestError, match="at most 512") as refused:
            chat(rig, logit_bias=bias)
        assert refused.value.param == "logit_bias"
        rig.sampler.texts.clear()


def test_a_constraint_is_compiled_in_a_thread_and_refused_by_the_field_that_asks_for_it(rig: Rig):
    prepared: list[tuple[int, str]] = []
    own = threading.get_ident()

    def prepare(constraint: Constraint) -> None:
        prepared.append((threading.get_ident(), constraint.kind))
        raise RequestRefused("a request", "shaping.constraint", "cannot be used: so")

    rig.sampler.prepare = prepare
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    forms = {
        "response_format": {"response_format": schema},
        "structured_outputs": {"structured_outputs": {"regex": "a"}},
        "guided_json": {"guided_json": {}},
        "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    }
    try:
        for field, form in forms.items():
            with pytest.raises(openai.BadRequestError, match="cannot be used: so") as refused:
                chat(rig, **form)
            assert refused.value.param == field
            assert "request" not in str(refused.value.body["message"])
    finally:
        del rig.sampler.prepare
        rig.sampler.texts.clear()
    assert len(prepared) == 4 and own not in {thread for thread, _ in prepared}


def test_a_session_whose_trainer_takes_no_masks_is_not_constrained(rig: Rig):
    forms = (
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
    )
    for number, (more, is_honoured) in enumerate(
        [({}, False), ({"takes_masks": True}, True), ({"for_training": False}, True)]
    ):
        session = session_of(rig, f"g2{number}", **more)
        before = rig.service.counts.ignored
        for form in forms:
            chat(rig, client=rig.openai.with_options(api_key=session.key), **form)
            assert (rig.sampler.requests[-1].shaping is not None) == is_honoured
        assert rig.service.counts.ignored - before == (0 if is_honoured else 2)
        body = {"prompt": "x", "guided_regex": "a+"}
        rig.sampler.texts.append("a")
        rig.http.post("/v1/completions", json=body, headers={"x-api-key": session.key})
        assert (rig.sampler.requests[-1].shaping is not None) == is_honoured
        assert session.counts().overridden_calls == (0 if is_honoured else 1)
        session.finish()


def test_token_counts_with_each_part_are_counted_as_ignored(rig: Rig):
    before = rig.service.counts.ignored
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(rig, stream=True, stream_options=options))
    assert chunks[-1].usage.completion_tokens > 0 and rig.service.counts.ignored == before + 1
    rig.sampler.texts.append("Hello")
    body = {"prompt": "x", "stream": True, "stream_options": options}
    assert rig.http.post("/v1/completions", json=body).status_code == 200
    assert rig.service.counts.ignored == before + 2
    chat(rig, stream=True, stream_options={"include_usage": True}).close()
    assert rig.service.counts.ignored == before + 2


def test_fields_without_effect_are_counted(rig: Rig):
    before = rig.service.counts.ignored
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    chat(rig, tools=strict, verbosity="low", user="me", metadata={"a": "b"})
    assert rig.service.counts.ignored - before == 2, "strict and verbosity"
    body = {"model": "m", "max_tokens": 9, "messages": HI, "speed": "fast"}
    rig.sampler.texts.append("Hello")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    rig.http.post("/v1/messages", json={**body, "thinking": thinking}).raise_for_status()
    assert rig.service.counts.ignored - before == 4, "the budget and the speed"


def test_variables_of_the_template_reach_a_guests_prompt(rig: Rig):
    closed_thinking = "<think>\n\n</think>\n\n"
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields, is_off in [
        ({}, False),
        (off, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"reasoning_effort": "high", **off}, True),
    ]:
        chat(rig, **fields)
        assert prompt_of(rig).endswith(closed_thinking) == is_off, fields
    for kind, is_off in [("disabled", True), ("adaptive", False), ("enabled", False)]:
        rig.sampler.texts.append("Hello")
        rig.anthropic.messages.create(
            model="m", max_tokens=9, messages=HI, extra_body={"thinking": {"type": kind}}
        )
        assert prompt_of(rig).endswith(closed_thinking) == is_off, kind
    rig.sampler.texts.append("Hello")
    rig.openai.responses.create(model="m", input="Hi", reasoning={"effort": "none"})
    assert prompt_of(rig).endswith(closed_thinking)
    before = rig.service.counts.ignored
    chat(rig, chat_template_kwargs={"messages": [], "no_such": 1})
    assert "Hi" in prompt_of(rig) and rig.service.counts.ignored == before + 1
    session = session_of(rig, "g8")
    chat(rig, client=rig.openai.with_options(api_key=session.key), **off)
    assert not prompt_of(rig).endswith(closed_thinking)
    assert rig.service.counts.ignored == before + 2
    session.finish()


def test_a_conversation_with_other_variables_is_a_new_context(rig: Rig):
    named = {"extra_headers": {"x-session-id": "talk"}}
    answer = chat(rig, **named).choices[0].message
    more = [*HI, {"role": "assistant", "content": answer.content}, *HI]
    counts = rig.service.counts
    chat(rig, messages=more, chat_template_kwargs={"enable_thinking": False}, **named)
    assert rig.service.counts.continued == counts.continued
    chat(rig, messages=more, **named)
    assert rig.service.counts.continued == counts.continued + 1


# ---- tools


def test_without_tools_a_call_is_text(rig: Rig):
    text = f"<think>\nhm\n</think>\n\nI say {CALL}"
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = chat(rig, text, **tools).choices[0].message
        assert (message.content, message.tool_calls) == (f"I say {CALL}", None)
        assert message.reasoning_content == "hm"
        chunks = [c.choices[0].delta for c in chat(rig, text, stream=True, **tools)]
        assert "".join(c.content or "" for c in chunks) == f"I say {CALL}"
        assert not any(c.tool_calls for c in chunks)
    rig.sampler.texts.append(text)
    reply = rig.anthropic.messages.create(model="m", max_tokens=99, messages=HI)
    assert [b.type for b in reply.content] == ["thinking", "text"]
    assert reply.content[1].text == f"I say {CALL}" and reply.stop_reason == "end_turn"
    rig.sampler.texts.append(text)
    reply = rig.openai.responses.create(model="m", input="Hi")
    assert reply.output_text == f"I say {CALL}"


def test_one_call_is_kept_without_parallel_calls(rig: Rig):
    for parallel, count in ((True, 2), (False, 1)):
        fields = {"tools": TOOLS, "parallel_tool_calls": parallel}
        assert len(chat(rig, CALL + CALL, **fields).choices[0].message.tool_calls) == count
        chunks = [c.choices[0].delta for c in chat(rig, CALL + CALL, stream=True, **fields)]
        assert sum(len(c.tool_calls or ()) for c in chunks) == count
        rig.sampler.texts.append(CALL + CALL)
        reply = rig.anthropic.messages.create(
            model="m", max_tokens=99, messages=HI, tools=ANTHROPIC_TOOLS,
            tool_choice={"type": "auto", "disable_parallel_tool_use": not parallel},
        )  # fmt: skip
        assert [b.type for b in reply.content] == ["tool_use"] * count
        rig.sampler.texts.append(CALL + CALL)
        tool = {"type": "function", **TOOLS[0]["function"], "strict": True}
        reply = rig.openai.responses.create(
            model="m", input="Hi", tools=[tool], parallel_tool_calls=parallel
        )
        assert [item.type for item in reply.output] == ["function_call"] * count
        assert reply.parallel_tool_calls == parallel


def test_a_required_call_is_a_constraint(rig: Rig):
    chat(rig, CALL, tools=TOOLS, tool_choice="required")
    constraint = rig.sampler.requests[-1].shaping.constraint
    assert constraint.kind == "turn" and "start: think? (calls)" in constraint.text
    rig.sampler.texts.append(CALL)
    rig.anthropic.messages.create(
        model="m", max_tokens=9, messages=HI, tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"}
    )
    assert rig.sampler.requests[-1].shaping.constraint == constraint
    chat(rig, tools=TOOLS)
    assert rig.sampler.requests[-1].shaping is None


def test_allowed_tools_are_counted_where_nothing_keeps_the_policy_from_others(rig: Rig):
    other = {"type": "function", "function": {"name": "sub"}}
    named = [{"type": "function", "function": {"name": "sub"}}]
    for mode, text, is_counted in (("auto", None, 1), ("auto", JSON, 0), ("required", None, 0)):
        before = rig.service.counts.ignored
        allowed = {"mode": mode, "tools": named}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        more = {} if text is None else {"response_format": text}
        chat(rig, "{}", tools=[*TOOLS, other], tool_choice=choice, **more)
        assert rig.service.counts.ignored - before == is_counted, (mode, text)
        shaping = rig.sampler.requests[-1].shaping
        assert is_counted == (shaping is None)
        assert is_counted or "add" not in shaping.constraint.text


@pytest.mark.full
def test_ids_of_calls_do_not_repeat_and_are_the_same_in_a_replay(rig: Rig):
    def ids(key, count=3):
        found, messages = [], list(HI)
        client = rig.openai.with_options(api_key=key)
        for _ in range(count):
            message = chat(rig, CALL, client=client, messages=messages, tools=TOOLS)
            (call,) = message.choices[0].message.tool_calls
            found.append(call.id)
            turn = message.choices[0].message.model_dump(exclude_none=True)
            messages += [turn, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        return found

    guests = ids(KEY) + ids(KEY)
    session = session_of(rig, "g9")
    played = ids(session.key)
    session.finish()
    again = session_of(rig, "g9")
    replayed = ids(again.key)
    again.finish()
    other = session_of(rig, "g10")
    others = ids(other.key)
    other.finish()
    assert played == replayed and len({*guests, *played, *others}) == 12
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", name) for name in (*guests, *played))


def test_ids_of_answers_differ_between_servers(rig: Rig):
    other = serve(Speaker(rig.tokenizer, []), rig.tokenizer)
    ids = [chat(one).id for one in (rig, rig, other)]
    closed(other)
    assert len(set(ids)) == 3 and all(name.startswith("chatcmpl-") for name in ids)


# ---- log-probs


def test_the_likeliest_tokens(rig: Rig):
    fields = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    reply = chat(rig, "ab", logprob_token_ids=[9, 8], **fields).choices[0]
    assert rig.sampler.requests[-1].logprobs == LogprobRequest(top=3, ids=(9, 8))
    word = rig.tokenizer.token_text
    first = reply.logprobs.content[0]
    assert [t.token for t in first.top_logprobs] == [
        "a", *map(word, (1, 2)), *map(word, (9, 8))
    ]  # fmt: skip
    assert [t.logprob for t in first.top_logprobs] == [-0.5, -1, -2, -7, -7]
    chunks = [c.choices[0] for c in chat(rig, "ab", stream=True, **fields)]
    streamed = [e for c in chunks if c.logprobs for e in c.logprobs.content]
    assert [len(e.top_logprobs) for e in streamed] == [3] * len(reply.token_ids)
    with pytest.raises(openai.BadRequestError, match="unless logprobs is true"):
        chat(rig, top_logprobs=2)


def test_the_log_probs_of_a_prompt(rig: Rig):
    body = chat(rig, "ab", prompt_logprobs=2, return_token_ids=True).model_dump()
    assert rig.sampler.requests[-1].logprobs == LogprobRequest(prompt=True, top=2)
    found = body["prompt_logprobs"]
    assert found[0] is None and len(found) == len(body["prompt_token_ids"])
    token = body["prompt_token_ids"][1]
    assert found[1][str(token)] == {
        "logprob": -0.5, "rank": 1, "decoded_token": rig.tokenizer.token_text(token)
    }  # fmt: skip
    assert found[1]["1"]["logprob"] == -1.0 and found[1]["1"]["rank"] == 2
    rig.sampler.texts.append("ab")
    params = {"max_tokens": 0, "prompt_logprobs": 0, "logprobs": 4}
    body = {"token_ids": [5, 6, 7], "sampling_params": params}
    reply = rig.http.post("/inference/v1/generate", json=body).json()
    assert rig.sampler.requests[-1].max_new_tokens == 0
    assert [list(p or ()) for p in reply["prompt_logprobs"]] == [[], ["6"], ["7"]]
    assert reply["choices"][0]["token_ids"] == []


def test_every_token_of_a_prompt_has_a_rank():
    known = PositionLogprobs(
        logprobs=np.array([np.nan, -4.0], np.float32),
        top_ids=np.array([[-1, -1], [8, 9]], np.int32),
        top_logprobs=np.array([[np.nan, np.nan], [-0.5, -1.0]], np.float32),
        id_logprobs=np.zeros((2, 0), np.float32),
    )
    words = AnswerFormat(
        text_of=str, bytes_of=lambda i: b"x", decode=str, bytes_in_text=None, label="v"
    )
    row = prompt_row(np.array([5, 6], np.int32), known)
    found = words.prompt_logprobs(row, ShownLogprobs(prompt=2))
    assert {i: entry["rank"] for i, entry in found[1].items()} == {"8": 1, "9": 2, "6": 3}


def test_a_client_without_a_header_takes_the_key_from_the_address(rig: Rig):
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 2}
    rig.sampler.texts.append("ab")
    url = f"{rig.endpoint.address}/v1/completions"
    reply = httpx.post(url, json=body, auth=("any", KEY))
    assert reply.status_code == 200 and len(reply.json()["choices"][0]["prompt_logprobs"]) == 3
    for headers in ({"Authorization": "Basic !"}, {"Authorization": "Basic eDp5"}, {}):
        assert httpx.post(url, json=body, headers=headers).status_code == 401


def test_an_echo_scores_its_prompt(rig: Rig):
    rig.sampler.texts += ["x", "ab", "ab", "ab"]
    create = rig.openai.completions.create
    scored = create(model="m", prompt="Hi there", max_tokens=0, echo=True, logprobs=2)
    ids = rig.tokenizer.encode("Hi there").tolist()
    request = rig.sampler.requests[-1]
    assert (request.max_new_tokens, request.logprobs) == (0, LogprobRequest(prompt=True, top=2))
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason) == ("Hi there", "length")
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * (len(ids) - 1)]
    assert choice.logprobs.top_logprobs[0] is None
    word = rig.tokenizer.token_text
    assert choice.logprobs.top_logprobs[1] == {word(ids[1]): -0.5, word(1): -1.0}
    assert choice.logprobs.text_offset[:2] == [0, len(word(ids[0]))]
    whole = create(model="m", prompt=ids, max_tokens=9, echo=True, logprobs=0).choices[0]
    assert whole.text == "Hi thereab" and whole.logprobs.top_logprobs is None
    sampled = len(whole.logprobs.tokens) - len(ids)
    assert whole.logprobs.token_logprobs == [None, *[-0.5] * (len(ids) - 1 + sampled)]
    assert whole.logprobs.text_offset[len(ids)] == len("Hi there")
    parts = [
        c.choices[0]
        for c in create(
            model="m", prompt="Hi there", max_tokens=9, echo=True, logprobs=0, stream=True
        )
    ]
    assert "".join(p.text for p in parts) == "Hi thereab"
    numbers = [x for p in parts for x in p.logprobs.token_logprobs]
    assert numbers == whole.logprobs.token_logprobs
    plain = create(model="m", prompt="Hi there", max_tokens=9, echo=True).choices[0]
    assert plain.text == "Hi thereab" and rig.sampler.requests[-1].logprobs is None
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        create(model="m", prompt="Hi", max_tokens=0)
    session = session_of(rig, "g11")
    own = rig.openai.with_options(api_key=session.key)
    with pytest.raises(openai.BadRequestError, match="samples at least one token"):
        own.completions.create(model="m", prompt="Hi", max_tokens=0, echo=True)
    session.finish()


def test_a_list_of_prompts_has_choices_in_order(rig: Rig):
    ids = rig.tokenizer.encode("ccc").tolist()
    create = rig.openai.completions.create
    for stream in (False, True):
        rig.sampler.texts += ["a1", "a2", "b1", "b2"]
        reply = create(model="m", prompt=["A", "BB"], n=2, max_tokens=9, seed=5, stream=stream)
        if stream:
            texts = [""] * 4
            for chunk in reply:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [c.text for c in reply.choices]
            lengths = [len(rig.tokenizer.encode(text)) for text in ("A", "BB")]
            assert reply.usage.prompt_tokens == sum(lengths)
        assert texts == ["a1", "a2", "b1", "b2"]
        requests = rig.sampler.requests[-4:]
        assert [r.key for r in requests] == [(5, 0), (5, 1)] * 2, "each prompt as if alone"
    rig.sampler.texts += ["x", "y"]
    reply = create(model="m", prompt=[ids, [5, 6]], max_tokens=9)
    assert [r.token_ids.tolist() for r in rig.sampler.requests[-2:]] == [ids, [5, 6]]
    for wrong, field in [([["x"]], "prompt[0]"), (["a", 3], "prompt[1]"), (["a", ""], "prompt[1]")]:
        with pytest.raises(openai.BadRequestError) as refused:
            create(model="m", prompt=wrong)
        assert refused.value.param == field
    with pytest.raises(openai.BadRequestError, match="1024"):
        create(model="m", prompt=["a"] * 600, n=2)


# ---- prompts


def test_a_prefix_begins_the_answer(rig: Rig):
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    named = {"extra_headers": {"x-session-id": "prefix"}}
    answer = chat(rig, " fine.", **fields, **named).choices[0].message.content
    assert answer == " fine." and prompt_of(rig).endswith("<|im_start|>assistant\nIt is")
    chunks = chat(rig, " fine.", stream=True, **fields)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == " fine."
    answer = {"role": "assistant", "content": "It is fine."}
    before = rig.service.counts.continued
    chat(rig, messages=[*HI, answer, *HI], **named)
    assert rig.service.counts.continued == before + 1, "the whole answer is the policy's turn"
    rig.sampler.texts.append(" fine.")
    reply = rig.anthropic.messages.create(model="m", max_tokens=9, messages=begun)
    assert reply.content[0].text == " fine."
    assert prompt_of(rig).endswith("<|im_start|>assistant\nIt is")
    chat(rig, messages=begun)
    assert prompt_of(rig).endswith("It is<|im_end|>\n<|im_start|>assistant\n")
    start = '<tool_call>\n{"name": "add",'
    fields["messages"] = [*HI, {"role": "assistant", "content": start}]
    rest = ' "arguments": {}}\n</tool_call>'
    for stream in (False, True):
        reply = chat(rig, rest, tools=TOOLS, stream=stream, **fields)
        found = [c.choices[0].delta for c in reply] if stream else [reply.choices[0].message]
        (call,) = [call for part in found for call in part.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("add", "{}")
        assert not any(part.content for part in found)


def test_a_system_message_may_stand_anywhere(rig: Rig):
    rig.sampler.texts += ["a", "b"]
    later = [*HI, {"role": "system", "content": "Be brief."}]
    rig.anthropic.messages.create(model="m", max_tokens=9, messages=later)
    assert "<|im_start|>system\nBe brief." in prompt_of(rig)
    rig.openai.responses.create(
        model="m", input=[*HI, {"role": "developer", "content": "Be brief."}]
    )
    assert "<|im_start|>system\nBe brief." in prompt_of(rig)


def test_images_are_refused_where_the_model_reads_text(rig: Rig):
    png = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    urls = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": urls}]},
        "/v1/messages": {"max_tokens": 9, "messages": [
            {"role": "user", "content": [{"type": "image", "source": png}]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
    }  # fmt: skip
    for path, body in bodies.items():
        reply = rig.http.post(path, json=body)
        assert reply.status_code == 400 and "only text is read here" in reply.text, reply.text
    bodies["/v1/messages"]["messages"][0]["content"][0]["source"] = {"type": "url", "url": "x"}
    assert "fetches no images" in rig.http.post("/v1/messages", json=bodies["/v1/messages"]).text


# ---- other paths


def test_tokens_of_a_text_and_of_messages(rig: Rig):
    ids = rig.tokenizer.encode("Hi <|im_end|>").tolist()
    body = {"model": "m", "prompt": "Hi <|im_end|>", "return_token_strs": True}
    reply = rig.http.post("/tokenize", json=body).json()
    assert reply == {
        "count": len(ids), "max_model_len": 10**5, "tokens": ids,
        "token_strs": [rig.tokenizer.token_text(i) for i in ids],
    }  # fmt: skip
    assert rig.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hi <|im_end|>"}
    chat(rig, tools=TOOLS)
    reply = rig.http.post("/tokenize", json={"messages": HI, "tools": TOOLS}).json()
    assert reply["tokens"] == rig.sampler.requests[-1].token_ids.tolist()
    assert reply["token_strs"] is None
    info = rig.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
    for body, name in [({}, "prompt"), ({"messages": HI, "prompt": "x"}, "prompt")]:
        assert rig.http.post("/tokenize", json=body).json()["error"]["param"] == name
    assert rig.http.post("/detokenize", json={"tokens": [-1]}).status_code == 400


def test_what_is_only_read(rig: Rig):
    import jaxrl_async

    assert rig.http.get("/version").json() == {"version": jaxrl_async.__version__}
    calls = rig.service.counts.calls
    reply = rig.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f"# TYPE jaxrl_async_endpoint_calls_total counter\njaxrl_async_endpoint_calls_total "\
        f"{calls}\n" in reply.text  # fmt: skip
    assert "jaxrl_async_endpoint_open_calls 0\n" in reply.text
    for path in ("/version", "/metrics", "/v1/models", "/health", "/v1/models/tiny"):
        head, whole = rig.http.head(path), rig.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        keyless = rig.http.get(path, headers={"x-api-key": "wrong"}).status_code
        assert keyless == (200 if path == "/health" else 401), path
    assert rig.http.head("/v1/completions").status_code == 405


def test_pages_of_named_origins_may_call(rig: Rig):
    page = {"origin": "https://example.org", "access-control-request-headers": "x-api-key"}
    assert rig.http.options("/v1/models", headers=page).status_code in (404, 405)
    assert "access-control-allow-origin" not in rig.http.get("/health", headers=page).headers
    service = EndpointService(
        served_by(Speaker(rig.tokenizer, []), rig.tokenizer),
        EndpointLimits(),
        guest_keys=(KEY,),
        cors_origins=("https://example.org",),
    )
    with Endpoint(service) as endpoint:
        allowed = rig.http.options(f"{endpoint.address}/v1/messages", headers=page)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-headers"] == "x-api-key"
        models = rig.http.get(f"{endpoint.address}/v1/models", headers=page)
        assert models.headers["access-control-allow-origin"] == "https://example.org"
        refused = rig.http.post(f"{endpoint.address}/v1/messages", headers=page, content="{")
        assert refused.headers["access-control-allow-origin"] == "https://example.org"
        other = {"origin": "https://example.com"}
        assert (
            "access-control-allow-origin"
            not in rig.http.get(f"{endpoint.address}/v1/models", headers=other).headers
        )
        reply = rig.http.options(f"{endpoint.address}/v1/messages", headers=other)
        assert reply.status_code == 405


def test_seeds_of_more_than_32_bits_differ(rig: Rig):
    for seed in (5, 5 + 2**32, 5 - 2**31, -1):
        chat(rig, seed=seed)
    keys = [r.key[0] for r in rig.sampler.requests]
    assert len(set(keys)) == 4 and (keys[0], keys[3]) == (5, -1)
    assert all(-(2**31) <= key < 2**31 for key in keys)


def test_an_unsupported_field_of_anthropics_is_refused_as_its_sdk_expects(rig: Rig):
    body = {"max_tokens": 9, "messages": HI, "thread": {"type": "create"}}
    error = rig.http.post("/v1/messages", json=body).json()["error"]
    assert error["details"] == {
        "error_code": "thread_unsupported_request", "unsupported": ["thread"]
    }  # fmt: skip
