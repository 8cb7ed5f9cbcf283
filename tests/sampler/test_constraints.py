"""Answers within constraints: valid by another judge, exact log-probs, and no effect on others."""

import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
from byte_level import byte_level_tokenizer
from chat_tokenizers import QWEN3, byte_tokenizer
from random_schemas import random_object, random_schema
from tiny import Held, Script
from whole_rows import row_logprobs

from jaxrl_async.codec import dumps, loads
from jaxrl_async.config import schema
from jaxrl_async.data.tokenizer import Tokenizer, chat_tokenizer
from jaxrl_async.errors import RequestRefused, RolloutError
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.decoder import TokenRows, init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.remote.run.sent_tokenizer import ReceivedTokenizer, sent_tokenizer
from jaxrl_async.remote.sampler.remote_replica import RemoteReplica
from jaxrl_async.remote.sampler.request_server import ReplicaServer
from jaxrl_async.sampler.grammar import Grammars, unpacked_bits
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, limits_of
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.trainer.token_columns import SparseBits, sequence_masks
from jaxrl_async.types import (
    Completion,
    Constraint,
    LogitShaping,
    Request,
    SamplingParams,
    StopReason,
    VersionedParams,
)

pytestmark = pytest.mark.full
TOKENS = byte_level_tokenizer()
VOCAB = 416  # some ids without a token, as in padded vocabularies
ROW = 256
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.001),
)


def spec_of(vocab: int) -> ModelSpec:
    sizes = schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64)
    return ModelSpec.from_architecture(sizes, vocab)


SPEC = spec_of(VOCAB)
PARAMS = init_params(SPEC, jax.random.key(0))
SECTION = schema.SamplerSection(
    slots=8, max_length=ROW, max_new_tokens=224, block=8, page_tokens=16
)


def sampler_of(tokenizer: Any = TOKENS, policy: Any = (SPEC, PARAMS), **more: Any) -> Sampler:
    section = SECTION.model_copy(update=more)
    return Sampler(policy, section=section, settings=SamplerSettings(tokenizer=tokenizer))


def request(number: int, constraint: Constraint | None = None, **more: Any) -> Request:
    random = np.random.default_rng(number)
    base: dict[str, Any] = {
        "request_id": f"r{number}",
        "token_ids": random.integers(1, 300, 3 + number % 20).astype(np.int32),
        "max_new_tokens": 200,
        "stop_token_ids": (0,),
        "key": (number, 0),
        "shaping": None if constraint is None else LogitShaping(constraint=constraint),
    }
    return Request(**{**base, **more})


def text_of(done: Completion, tokenizer: Tokenizer = TOKENS) -> str:
    return tokenizer.decode(done.token_ids)


def trainers_logprobs(
    spec: ModelSpec, params: Any, asked: Request, done: Completion, row: int = ROW
) -> np.ndarray:
    """[drawn] log-probs by the trainer's program, over the tokens of the masks."""
    whole = np.concatenate([asked.token_ids, done.token_ids])
    begin, end = len(asked.token_ids), len(whole)
    assert done.kept is not None
    sampled = (np.arange(end) >= begin).astype(bool)
    masks = sequence_masks(done.kept, whole, sampled, spec.vocab)
    index = np.full((1, row), -1)
    index[0, begin:end] = np.arange(end - begin)
    ids = np.zeros((1, row), np.int32)
    ids[0, :end] = whole
    there = (np.arange(row) < end).astype(np.int32)[None]
    bits = np.asarray(SparseBits(masks, index, spec.vocab))
    rows = TokenRows(ids, np.arange(row, dtype=np.int32)[None] * there, there, bits)
    return np.asarray(row_logprobs(spec, params, rows))[0, begin:end]


