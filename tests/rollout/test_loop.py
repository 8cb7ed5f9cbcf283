"""The rollout loop: bursts, order, failures, the end."""

import asyncio
import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports import Reply
from jaxrl_async.rollout.loop import RolloutLoop
from jaxrl_async.types import Completion, Drop, Prompt, SamplingParams, Score, StopReason, Ticket


def prompts():
    for i in itertools.count():
        ids = np.array([1, i], np.int32)
        yield Prompt(prompt_id=i % 3, position=i, token_ids=ids, text=f"p{i}", reference="r")


class ScriptedGate:
    """Gives bursts of so many tickets, then closes once as many groups have come back."""

    def __init__(self, *bursts):
        self.bursts, self.total = list(bursts), sum(bursts)
        self.put_groups, self.failed, self.given = [], [], 0
        self.all_back = threading.Event()
        if not self.total:
            self.all_back.set()

    def admit(self, timeout_s=None):
        if not self.bursts:
            if self.all_back.wait(timeout_s):
                raise Closed("the end")
            return ()
        count = self.bursts.pop(0)
        tickets = [Ticket(group=self.given + i, version=0) for i in range(count)]
        self.given += count
        return tuple(reversed(tickets))

    def put(self, group):
        self.put_groups.append(group)
        self._count()

    def fail(self, ticket, prompt, reason):
        self.failed.append((ticket.group, prompt.position, reason))
        self._count()

    def _count(self):
        if len(self.put_groups) + len(self.failed) == self.total:
            self.all_back.set()


class EchoGenerate:
    """Answers every request with [9, 0] a little later; those of groups in `never` not at all."""

    def __init__(self, never=(), delay=lambda request: 0.0):
        self.calls, self.futures, self.never, self.delay = [], [], never, delay

    def submit_many(self, requests):
        self.calls.append([r.request_id for r in requests])
        loop = asyncio.get_running_loop()
        futures = []
        for request in requests:
            future = loop.create_future()
            if request.request_id.split("/")[0] not in self.never:
                loop.call_later(self.delay(request), self._answer, future, request)
            futures.append(future)
        self.futures += futures
        return futures

    @staticmethod
    def _answer(future, request):
        if future.done():
            return
        two = np.zeros(2, np.int32)
        future.set_result(
            Completion(
                request_id=request.request_id,
                token_ids=np.array([9, 0], np.int32),
                logprobs=two.astype(np.float32),
                versions=two,
                stop=StopReason.EOS,
            )
        )


class PositionScorer:
    """The reward is the prompt's position; positions in `broken` raise."""

    def __init__(self, broken=()):
        self.broken = broken

    async def __call__(self, episodes, prompt):
        if prompt.position in self.broken:
            raise RolloutError(f"no reward for {prompt.position}")
        return tuple(Score(reward=float(prompt.position)) for _ in episodes)


def make_loop(gate, generate=None, scorer=None, stream=None, **change):
    settings = {
        "group_size": 2,
        "sampling": SamplingParams(),
        "stop_token_ids": (0,),
        "max_new_tokens": 4,
        "max_length": 10,
    }
    return RolloutLoop(
        stream or prompts(), generate or EchoGenerate(), scorer or PositionScorer(), gate,
        **{**settings, **change},
    )  # fmt: skip


def test_each_burst_is_queued_in_one_call_in_ticket_order():
    gate, generate = ScriptedGate(3, 1), EchoGenerate()
    asyncio.run(make_loop(gate, generate).run())
    assert generate.calls == [
        ["g0/m0/t0", "g0/m1/t0", "g1/m0/t0", "g1/m1/t0", "g2/m0/t0", "g2/m1/t0"],
        ["g3/m0/t0", "g3/m1/t0"],
    ]


def test_tickets_take_prompts_in_order_and_groups_come_back_whole():
    gate = ScriptedGate(3, 2)
    loop = make_loop(
        gate, EchoGenerate(delay=lambda r: 0.05 if r.request_id.startswith("g0") else 0.0)
    )
    asyncio.run(loop.run())
    assert gate.put_groups[0].ticket.group != 0  # a slow group holds up nobody
    groups = sorted(gate.put_groups, key=lambda g: g.ticket.group)
    assert [g.prompt.position for g in groups] == [0, 1, 2, 3, 4]
    for group in groups:
        assert [s.reward for s in group.scores] == [group.prompt.position] * 2
        assert [e.token_ids.tolist() for e in group.episodes] == [
            [1, group.prompt.position, 9, 0]
        ] * 2
    stats = loop.stats()
    assert (stats.groups, stats.failures, stats.active) == (5, 0, 0)


