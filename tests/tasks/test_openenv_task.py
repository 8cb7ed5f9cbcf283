"""Environment servers of OpenEnv: messages, and whole episodes at a server in a process of its
own."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import Away, ConfigError, RolloutError, StartOver
from jaxrl_async.tasks.named_tasks import load_task
from jaxrl_async.tasks.openenv_client import ServerAddress, checked_url, read_observed
from jaxrl_async.tasks.openenv_task import (
    CUT,
    EnvConverter,
    OpenEnvEnvironment,
    message_action,
    observation_text,
    text_field,
)
from jaxrl_async.tasks.task import Step

ONE_TEXT = {
    "properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["guess"],
}
A_MOVE = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}


def test_the_schema_says_how_a_message_becomes_an_action():
    assert text_field(ONE_TEXT) == "guess" and text_field(A_MOVE) is None
    assert message_action("it is 3", ONE_TEXT) == {"guess": "it is 3"}
    for text in ('{"row": 1}', 'So I go:\n```json\n{"row": 1}\n```'):
        assert message_action(text, A_MOVE) == {"row": 1}
    for text in ("row 1", "[1]", '{"row": '):
        with pytest.raises(ValueError, match="fields row, column"):
            message_action(text, A_MOVE)


def test_an_observation_is_its_text_or_json():
    assert observation_text({"prompt": "Go on", "board": [1]}, 99) == "Go on"
    assert json.loads(observation_text({"board": [1], "text": ""}, 99)) == {
        "board": [1],
        "text": "",
    }
    assert observation_text({"text": "x" * 50}, 10) == "x" * 10 + CUT


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "not JSON"),
        ("[]", "not an OpenEnv message"),
        ('{"type": "observation"}', "not an OpenEnv message"),
        ('{"type": "observation", "data": {"observation": 3}}', "must have an observation"),
        ('{"type": "observation", "data": {"observation": {}, "reward": "1"}}', "finite number"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "finite number"),
        ('{"type": "observation", "data": {"observation": {}, "done": 1}}', "and done"),
        ('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}', "boom"),
    ],
)
def test_what_a_server_sends_is_checked(text: str, error: str):
    with pytest.raises(RolloutError, match=error):
        read_observed(text, "here")


@pytest.mark.full
@pytest.mark.parametrize("url", ["x", "ftp://h", "http://", "http://h?a=1"])
def test_an_address_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match="not a server's address"):
        checked_url(url)


PROTOCOL_SERVER = '''
"""The protocol of OpenEnv's servers, written from its messages: guess a number from 1 to 4."""

import asyncio
import json
import sys
from http import HTTPStatus

from websockets.asyncio.server import serve

OPEN = 0
SCHEMA = {"action": {"properties": {"guess": {"type": "string"}}, "required": ["guess"]}}


def error(code, message):
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


async def session(socket):
    global OPEN
    if OPEN >= 2:
        await socket.send(error("CAPACITY_REACHED", "2 of 2 sessions"))
        return
    OPEN += 1
    try:
        async for text in socket:
            message = json.loads(text)
            data = message.get("data", {})
            if message["type"] == "close":
                break
            if message["type"] == "reset":
                secret, hint, reward, done = 1 + data["seed"] % 4, "Guess from 1 to 4.", None, False
            else:
                guess = data["guess"]
                if guess == "hang":
                    await asyncio.sleep(60)
                if guess == "die":
                    await socket.close()
                    break
                if guess == "boom":
                    await socket.send(error("EXECUTION_ERROR", "boom"))
                    continue
                if not guess.isdigit():
                    await socket.send(error("VALIDATION_ERROR", "guess must be a number"))
                    continue
                done = int(guess) == secret
                reward = 1.0 if done else -0.1
                hint = "higher" if int(guess) < secret else "lower"
            observation = {"observation": {"prompt": hint}, "reward": reward, "done": done}
            await socket.send(json.dumps({"type": "observation", "data": observation}))
    finally:
        OPEN -= 1


def page(connection, request):
    if request.path != "/ws":
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA))


async def main():
    async with serve(session, "127.0.0.1", int(sys.argv[1]), process_request=page):
        await asyncio.Future()


asyncio.run(main())
'''
REAL_SERVER = '''
"""The same game behind OpenEnv's own server."""

