"""Environments of the library verifiers: what is refused, and what becomes of an episode."""

import asyncio
import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from chat_tokenizers import CHATML, byte_tokenizer

from jaxrl_async.codec import dumps, loads
from jaxrl_async.config import schema
from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramEndpoint
from jaxrl_async.endpoint.sessions import SessionLimits
from jaxrl_async.errors import ConfigError, MissingExtraError, RolloutError
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group, saved_episode
from jaxrl_async.rollout.running_groups import SAVED_KINDS
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.scorers.results import score_of
from jaxrl_async.tasks import verifiers_task as module
from jaxrl_async.tasks.named_tasks import check_task_name, load_task
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import EpisodeLimits, SamplingParams

pytest.importorskip("verifiers", reason="needs the extra [verifiers]")
from endpoint_rig import closed, serve, tiny_policy

NAME = "verifiers:verifiers_reverse"
SECTION = schema.SamplerSection(slots=4, max_length=192, max_new_tokens=12, block=4, page_tokens=16)
TWO_TURNS = {"agent": {"harness": {"id": "verifiers_reverse", "turns": 2}}}


class Remembers:
    """A sampler that keeps what it sampled, by request."""

    def __init__(self, sampler):
        self._sampler, self.seed, self.sampled = sampler, sampler.seed, {}

    def submit_many(self, requests):
        futures = self._sampler.submit_many(requests)
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(
                lambda done, name=request.request_id: self.sampled.__setitem__(name, done.result())
            )
        return futures

    def __getattr__(self, name):
        return getattr(self._sampler, name)


def played(task, records, *, members=2, saved=None, kept=None):
    """Play each record by a group; return the groups and what the sampler sampled for all of them.

    saved: the episodes of each group from a checkpoint; kept: gets them as a checkpoint at the end
    would have them.
    """
    tokenizer, (spec, params) = byte_tokenizer(CHATML), tiny_policy()
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=tokenizer.eos_ids,
        max_new_tokens=SECTION.max_new_tokens,
        max_length=SECTION.max_length,
    )

    async def groups():
        programs = AgentPrograms(
            task.program,
            rig.sessions,
            ProgramEndpoint(address=lambda: rig.endpoint.address),
            SessionLimits(total_s=60, idle_s=60),
            judge=score_of,
        )
        requests = [
            (
                f"g{n}",
                replace(make_prompt(n, token_ids=()), columns=record),
                (SavedEpisode(),) * members if saved is None else saved[n],
            )
            for n, record in enumerate(records)
        ]
        begun = begin_groups(sampler, programs, requests, limits)
        done = await asyncio.gather(
            *(
                play_group(sampler, prompt, group, label=label, limits=limits)
                for (label, prompt, _), group in zip(requests, begun, strict=True)
            )
        )
        if kept is not None:
            kept.extend([saved_episode(member, None) for member in group] for group in begun)
        return done

    with Sampler((spec, params), section=SECTION, seed=5) as inner:
        sampler = Remembers(inner)
        rig = serve(sampler, tokenizer)
        try:
            return asyncio.run(groups()), sampler.sampled, tokenizer
        finally:
            closed(rig)


@pytest.mark.exhaustive
def test_an_episode_has_the_samplers_own_tokens_and_the_environments_score():
    task = load_task({NAME: TWO_TURNS})
    groups, sampled, tokenizer = played(task, task.records[3:5])
    for number, group in enumerate(groups):
        for member, episode in enumerate(group):
            label = f"g{number}/m{member}/"
            mine = [done for name, done in sampled.items() if name.startswith(label)]
            assert len(mine) == 2 == episode.num_turns
            np.testing.assert_array_equal(
                episode.token_ids[episode.drawn], np.concatenate([d.token_ids for d in mine])
            )
            np.testing.assert_array_equal(
                episode.logprobs[episode.drawn], np.concatenate([d.logprobs for d in mine])
            )
            assert episode.starts == (0,)
            prompt = tokenizer.decode(episode.token_ids[: int(np.argmax(episode.drawn))])
            record = task.records[3 + number]
            assert record["question"] in prompt and "Be brief." in prompt
            parts = episode.score.parts
            assert episode.score.reward == 2.0 * parts["share"]
            assert set(parts) == {"share", "letters"}


def up_to_the_first_answer(saved):
    """A saved episode of one context as it was after its first turn."""
    (calls,) = saved.calls
    end = calls.begins[0] + len(calls.completions[0].token_ids)
    first = {name: getattr(calls, name)[:1] for name in ("numbers", "begins", "completions")}
    return SavedEpisode(calls=(replace(calls, token_ids=calls.token_ids[:end], **first),))