def check_schemas(
    count: int, seed: int, spec: ModelSpec, params: Any, tokenizer: Tokenizer
) -> tuple[int, float]:
    """Sample an answer to each of `count` schemas; return the finished ones and the largest error
    of the log-probs."""
    random = np.random.default_rng(seed)
    schemas = [random_schema(random) for _ in range(count)]
    asked = [
        request(i, Constraint.schema(one), sampling=SamplingParams(temperature=1 + i % 2))
        for i, one in enumerate(schemas)
    ]
    with sampler_of(tokenizer, (spec, params)) as sampler:
        answers = sampler.generate(asked)
    finished, worst = 0, 0.0
    for one, wanted, done in zip(schemas, asked, answers, strict=True):
        if done.stop is StopReason.EOS:
            finished += 1
            jsonschema.validate(json.loads(text_of(done, tokenizer)), one)
        if wanted.sampling.temperature == 1:
            own = trainers_logprobs(spec, params, wanted, done)
            worst = max(worst, float(np.abs(np.exp(own - done.logprobs) - 1).max()))
    return finished, worst


def test_finished_answers_are_valid_and_the_trainers_ratio_is_1() -> None:
    finished, worst = check_schemas(24, 0, SPEC, PARAMS, TOKENS)
    assert finished >= 20
    assert worst < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 5))
def test_a_thousand_random_schemas_are_followed(seed: int) -> None:
    finished, worst = check_schemas(250, seed, SPEC, PARAMS, TOKENS)
    assert finished >= 225
    assert worst < 1e-5


def test_each_kind_of_constraint_is_followed() -> None:
    asked = [
        request(1, Constraint.schema()),
        request(2, Constraint(kind="regex", text="[a-c]{3}-[0-9]{1,4}")),
        request(3, Constraint.choice(["yes", 'a "no"', "größer\n"])),
        request(4, Constraint(kind="lark", text='start: "<" /[a-z]{2}/ ">" | "[]"')),
        request(5, Constraint.schema(PERSON)),
    ]
    with sampler_of() as sampler:
        for wanted in asked:
            for sampling in KINDS:
                (done,) = sampler.generate([replace(wanted, sampling=sampling)])
                if done.stop is not StopReason.EOS:
                    assert wanted.request_id in ("r1", "r5")  # a string may have no end
                    continue
                text, kind = text_of(done), wanted.constraint.kind
                if kind == "json_object":
                    assert isinstance(json.loads(text), dict)
                elif kind == "json_schema":
                    jsonschema.validate(json.loads(text), PERSON)
                elif kind == "choice":
                    assert text in ("yes", 'a "no"', "größer\n")
                else:
                    pattern = "[a-c]{3}-[0-9]{1,4}" if kind == "regex" else r"<[a-z]{2}>|\[\]"
                    assert re.fullmatch(pattern, text)


def test_others_sample_the_same_tokens_as_without_a_constrained_neighbour() -> None:
    plain = [request(i, sampling=KINDS[i % 4], extras=i % 2 == 0) for i in range(6)]
    with sampler_of() as sampler:
        alone = sampler.generate(plain)
        mixed = sampler.generate(
            [*plain[:3], request(20, Constraint.schema(PERSON)), *plain[3:],
             request(21, Constraint.schema())]
        )  # fmt: skip
    mixed = [*mixed[:3], *mixed[4:7]]
    for one, other in zip(alone, mixed, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-6)  # sums of other rows
        assert (one.kept is None) == (other.kept is None)


def same(one: Completion, other: Completion) -> None:
    assert one.stop is other.stop
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert one.kept is not None and other.kept is not None
    assert one.kept.num_tokens == other.kept.num_tokens == len(one.token_ids)
    for token in range(one.kept.num_tokens):
        np.testing.assert_array_equal(one.kept.of(token), other.kept.of(token))


def test_an_answer_does_not_depend_on_its_neighbours_nor_on_preemption() -> None:
    random = np.random.default_rng(5)
    asked = [request(i, Constraint.schema(random_object(random))) for i in range(12)]
    with sampler_of(slots=2) as narrow, sampler_of() as wide:
        alone = [narrow.generate([one])[0] for one in asked]
        together = wide.generate([*asked, request(30), request(31)])[:12]
    page = 2 * 2 * 2 * 8 * 4 * 16
    with sampler_of(kv_memory_mib=18 * page / 2**20) as crowded:
        squeezed = crowded.generate([*asked, request(30), request(31)])[:12]
        assert crowded.stats().preempted
    for one, other, third in zip(alone, together, squeezed, strict=True):
        same(one, other)
        same(one, third)


