"""Long and hostile input: texts, JSON and replies that cost little to send."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import KEY, Speaker, closed, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxrl_async.config import schema
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.preferences import read_preferences
from jaxrl_async.data.record_files import Bad, BadRecord
from jaxrl_async.data.records import RecordReader
from jaxrl_async.data.token_bytes import LEAST_LOOSE, chars_per_token
from jaxrl_async.data.tokenizer import BARE, PIECE, Tokenizer, chat_tokenizer
from jaxrl_async.endpoint.body_fields import parsed_json
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.json_shape import MAX_DEPTH, MAX_PARTS, check_shape
from jaxrl_async.endpoint.service import EndpointLimits
from jaxrl_async.errors import DataError, TextTooLong
from jaxrl_async.host import give_back_memory
from jaxrl_async.rollout.chat_env import ChatEnvs, ChatLimits
from jaxrl_async.rollout.long_replies import cut_text
from jaxrl_async.tasks.task import Environment, Step, Task
from jaxrl_async.tasks.toolbox import ToolLimits
from jaxrl_async.types import Completion, Prompt, StopReason

WITHIN_S = 20.0
"""Longest wait for what a thread does."""


def byte_level(normalizer=None, merges=(("a", "a"), ("aa", "aa"))):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*alphabet, *("".join(m) for m in merges)])}
    backend = Backend(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def sentencepiece(**model):
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "ab", "▁ab"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("a", "b"), ("▁", "ab")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", **model))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


PROVED = {
    "byte level": (byte_level(), 4),
    "with NFC": (byte_level(normalizers.NFC()), 16),
    "with NFKC and lower case": (
        byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
        16,
    ),
    "long mark": (byte_level(normalizers.Replace("<break>", "~~")), 16),
    "byte fallback": (sentencepiece(byte_fallback=True, fuse_unk=True), 6),
    "one unknown each": (sentencepiece(fuse_unk=False), 6),
}
"""Tokenizers, and the most characters that one of their tokens stands for."""


@pytest.mark.full
@pytest.mark.parametrize("name", PROVED)
@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("aaaab ▁ \u0308\u0323\u1161\u1100\u11a8é中😀<break>\n"), max_size=80)
)
def test_no_text_has_fewer_tokens_than_its_length_proves(name, text):
    backend, longest = PROVED[name]
    assert chars_per_token(backend) == longest
    assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


def test_no_character_is_composed_of_more_than_four():
    # what NFC and NFKC make one character of: Unicode's own table
    longest = max(len(unicodedata.normalize("NFD", chr(c))) for c in range(0x110000))
    assert longest == 4


def unproved():
    words = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    collapsing = byte_level(normalizers.Replace(Regex(" +"), " "))
    absorbing = byte_level()
    absorbing.add_special_tokens([AddedToken("<|assistant|>", rstrip=True)])
    halves = Backend(models.BPE({"a": 0}, []))
    return {
        "words": words,
        "white space made one": collapsing,
        "taken off": byte_level(normalizers.Strip()),
        "a token that takes in the white space": absorbing,
        "unknown characters are dropped": halves,
        "unknown ones are one": sentencepiece(fuse_unk=True),
        "removed": byte_level_removing(),
    }


def byte_level_removing():
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


@pytest.mark.full
@pytest.mark.parametrize("name", unproved())
def test_where_a_token_may_stand_for_any_text_nothing_is_proved(name):
    backend = unproved()[name]
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert chars_per_token(backend) is None
    tokenizer.max_tokens = 4
    # "a" and 900,000 blanks are few tokens here, or too many: never an error of another kind
    with contextlib.suppress(TextTooLong):
        assert len(tokenizer.encode("a" + " " * 900_000)) <= 900_001
    with pytest.raises(TextTooLong):
        tokenizer.encode("a" + " " * LEAST_LOOSE)


def test_a_text_that_vanishes_is_encoded_whole():
    backend = unproved()["white space made one"]
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    tokenizer.max_tokens = 8
    assert len(tokenizer.encode("aaaa" + " " * 500_000 + "aaaa")) == 3


def heard(tokenizer, monkeypatch):
    """Lengths of the texts that reach the tokenizer's own code."""
    lengths, encode = [], Tokenizer._ids_of

    def ids_of(self, text, **wishes):
        lengths.append(len(text))
        return encode(self, text, **wishes)

    monkeypatch.setattr(Tokenizer, "_ids_of", ids_of)
    return lengths