@pytest.mark.exhaustive
def test_an_environment_continues_from_its_last_complete_turn_after_a_resume():
    task, saved = load_task({NAME: TWO_TURNS}), []
    whole, sampled, _ = played(task, task.records[3:5], kept=saved)
    assert len(sampled) == 8
    cut = [[up_to_the_first_answer(member) for member in group] for group in saved]
    cut = loads(dumps(cut), SAVED_KINDS)
    groups, sampled, _ = played(task, task.records[3:5], saved=cut)
    assert sorted(sampled) == [f"g{g}/m{m}/t1" for g in range(2) for m in range(2)]
    for group, before in zip(groups, whole, strict=True):
        for episode, other in zip(group, before, strict=True):
            for name in ("token_ids", "drawn", "versions"):
                np.testing.assert_array_equal(getattr(episode, name), getattr(other, name))
            ours, theirs = episode.logprobs[episode.drawn], other.logprobs[other.drawn]
            kept = len(cut[0][0].calls[0].completions[0].token_ids)
            np.testing.assert_array_equal(ours[:kept], theirs[:kept])  # the second: sampled again
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            assert episode.score == other.score and episode.messages == other.messages


@pytest.mark.exhaustive
@pytest.mark.parametrize("souths", [1, 2])
def test_each_seat_is_an_episode_with_its_own_reward(souths):
    """Before, an episode had the mean of its seats: 0 in a game of zero sum."""
    task = load_task({"verifiers:verifiers_duel": {"souths": souths}})
    groups, sampled, tokenizer = played(task, task.records[:2])
    for number, group in enumerate(groups):
        assert len(group) == 2 * (1 + souths)
        for member in range(2):
            mine = [d for name, d in sampled.items() if name.startswith(f"g{number}/m{member}/")]
            assert len(mine) == 1 + souths
            episodes = group[member * (1 + souths) : (member + 1) * (1 + souths)]
            seats = ["north"] + ["south"] * souths
            assert [e.seat for e in episodes] == seats
            south = "south" if souths == 1 else f"south/{member}"
            assert [e.peers for e in episodes] == ["north"] + [south] * souths
            assert [e.score.reward for e in episodes] == [3.0] + [-3.0] * souths
            assert [dict(e.score.parts) for e in episodes] == [
                {f"{seat}.payoff": -3.0 if index else 3.0, f"{seat}.number": float(index)}
                for index, seat in enumerate(seats)
            ]
            for episode, seat in zip(episodes, seats, strict=True):
                prompt = tokenizer.decode(episode.token_ids[: int(np.argmax(episode.drawn))])
                assert f"You are {seat}." in prompt and episode.num_turns == 1
                (own,) = [
                    d for d in mine if np.array_equal(d.token_ids, episode.token_ids[episode.drawn])
                ]
                np.testing.assert_array_equal(own.logprobs, episode.logprobs[episode.drawn])
                assert [m["role"] for m in (*episode.opened, *episode.messages)] == [
                    "user",
                    "assistant",
                ]


@pytest.mark.exhaustive
def test_each_attempt_of_best_of_n_has_its_own_reward():
    task = load_task({NAME: {"id": "best-of-n", "n": 3}})
    ((*episodes,),), _, _ = played(task, task.records[:1], members=1)
    assert len(episodes) == 3 and {(e.seat, e.peers) for e in episodes} == {("", "")}
    for episode in episodes:
        assert episode.score.reward == 2 * episode.score.parts["share"]


def words_of_failure(task, error):
    """What a run reports where every member of a group fails."""
    with pytest.raises(RolloutError, match=error):
        played(task, task.records[:1], members=1)


@pytest.mark.full
def test_a_seat_that_is_not_trained_must_not_be_played_by_the_policy():
    quiet = {"harness": {"id": "verifiers_reverse"}}
    seats = {"assistant": quiet, "user": quiet}
    words_of_failure(load_task({NAME: {"id": "user-sim", **seats}}), "'user' is not trained")


@pytest.mark.full
def test_what_an_environment_raises_fails_its_group(monkeypatch):
    task = load_task(NAME)

    async def broken(self, *args, **kwargs):
        raise RuntimeError("no such machine")

    monkeypatch.setattr("verifiers_reverse.ReverseHarness.launch", broken)
    words_of_failure(task, "no such machine")


