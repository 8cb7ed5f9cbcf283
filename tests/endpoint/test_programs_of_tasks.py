"""Agent programs that know nothing but an endpoint learn what the same task learns as an
environment."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, metrics_of, weights_of

from jaxrl_async.config.schema import Config
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start={steps: 20, batch_size: 16}",
    # One sequence at a time: the last bits of log-probs depend on what is computed together, and
    # calls over HTTP come one by one.
    "sampler.slots=1",
    "sampler.reserve=0",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-3}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "staleness.max_staleness=0",
    "run.steps=2",
    "eval.every=2",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
PROGRAM = '''
"""The built-in game, played by programs that only have an OpenAI endpoint."""

import json
import os
import sys

from openai import AsyncOpenAI, OpenAI

from jaxrl_async import Task
from jaxrl_async.tasks.guess_number import GuessNumber, guess_number

GAME = guess_number(highest=8, guesses=4)


def turn(game, messages, choice):
    if choice.finish_reason == "length":  # half a turn ends a game of the environment, too
        return {"reward": 0.0}
    answer = choice.message.content or ""
    messages.append({"role": "assistant", "content": answer})
    step = game.step({"role": "assistant", "content": answer})
    if isinstance(step, str):
        messages.append({"role": "user", "content": step})
        return None
    return {"reward": step.reward or 0.0, **step.parts}


async def play(session):
    game = GuessNumber(4)
    messages = [{"role": "user", "content": game.reset(session.record)}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        while True:
            answer = await client.chat.completions.create(model=session.model, messages=messages)
            outcome = turn(game, messages, answer.choices[0])
            if outcome is not None:
                return scored(outcome)


def scored(outcome):
    from jaxrl_async.types import Score

    reward = outcome.pop("reward")
    return Score(reward=reward or sum(outcome.values()), parts=outcome)


as_function = Task(records=GAME.records, held_out=GAME.held_out, program=play, words=GAME.words)
as_command = Task(
    records=GAME.records,
    held_out=GAME.held_out,
    program=[sys.executable, __file__],
    words=GAME.words,
)
if __name__ == "__main__":
    import urllib.request

    def post(path, body, key):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + path,
            json.dumps(body).encode(),
            {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request))

    reward_key = post("/session/reward_key", {}, os.environ["OPENAI_API_KEY"])["reward_key"]
    game = GuessNumber(4)
    messages = [{"role": "user", "content": game.reset(json.loads(os.environ["JAXRL_RECORD"]))}]
    client = OpenAI()
    outcome = None
    while outcome is None:
        answer = client.chat.completions.create(model=os.environ["JAXRL_MODEL"], messages=messages)
        outcome = turn(game, messages, answer.choices[0])
    reward = outcome.pop("reward")
    score = {"reward": reward or sum(outcome.values()), "parts": outcome}
    post("/session/reward", score, reward_key)
'''


@pytest.fixture(scope="module")
def as_environment(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The game played by its environment."""
    config = game(
        tmp_path_factory.mktemp("runs"), "environment", "{guess_number: {highest: 8, guesses: 4}}"
    )
    train(config)
    return config


def game(folder: Path, name: str, task: str) -> Config:
    return config_of("guess_number", folder, *TINY, f"run.name={name}", f"task={task}")


def numbers(config: Config) -> list[dict[str, object]]:
    """What is measured of a run, without what its sessions and its endpoint count."""
    ours = ("endpoint/", "faults/", "sampler/prefix", "sampler/slot_occupancy", "sampler/kv")
    lines = [comparable(line) for line in metrics_of(config)]
    return [{k: v for k, v in line.items() if not k.startswith(ours)} for line in lines]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["as_function", "as_command"])
def test_training_through_the_endpoint_is_the_training_without(
    tmp_path: Path, as_environment: Config, way: str
) -> None:
    pytest.importorskip("openai", reason="needs the official client")
    file = tmp_path / "games.py"
    file.write_text(PROGRAM, encoding="utf-8")
    config = game(tmp_path, way, f"{file}:{way}")
    train(config)
    ours, theirs = numbers(as_environment), numbers(config)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        differ = {k: (v, other.get(k)) for k, v in mine.items() if other.get(k) != v}
        assert not differ, differ
    weights = weights_of(config)
    for key, values in weights_of(as_environment).items():
        np.testing.assert_array_equal(values, weights[key], err_msg=key)