def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.max_tokens = 100
    most = tokenizer.most_chars(100)
    lengths = heard(tokenizer, monkeypatch)
    with pytest.raises(TextTooLong, match=r"1,000,000 characters is too long: at most 100 tokens"):
        tokenizer.encode_prompt("x" * 1_000_000, BARE)
    assert max(lengths) <= 2048
    assert len(tokenizer.encode("the assistant " * (most // 14))) > 0  # may fit, and is counted


@pytest.mark.full
def test_of_a_long_text_pieces_are_counted_until_it_is_clear(monkeypatch):
    backend = byte_level(merges=[("a" * 2**n, "a" * 2**n) for n in range(10)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    tokenizer.max_tokens = 1024
    assert tokenizer.most_chars(1024) == 2**20
    lengths = heard(tokenizer, monkeypatch)
    with pytest.raises(TextTooLong, match="its first 65,536 have 65,536"):
        tokenizer.encode("xyz" * 300_000)
    assert max(lengths) == PIECE and len(lengths) == 2
    # 1,024 times the longest token fits to the last character, and is encoded
    assert len(tokenizer.encode("a" * 2**20)) == 1024


def test_half_a_surrogate_pair_in_a_long_text_is_refused_as_such():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.max_tokens = 100_000
    with pytest.raises(DataError, match=r"surrogate|cannot encode"):
        tokenizer.encode("\ud83d" + "é" * 90_000)
    tokenizer.max_tokens = 10
    with pytest.raises(TextTooLong):
        tokenizer.encode("\ud83d" * 10_000)


# --- records -------------------------------------------------------------------------------------


def test_records_that_cannot_fit_are_refused_as_too_long(tmp_path, caplog):
    tokenizer = chat_tokenizer()
    tokenizer.max_tokens = 64
    data = schema.DataSection(addition=None, max_prompt_tokens=64)
    long = "1" * (LEAST_LOOSE + 1)
    with pytest.raises(BadRecord) as refused:
        RecordReader(data, tokenizer).record({"question": long, "answer": "2"})
    assert refused.value.kind is Bad.TOO_LONG
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "1+1", "chosen": "2", "rejected": "3"}] * 3
    rows += [{"prompt": "1+2", "chosen": long, "rejected": "3"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data.model_copy(update={"jsonl": schema.JsonlSection(path=str(file), max_bad_share=0.5)})
    with caplog.at_level(logging.WARNING):
        assert len(read_preferences(file, data, tokenizer, max_tokens=64)) == 3
    assert str(Bad.PAIR_TOO_LONG) in caplog.text


# --- environments --------------------------------------------------------------------------------


class Shell(Environment):
    """Says a log of a megabyte behind the policy's turn."""

    log = "first line\n" + "line of output\n" * 70_000 + "exit code 3"

    def reset(self, record):
        return "go"

    def step(self, message):
        return Step(messages=self.log)


ASKED = Prompt(
    prompt_id=1, position=1, token_ids=np.zeros(0, np.int32), text="x", reference="", columns={}
)


def said(tokenizer, *texts):
    ids = np.concatenate([*map(tokenizer.encode, texts), tokenizer.eos_ids[:1]]).astype(np.int32)
    zeros = np.zeros(len(ids), np.int32)
    return Completion(
        request_id="r",
        token_ids=ids,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        stop=StopReason.EOS,
    )


def played(env_class, *, max_length=4096, result_chars=200, most_chars=None):
    """Play a turn of an environment; return the tokenizer, its opening, its reply, the faults."""
    tokenizer, counts = byte_tokenizer(CHATML), Counter()
    tokenizer.max_tokens = max_length
    limits = ChatLimits(
        most_chars=most_chars or tokenizer.most_chars(max_length),
        cannot_fit=tokenizer.cannot_fit,
        tools=ToolLimits(result_chars=result_chars),
    )
    task = Task(environment=env_class)
    envs = ChatEnvs(task, chat_format(tokenizer, None), limits, lambda n: counts.update([n]))

    async def play():
        env = envs(ASKED)
        try:
            return await env.open(ASKED), await env.step(ASKED, said(tokenizer, "ls"))
        finally:
            await env.close()

    return tokenizer, *asyncio.run(play()), counts


def test_a_reply_that_cannot_fit_is_cut_to_head_and_tail_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer, _, reply, counts = played(Shell)
    assert counts == {"long_replies": 1}
    assert (
        f"gave {len(Shell.log) + 4} characters, which cannot fit into sampler.max_length"
        in caplog.text
    )
    text = tokenizer.decode(reply.token_ids)
    assert "first line" in text and "exit code 3" in text and len(text) < 400
    said = reply.messages[-1]["content"]
    assert said in text
    assert said == cut_text(Shell.log, 100)  # its role is a text, too


def test_a_reply_whose_tokens_are_too_many_is_cut_as_well():
    # as with tokenizers that have tokens of 128 blanks: the length alone proves little
    *_, reply, counts = played(Shell, most_chars=2**24)
    assert counts == {"long_replies": 1}
    assert reply.messages[-1]["content"] == cut_text(Shell.log, 100)


def test_an_opening_that_cannot_fit_even_cut_leaves_no_room():
    class ManyMessages(Shell):
        def reset(self, record):
            return [{"role": "user", "content": "x" * 500}] * 60

    tokenizer, opening, *_ = played(ManyMessages, max_length=32)
    assert len(opening) >= 32  # so the episode ends there, cut off
    assert tokenizer.decode(opening).startswith("user\nxxx")


def test_a_long_reply_is_tokenized_beside_the_event_loop(monkeypatch):
    threads, encode = [], Tokenizer._ids_of

    def ids_of(self, text, **wishes):
        if len(text) > PIECE:
            threads.append(threading.current_thread())
        return encode(self, text, **wishes)

    class Talks(Shell):
        log = "line of output\n" * 10_000

    monkeypatch.setattr(Tokenizer, "_ids_of", ids_of)
    *_, counts = played(Talks, max_length=160_000)
    assert not counts  # it may fit, and is not cut
    assert threads and threading.main_thread() not in threads


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300), st.integers(2, 200))
def test_a_cut_text_keeps_its_head_and_its_tail(text, most):
    cut = cut_text(text, most)
    if len(text) <= most:
        assert cut == text
    else:
        assert cut.startswith(text[: most - most // 2]) and cut.endswith(text[-(most // 2) :])
        assert f"({len(text) - most:,} characters are cut)" in cut


# --- the endpoint --------------------------------------------------------------------------------


def parts_and_depth(value):
    """Lists, objects and fields of a value, and how deep they are nested."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [parts_and_depth(one) for one in inner]
    fields = len(value) if isinstance(value, dict) else 0
    return 1 + fields + sum(n for n, _ in found), 1 + max((d for _, d in found), default=0)


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\[]{}:, é'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('"\\[{:b'), max_size=4), inner, max_size=4)
    ),
    max_leaves=40,
)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(JSON, st.booleans())
def test_brackets_within_strings_are_not_counted(value, spaced):
    body = json.dumps(value, indent=1 if spaced else None, ensure_ascii=False).encode()
    parts, depth = parts_and_depth(value)
    with pytest.MonkeyPatch.context() as patch:
        for name, exact in (("MAX_DEPTH", depth), ("MAX_PARTS", parts), ("PIECE", 7)):
            patch.setattr(f"jaxrl_async.endpoint.json_shape.{name}", exact)
        check_shape(body)
        if depth:
            for name, exact in (("MAX_DEPTH", depth), ("MAX_PARTS", parts)):
                with patch.context() as less:
                    less.setattr(f"jaxrl_async.endpoint.json_shape.{name}", exact - 1)
                    with pytest.raises(CallRefused):
                        check_shape(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 100_000, f"nested deeper than {MAX_DEPTH} levels"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"[" + b"[]," * (5 << 20) + b"[]]", f"more than {MAX_PARTS:,} lists"),
        (b'{"x":[' + b'{"a":1},' * (2 << 20) + b"{}]}", f"more than {MAX_PARTS:,} lists"),
        (b"{" + b'"a":1,' * (2 << 20) + b'"b":1}', f"more than {MAX_PARTS:,} lists"),
        ('{"prompt":"x"}'.encode("utf-16"), "not JSON in UTF-8"),
        (b'{"prompt":"\xed\xa0\x80"}', "not JSON in UTF-8"),
        (b'"' + b"\\" * 3_000_001, "not JSON"),
    ],
)
def test_hostile_json_is_refused_before_it_is_made_into_objects(body, reason):
    with pytest.raises(CallRefused, match=reason):
        parsed_json(body)


def test_a_mark_at_the_beginning_of_a_body_is_allowed():
    assert parsed_json('\ufeff{"a": "[[[["}'.encode()) == {"a": "[[[["}


@pytest.fixture
def rig():
    tokenizer = byte_tokenizer(CHATML)
    rig = serve(Speaker(tokenizer, ["yes"] * 50), tokenizer)
    yield rig
    closed(rig)


@pytest.mark.full
def test_a_long_prompt_is_refused_by_its_length(rig, monkeypatch):
    lengths = heard(rig.tokenizer, monkeypatch)
    chat = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
    for path, body in {
        "/v1/completions": {"prompt": "word " * 200_000},
        "/v1/chat/completions": chat,
        "/v1/messages": {**chat, "max_tokens": 3},
        "/v1/messages/count_tokens": chat,
        "/v1/responses": {"input": "x" * 1_000_000},
    }.items():
        answer = rig.http.post(path, json=body)
        assert answer.status_code == 400, path
        assert "maximum context length is 128 tokens" in answer.text
        assert "characters is too long" in answer.text
    assert max(lengths) <= 2048


def test_a_body_may_be_as_long_as_the_longest_context_needs(rig):
    most = 2**20 + 128 * 128
    assert rig.http.post("/v1/completions", content=b" " * (most + 1)).status_code == 413
    escaped = '{"prompt": "' + "\\u0041" * 120 + '", "max_tokens": 2}'
    padded = escaped.encode().ljust(most)
    assert rig.http.post("/v1/completions", content=padded).status_code == 200


def left_at_once(rig, body: bytes):
    """Send a call and close the connection."""
    with socket.create_connection((rig.endpoint.host, rig.endpoint.port)) as line:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def until(condition):
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_calls_whose_client_has_left_are_not_tokenized(rig, monkeypatch):
    begun, may_end, encode = [], threading.Event(), Tokenizer.encode_prompt

    def slow(self, text, template=None):
        if text.startswith("long"):
            begun.append(text)
            may_end.wait(WITHIN_S)
        return encode(self, text, template)

    monkeypatch.setattr(Tokenizer, "encode_prompt", slow)
    stays = {"prompt": "long first " + "x" * 70_000}
    with ThreadPoolExecutor(1) as one:
        first = one.submit(rig.http.post, "/v1/completions", json=stays)
        until(lambda: begun)
        for number in range(12):
            left_at_once(rig, json.dumps({"prompt": f"long {number} " + "x" * 70_000}).encode())
        until(lambda: rig.service.counts.disconnected == 12)
        with httpx.Client(base_url=rig.endpoint.address, headers={"x-api-key": KEY}) as other:
            short = other.post("/v1/completions", json={"prompt": "short", "max_tokens": 3})
        assert short.status_code == 200  # it does not wait behind the long one
        may_end.set()
        assert first.result().status_code == 400
    assert [text[:10] for text in begun] == ["long first"]


def test_what_long_bodies_hold_is_bounded(rig, monkeypatch):
    monkeypatch.setattr("jaxrl_async.endpoint.service.MOST_HELD", 2**18)
    long = {"prompt": "x" * 2**18}
    answer = rig.http.post("/v1/completions", json=long)
    assert answer.status_code == 429 and "try again" in answer.text
    assert rig.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.full
def test_memory_after_an_attack_is_as_before():
    tokenizer = byte_tokenizer(CHATML)
    limits = EndpointLimits(max_body_bytes=2**24)
    rig = serve(Speaker(tokenizer, ["yes"] * 50), tokenizer, limits)
    process = psutil.Process()
    bodies = [
        json.dumps({"prompt": "word " * 2_000_000}).encode(),
        b'{"prompt":[' + b"[]," * (2**22) + b"1]}",
        json.dumps({"messages": [{"role": "user", "content": "\u00e9\n" * 500_000}]}).encode(),
    ]

    def attack():
        for body in bodies:
            for path in ("/v1/completions", "/v1/chat/completions"):
                assert rig.http.post(path, content=body, timeout=60).status_code == 400

    try:
        attack()  # what is made once: threads, tables
        give_back_memory()
        before = process.memory_info().rss
        for _ in range(3):
            attack()
        until(lambda: process.memory_info().rss < 1.1 * before)
        assert rig.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    finally:
        closed(rig)
