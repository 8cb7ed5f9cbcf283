"""What teachers' servers say about episodes: choices, protocols, faults and time limits."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import episode_of
from chat_tokenizers import CHATML, byte_tokenizer
from fake_teacher import FakeTeacher

from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.schema import NamedTeacher
from jaxrl_async.data.chat import chat_format
from jaxrl_async.errors import (
    BadEndpoint,
    ConfigError,
    OutageTooLong,
    RetriesExhausted,
    RolloutError,
)
from jaxrl_async.outages import Outages
from jaxrl_async.teachers.prompt_logprobs import UnreadableLogprobs, read_scores
from jaxrl_async.teachers.teacher_choices import TeacherChoices
from jaxrl_async.teachers.teacher_contexts import TeacherContexts
from jaxrl_async.teachers.teacher_scorer import TeacherScorer
from jaxrl_async.teachers.teacher_service import TeacherService
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import EpisodeGroup, Score, Ticket

VOCAB = 13
EPISODE = replace(  # two contexts: P P A A | P A A
    episode_of((-1, -1, 3, 3, -1, 4, 4)),
    token_ids=np.array([5, 2, 7, 1, 5, 11, 12], np.int32),
    starts=(0, 4),
)
TRIED: dict[str, Any] = {"backoff_first_s": 0.1, "longest_s": 20.0}


async def rewards(episodes: Any, prompt: Any) -> tuple[Score, ...]:
    return tuple(Score(reward=float(n)) for n in range(len(episodes)))


def service(url: str, name: str = "t", top_k: int = 0, **changes: Any) -> TeacherService:
    section = NamedTeacher(url=url, model="m", **changes)
    return TeacherService(
        name, section, top_k=top_k, vocab=VOCAB, named_tokens=VOCAB, outages=Outages(**TRIED)
    )


def asked(
    one: TeacherService,
    *episodes: Any,
    wait_s: float | None = None,
    column: Any = "t",
    openings: Any = None,
) -> tuple[Score, ...]:
    choices = TeacherChoices(weights={"t": 2.0}, column="teacher")
    scorer = TeacherScorer(rewards, choices, {"t": one}, {"t": wait_s}, openings or {})
    prompt = replace(make_prompt(3), columns={"teacher": column})
    try:
        return asyncio.run(scorer(episodes or (EPISODE,), prompt))
    finally:
        one.close()


# ---- what is said


@pytest.mark.parametrize("protocol", ["completions", "generate", "echo"])
def test_each_protocol_gives_the_log_probs_of_generated_tokens(protocol: str) -> None:
    with FakeTeacher(VOCAB, 0) as server:
        (score,) = asked(service(server.url, protocol=protocol))
        wanted = [server.table[2, 7], server.table[7, 1], server.table[5, 11], server.table[11, 12]]
        paths = {path for path, _, _ in server.bodies}
    assert score.reward == 0.0
    (found,) = score.teachers
    assert (found.teacher, found.weight) == ("t", 2.0)
    assert found.places.tolist() == [2, 3, 5, 6]
    np.testing.assert_allclose(found.logprobs, wanted, rtol=1e-6)
    assert found.top_ids.shape == (4, 0)
    path = "/inference/v1/generate" if protocol == "generate" else "/v1/completions"
    assert paths == {path}


@pytest.mark.parametrize("protocol", ["completions", "generate"])
def test_the_likeliest_tokens_come_in_order(protocol: str) -> None:
    with FakeTeacher(VOCAB, 1) as server:
        (score,) = asked(service(server.url, top_k=4, protocol=protocol))
        rows = server.table[[2, 7, 5, 11]]
    order = np.argsort(-rows, axis=-1)[:, :4]
    np.testing.assert_array_equal(score.teachers[0].top_ids, order)
    likely = np.take_along_axis(rows, order, -1)
    np.testing.assert_allclose(score.teachers[0].top_logprobs, likely, rtol=1e-6)


def test_an_episode_without_generated_tokens_is_not_asked_about() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        (score,) = asked(service(server.url), episode_of((-1, -1)))
        assert not server.bodies
    assert len(score.teachers[0].places) == 0


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    with FakeTeacher(VOCAB, 0) as server:
        asked(service(server.url, key_variable="MY_KEY"))
        assert {key for _, _, key in server.bodies} == {"Bearer abc"}
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match=r"teachers.t.key_variable = MY_KEY: the environment"):
        service("http://x/v1", key_variable="MY_KEY")


def test_a_context_is_asked_about_up_to_a_token_that_no_tokenizer_has() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        section = NamedTeacher(url=server.url, model="m")
        outages = Outages(**TRIED)
        one = TeacherService("t", section, top_k=0, vocab=VOCAB, named_tokens=12, outages=outages)
        (score,) = asked(one)  # the last token, 12, pads the vocabulary
        wanted = [server.table[2, 7], server.table[7, 1], server.table[5, 11]]
        assert all(max(body["prompt"]) < 12 for _, body, _ in server.bodies)
    assert score.teachers[0].places.tolist() == [2, 3, 5]
    np.testing.assert_allclose(score.teachers[0].logprobs, wanted, rtol=1e-6)
    assert one.counts()["unknown_tokens"] == 1


# ---- another context than the policy's


def test_a_teacher_may_read_a_demonstration_in_place_of_the_prompt() -> None:
    episode = replace(EPISODE, starts=(0,), token_ids=EPISODE.token_ids)
    prompt = replace(make_prompt(3), token_ids=np.array([5, 2], np.int32), columns={"teacher": "t"})
    shown = np.array([9, 8, 6], np.int32)
    with FakeTeacher(VOCAB, 0) as server:
        one = service(server.url)
        choices = TeacherChoices(weights={"t": 1.0}, column="teacher")
        scorer = TeacherScorer(rewards, choices, {"t": one}, {"t": None}, {"t": lambda p, _: shown})
        (score,) = asyncio.run(scorer((episode,), prompt))
        (_, body, _) = server.bodies[0]
        assert body["prompt"] == [9, 8, 6, 7, 1, 5, 11, 12]
        found = score.teachers[0]
        assert found.places.tolist() == [2, 3, 5, 6]
        wanted = [server.table[6, 7], server.table[7, 1], server.table[5, 11], server.table[11, 12]]
        np.testing.assert_allclose(found.logprobs, wanted, rtol=1e-6)
        other = replace(prompt, token_ids=np.array([5, 3], np.int32))
        with pytest.raises(BadEndpoint, match="does not begin with it"):
            asyncio.run(scorer((episode,), other))
        one.close()


def test_a_context_is_a_text_or_messages_of_a_record() -> None:
    tokenizer = byte_tokenizer(CHATML)
    contexts = TeacherContexts(
        "teachers.t.context=shown",
        "shown",
        template=None,
        tokenizer=tokenizer,
        chat=lambda: chat_format(tokenizer, None),
    )
    prompt = replace(make_prompt(3), columns={"shown": "1 + 1 = 2. Now: 1 + 2"})
    asked_for = [{"role": "user", "content": "1 + 1 = 2. Now: 1 + 2"}]
    written = contexts(prompt).tolist()
    assert "1 + 1 = 2. Now: 1 + 2" in tokenizer.decode_all(written)
    assert contexts(replace(prompt, columns={"shown": asked_for})).tolist() == written
    for wrong in ({}, {"shown": ""}, {"shown": 3}):
        with pytest.raises(BadEndpoint, match=r"teachers\.t\.context=shown: prompt 3"):
            contexts(replace(prompt, columns=wrong))


# ---- choices


@pytest.mark.parametrize(
    ("columns", "of_task", "wanted"),
    [
        ({"teacher": "a"}, None, {"a": 1.0}),
        ({"teacher": ["a", "b"]}, None, {"a": 1.0, "b": 0.5}),
        ({"teacher": {"a": 0.25, "b": 2}}, None, {"a": 0.25, "b": 2.0}),
        ({"teacher": {"a": 0.25, "b": None}}, None, {"a": 0.25}),
        ({"teacher": ""}, "a", {}),
        ({"teacher": None}, "a", {}),
        ({}, "b", {"b": 0.5}),
        ({"kind": "b"}, lambda record: record["kind"], {"b": 0.5}),
    ],
)
def test_a_record_or_its_task_names_the_teachers(columns: Any, of_task: Any, wanted: Any) -> None:
    choices = TeacherChoices(weights={"a": 1.0, "b": 0.5}, column="teacher", of_task=of_task)
    assert choices.of(replace(make_prompt(0), columns=columns)) == wanted


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"teacher": "c"}, "names the teacher 'c', and teachers has a, b"),
        ({"teacher": {"a": 0}}, "gives the teacher a the weight 0"),
        ({"teacher": {"a": True}}, "gives the teacher a the weight True"),
        ({"teacher": {"a": float("nan")}}, "gives the teacher a the weight nan"),
        ({"teacher": {"a": float("inf")}}, "gives the teacher a the weight inf"),
        ({"teacher": 7}, "names the teacher 7"),
        ({}, "has no column 'teacher'"),
    ],
)
def test_a_wrong_teacher_ends_the_run_with_its_name(columns: Any, message: str) -> None:
    choices = TeacherChoices(weights={"a": 1.0, "b": 0.5}, column="teacher")
    with pytest.raises(BadEndpoint, match=message):
        choices.of(replace(make_prompt(0), columns=columns))


def test_a_function_of_the_task_reads_the_whole_record() -> None:
    seen: list[Any] = []

    def of_task(record: Any) -> str:
        seen.append(record)
        return "a" if record["messages"][0]["content"] == record["prompt"] else "b"

    prompt = replace(
        make_prompt(4), text="1+1", messages=({"role": "user", "content": "1+1"},), columns={"n": 2}
    )
    choices = TeacherChoices(weights={"a": 1.0, "b": 0.5}, column="teacher", of_task=of_task)
    assert choices.of(prompt) == {"a": 1.0}
    assert seen == [{"prompt": "1+1", "n": 2, "messages": [{"role": "user", "content": "1+1"}]}]
    wrong = TeacherChoices(weights={"a": 1.0}, column="teacher", of_task=lambda r: r["kind"])
    with pytest.raises(BadEndpoint, match=r"Task\.teacher raised KeyError .* prompt 4: 'kind'"):
        wrong.of(prompt)


def test_records_are_checked_without_a_call_of_the_tasks_function() -> None:
    one = make_prompt(4)
    calls: list[Any] = []
    choices = TeacherChoices(weights={"a": 1.0, "b": 1.0}, column="teacher", of_task=calls.append)
    choices.check(one)
    assert not calls
    wrong = replace(one, columns={"teacher": "c"})
    for checked in (choices, replace(choices, of_task=None)):
        with pytest.raises(BadEndpoint, match="column 'teacher' names the teacher 'c'"):
            checked.check(wrong)
    with pytest.raises(BadEndpoint, match="prompt 4 does not say which"):
        replace(choices, of_task=None).check(one)


def test_only_the_teachers_of_a_record_are_asked() -> None:
    with FakeTeacher(VOCAB, 0) as one, FakeTeacher(VOCAB, 1) as two:
        both = {"a": service(one.url, "a"), "b": service(two.url, "b")}
        choices = TeacherChoices(weights={"a": 1.0, "b": 1.0, "local": 3.0}, column="teacher")
        scorer = TeacherScorer(rewards, choices, both, dict.fromkeys(both), {})
        for choice in ("b", ["local", "b"]):
            prompt = replace(make_prompt(0), columns={"teacher": choice})
            (score,) = asyncio.run(scorer((EPISODE,), prompt))
        assert not one.bodies and len(two.bodies) == 4
        for each in both.values():
            each.close()
    local, found = score.teachers  # what the trainer computes comes without places
    assert (local.teacher, local.weight, len(local.places)) == ("local", 3.0, 0)
    assert found.teacher == "b" and len(found.places) == 4


# ---- faults


def test_overloads_and_broken_calls_are_repeated_and_counted() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        server.faults = ["429", "503"]
        one = service(server.url, concurrency=1)
        (score,) = asked(one)
    assert np.isfinite(score.teachers[0].logprobs).all()
    counts = one.counts()
    assert (counts["calls"], counts["retries"], counts["failures"]) == (4, 2, 0)


@pytest.mark.full
def test_a_server_that_is_started_again_is_waited_for() -> None:
    first = FakeTeacher(VOCAB, 0)
    one = service(first.url)
    asked(one)
    first.close()
    second: list[FakeTeacher] = []

    async def later() -> tuple[Score, ...]:
        choices = TeacherChoices(weights={"t": 1.0}, column="teacher")
        scorer = TeacherScorer(rewards, choices, {"t": one}, {"t": None}, {})
        asking = asyncio.ensure_future(scorer((EPISODE,), make_prompt(0)))
        await asyncio.sleep(0.5)
        second.append(FakeTeacher(VOCAB, 0, port=first.port))
        return await asking

    (score,) = asyncio.run(later())
    wanted = second[0].table[[2, 7, 5, 11], [7, 1, 11, 12]]
    second[0].close()
    one.close()
    np.testing.assert_allclose(score.teachers[0].logprobs, wanted, rtol=1e-6)
    assert one.counts()["retries"] >= 1 and one.counts()["failures"] == 0


def test_a_group_that_waits_too_long_is_dropped_and_counted() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        server.faults = ["hang", "hang"]
        one = service(server.url)
        began_s = time.monotonic()
        with pytest.raises(RetriesExhausted, match=r"prompt 3: the group waited .* is dropped"):
            asked(one, wait_s=0.2)
        assert time.monotonic() - began_s < 5
    assert one.counts()["dropped_groups"] == 1


def test_a_wrong_address_or_answer_ends_the_run() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        server.faults = ["404", "404"]
        with pytest.raises(BadEndpoint, match=r"answers 404.*Correct teachers\.t"):
            asked(service(server.url))
        server.faults = ["garbage", "garbage"]
        with pytest.raises(BadEndpoint, match="has no log-probs of the prompt"):
            asked(service(server.url))
        server.faults = ["short", "short"]
        with pytest.raises(BadEndpoint, match=r"likely tokens and not 13 \(teacher.top_k\)"):
            asked(service(server.url, top_k=13))
        server.faults = ["400", "400"]
        one = service(server.url)
        with pytest.raises(RolloutError, match=r"answers 400.*lower sampler.max_length"):
            asked(one)
        assert one.counts()["failures"] >= 1


def test_a_server_that_never_answered_ends_the_run_after_the_longest_outage() -> None:
    closed = FakeTeacher(VOCAB, 0)
    closed.close()
    section = NamedTeacher(url=closed.url, model="m")
    outages = Outages(backoff_first_s=0.1, longest_s=0.2)
    one = TeacherService("t", section, top_k=0, vocab=VOCAB, named_tokens=VOCAB, outages=outages)
    with pytest.raises(OutageTooLong, match=r"the teacher t at http://127\.0\.0\.1"):
        asked(one)


def test_at_most_so_many_calls_run_at_once() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        server.pause_s = 0.02
        asked(service(server.url, concurrency=2), *(EPISODE,) * 4)
        assert len(server.bodies) == 8 and server.most_at_once <= 2


def test_the_first_failure_of_rewards_ends_the_questions() -> None:
    async def broken(episodes: Any, prompt: Any) -> tuple[Score, ...]:
        raise RolloutError("no reward")

    with FakeTeacher(VOCAB, 0) as server:
        server.faults = ["hang", "hang"]
        one = service(server.url)
        choices = TeacherChoices(weights={"t": 1.0}, column="teacher")
        scorer = TeacherScorer(broken, choices, {"t": one}, {"t": None}, {})
        began_s = time.monotonic()
        with pytest.raises(RolloutError, match="no reward"):
            asyncio.run(scorer((EPISODE,), make_prompt(0)))
        one.close()
        assert time.monotonic() - began_s < 5


# ---- answers


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("null", "position 1 is None, not an object"),
        ('{"4": {"logprob": -1.0}}', "position 1 has no log-prob of its token 2"),
        ('{"2": {"logprob": NaN}}', "the log-prob of position 1 is nan"),
        ('{"2": {"logprob": 0.5}}', "the log-prob of position 1 is 0.5"),
        ('{"2": {}}', "position 1 is"),
        ('{"2": {"logprob": -1.0}, "99": {"logprob": -0.5}}', "names the token 99"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(position: str, message: str) -> None:
    content = f'{{"choices": [{{"prompt_logprobs": [null, {position}]}}]}}'.encode()
    with pytest.raises(UnreadableLogprobs, match=message):
        read_scores("completions", content, np.array([1, 2], np.int32), 1, VOCAB)


def test_a_tokens_own_log_prob_is_read_where_others_are_likelier() -> None:
    at = {"2": {"logprob": -3.0}, "7": {"logprob": -0.25}, "4": {"logprob": -2.0}}
    content = json.dumps({"choices": [{"prompt_logprobs": [None, at]}]}).encode()
    found = read_scores("completions", content, np.array([1, 2], np.int32), 2, VOCAB)
    assert found.logprobs[1] == -3.0
    assert found.top_ids[1].tolist() == [7, 4]
    assert found.top_logprobs[1].tolist() == [-0.25, -2.0]


def test_an_answer_may_have_more_tokens_than_the_prompt_and_round_above_zero() -> None:
    content = b'{"choices": [{"logprobs": {"token_logprobs": [null, 1e-7, -2.0]}}]}'
    found = read_scores("echo", content, np.array([1, 2], np.int32), 0, VOCAB)
    assert np.isnan(found.logprobs[0]) and found.logprobs[1] == 0.0 and len(found.logprobs) == 2


def test_a_group_is_stored_and_sent_with_what_its_teachers_say() -> None:
    with FakeTeacher(VOCAB, 0) as server:
        (score,) = asked(service(server.url, top_k=3))
    episodes = (EPISODE,)
    ticket = Ticket(group=0, version=3)
    group = EpisodeGroup(prompt=make_prompt(0), episodes=episodes, scores=(score,), ticket=ticket)
    (again,) = loads(dumps((group,)))
    (before,), (after,) = score.teachers, again.scores[0].teachers
    for name in ("places", "logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert (after.teacher, after.weight) == ("t", 2.0)
