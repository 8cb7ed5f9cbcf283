"""The rollout loop with several tasks: failures, timeouts and limits of one touch no other."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from rollout_rig import EchoGenerate, PositionScorer, ScriptedGate, prompts

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.rollout_loop import FailuresByTask, RolloutLoop, RolloutSettings
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import Drop, EpisodeLimits, SamplingParams

LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=4, max_length=10
)


def alternating(*tasks):
    for prompt, task in zip(prompts(), itertools.cycle(tasks), strict=True):
        yield replace(prompt, task=task)


def loop_of(gate, tasks=("a", "b"), scorer=None, generate=None, limits=LIMITS, **settings):
    parts = {key: settings.pop(key) for key in ("make_env", "may_begin") if key in settings}
    return RolloutLoop(
        alternating(*tasks),
        generate or EchoGenerate(),
        scorer or PositionScorer(),
        gate,
        settings=RolloutSettings(
            group_size=2, limits=limits, tasks=tuple(tasks), backoff_s=0.0, **settings
        ),
        **parts,
    )


class TurnGate(ScriptedGate):
    """Gives a burst once all groups of the last one have come back."""

    def admit(self, timeout_s=None):
        back = len(self.put_groups) + len(self.failed) + len(self.cancelled)
        if self.bursts and back < self.given:
            time.sleep(0.001)
            return ()
        return super().admit(timeout_s)


class FailingTask:
    """Scores of one task raise."""

    def __init__(self, *tasks):
        self.tasks = tasks

    async def __call__(self, episodes, prompt):
        if prompt.task in self.tasks:
            raise RolloutError(f"{prompt.task} is broken")
        return await PositionScorer()(episodes, prompt)


def test_a_task_that_always_fails_ends_nothing(caplog):
    gate = TurnGate(*[2] * 20)
    loop = loop_of(gate, scorer=FailingTask("a"), max_failures=3)
    asyncio.run(loop.run())
    assert len(gate.failed) == 20 and len(gate.put_groups) == 20
    assert {g.prompt.task for g in gate.put_groups} == {"b"}
    messages = [
        r.getMessage() for r in caplog.records if "The other tasks continue" in r.getMessage()
    ]
    assert len(messages) == 1 and messages[0].startswith("task a: 3 groups failed in a row")


def test_the_run_ends_once_all_tasks_fail():
    gate = TurnGate(*[2] * 20)
    loop = loop_of(gate, scorer=FailingTask("a", "b"), max_failures=3)
    with pytest.raises(RolloutError, match="3 groups failed in a row"):
        asyncio.run(loop.run())


def test_a_failing_task_rests_alone_and_longer_each_time():
    now = 0.0
    failures = FailuresByTask(("a", "b"), 8, 1.0, lambda: now)
    a, b = (replace(make_prompt(), task=name) for name in "ab")
    backoffs = []
    for _ in range(8):
        failures.failed(a, RolloutError("x"), after=failures.of(a).number)
        backoffs.append(failures.of(a).backoff_until_s)
        assert failures.is_backing_off("a") and not failures.is_backing_off("b")
        assert failures.backoff_until_s == 0.0, "another task may start"
    assert backoffs == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    failures.of(a).succeeded()
    assert not failures.is_backing_off("a")
    failures.failed(a, RolloutError("x"), after=0)
    failures.failed(b, RolloutError("x"), after=0)
    assert failures.backoff_until_s == 1.0, "all wait"


def test_failures_of_a_task_without_a_weight_end_nothing_and_rest_alone():
    failures = FailuresByTask(("a",), 2, 1.0, lambda: 0.0)
    other = replace(make_prompt(), task="b")
    for _ in range(3):
        failures.failed(other, ValueError("down"), after=failures.of(other).number)
    assert failures.is_backing_off("b") and not failures.is_backing_off("a")
    assert failures.backoff_until_s == 0.0
    own = replace(make_prompt(), task="a")
    failures.failed(own, ValueError("down"), after=0)
    with pytest.raises(RolloutError, match="failed in a row"):
        failures.failed(own, ValueError("down"), after=1)


def test_one_task_fails_as_before():
    failures = FailuresByTask((), 2, 1.0, lambda: 0.0)
    failures.failed(make_prompt(), RolloutError("x"), after=0)
    assert failures.backoff_until_s == 0.0, "no wait before a success"
    with pytest.raises(RolloutError, match="2 groups failed in a row"):
        failures.failed(make_prompt(), RolloutError("x"), after=1)


class Hangs:
    """An environment that never answers in one task."""

    def __init__(self, prompt):
        self.prompt = prompt

    async def step(self, prompt, completion):
        if prompt.task == "a":
            await asyncio.sleep(3600)
        return Reply(token_ids=np.zeros(0, np.int32), done=True)


def test_a_group_that_takes_longer_than_its_tasks_timeout_fails():
    gate = ScriptedGate(4)
    loop = loop_of(gate, make_env=Hangs, timeouts_s={"a": 0.05})
    asyncio.run(loop.run())
    assert sorted(gate.failed) == [(0, 0, Drop.FAILED), (2, 2, Drop.FAILED)]
    assert [g.prompt.task for g in gate.put_groups] == ["b", "b"]
    assert loop.stats().active == 0


def test_tickets_wait_while_no_task_may_begin_and_keep_their_order():
    gate, running = ScriptedGate(5), Counter()

    started = []

    def may_begin():
        return len(started) - len(gate.put_groups) < 2

    def counted():
        for prompt in alternating("a", "b"):
            started.append(prompt)
            running["most"] = max(running["most"], len(started) - len(gate.put_groups))
            yield prompt

    loop = RolloutLoop(
        counted(),
        EchoGenerate(),
        PositionScorer(),
        gate,
        settings=RolloutSettings(group_size=2, limits=LIMITS, tasks=("a", "b")),
        may_begin=may_begin,
    )
    asyncio.run(loop.run())
    groups = sorted(gate.put_groups, key=lambda g: g.ticket.group)
    assert [g.prompt.position for g in groups] == [0, 1, 2, 3, 4]
    assert running["most"] == 2


class Twice:
    """An environment of two turns."""

    def __init__(self, prompt):
        self.turns = 0

    async def step(self, prompt, completion):
        self.turns += 1
        return Reply(token_ids=np.ones(1, np.int32), done=self.turns == 2)


def test_requests_of_a_task_have_its_sampling_settings_in_every_turn():
    seen = defaultdict(list)

    class Noting(EchoGenerate):
        def submit_many(self, requests):
            for request in requests:
                seen[request.request_id.split("/")[0]].append(request)
            return super().submit_many(requests)

    own = replace(
        LIMITS,
        sampling=SamplingParams(temperature=0.3),
        max_new_tokens=3,
        stop_token_ids=(0, 5),
    )
    limits = replace(LIMITS, by_task={"b": own})
    asyncio.run(loop_of(ScriptedGate(2), generate=Noting(), limits=limits, make_env=Twice).run())
    assert len(seen["g0"]) == len(seen["g1"]) == 4, "two members, two turns"
    assert {(r.sampling.temperature, r.stop_token_ids) for r in seen["g0"]} == {(1.0, (0,))}
    assert {(r.sampling.temperature, r.stop_token_ids) for r in seen["g1"]} == {(0.3, (0, 5))}
    assert seen["g0"][0].max_new_tokens == 4 and seen["g1"][0].max_new_tokens == 3