def test_a_failing_group_gives_its_ticket_back_and_the_others_go_on():
    gate = ScriptedGate(4)
    loop = make_loop(gate, scorer=PositionScorer(broken=[1]))
    asyncio.run(loop.run())
    assert gate.failed == [(1, 1, Drop.FAILED)]
    assert sorted(g.ticket.group for g in gate.put_groups) == [0, 2, 3]
    assert (loop.stats().groups, loop.stats().failures) == (3, 1)


def test_a_failing_environment_is_treated_like_a_failing_scorer():
    class Broken:
        def __init__(self, prompt):
            self.prompt = prompt

        async def step(self, prompt, completion):
            if prompt.position == 0:
                raise OSError("down")
            return Reply(token_ids=np.zeros(0, np.int32), done=True)

    gate = ScriptedGate(2)
    asyncio.run(make_loop(gate, make_env=Broken).run())
    assert gate.failed == [(0, 0, Drop.FAILED)]
    assert len(gate.put_groups) == 1


def test_each_scored_group_is_observed_before_the_gate_has_it():
    gate, seen = ScriptedGate(4), []

    def observe(group):
        assert group.ticket.group not in [g.ticket.group for g in gate.put_groups]
        seen.append(group.prompt.position)

    asyncio.run(make_loop(gate, scorer=PositionScorer(broken=[1]), observe=observe).run())
    assert sorted(seen) == [0, 2, 3]


def test_too_many_failures_in_a_row_end_the_run_with_the_first_cause():
    gate = ScriptedGate(*[1] * 20)
    loop = make_loop(gate, scorer=PositionScorer(broken=range(100)), max_failures=3)
    with pytest.raises(
        RolloutError, match=r"3 groups failed in a row.*the first failure was no reward for 0"
    ):
        asyncio.run(asyncio.wait_for(loop.run(), 20))
    assert len(gate.failed) == 2


def test_a_success_between_failures_forgives_them():
    class OneAtATime(ScriptedGate):
        def admit(self, timeout_s=None):
            while len(self.put_groups) + len(self.failed) < self.given:
                return ()
            return super().admit(timeout_s)

    gate = OneAtATime(*[1] * 9)
    broken = [i for i in range(9) if i % 3]
    asyncio.run(make_loop(gate, scorer=PositionScorer(broken=broken), max_failures=3).run())
    assert len(gate.failed) == 6


def test_closing_leaves_nothing_in_flight():
    class Closing(ScriptedGate):
        def admit(self, timeout_s=None):
            if not self.bursts:
                raise Closed("now")
            return super().admit(timeout_s)

    generate = EchoGenerate(never=("g0", "g1"))
    asyncio.run(asyncio.wait_for(make_loop(Closing(2), generate).run(), 20))
    assert len(generate.futures) == 4
    assert all(f.cancelled() for f in generate.futures)


def test_cancelling_leaves_nothing_in_flight():
    gate, generate = ScriptedGate(2), EchoGenerate(never=("g0", "g1"))

    async def go():
        task = asyncio.ensure_future(make_loop(gate, generate).run())
        while not generate.futures:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(go())
    assert all(f.cancelled() for f in generate.futures)
    assert not gate.put_groups and not gate.failed


def test_a_closed_sampler_ends_the_loop_quietly():
    class ClosedGenerate:
        def submit_many(self, requests):
            raise Closed("sampler")

    asyncio.run(make_loop(ScriptedGate(1), ClosedGenerate()).run())


def test_prompts_that_run_out_are_an_error():
    with pytest.raises(RolloutError, match="ran out"):
        asyncio.run(make_loop(ScriptedGate(2), stream=itertools.islice(prompts(), 1)).run())


def test_a_scorer_that_forgets_an_episode_fails_the_group():
    class Short:
        async def __call__(self, episodes, prompt):
            return (Score(reward=1.0),)

    with pytest.raises(RolloutError, match="1 scores for 2 episodes"):
        asyncio.run(make_loop(ScriptedGate(1), scorer=Short(), max_failures=1).run())


def test_rollouts_need_no_jax():
    code = (
        "import sys, jaxrl_async.rollout.loop, jaxrl_async.rollout.evaluate; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
