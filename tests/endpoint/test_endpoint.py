"""The endpoint with the official clients: they get what a direct call of the sampler returns."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import numpy as np
import openai
import pytest
from chat_tokenizers import CHATML, QWEN3, byte_tokenizer
from endpoint_rig import KEY, SECTION, Rig, Speaker, closed, serve, tiny_policy

from jaxrl_async.endpoint.sampling_request import CallerLimits
from jaxrl_async.endpoint.service import EndpointLimits
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember
from jaxrl_async.interop.vllm_messages import checked_reply, request_body
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import Completion, EpisodeLimits, Request, SamplingParams

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Sampler(tiny_policy(), section=SECTION, seed=5) as sampler:
        rig = serve(sampler, byte_tokenizer(CHATML))
        yield rig
        closed(rig)


def long_terms(tokenizer) -> CallerLimits:
    """Terms of answers of any length."""
    return CallerLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=10**7,
        max_length=10**7,
    )


def flat(rows) -> list:
    return list(itertools.chain.from_iterable(rows))


def sampled_directly(rig: Rig, token_ids, *, count=12, key=(7, 0), **options) -> Completion:
    """What the sampler returns for a request with the key that a call's seed makes."""
    request = Request(
        request_id="direct",
        token_ids=np.array(token_ids, np.int32),
        max_new_tokens=count,
        stop_token_ids=rig.tokenizer.eos_ids,
        key=key,
        **options,
    )
    return rig.sampler.generate([request])[0]


def is_same(choice, done: Completion) -> bool:
    """Whether a chat choice has these tokens and log-probs, bit for bit."""
    logprobs = np.array([e.logprob for e in choice.logprobs.content], np.float32)
    return choice.token_ids == done.token_ids.tolist() and np.array_equal(logprobs, done.logprobs)


def until(is_so, seconds: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# ---- the same tokens


@pytest.mark.full
def test_a_chat_returns_what_the_sampler_samples(rig: Rig):
    reply = rig.chat(seed=7, temperature=0.8, top_p=0.9, extra_body={"top_k": 50})
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)
    done = sampled_directly(rig, reply.prompt_token_ids, sampling=sampling)
    assert is_same(reply.choices[0], done)
    assert reply.usage.completion_tokens == len(done.token_ids)
    assert reply.choices[0].finish_reason == ("stop" if done.stop == "eos" else "length")
    assert reply.choices[0].weight_versions[0]["version"] == "weights-0"


@pytest.mark.full
def test_each_of_several_answers_has_its_own_random_numbers(rig: Rig):
    reply = rig.chat(seed=7, n=4)
    for i, choice in enumerate(reply.choices):
        assert is_same(choice, sampled_directly(rig, reply.prompt_token_ids, key=(7, i)))
    assert len({tuple(c.token_ids) for c in reply.choices}) == 4


@pytest.mark.full
def test_a_stream_is_the_whole_answer_in_parts(rig: Rig):
    whole = rig.chat(seed=11, n=2, max_tokens=40)
    chunks = list(
        rig.chat(seed=11, n=2, max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for i, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == i]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert flat(getattr(c, "token_ids", []) for c in own) == choice.token_ids
        entries = flat(c.logprobs.content for c in own if c.logprobs)
        assert entries == choice.logprobs.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]


@pytest.mark.full
def test_completions_take_text_and_token_ids(rig: Rig):
    ids = rig.tokenizer.encode("the user asked").tolist()
    done = sampled_directly(rig, ids, key=(3, 0))
    for prompt in ("the user asked", ids):
        more = {"return_token_ids": True}
        reply = rig.openai.completions.create(
            model="m", prompt=prompt, max_tokens=12, seed=3, logprobs=1, extra_body=more
        )
        choice = reply.choices[0]
        assert choice.token_ids == done.token_ids.tolist()
        assert np.array_equal(np.float32(choice.logprobs.token_logprobs), done.logprobs)
        assert choice.text == rig.tokenizer.decode(done.token_ids)
    parts = rig.openai.completions.create(model="m", prompt=ids, max_tokens=12, seed=3, stream=True)
    assert "".join(p.choices[0].text for p in parts) == choice.text


