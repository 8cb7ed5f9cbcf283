"""Runs the modes of a driver: one for each line of JSON on the standard input, or, with an address
and a key, one for each task of a run.

Only the standard library: drivers run in an environment of their own.
"""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

Modes = Mapping[str, Callable[[], Any]]
BEGINS_S = 300.0
"""Longest wait for a run to begin, seconds."""


def drive(package: str, modes: Modes) -> None:
    """Write a line of JSON for each line of the standard input or for each task.

    Args of the command: an address, a key and the modes to play in turn; none: the standard input.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    asked = tasks(*sys.argv[1:3], sys.argv[3:]) if sys.argv[1:] else map(json.loads, sys.stdin)
    for one in asked:
        said = result_of(modes, one) | {"version": version(package)}
        one.get("done", lambda _: None)(said)
        print(json.dumps(said, default=str), file=answers, flush=True)


def result_of(modes: Modes, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Call a mode under its environment variables."""
    os.environ.update(asked["environment"])
    said = {"mode": asked["mode"]}
    try:
        result = modes[asked["mode"]]()
        return said | {"result": asyncio.run(result) if inspect.iscoroutine(result) else result}
    except BaseException as error:
        traceback.print_exc()
        return said | {"error": f"{type(error).__name__}: {error}"}


def tasks(address: str, key: str, modes: list[str]):
    """Take tasks of a run until it has ended, and send their rewards: 1 for milk, 0 otherwise."""
    number, since = 0, time.monotonic()
    while True:
        try:
            task = post(f"{address}/v1/session/begin", key, {"wait_s": 5})
        except urllib.error.HTTPError as error:
            if json.load(error)["error"]["code"] == "no_task":
                continue
            return
        except OSError:  # the run begins, or has ended
            if number or time.monotonic() > since + BEGINS_S:
                return
            time.sleep(0.2)
            continue
        yield {
            "mode": modes[number % len(modes)],
            "environment": {
                "OPENAI_BASE_URL": task["base_url"],
                "OPENAI_API_KEY": task["api_key"],
                "ANTHROPIC_BASE_URL": task["base_url"].removesuffix("/v1"),
                "ANTHROPIC_API_KEY": task["api_key"],
                "JAXRL_MODEL": task["model"],
            },
            "done": lambda said, task=task: rewarded(address, task["reward_key"], said),
        }
        number += 1


def rewarded(address: str, key: str, said: dict[str, Any]) -> None:
    """Reward a session and end it; a run that has ended meanwhile refuses that."""
    reward = float("milk" in json.dumps(said.get("result")).lower())
    try:
        post(f"{address}/v1/session/reward", key, {"reward": reward})
        post(f"{address}/v1/session/end", key, {})
    except OSError as error:
        said["late"] = str(error)


def post(address: str, key: str, body: Mapping[str, Any]) -> Any:
    headers = {"x-api-key": key, "Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
