"""What misbehaves at random: programs, a reward, and a server of environments, for soak.py.

    python -m jaxrl_async.train configs/guess_number.yaml task=benchmarks/misbehaving.py:functions
    python benchmarks/misbehaving.py serve PORT

All play the built-in game. One episode in ONE_OF, and one answer of the server in as many, is not
played as it should be: see FUNCTION_FAULTS, COMMAND_FAULTS and SERVER_FAULTS. The reward raises or
hangs about once a minute (REWARD_FAULTS).
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from http import HTTPStatus
from typing import Any

ONE_OF = 25
"""One episode of so many misbehaves."""
REWARD_S = 60.0
"""Mean time between two calls of the reward that raise or hang, in each process, seconds."""
LEFT_S = 30.0
"""How long a child that is left behind lives, if nothing ends it, and how long a function that
swallows its cancellation continues, seconds."""
LONG = "a" * 2**18
"""A message that no policy can read."""
HIGHEST, GUESSES = 8, 4
"""Of the game."""

FUNCTION_FAULTS = ("child", "swallow", "hang", "exit", "long", "leave", "nonsense")
COMMAND_FAULTS = ("child", "daemon", "hang", "deaf", "exit", "long", "chatter")
SERVER_FAULTS = ("hang", "close", "long", "garbage", "nan", "error")
REWARD_FAULTS = ("raise", "hang")


def misbehaves(faults: tuple[str, ...]) -> str:
    """Return the fault of an episode; "": none."""
    return random.choice(faults) if random.randrange(ONE_OF) == 0 else ""


# ---- programs


def post(url: str, key: str, path: str, body: Any) -> Any:
    """Call the endpoint, and return what it answers."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def spawn(detached: bool = False) -> None:
    """Leave a child behind that has our output."""
    asleep = [sys.executable, "-S", "-c", f"import time; time.sleep({LEFT_S})"]
    subprocess.Popen(asleep, start_new_session=detached)


async def play_by_function(session: Any) -> float:
    """Play by an async function."""
    fault = misbehaves(FUNCTION_FAULTS)
    if fault == "child":
        spawn()
    elif fault == "exit":
        raise SystemExit(3)
    elif fault == "hang":
        await asyncio.sleep(3600)
    elif fault == "swallow":
        end = time.monotonic() + LEFT_S
        while time.monotonic() < end:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
    text = LONG if fault == "long" else "1 to 8"
    body = {"messages": [{"role": "user", "content": text}]}
    call = asyncio.ensure_future(
        asyncio.to_thread(post, session.base_url, session.api_key, "/chat/completions", body)
    )
    if fault == "leave":
        await asyncio.sleep(0.01)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return 0.0
    answer = (await call)["choices"][0]["message"]["content"] or ""
    return "much" if fault == "nonsense" else float(len(answer) % 3)  # type: ignore[return-value]


def play_by_command() -> int:
    """Play by a command; return its exit code."""
    fault = misbehaves(COMMAND_FAULTS)
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    reward_key = post(url, key, "/session/reward_key", {})["reward_key"]
    if fault in ("child", "daemon"):
        spawn(detached=fault == "daemon")
    elif fault == "exit":
        return 3
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "deaf":
        import signal

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)
    elif fault == "chatter":
        print(LONG * 16)
    text = LONG if fault == "long" else "1 to 8"
    body = {"messages": [{"role": "user", "content": text}]}
    answer = post(url, key, "/chat/completions", body)["choices"][0]["message"]["content"] or ""
    post(url, reward_key, "/session/reward", {"reward": len(answer) % 3})
    return 0


def __getattr__(name: str) -> Any:
    """Make the tasks when they are asked for: commands and the server need none of jaxrl_async."""
    from dataclasses import replace

    from jaxrl_async.tasks.guess_number import guess_number
    from jaxrl_async.tasks.openenv_task import openenv_task
    from jaxrl_async.tasks.task import Task

    game: Any = guess_number(highest=HIGHEST, guesses=GUESSES)
    words: Any = {
        "records": game.records,
        "held_out": [game.held_out[i] for i in range(4)],
        "words": game.words,
    }
    if name == "functions":
        return Task(program=play_by_function, **words)
    if name == "commands":
        return Task(program=[sys.executable, "-S", __file__, "play"], **words)
    if name == "served":
        task = openenv_task(os.environ["SOAK_SERVER"], eval_size=4, reply_s=2.0, patience_s=20.0)
        return replace(task, words=game.words)
    raise AttributeError(name)


# ---- the reward


class Moments:
    """Random moments, about REWARD_S apart, as calls meet them."""

    def __init__(self) -> None:
        self.next = time.monotonic() + random.expovariate(1 / REWARD_S)

    def come(self) -> bool:
        """Return whether one has come."""
        if time.monotonic() < self.next:
            return False
        self.next = time.monotonic() + random.expovariate(1 / REWARD_S)
        return True


MOMENTS = Moments()


def reward(prompt: str, completion: str, reference: str) -> float:
    """Count digits, but for a call that raises or hangs."""
    if MOMENTS.come():
        if random.choice(REWARD_FAULTS) == "raise":
            raise RuntimeError("injected: the reward fails")
        time.sleep(3600)
    return sum(c.isdigit() for c in completion) / 16


# ---- the server of environments (OpenEnv's protocol)


async def session(socket: Any) -> None:
    """Play one episode with a client."""
    number = made = 0
    async for text in socket:
        message = json.loads(text)
        if message["type"] == "close":
            return
        fault = misbehaves(SERVER_FAULTS)
        reward, done = None, False
        if message["type"] == "reset":
            number, made, prompt = 1 + message["data"]["seed"] % HIGHEST, 0, "1 to 8"
        else:
            guess = message["data"]["guess"].strip()
            made += 1
            done = guess == str(number) or made == GUESSES
            reward = float(guess == str(number))
            prompt = "lower" if guess > str(number) else "higher"
        if fault == "hang":
            await asyncio.sleep(10)
        elif fault == "close":
            return
        elif fault == "garbage":
            await socket.send('{"type": "observation", "data": [')
            continue
        elif fault == "error":
            data = {"code": "EXECUTION_ERROR", "message": "injected"}
            await socket.send(json.dumps({"type": "error", "data": data}))
            continue
        elif fault == "nan":
            reward = float("nan")
        seen = {"prompt": LONG if fault == "long" else prompt}
        observed = {"observation": seen, "reward": reward, "done": done}
        await socket.send(json.dumps({"type": "observation", "data": observed}))


async def serve(port: int) -> None:
    """Serve until the process is killed."""
    from websockets.asyncio.server import serve as open_server

    schema = {"action": {"properties": {"guess": {"type": "string"}}, "required": ["guess"]}}

    def page(connection: Any, request: Any) -> Any:
        if request.path != "/ws":
            return connection.respond(HTTPStatus.OK, json.dumps(schema))
        return None

    async with open_server(session, "127.0.0.1", port, process_request=page):
        await asyncio.Future()


if __name__ == "__main__":
    if sys.argv[1] == "play":
        sys.exit(play_by_command())
    asyncio.run(serve(int(sys.argv[2])))