MIXED = "Hi 😀🎉 naïve 日本語 คำตอบ الجواب done"


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named_by_id", [False, True])
def test_offsets_and_bytes_of_log_probs_are_those_of_the_text(scripted: Rig, stream, named_by_id):
    scripted.sampler.texts = [MIXED]
    more = {"return_tokens_as_token_ids": named_by_id, "return_token_ids": True}
    fields = {"prompt": "x", "max_tokens": 200, "logprobs": 1, "extra_body": more}
    reply = scripted.openai.completions.create(model="m", stream=stream, **fields)
    parts = [r.choices[0] for r in (reply if stream else [reply]) if r.choices]
    text = "".join(part.text for part in parts)
    assert text == MIXED
    offsets = flat(part.logprobs.text_offset for part in parts if part.logprobs)
    ids = flat(part.token_ids or [] for part in parts)
    assert len(offsets) == len(ids)
    starts = [0]  # the bytes before each token, by the tokenizer's own alphabet
    for token in ids:
        starts.append(starts[-1] + len(scripted.tokenizer.token_bytes(token)))
    owner = [i for i, c in enumerate(text) for _ in c.encode()]
    sampled = [i for i, start in enumerate(starts[:-1]) if start < len(owner)]
    assert [offsets[i] for i in sampled] == [owner[starts[i]] for i in sampled]
    assert len(sampled) >= len(ids) - 1  # all but the end token


@pytest.mark.full
def test_bytes_of_a_chats_tokens_joined_are_the_text(scripted: Rig):
    scripted.sampler.texts = [MIXED]
    reply = scripted.chat(max_tokens=200)
    entries = reply.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.removesuffix(b"<|im_end|>").decode() == MIXED == reply.choices[0].message.content