def test_services_are_opened_once_renewed_and_closed(monkeypatch):
    monkeypatch.setattr(module, "SERVED_MOST", 3)
    events = []

    class Env:
        @contextlib.asynccontextmanager
        async def serving(self):
            number = len(events)
            events.append(f"open {number}")
            yield
            events.append(f"close {number}")

    async def episodes():
        services = module.EnvironmentServices(Env)

        async def one(wait_s):
            async with services.opened() as env:
                await asyncio.sleep(wait_s)
                return env

        envs = await asyncio.gather(*(one(0.01 * n) for n in range(5)))
        assert envs[0] is envs[1] is envs[2] is not envs[3] and envs[3] is envs[4]
        assert await one(0) not in envs
        while sum(event.startswith("close") for event in events) < 3:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(episodes(), 10))
    assert sum(event.startswith("open") for event in events) == 3


def test_services_that_cannot_be_opened_say_why():
    class Env:
        @contextlib.asynccontextmanager
        async def serving(self):
            raise OSError("no port is free")
            yield

    async def episode():
        async with module.EnvironmentServices(Env).opened():
            pass

    with pytest.raises(RolloutError, match="no port is free"):
        asyncio.run(asyncio.wait_for(episode(), 10))


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("verifiers:nothing_there", "taskset 'nothing_there' not found"),
        ({NAME: {"taskset": {"wordz": 3}}}, r"taskset\.wordz: Extra inputs"),
        ({NAME: {"taskset": {"words": 0}}}, "has no tasks"),
        ({NAME: {"agnt": {}}}, "agnt: Extra inputs"),
        ({NAME: {"size": 0}}, "size"),
        ({NAME: {"agent": {"harness": {"id": "bash"}}}}, "which runs the policy's code"),
    ],
)
def test_what_cannot_be_is_refused(choice, words):
    with pytest.raises(ConfigError, match=words):
        load_task(choice)


@pytest.mark.full
def test_a_harness_that_needs_a_container_is_refused_at_the_start(monkeypatch):
    contained = {"agent": {"harness": {"id": "verifiers_contained"}}}
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "helpers"))
    with pytest.raises(
        ConfigError, match=r"'agent' is played by .*which needs a container.*docker"
    ):
        load_task({NAME: contained})
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    docker = {"agent": {"harness": {"id": "verifiers_reverse"}, "runtime": {"type": "docker"}}}
    with pytest.raises(ConfigError, match="not installed on this machine"):
        load_task({NAME: docker})


@pytest.mark.parametrize("name", ["old_game", "old-game", "somebody/old-game@0.1.2"])
@pytest.mark.parametrize("layout", ["file", "package"])
@pytest.mark.parametrize(
    "defined",
    [
        "def load_environment(**kwargs):\n    return vf.State()\n",
        "def made(**kwargs):\n    return vf.State()\n\nload_environment = made\n",
        "load_environment: object = vf.State\n",
    ],
)
def test_an_environment_of_version_0_is_refused_in_a_sentence(
    tmp_path, monkeypatch, name, layout, defined
):
    code = f"import verifiers as vf\n\n{defined}"
    if layout == "file":
        (tmp_path / "old_game.py").write_text(code)
    else:
        (tmp_path / "old_game").mkdir()
        (tmp_path / "old_game" / "__init__.py").write_text("from .env import load_environment\n")
        (tmp_path / "old_game" / "env.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "old_game", raising=False)
    with pytest.raises(ConfigError, match=r"version 0 \(old_game has load_environment\)"):
        load_task(f"verifiers:{name}")


def test_the_taskset_of_the_evaluation_may_differ():
    task = load_task({NAME: {"size": 5, "eval_taskset": {"split": "final", "words": 3}}})
    assert len(task.records) == 5 and len(task.held_out) == 3
    assert task.held_out[1]["question"] == "Turn round: 001f"
    bash = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}
    assert load_task({NAME: {"agent": bash}}).program is not None


def test_the_taskset_of_the_page_for_switchers_is_read_unchanged(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/coming_from.md").read_text("utf-8")
    blocks = re.findall(r"^```(python|yaml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = [text for language, text in blocks if "vf.Taskset[" in text]
    settings = [yaml.safe_load(text) for language, text in blocks if language == "yaml"]
    (tmp_path / "addition_v1.py").write_text(script, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    choices = [one["task"] for one in settings]
    assert choices == [{"verifiers:addition_v1": {"agent": {"harness": {"id": "null"}}}}] * 2
    task = load_task(choices[0])
    assert len(task.records) == 100 and task.program is not None
    assert "What is 3 + 3?" in str(task.records[3])


@pytest.mark.full
def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingExtraError, match=r"jaxrl_async\[verifiers\]"):
        load_task(NAME)
    check_task_name(NAME)  # where the settings are read, it need not be installed