def test_a_saved_answer_continues_and_forks_within_its_constraint(tmp_path) -> None:
    asked = request(7, Constraint.schema(PERSON))
    with sampler_of() as sampler:
        (whole,) = sampler.generate([asked])
        held = Held(sampler, tokens=6)
        (future,) = sampler.start_many([asked])
        (saved,) = held.meanwhile(lambda: sampler.save("r7", stop=True))
        future.result()
        assert 6 <= len(saved.token_ids) < len(whole.token_ids)
        saved = loads(dumps(saved))
        (resumed,) = sampler.resume([saved])
        same(whole, resumed)
        forks = sampler.fork(saved, 3)
    assert len({tuple(f.token_ids) for f in forks}) > 1
    for fork in forks:
        assert fork.kept is not None and fork.kept.num_tokens == len(fork.token_ids)
        if fork.stop is StopReason.EOS:
            jsonschema.validate(json.loads(text_of(fork)), PERSON)
    with pytest.raises(RolloutError, match="kept of its tokens was not saved"), sampler_of() as one:
        one.resume([replace(saved, kept=None)])


def test_min_tokens_give_way_to_a_text_that_is_complete() -> None:
    choice, free = Constraint.choice(["yes"]), Constraint(kind="regex", text="[ab]*")
    with sampler_of() as sampler:
        early = request(1, shaping=LogitShaping(min_tokens=20, constraint=choice))
        late = request(2, shaping=LogitShaping(min_tokens=20, constraint=free))
        short, long = sampler.generate([early, late])
    assert text_of(short) == "yes" and short.stop is StopReason.EOS
    assert len(long.token_ids) >= 21 and set(text_of(long)) <= {"a", "b"}
    assert 0 not in long.kept.of(19) and 0 in long.kept.of(20)


def test_a_stop_token_may_be_a_part_of_the_text() -> None:
    (b,) = TOKENS.encode("b").tolist()
    needed, possible = (
        Constraint(kind="regex", text="a{12}bc"),
        Constraint(kind="regex", text="[ab]*"),
    )
    with sampler_of() as sampler:
        one, other = sampler.generate(
            [
                request(1, needed, stop_token_ids=(0, b)),
                request(
                    2,
                    stop_token_ids=(0, b),
                    shaping=LogitShaping(min_tokens=6, constraint=possible),
                ),
            ]
        )
    assert text_of(one) == 12 * "a" + "b" and one.stop is StopReason.EOS
    assert one.kept.of(12).tolist() == [b] and one.logprobs[12] == 0
    assert set(text_of(other)[:6]) == {"a"} and {0, b} <= set(other.kept.of(6).tolist())


def test_the_masks_of_an_answer_are_small() -> None:
    """A token in a string may be nearly any: 1.6 kB each if listed."""
    string = Constraint(kind="json_schema", text='{"type": "string", "minLength": 400}')
    with sampler_of() as sampler:
        (done,) = sampler.generate([request(3, string, max_new_tokens=150)])
    assert done.kept.num_tokens == 150 and done.kept.sizes[2:].mean() > 200
    assert done.kept.ids.nbytes < 20_000 < done.kept.sizes.sum() * 4 / 5


def test_what_cannot_be_followed_is_refused_before_anything_is_queued() -> None:
    cases = {
        '{"type": "nope"}': "Invalid type",
        '{"not": {"type": "string"}}': 'Unimplemented keys: ["not"]',
        "[1": "no JSON schema",
        '{"type": "integer", "minimum": 5, "maximum": 3}': "Unsatisfiable",
    }
    with sampler_of() as sampler:
        for text, reason in cases.items():
            with pytest.raises(RolloutError, match=re.escape(reason)):
                sampler.generate(
                    [request(1), request(2, Constraint(kind="json_schema", text=text))]
                )
        for kind, text, reason in (
            ("regex", "(a", "unclosed group"),
            ("lark", "start: foo", 'unknown name: "foo"'),
            ("choice", "[]", "at least one text"),
        ):
            with pytest.raises(RolloutError, match=re.escape(reason)):
                sampler.generate([request(2, Constraint(kind=kind, text=text))])
        with pytest.raises(RolloutError, match="needs a stop token"):
            sampler.generate([request(2, Constraint.schema(), stop_token_ids=())])
        with pytest.raises(RolloutError, match="forced_length"):
            sampler.generate([request(2, Constraint.schema(), forced_length=5)])
        assert sampler.stats().requests_done == 0
    unknowing = Sampler((SPEC, PARAMS), section=SECTION)
    with unknowing, pytest.raises(RolloutError, match="knows no tokenizer"):
        unknowing.generate([request(2, Constraint.schema())])