@pytest.mark.full
def test_messages_return_what_the_sampler_samples(rig: Rig):
    fields = {"model": "m", "max_tokens": 12, "messages": HI, "system": "Be"}
    fields["extra_body"] = {"temperature": 0.0}
    message = rig.anthropic.messages.create(**fields)
    prompt = rig.tokenizer.encode(
        "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    done = sampled_directly(rig, prompt, sampling=SamplingParams(temperature=0.0))
    expected = rig.service.served.chat.message(done.token_ids, ())
    assert message.content[-1].text == expected["content"]
    assert message.usage.output_tokens == len(done.token_ids)
    assert message.usage.input_tokens == len(prompt)
    with rig.anthropic.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [b.text for b in final.content] == [b.text for b in message.content]
    assert final.usage == message.usage
    counted = rig.anthropic.messages.count_tokens(model="m", messages=HI, system="Be")
    assert counted.input_tokens == len(prompt)


@pytest.mark.full
def test_token_ids_come_as_our_own_vllm_client_reads_them(rig: Rig):
    sampling = SamplingParams(temperature=0.7, top_k=20)
    request = Request(
        request_id="r", token_ids=np.arange(5, 25, dtype=np.int32), max_new_tokens=9,
        sampling=sampling, key=(4, 0),
    )  # fmt: skip
    body = request_body(request, 0, "weights-0")
    body["sampling_params"]["seed"] = 4
    reply = rig.http.post("/inference/v1/generate", json=body | {"return_sampling_mask": True})
    (done,) = rig.sampler.generate([request])
    found = checked_reply(reply.json(), request, "weights", 0)
    assert np.array_equal(found.token_ids, done.token_ids)
    assert np.array_equal(found.logprobs, done.logprobs)
    assert np.array_equal(found.versions, done.versions)
    masks = reply.json()["choices"][0]["sampling_mask"]
    assert len(masks) == len(done.token_ids) and all(len(m) <= 20 for m in masks)
    assert all(t in m for t, m in zip(done.token_ids.tolist(), masks, strict=True))


@pytest.mark.full
async def test_the_client_of_renderers_takes_the_answer(rig: Rig):
    client = pytest.importorskip("renderers.client")

    class Bare:
        supports_tools = True

        def get_stop_token_ids(self):
            return list(rig.tokenizer.eos_ids)

        def parse_response(self, ids, **_):
            from renderers import ParsedResponse

            return ParsedResponse(content=rig.tokenizer.decode(ids))

    async with openai.AsyncOpenAI(base_url=f"{rig.endpoint.address}/v1", api_key=KEY) as caller:
        prompt = list(range(10, 30))
        result = await client.generate(
            client=caller, renderer=Bare(), messages=HI, model="tiny", prompt_ids=prompt,
            sampling_params={"max_tokens": 8, "seed": 2, "temperature": 1.0},
        )  # fmt: skip
    done = sampled_directly(rig, prompt, count=8, key=(2, 0))
    assert result["completion_ids"] == done.token_ids.tolist()
    assert np.array_equal(np.float32(result["completion_logprobs"]), done.logprobs)


def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(rig: Rig):
    free = rig.chat(seed=21, max_tokens=40)
    text = free.choices[0].message.content
    stop = re.findall(r"[a-z ]{2}", text)[-1]
    before = text[: text.find(stop)]
    streamed = rig.chat(seed=21, max_tokens=40, stop=["never", stop], stream=True)
    for reply in (rig.chat(seed=21, max_tokens=40, stop=stop), None):
        if reply is None:
            choices = [c.choices[0] for c in streamed]
            assert "".join(c.delta.content or "" for c in choices) == before
            ids = flat(getattr(c, "token_ids", []) for c in choices)
            assert choices[-1].finish_reason == "stop"
        else:
            choice = reply.choices[0]
            assert (choice.message.content, choice.finish_reason) == (before, "stop")
            assert reply.usage.completion_tokens == len(choice.token_ids)
            ids = choice.token_ids
        assert ids == free.choices[0].token_ids[: len(ids)]
        assert stop in rig.tokenizer.decode(ids) and stop not in rig.tokenizer.decode(ids[:-1])
    message = rig.anthropic.messages.create(
        model="m", max_tokens=40, messages=HI, stop_sequences=["e", "t", "a"]
    )
    assert (message.stop_reason == "stop_sequence") == (message.stop_sequence is not None)


# ---- conversations


def test_the_next_turn_begins_with_the_very_tokens_of_the_last(rig: Rig):
    named = {"x-session-id": "talk"}
    first = rig.chat(seed=5, extra_headers=named)
    earlier = [*HI, first.choices[0].message.model_dump(exclude_none=True)]
    more = [*earlier, {"role": "user", "content": "More"}]
    second = rig.chat(messages=more, seed=5, extra_headers=named)
    before = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert len(second.prompt_token_ids) > len(before)
    changed = [HI[0], {"role": "assistant", "content": "I said"}, more[-1]]
    other = rig.chat(messages=changed, seed=5, extra_headers=named)
    anew = rig.chat(messages=changed, seed=5)
    assert other.prompt_token_ids == anew.prompt_token_ids
    assert rig.endpoint.counts().continued >= 1


def opened(rig: Rig, position: int = 3, **bounds):
    """A session of a run's, in which the run's distribution holds."""
    limits = EpisodeLimits(
        sampling=SamplingParams(temperature=0.9),
        stop_token_ids=rig.tokenizer.eos_ids,
        max_new_tokens=10,
        max_length=200,
    )
    member = SessionMember(prompt=make_prompt(position), label=f"g{position}", index=1)
    return rig.sessions.open(rig.sampler, member, limits, SessionLimits(**bounds))


def test_a_session_becomes_an_episode_of_what_was_sampled(rig: Rig):
    session = opened(rig)
    with openai.OpenAI(base_url=f"{rig.endpoint.address}/v1", api_key=session.key) as client:
        messages, turns = list(HI), []
        for _ in range(3):
            turns.append(
                client.chat.completions.create(
                    model="m", messages=messages, temperature=0.1, max_tokens=10**9, logprobs=True,
                    extra_body={"return_token_ids": True},
                )
            )  # fmt: skip
            answer = turns[-1].choices[0].message.model_dump(exclude_none=True)
            messages += [answer, {"role": "user", "content": "And?"}]
        path, shown = "/v1/session/reward", {"x-api-key": session.reward_key}
        of_turn = {"reward": 2, "call": turns[1].choices[0].request_id}
        for given in ({"reward": 0.5, "parts": {"style": 1}}, of_turn):
            assert rig.http.post(path, json=given, headers=shown).is_success
        wrong = rig.http.post(path, json={"reward": 1, "call": "g9/m9/t9"}, headers=shown)
        assert wrong.status_code == 400 and "g9/m9/t9" in wrong.json()["error"]["message"]
        assert rig.http.post("/v1/session/end", json={}, headers=shown).is_success
        late = rig.http.post(
            "/v1/chat/completions", json={"messages": HI}, headers={"x-api-key": session.key}
        )
    assert late.status_code == 401 and "finished" in late.json()["error"]["message"]
    episode = session.episode()
    assert (episode.starts, episode.num_turns, episode.score.reward) == ((0,), 3, 0.5)
    assert [m["role"] for m in episode.messages] == ["assistant", "user"] * 2 + ["assistant"]
    assert [m["content"] for m in episode.opened] == [m["content"] for m in HI]
    assert episode.messages[2]["content"] == turns[1].choices[0].message.content
    assert episode.token_ids[episode.drawn].tolist() == flat(t.choices[0].token_ids for t in turns)
    sampled = np.flatnonzero(episode.drawn)
    last_of_turn = sampled[len(turns[0].choices[0].token_ids + turns[1].choices[0].token_ids) - 1]
    assert np.flatnonzero(episode.score.token_rewards).tolist() == [last_of_turn]
    logprobs = [e.logprob for t in turns for e in t.choices[0].logprobs.content]
    assert np.array_equal(episode.logprobs[episode.drawn], np.float32(logprobs))
    direct = sampled_directly(
        rig, turns[0].prompt_token_ids, count=10, key=(3, 1),
        sampling=SamplingParams(temperature=0.9),
    )  # fmt: skip
    assert turns[0].choices[0].token_ids == direct.token_ids.tolist()
    assert session.counts().overridden_calls == 3
    assert rig.endpoint.counts().capped >= 3


def test_many_sessions_at_once_keep_apart(rig: Rig):
    sessions = [opened(rig, 10 + i) for i in range(12)]

    def converse(session) -> list[int]:
        shown = {"x-api-key": session.key}
        sampled: list[int] = []
        messages = list(HI)
        for _ in range(2):
            body = {"messages": messages, "return_token_ids": True, "n": 2}
            choices = rig.http.post("/v1/chat/completions", json=body, headers=shown).json()[
                "choices"
            ]
            sampled += [t for c in choices for t in c["token_ids"]]
            messages = [*messages, choices[1]["message"], {"role": "user", "content": "So"}]
        return sampled

    with ThreadPoolExecutor(12) as clients:
        sampled = list(clients.map(converse, sessions))
    for session, ids in zip(sessions, sampled, strict=True):
        session.finish()
        episode = session.episode()
        assert len(episode.starts) == 3, "of four answers one continues another"
        assert sorted(episode.token_ids[episode.drawn].tolist()) == sorted(ids)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Rig]:
    tokenizer = byte_tokenizer(QWEN3)
    rig = serve(Speaker(tokenizer, []), tokenizer, terms=long_terms(tokenizer))
    yield rig
    closed(rig)


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered_in_openai_form(scripted: Rig, stream):
    scripted.sampler.texts = [f"<think>\nlet me see\n</think>\n\nI add. {CALL}", "It is 3."]
    scripted.sampler.requests.clear()
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list = [{"role": "user", "content": "1+2?"}]
    fields = {"model": "m", "tools": tools, "extra_headers": {"x-session-id": f"tools {stream}"}}
    create = scripted.openai.chat.completions.create
    if stream:
        with scripted.openai.chat.completions.stream(messages=messages, **fields) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = create(messages=messages, **fields).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    if not stream:
        assert choice.message.reasoning_content == "let me see"
    answer = {"role": "assistant", "content": "I add.", "tool_calls": [
        {"id": call.id, "type": "function",
         "function": {"name": "add", "arguments": call.function.arguments}}]}  # fmt: skip
    messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    last = create(messages=messages, **fields).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", "It is 3.")
    first, second = (scripted.tokenizer.decode_all(r.token_ids) for r in scripted.sampler.requests)
    assert second.startswith(first) and "let me see" in second and "<tool_response>" in second
    assert "add" in first


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered_in_anthropic_form(scripted: Rig, stream):
    scripted.sampler.texts = [f"<think>\nlet me see\n</think>\n\nI add. {CALL}", "It is 3."]
    scripted.sampler.requests.clear()
    tools = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]
    messages: list = [{"role": "user", "content": "1+2?"}]
    fields = {"model": "m", "tools": tools, "max_tokens": 90}
    fields["extra_headers"] = {"x-session-id": f"blocks {stream}"}

    def ask():
        if not stream:
            return scripted.anthropic.messages.create(messages=messages, **fields)
        with scripted.anthropic.messages.stream(messages=messages, **fields) as events:
            return events.get_final_message()

    first = ask()
    assert [b.type for b in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[2].input) == ("tool_use", {"a": 1, "b": 2})
    assert (first.content[0].thinking, first.content[1].text) == ("let me see", "I add.")
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "3"}
    blocks = [b.model_dump(exclude_none=True) for b in first.content]
    messages += [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    last = ask()
    assert (last.stop_reason, last.content[0].text) == ("end_turn", "It is 3.")
    one, two = (scripted.tokenizer.decode_all(r.token_ids) for r in scripted.sampler.requests)
    assert two.startswith(one) and "let me see" in two


def test_tool_calls_stay_text_where_none_are_given(scripted: Rig):
    scripted.sampler.texts = [CALL]
    tools = [{"type": "function", "function": {"name": "add"}}]
    reply = scripted.openai.chat.completions.create(
        model="m", messages=HI, tools=tools, tool_choice="none"
    )
    assert reply.choices[0].message.content == CALL
    assert not reply.choices[0].message.tool_calls


@pytest.mark.full
def test_a_long_answer_is_streamed_while_it_is_sampled(scripted: Rig):
    text = "a word and " * 12
    scripted.sampler.texts = [text]
    parts = scripted.openai.chat.completions.create(model="m", messages=HI, stream=True)
    texts = [c.choices[0].delta.content or "" for c in parts]
    assert "".join(texts) == text and sum(map(bool, texts)) > 3


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [*HI, 3]}, "messages[1]"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}]},
         "messages[0].content[0].image_url"),
        ({"messages": HI, "continue_final_message": True}, "messages[0]"),
        ({"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": HI, "response_format": {"type": "json_schema"}},
         "response_format.json_schema"),
        ({"messages": HI, "response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"messages": HI, "guided_regex": "a", "guided_choice": ["b"]}, "response_format"),
        ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"messages": HI, "frequency_penalty": 2.5}, "frequency_penalty"),
        ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
        ({"messages": HI, "echo": True}, "echo"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": HI, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": HI, "temperature": -1}, "temperature"),
        ({"messages": HI, "temperature": "hot"}, "temperature"),
        ({"messages": HI, "temperature": 10**400}, "temperature"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": HI, "n": 1000}, "n"),
        ({"messages": HI, "stop": [""]}, "stop"),
        ({"messages": HI, "stop_token_ids": [1, -2]}, "stop_token_ids"),
        ({"messages": HI, "no_such_field": 1}, "no_such_field"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(rig: Rig, body, field):
    reply = rig.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field, error
    assert error["type"] == "invalid_request_error" and len(error["message"]) > 10


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/chat/completions", b"\xff\x00 not JSON", 400),
        ("/v1/chat/completions", b"[" * 100_000, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ("/v1/chat/completions", b'{"seed": NaN}', 400),
        ("/v1/completions", b'{"prompt": [1, 2, 99999999]}', 400),
        ("/inference/v1/generate", b'{"token_ids": []}', 400),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "Hi"}]}', 400),
        ("/v1/session/end", b"{}", 404),
        ("/v1/session/reward_key", b"{}", 404),
        ("/v1/unheard", b"{}", 404),
    ],
)  # fmt: skip
def test_garbage_is_answered_with_what_is_wrong(rig: Rig, path, content, status):
    reply = rig.http.post(path, content=content)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert ("type" in reply.json()) == path.startswith("/v1/messages")


