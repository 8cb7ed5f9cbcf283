"""Who may reward a session, and how much: never the code that the policy has written."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from chat_tokenizers import CHATML, byte_tokenizer
from endpoint_rig import Rig, Speaker, closed, serve
from played_programs import LIMITS, Policy

from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember, Sessions
from jaxrl_async.errors import RolloutError
from jaxrl_async.testing.fakes import make_prompt

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    tokenizer = byte_tokenizer(CHATML)
    rig = serve(Speaker(tokenizer, ["yes"]), tokenizer)
    yield rig
    closed(rig)


@pytest.fixture
def held(rig: Rig):
    """A session of a run's, whose rewards are at most 2."""
    member = SessionMember(prompt=make_prompt(3), label="g3", index=0)
    session = rig.sessions.open(rig.sampler, member, LIMITS, SessionLimits(max_reward=2.0))
    yield session
    session.finish()


def post(rig: Rig, path: str, key: str, body: object) -> httpx.Response:
    return rig.http.post(f"/v1/session/{path}", json=body, headers={"x-api-key": key})


def test_the_key_that_samples_neither_rewards_nor_ends_and_the_other_does_not_sample(rig, held):
    for path, body in (("reward", {"reward": 1}), ("end", {}), ("end", {"failed": "bad luck"})):
        refused = post(rig, path, held.key, body)
        assert refused.status_code == 403 and "reward_key" in refused.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "permission_error"
    assert held.ended is None
    asked = {"messages": HI}
    shown = {"x-api-key": held.reward_key}
    assert rig.http.post("/v1/chat/completions", json=asked, headers=shown).status_code == 403
    asked |= {"max_tokens": 4}
    refused = rig.http.post("/v1/messages", json=asked, headers=shown)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert post(rig, "reward", "reward-guessed", {"reward": 1}).status_code == 401
    assert post(rig, "reward", held.reward_key, {"reward": 1}).is_success
    assert post(rig, "end", held.reward_key, {}).is_success
    late = post(rig, "reward", held.reward_key, {"reward": 2})
    assert late.status_code == 401 and "finished" in late.json()["error"]["message"]


def test_the_reward_key_is_told_once(rig, held):
    told = post(rig, "reward_key", held.key, {})
    assert told.json() == {"reward_key": held.reward_key} and held.reward_key != held.key
    again = post(rig, "reward_key", held.key, {})
    assert again.status_code == 400 and "returned before" in again.json()["error"]["message"]


def test_the_reward_key_is_not_told_once_the_policy_has_been_asked():
    """Nothing that the policy has written can have run before."""
    session = Sessions().open(
        Policy(), SessionMember(prompt=make_prompt(3), label="g5"), LIMITS, SessionLimits()
    )
    asyncio.run(session.sample(np.array([1])))
    with pytest.raises(RolloutError, match="calls were made"):
        session.take_reward_key()


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({"reward": 2.0}, True),
        ({"reward": -2}, True),
        ({"reward": 2.01}, False),
        ({"reward": -1e30}, False),
        ({"reward": 10**400}, False),
        ({"reward": 1, "parts": {"style": 2.0}}, True),
        ({"reward": 1, "parts": {"style": 3.0}}, False),
        ({"reward": 1, "parts": {"style": 10**400}}, False),
    ],
)
def test_a_reward_beyond_the_bound_is_refused(rig, held, given, is_taken):
    reply = post(rig, "reward", held.reward_key, given)
    assert reply.is_success == is_taken
    if not is_taken:
        assert reply.status_code == 400
    if given == {"reward": 2.01}:
        assert "endpoint.max_reward" in reply.json()["error"]["message"]


@pytest.mark.full
def test_the_commands_of_the_soak_reward_their_sessions(rig):
    """They exit with 0 where nothing misbehaves, and the session's reward is what they said."""
    program = Path(__file__).parents[2] / "benchmarks" / "misbehaving.py"
    plays = f"import runpy; play = runpy.run_path({str(program)!r})['play_by_command']"
    plays += "; play.__globals__['misbehaves'] = lambda faults: ''; raise SystemExit(play())"
    member = SessionMember(prompt=make_prompt(3), label="g4", index=0)
    limits = replace(LIMITS, max_length=128, max_new_tokens=8)
    session = rig.sessions.open(rig.sampler, member, limits, SessionLimits())
    rig.sampler.texts[:] = ["four"]
    own = {"OPENAI_BASE_URL": f"{rig.endpoint.address}/v1", "OPENAI_API_KEY": session.key}
    done = subprocess.run(
        [sys.executable, "-c", plays],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    session.finish()
    score = session.episode().score
    assert score is not None and score.reward == 4 % 3