import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Said(Observation):
    prompt: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self.secret = 1 + (seed or 0) % 4
        return Said(prompt="Guess from 1 to 4.", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        if action.guess == "boom":
            raise RuntimeError("boom")
        number = int(action.guess) if action.guess.isdigit() else 0
        done = number == self.secret
        hint = "higher" if number < self.secret else "lower"
        return Said(prompt=hint, done=done, reward=1.0 if done else -0.1)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


def real_python() -> str | None:
    """A Python that has OpenEnv: that of the variable OPENENV_PYTHON, or this one."""
    given = os.environ.get("OPENENV_PYTHON", sys.executable)
    has = subprocess.run([given, "-c", "import openenv.core"], capture_output=True, check=False)
    return given if has.returncode == 0 else None


@pytest.fixture(params=["protocol", "real"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    pytest.importorskip("websockets", reason="the extra [openenv]")
    python = sys.executable if request.param == "protocol" else real_python()
    if python is None:
        pytest.skip("no Python here has OpenEnv")
    file = tmp_path / "server.py"
    file.write_text(PROTOCOL_SERVER if request.param == "protocol" else REAL_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environ = {k: v for k, v in os.environ.items() if python == sys.executable or k != "PYTHONPATH"}
    with subprocess.Popen([python, str(file), str(port)], env=environ) as process:
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        process.kill()


def environment(url: str, **limits: float) -> OpenEnvEnvironment:
    server = ServerAddress(url=url, **limits)
    return OpenEnvEnvironment(server, EnvConverter(server))


def user_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def game(url: str, seed: int) -> list[float | None]:
    """Play one episode to its end; return its rewards."""
    env, rewards = environment(url), list[float | None]()
    try:
        assert await env.reset({"seed": seed}) == "Guess from 1 to 4."
        low, high = 1, 4
        while True:
            guess = (low + high) // 2
            reply = await env.step(user_message(str(guess)))
            assert isinstance(reply, Step)
            rewards.append(reply.reward)
            if reply.done:
                assert reply.messages is None
                return rewards
            low, high = (guess + 1, high) if reply.messages == "higher" else (low, guess - 1)
    finally:
        await env.close()


@pytest.mark.exhaustive
async def test_more_episodes_at_once_than_the_server_holds_all_end(server: str):
    task = load_task({f"openenv:{server}": {"size": 8, "eval_size": 4}})
    assert [r["seed"] for r in task.records] == list(range(8))
    assert [r["seed"] for r in task.held_out] == [8, 9, 10, 11]
    played = await asyncio.gather(*(game(server, record["seed"]) for record in task.records))
    assert played == [[-0.1, 1.0], [1.0], [-0.1, 1.0], [-0.1, -0.1, 1.0]] * 2
    made = task.environment()
    assert await made.reset(task.records[3]) == "Guess from 1 to 4."
    assert (await made.step(user_message("4"))).reward == 1.0
    await made.close()


@pytest.mark.exhaustive
async def test_an_environment_that_raises_and_a_server_that_stays_full_fail_the_episode(
    server: str,
):
    env = environment(server)
    await env.reset({"seed": 3})
    with pytest.raises(RolloutError, match="boom"):
        await env.step(user_message("boom"))
    await env.close()
    full = [environment(server, patience_s=0.5) for _ in range(2)]
    for one in full:
        await one.reset({"seed": 0})
    with pytest.raises(RolloutError, match="let no episode begin within"):
        await environment(server, patience_s=0.5).reset({"seed": 0})
    for one in full:
        await one.close()


@pytest.mark.exhaustive
async def test_an_episode_continues_after_a_resume_where_the_server_answers_as_before(server: str):
    env = environment(server)
    await env.reset({"seed": 3})
    assert (await env.step(user_message("1"))).messages == "higher"
    state = loads(dumps(env.state()))
    await env.close()  # the trainer has died, and the server's environment with it
    resumed = environment(server)
    await resumed.restore(state)
    assert resumed.state() == state
    assert (await resumed.step(user_message("4"))).reward == 1.0
    await resumed.close()
    # A server that was changed meanwhile.
    for wrong in ({"reset": {"seed": 0}}, {"taken": [{**state["taken"][0], "answer": "another"}]}):
        with pytest.raises(StartOver, match="answers action 1 of 1 in another way"):
            await environment(server).restore({**state, **wrong})


@pytest.mark.exhaustive
@pytest.mark.parametrize("server", ["protocol"], indirect=True)
async def test_a_server_that_hangs_dies_or_refuses(server: str):
    env = environment(server, reply_s=0.5)
    await env.reset({"seed": 3})
    refused = await env.step(user_message("four"))
    assert isinstance(refused, str) and "guess must be a number" in refused
    assert (await env.step(user_message("4"))).done
    await env.close()
    for word, error in (("hang", Away), ("die", Away)):
        env = environment(server, reply_s=0.5)
        await env.reset({"seed": 3})
        with pytest.raises(error):
            await env.step(user_message(word))
        await env.close()
    absent = environment("http://127.0.0.1:9", patience_s=0.3, reply_s=0.5)
    with pytest.raises(RolloutError, match="does not return its actions"):
        await absent.reset({"seed": 0})
