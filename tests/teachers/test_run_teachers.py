"""The teachers of a run: all its tasks ask the same ones."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import episode_of
from byte_level import byte_level_tokenizer
from fake_teacher import FakeTeacher

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.task import Task
from jaxrl_async.teachers.run_teachers import RunTeachers
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import Score

TOKENIZER = byte_level_tokenizer(300)
TASKS = {"a": {"data": {"addition": {}}}, "b": {"task": "calculator"}, "c": {"task": "calculator"}}
EPISODES = tuple(
    replace(
        episode_of((-1, -1, 3, 3)),
        token_ids=np.array([65, 66, 67 + i, 68], np.int32),
    )
    for i in range(6)
)


async def no_reward(episodes: Any, prompt: Any) -> tuple[Score, ...]:
    return (Score(reward=0.0),) * len(episodes)


def run_of(url: str, **changes: Any) -> tuple[Config, RunTeachers]:
    config = Config(
        teacher={"source": "teachers"},
        teachers={"t": {"url": url, "model": "m", **changes}},
        tasks=TASKS,
    )
    outages = Outages(longest_s=20.0)
    size = TOKENIZER.vocab_size
    return config, RunTeachers(config, TOKENIZER, size, FaultCounts(), outages, lambda: None)


@pytest.mark.full
def test_concurrency_limits_the_calls_of_all_tasks_together() -> None:
    with FakeTeacher(TOKENIZER.vocab_size, 0) as server:
        server.pause_s = 0.02
        config, run = run_of(server.url, concurrency=2)
        tasks = {name: run.of_task(own, Task()) for name, own in config.by_task.items()}
        scorers = {name: one.with_teachers(no_reward) for name, one in tasks.items()}

        async def ask() -> Any:
            prompts = {name: replace(make_prompt(3), task=name) for name in scorers}
            return await asyncio.gather(*(s(EPISODES, prompts[n]) for n, s in scorers.items()))

        found = asyncio.run(ask())
        for one in tasks.values():
            one.close()
    assert server.most_at_once == 2
    assert len(server.bodies) == len(TASKS) * len(EPISODES)
    for scores in found:
        logprobs = [score.teachers[0].logprobs for score in scores]
        expected = [server.logprobs(one.token_ids)[1:] for one in EPISODES]
        np.testing.assert_allclose(logprobs, expected, rtol=1e-6)


def test_each_call_is_counted_once_whichever_task_asked() -> None:
    with FakeTeacher(TOKENIZER.vocab_size, 0) as server:
        config, run = run_of(server.url)
        a, b = (run.of_task(config.of_task(name), Task()) for name in "ab")
        asyncio.run(a.with_teachers(no_reward)(EPISODES[:1], make_prompt(3)))
        asyncio.run(b.with_teachers(no_reward)(EPISODES[:2], make_prompt(3)))
        a.close()
    assert a.counts() == b.counts()
    assert a.counts()["t/calls"] == 3.0


def test_each_task_names_the_teachers_of_its_records() -> None:
    config, run = run_of("http://127.0.0.1:1/v1")
    tasks = [run.of_task(config.of_task(n), Task(teacher=t)) for n, t in (("a", "t"), ("b", "x"))]
    tasks[0].check(make_prompt(3))
    with pytest.raises(ConfigError, match="names the teacher 'x', and teachers has t"):
        tasks[1].check(make_prompt(3))