@pytest.mark.parametrize(
    "texts",
    [
        [f"item number {i}" for i in range(5000)],
        ["x<eos>y"],  # a text like others, not the end token
        ["", "yes", "yes please", "\U0001f600", 'a\n"\\/'],
    ],
    ids=["many", "special", "odd"],
)
def test_a_choice_may_have_many_texts_and_any(texts: list[str]) -> None:
    asked, random = request(1, Constraint.choice(texts)), np.random.default_rng(0)
    grammars, seen = Grammars(TOKENS, VOCAB), set()
    grammars.check(asked)
    for _ in range(40):
        matching, ids = grammars.matching(asked, []), list[int]()
        while not ids or ids[-1] != 0:
            matching.force()
            (mask,) = matching.masks_of(1)
            ids.append(int(random.choice(np.flatnonzero(unpacked_bits(mask)))))
            matching.take(ids[-1:])
        seen.add(TOKENS.decode(np.asarray(ids[:-1], np.int32)))
    assert seen == set(texts) if len(texts) < 10 else seen < set(texts)


@pytest.mark.parametrize("lead", ["", "a"])
def test_a_grammar_may_have_many_alternatives(lead: str) -> None:
    words = " | ".join(f'"w{i}x"' for i in range(3000))
    asked = request(1, Constraint(kind="lark", text=f'start: "{lead}" one\none: {words}'))
    with sampler_of() as sampler:
        (done,) = sampler.generate([asked])
    assert re.fullmatch(rf"{lead}w\d+x", text_of(done))
    many = " | ".join(f"r{i}" for i in range(70_000))
    rules = "\n".join(f'r{i}: "a"' for i in range(70_000))
    text = f"start: {many}\n{rules}"[: 2**20]
    with sampler_of() as sampler, pytest.raises(RequestRefused):
        sampler.generate([request(1, Constraint(kind="lark", text=text))])


def test_a_constraint_that_compiles_keeps_no_other_request_waiting() -> None:
    grammars = Grammars(TOKENS, VOCAB)
    known, slow = Constraint.choice(["yes"]), Constraint.choice(["no"])
    grammars.prepare(known)
    compile_, begun, goes_on = grammars._compile, threading.Event(), threading.Event()

    def held(constraint: Constraint) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return compile_(constraint)

    grammars._compile = held  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(grammars.prepare, slow)
        assert begun.wait(60)
        second = pool.submit(grammars.check, request(2, slow))
        pool.submit(grammars.matching, request(1, known), []).result(60)
        assert not first.done() and not second.done()
        goes_on.set()
        first.result(60)
        second.result(60)
    assert grammars.matching(request(2, slow), []) is not None


def test_marks_come_only_where_a_turns_grammar_names_them() -> None:
    tokens = byte_tokenizer(QWEN3)
    call, think = (tokens.token_id(text) for text in ("<tool_call>", "<think>"))
    text = Constraint(kind="lark", text="start: /(?s:.*)/")
    named = Constraint(kind="turn", text=f"start: <[{call}]> /(?s:.*)/")
    grammars = Grammars(tokens, tokens.vocab_size)
    allowed = unpacked_bits(grammars.matching(request(1, text), []).mask())
    assert allowed[call] and allowed[think]
    matching = grammars.matching(request(1, named), [])
    matching.force()
    assert matching.forced == [call]
    allowed = unpacked_bits(matching.mask())
    assert not allowed[call] and not allowed[think] and allowed[tokens.encode("a")[0]]