def test_calls_without_a_key_are_not_served(rig: Rig):
    for client, call in (
        (openai.OpenAI(base_url=f"{rig.endpoint.address}/v1", api_key="x", max_retries=0), "o"),
        (anthropic.Anthropic(base_url=rig.endpoint.address, api_key="x", max_retries=0), "a"),
    ):
        with client, pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)):
            if call == "o":
                client.models.list()
            else:
                client.messages.create(model="m", max_tokens=1, messages=HI)
    assert httpx.post(f"{rig.endpoint.address}/v1/completions", json={}).status_code == 401


def test_a_billion_tokens_are_capped_and_counted(rig: Rig):
    before = rig.endpoint.counts().capped
    reply = rig.chat(max_tokens=10**9)
    assert reply.usage.total_tokens <= 256
    assert rig.endpoint.counts().capped == before + 1


# ---- clients that misbehave


def raw_call(rig: Rig, body: dict) -> socket.socket:
    """Send a chat call and leave its answer unread."""
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-Api-Key: {KEY}\r\n"
    sock = socket.socket()
    sock.settimeout(20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((rig.endpoint.host, rig.endpoint.port))
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock


class Patient:
    """A ports.Generate that holds every request until it is cancelled."""

    seed = None

    def __init__(self):
        self.futures = []

    def submit_many(self, requests):
        loop = asyncio.get_running_loop()
        new = [loop.create_future() for _ in requests]
        self.futures += new
        return new

    def progress(self):
        return ()


def test_a_client_that_goes_away_frees_its_slots():

    generate = Patient()
    rig = serve(generate, byte_tokenizer(CHATML))
    for stream in (False, True):
        generate.futures.clear()
        sock = raw_call(rig, {"messages": HI, "stream": stream, "n": 3})
        until(lambda: len(generate.futures) == 3)
        assert not any(f.done() for f in generate.futures)
        sock.close()
        until(lambda: all(f.cancelled() for f in generate.futures))
    until(lambda: rig.endpoint.counts().disconnected == 2)
    closed(rig)


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    generate = Patient()
    limits = EndpointLimits(call_s=0.2, ping_s=0.05 if stream else 10.0)
    rig = serve(generate, byte_tokenizer(CHATML), limits)
    reply = rig.http.post("/v1/chat/completions", json={"messages": HI, "stream": stream})
    assert "took too long" in reply.text
    assert ("waiting" in reply.text, reply.status_code) == (stream, 200 if stream else 503)
    assert generate.futures[0].cancelled()
    closed(rig)


@pytest.mark.full
def test_a_flood_is_answered_with_retry_after():
    generate = Speaker(byte_tokenizer(CHATML), ["word " * 8] * 40, step=4)
    rig = serve(generate, byte_tokenizer(CHATML), EndpointLimits(max_open_calls=3))
    with ThreadPoolExecutor(20) as clients:
        replies = list(
            clients.map(
                lambda _: rig.http.post("/v1/chat/completions", json={"messages": HI}), range(20)
            )
        )
    turned_away = [r for r in replies if r.status_code == 429]
    assert len(turned_away) >= 10 and all(r.headers["retry-after"] == "1" for r in turned_away)
    assert sum(r.status_code == 200 for r in replies) == 20 - len(turned_away) >= 3
    assert rig.endpoint.counts().busy == len(turned_away)
    closed(rig)


@pytest.mark.full
def test_bodies_are_bounded_in_size_and_time():
    limits = EndpointLimits(max_body_bytes=1000, body_s=0.3)
    rig = serve(Speaker(byte_tokenizer(CHATML), []), byte_tokenizer(CHATML), limits)
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert rig.http.post("/v1/chat/completions", json=body).status_code == 413
    chunked = rig.http.post("/v1/chat/completions", content=(b"x" * 400 for _ in range(4)))
    assert chunked.status_code == 413
    with socket.create_connection((rig.endpoint.host, rig.endpoint.port), timeout=20) as sock:
        sock.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Api-Key: {KEY}\r\n"
            "Content-Length: 900\r\n\r\n{".encode()
        )
        assert b" 408 " in sock.recv(100)
    closed(rig)


