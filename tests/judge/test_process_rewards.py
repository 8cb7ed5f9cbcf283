"""Rewards of steps: cut from any answer, in time or left out, at each step's last token."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fake_judge import FakeJudge
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.judge_section import JudgeSection, ProcessSection
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.judge.judge import JudgeService, Transcripts
from jaxrl_async.judge.process_rewards import (
    FunctionSteps,
    JudgedSteps,
    ProcessScorer,
    RewardedStep,
    sampled_runs,
    steps_of,
)
from jaxrl_async.scorers.guard import checked
from jaxrl_async.types import Episode, Prompt, Score, StopReason

PIECES = ("a", "bc", ".", ". ", "d.e", "\n", " ")
PROMPT = Prompt(
    prompt_id=1, position=1, token_ids=np.zeros(1, np.int32), text="task", reference="ref"
)


def section_of(**settings) -> ProcessSection:
    return ProcessSection(function="x.py:f", **settings)


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def episode(runs: list[list[int]], starts: tuple[int, ...] = (0,), version: int = 0) -> Episode:
    """Turns of drawn tokens, each after a token that was not drawn."""
    ids, sampled = [], []
    for run in runs:
        ids += [0, *run]
        sampled += [False, *(True for _ in run)]
    flags = np.array(sampled, bool)
    return Episode(
        token_ids=np.array(ids, np.int32),
        drawn=flags,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(flags, version, -1).astype(np.int32),
        stop=StopReason.EOS,
        num_turns=len(runs),
        starts=starts,
    )


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=4))
def test_steps_hold_all_that_was_sampled_and_end_where_their_text_does(runs):
    whole = episode(runs)
    for split in ("separator", "turn", "token"):
        steps = steps_of(whole, section_of(split=split, separator="."), decode)
        assert "".join(s.text for s in steps) == decode(whole.token_ids[whole.drawn])
        ends = [s.end for s in steps]
        assert ends == sorted(ends) and all(whole.drawn[end] for end in ends)
        assert [e for _, e in sampled_runs(whole)][-1] - 1 == ends[-1]
        if split != "separator":
            assert len(set(ends)) == len(ends)
    counts = Counter(s.end for s in steps_of(whole, section_of(split="token"), decode))
    assert len(counts) == whole.num_drawn


@given(
    st.text(alphabet="ab。é🙂", min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 10**6)
)
def test_a_step_that_ends_in_a_character_of_several_tokens_ends_with_the_last_of_them(
    text, most, seed
):
    """Tokens are bytes, or a few of them: a part of a character is shown as another one."""
    data, rng, pieces = text.encode(), np.random.default_rng(seed), []
    while sum(map(len, pieces)) < len(data):
        begin = sum(map(len, pieces))
        pieces.append(data[begin : begin + int(rng.integers(1, most + 1))])
    ids = np.arange(1, len(pieces) + 1, dtype=np.int32)
    whole = replace(episode([[0] * len(pieces)]), token_ids=np.array([0, *ids], np.int32))

    def of_bytes(tokens):
        return b"".join(pieces[i - 1] for i in tokens).decode(errors="replace")

    steps = steps_of(whole, section_of(split="separator", separator="。"), of_bytes)
    assert "".join(s.text for s in steps) == text
    ends = np.cumsum([len(s.text.encode()) for s in steps])
    bytes_to = np.cumsum([len(p) for p in pieces])
    assert [s.end for s in steps] == [1 + int(np.searchsorted(bytes_to, e)) for e in ends]


def test_a_new_context_ends_a_turn():
    two = episode([[1, 1, 1]])
    two = Episode(**{n: getattr(two, n) for n in Episode.__dataclass_fields__} | {"starts": (0, 2)})
    assert sampled_runs(two) == [(1, 2), (2, 4)]


def test_a_steps_reward_is_at_its_last_token():
    whole = episode([[0, 2, 1, 3, 1], [0]])  # a . bc ". " bc | a
    scores = scored(lambda steps: [len(s) for s in steps], [whole], separator=".", weight=0.5)
    assert scores[0].reward == 1.0
    expected = [0, 0, 1.0, 0, 1.5, 1.5, 0, 0.5]
    np.testing.assert_allclose(scores[0].process_rewards, expected)
    assert scores[0].total == pytest.approx(1.0 + sum(expected))


def test_steps_that_end_in_one_token_add_up_there():
    twice = episode([[4, 4]])  # "d.ed.e": the last two of "d.", "ed.", "e" end in the second token
    (score,) = scored(lambda steps: [1.0, 2.0, 4.0], [twice], separator=".")
    np.testing.assert_allclose(score.process_rewards, [0, 1, 6])


async def outcome(episodes, prompt):
    return tuple(Score(reward=1.0) for _ in episodes)


def scored(function, episodes, *, version=lambda: 0, faults=None, **settings):
    """The scores of a group whose steps a function rewards."""
    section = section_of(**settings)
    rewards = FunctionSteps(function, "f", decode=decode, timeout_s=section.timeout_s, threads=2)
    count = (lambda name: None) if faults is None else (lambda name: faults.update([name]))
    scorer = ProcessScorer(outcome, rewards, section, decode=decode, count=count, version=version)
    scores = asyncio.run(scorer(tuple(episodes), PROMPT))
    return checked(scores, tuple(episodes), PROMPT)


async def endless(steps):
    await asyncio.sleep(3600)


def test_a_group_continues_without_what_is_late():
    faults = Counter()
    (score,) = scored(endless, [episode([[1]])], faults=faults, max_age_s=0.02)
    assert score == Score(reward=1.0) and faults == {"late_process_rewards": 1}


@pytest.mark.full
def test_a_group_continues_when_the_weights_are_too_new():
    faults, versions = Counter(), iter([3, 4, 5, 5, 5])
    (score,) = scored(
        endless,
        [episode([[1]], version=3)],
        faults=faults,
        max_age=2,
        version=lambda: next(versions),
    )
    assert score.process_rewards is None and faults == {"late_process_rewards": 1}


def test_what_is_in_time_is_used_whatever_the_age():
    (score,) = scored(lambda steps: [1.0], [episode([[1]])], max_age_s=5.0)
    assert score.total == 2.0


@pytest.mark.parametrize(
    "function",
    [
        lambda steps: [1.0] * (len(steps) + 1),
        lambda steps: [float("nan")] * len(steps),
        lambda steps: 1 / 0,
        lambda steps: "no",
    ],
)
def test_failed_process_rewards_fail_the_group_or_are_left_out(function):
    faults = Counter()
    with pytest.raises(RolloutError, match="process reward f on prompt 1"):
        scored(function, [episode([[1]])])
    (score,) = scored(function, [episode([[1]])], faults=faults, on_failure="without")
    assert score.process_rewards is None and faults == {"failed_process_rewards": 1}


def test_what_a_function_does_with_the_record_and_the_episode_reaches_no_other_call():
    seen = []

    def uses_up(steps, columns, episode, token_ids):
        seen.append(len(columns["tests"]))
        columns["tests"].clear()
        token_ids[:] = 0
        with pytest.raises(ValueError, match="read-only"):
            episode.logprobs[:] = 7
        return [0.5] * len(steps)

    steps = FunctionSteps(uses_up, "f", decode=decode, timeout_s=20.0, threads=1)
    of = replace(PROMPT, columns={"tests": [1, 2]})
    played = episode([[2, 3]])
    for _ in range(2):
        step = RewardedStep(text="a", end=len(played.token_ids) - 1)
        assert asyncio.run(steps(played, of, [step])) == [0.5]
    assert seen == [2, 2] and of.columns == {"tests": [1, 2]}


def test_a_function_that_cannot_be_called_is_refused():
    for function in (lambda a: 0, lambda prompt: 0, print):
        with pytest.raises(ConfigError, match="cannot be called"):
            FunctionSteps(function, "f", decode=decode, timeout_s=1.0, threads=1)


@pytest.mark.full
def test_the_judge_rates_steps_and_their_number_earns_nothing():
    with FakeJudge() as server:
        judge = JudgeSection(model="m", base_url=server.url, weight=0.0, backoff_s=0.01)
        service = JudgeService(judge, lambda name: None)
        shown = Transcripts(decode=decode, decode_all=decode)
        section = ProcessSection(function="judge", separator=".")
        rewards = JudgedSteps(service, judge, "Good?", shown)
        scorer = ProcessScorer(outcome, rewards, section, decode=decode)
        server.judge = lambda text: 10.0
        for runs in ([[0, 2, 0]], [[0, 2, 0, 2, 0, 2, 0]]):
            (score,) = asyncio.run(scorer((episode(runs),), PROMPT))
            assert score.total == pytest.approx(2.0)
        server.judge = lambda text: 11.0
        with pytest.raises(RolloutError, match="steps could not be judged"):
            asyncio.run(scorer((episode([[4]]),), PROMPT))
        service.close()
