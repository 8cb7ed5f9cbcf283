"""Agents in another process play all episodes of a run; some of them vanish."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import config_of, metrics_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.loop import train

TASK = '''
"""The records of the built-in game, and a reward for short episodes; agents outside play."""

from jaxrl_async import Task
from jaxrl_async.tasks.guess_number import guess_number

GAME = guess_number(highest=8, guesses=4)


def short(token_ids):
    return {"short": 0.1 * (len(token_ids) < 8)}


records_alone = Task(
    records=GAME.records, held_out=[*GAME.held_out][:4], reward=short, words=GAME.words
)
'''
AGENTS = '''
"""Agents that know an address and a key. Two of them leave or give up, never one session twice."""

import json
import sys
import threading
import time
from collections import Counter

import httpx
from openai import OpenAI

from jaxrl_async.tasks.guess_number import GuessNumber

ADDRESS, KEY, COUNTS = sys.argv[1:]
counts, left, lock = Counter(), set(), threading.Lock()


def post(path, key, body):
    return httpx.post(ADDRESS + path, json=body, headers={"x-api-key": key}, timeout=30)


def leaves(task):
    with lock:
        is_new = task["session"] not in left
        left.add(task["session"])
    return is_new


def play(task):
    game = GuessNumber(4)
    messages = [{"role": "user", "content": game.reset(task["record"])}]
    with OpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
        while True:
            answer = client.chat.completions.create(model=task["model"], messages=messages)
            choice = answer.choices[0]
            if choice.finish_reason == "length":
                return 0.0
            turn = {"role": "assistant", "content": choice.message.content or ""}
            reply = game.step(turn)
            if not isinstance(reply, str):
                return reply.reward or sum(reply.parts.values())
            messages += [turn, {"role": "user", "content": reply}]


def agent(number):
    taken = 0
    while True:
        try:
            reply = post("/v1/session/begin", KEY, {"wait_s": 5})
        except httpx.TransportError:
            if taken:
                return
            time.sleep(0.2)  # the run begins
            continue
        if reply.status_code == 503:
            assert reply.headers["retry-after"], reply.text
            if reply.json()["error"]["code"] != "no_task":
                return
            continue
        task = reply.json()
        taken += 1
        with lock:
            counts["held out" if task["held_out"] else "taken"] += 1
        if number == 0 and taken % 2 and leaves(task):
            counts["vanished"] += 1
            continue
        if number == 1 and taken % 2 and leaves(task):
            counts["given up"] += 1
            post("/v1/session/end", task["reward_key"], {"failed": "no disk"})
            continue
        try:
            reward = play(task)
            post("/v1/session/reward", task["reward_key"], {"reward": reward}).raise_for_status()
            post("/v1/session/end", task["reward_key"], {}).raise_for_status()
            with lock:
                counts["played"] += 1
        except Exception as error:
            with lock:
                counts[type(error).__name__] += 1


agents = [threading.Thread(target=agent, args=(n,)) for n in range(8)]
for thread in agents:
    thread.start()
for thread in agents:
    thread.join()
with open(COUNTS, "w") as file:
    json.dump(counts, file)
'''
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start={steps: 5, batch_size: 16}",
    "sampler.slots=8",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-3}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "staleness.max_staleness=1",
    "run.steps=4",
    "eval.every=2",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "env={program_idle_s: 5.0}",
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.mark.full
@pytest.mark.exhaustive
def test_agents_in_another_process_play_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="needs the official client")
    task, agents, counts = (tmp_path / name for name in ("task.py", "agents.py", "counts.json"))
    task.write_text(TASK, encoding="utf-8")
    agents.write_text(AGENTS, encoding="utf-8")
    port = free_port()
    monkeypatch.setenv("JAXRL_ASYNC_AGENT_KEY", "for agents")
    config = config_of(
        "guess_number",
        tmp_path,
        *TINY,
        f"task={task}:records_alone",
        f"endpoint={{external_agents: true, port: {port}}}",
    )
    words = [sys.executable, str(agents), f"http://127.0.0.1:{port}", "for agents", str(counts)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            train(config)
            assert process.wait(60) == 0, "they end by themselves when the run has ended"
        finally:
            process.kill()
    counted = json.loads(counts.read_text())
    assert counted["vanished"] >= 1 and counted["given up"] >= 1 and counted["played"] >= 4 * 8
    assert counted["held out"] >= 3 * 4, "evaluations before, between and after"
    lines = [line for line in metrics_of(config) if line["step"]]
    left = counted["vanished"] + counted["given up"]
    assert 1 <= sum(line["faults/abandoned_sessions"] for line in lines) <= left
    assert not any(line["faults/failed_groups"] for line in lines)
    found = audit_run(Path(config.run.dir) / config.run.name)
    assert not found.problems and found.trained == 4 * 4 and not found.dropped
    assert any("short" in key for key in lines[-1]), sorted(lines[-1])


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXRL_ASYNC_AGENT_KEY", raising=False)
    config = config_of("guess_number", tmp_path, *TINY, "endpoint.external_agents=true")
    with pytest.raises(ConfigError, match=r"a program, an environment, a game or tools"):
        train(config)
    config = config_of("addition", tmp_path, "endpoint.external_agents=true")
    with pytest.raises(ConfigError, match="JAXRL_ASYNC_AGENT_KEY"):
        train(config)
    file = tmp_path / "c.yaml"
    file.write_text("endpoint: {agent_tries: 2}\ntask: calculator\n")
    with pytest.raises(ConfigError, match=r"agent_tries.*endpoint\.external_agents"):
        load(file, [])