def test_tokens_of_whole_words_are_judged_by_their_text() -> None:
    words = chat_tokenizer(["yes", "no", " ", "maybe"])
    spec = spec_of(words.vocab_size)
    choice = Constraint.choice(["yes no", "maybe"])
    with sampler_of(words, (spec, init_params(spec, jax.random.key(1)))) as sampler:
        asked = request(4, choice, token_ids=np.array([5, 6], np.int32))
        (done,) = sampler.generate([replace(asked, stop_token_ids=words.eos_ids)])
    assert text_of(done, words) in ("yes no", "maybe")


@pytest.mark.parametrize("mode", ["recompute", "restart", "continue"])
def test_new_weights_leave_constraints_as_they_are(mode: str) -> None:
    other = init_params(SPEC, jax.random.key(9))
    source = Script([VersionedParams(version=3, params=other)], after=12)
    section = SECTION.model_copy(update={"on_new_weights": mode, "block": 4})
    settings = SamplerSettings(tokenizer=TOKENS)
    asked = [request(i, Constraint.schema(PERSON)) for i in range(4)]
    with Sampler((SPEC, PARAMS), section=section, weights=source, settings=settings) as sampler:
        answers = sampler.generate(asked)
        assert sampler.stats().swaps == 1
        if mode == "restart":
            assert sampler.stats().restarted
    for wanted, done in zip(asked, answers, strict=True):
        jsonschema.validate(json.loads(text_of(done)), PERSON)
        assert done.kept.num_tokens == len(done.token_ids)
        params = other if mode == "restart" else PARAMS
        sure = done.versions == (3 if mode == "restart" else 0)
        own = trainers_logprobs(SPEC, params, wanted, done)
        np.testing.assert_allclose(own[sure], done.logprobs[sure], atol=1e-5)


def test_a_mesh_samples_the_same_answers() -> None:
    axes = schema.AxesSection(data=2, tensor=2)
    settings = SamplerSettings(tokenizer=TOKENS)
    asked = [
        request(1, Constraint.schema(PERSON)),
        request(2),
        request(3, shaping=LogitShaping(repetition_penalty=1.2, bias=((7, 3.0),), min_tokens=9)),
    ]
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    with (
        sampler_of() as one,
        Sampler((SPEC, PARAMS), section=SECTION, mesh=mesh, settings=settings) as several,
    ):
        for own, other in zip(one.generate(asked), several.generate(asked), strict=True):
            np.testing.assert_array_equal(own.token_ids, other.token_ids)
            np.testing.assert_allclose(own.logprobs, other.logprobs, atol=1e-4)


def test_a_tokenizer_arrives_at_another_machine_as_it_is() -> None:
    arrived = ReceivedTokenizer(loads(dumps(sent_tokenizer(TOKENS))))
    asked = [request(i, Constraint.schema(PERSON)) for i in range(3)]
    with sampler_of() as here, sampler_of(arrived) as there:
        for one, other in zip(here.generate(asked), there.generate(asked), strict=True):
            same(one, other)


def test_constraints_travel_to_a_remote_sampler_and_errors_come_back() -> None:
    settings = SamplerSettings(tokenizer=TOKENS)
    check = RequestCheck(limits_of(SPEC, SECTION, 0, settings), itertools.count())
    pair = session_pair(sampler="sampler")
    good = [request(i, Constraint.schema(PERSON)) for i in range(3)]
    bad = request(9, Constraint(kind="json_schema", text='{"type": "nope"}'))
    with sampler_of() as here, sampler_of() as there:
        server = ReplicaServer(pair.sampler, there, beat_s=0.05)
        replica = RemoteReplica(
            pair.trainer, check, capacity=there.capacity, newest=lambda: 0, count=lambda name: None
        )
        server.start()
        futures = replica.start_many([*good, bad])
        for one, future in zip(here.generate(good), futures[:3], strict=True):
            same(one, future.result(60))
        with pytest.raises(RolloutError, match="Invalid type"):
            futures[3].result(60)
        server.close()
        pair.close()