def test_an_answer_is_sent_without_waiting_for_the_one_before(rig: Rig):
    """Else a small answer on a kept connection waits 40 ms for the client's acknowledgement."""
    assert rig.http.get("/health").status_code == 200
    connections = rig.endpoint._server.server_state.connections
    sockets = [one.transport.get_extra_info("socket") for one in connections]
    assert sockets
    assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


@pytest.mark.full
def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch):
    monkeypatch.setattr("jaxrl_async.endpoint.connection.HEAD_S", 0.2)
    rig = serve(Speaker(byte_tokenizer(CHATML), []), byte_tokenizer(CHATML))
    for sent in (b"", b"POST /v1/comp"):
        with socket.create_connection((rig.endpoint.host, rig.endpoint.port), timeout=20) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(10) == b""
    rig.http.get("/health")
    time.sleep(0.4)
    assert rig.http.get("/health").status_code == 200, "one that is kept open is not cut off"
    closed(rig)


@pytest.mark.full
def test_a_client_that_does_not_read_is_cut_off():
    tokenizer, limits = byte_tokenizer(CHATML), EndpointLimits(stall_s=0.3)
    generate = Speaker(tokenizer, ["a long answer " * 50_000], step=10**7)
    rig = serve(generate, tokenizer, limits, terms=long_terms(tokenizer))
    with raw_call(rig, {"messages": HI, "stream": True}):
        until(lambda: rig.endpoint.counts().stalled == 1)
    until(lambda: rig.endpoint.counts().disconnected == 1)
    closed(rig)
