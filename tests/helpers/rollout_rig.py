"""A rollout loop between a gate that is scripted and a sampler that answers alike."""

import asyncio
import itertools
import threading

import numpy as np

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.types import (
    Completion,
    EpisodeLimits,
    Prompt,
    SamplingParams,
    Score,
    StopReason,
    Ticket,
)


def prompts():
    for i in itertools.count():
        ids = np.array([1, i], np.int32)
        yield Prompt(prompt_id=i % 3, position=i, token_ids=ids, text=f"p{i}", reference="r")


class ScriptedGate:
    """Gives bursts of so many tickets, then closes once as many groups have come back."""

    def __init__(self, *bursts):
        self.bursts, self.total = list(bursts), sum(bursts)
        self.put_groups, self.failed, self.cancelled, self.given = [], [], [], 0
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

    def watch(self, aged, stop):
        self.aged, self.stop = aged, stop

    def cancel(self, group):
        self.cancelled.append(group)
        self._count()

    def _count(self):
        if len(self.put_groups) + len(self.failed) + len(self.cancelled) == self.total:
            self.all_back.set()


class EchoGenerate:
    """Answers every request with [9, 0] a little later; those of groups in `never` not at all."""

    seed = None

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

    def progress(self):
        return ()

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


def make_loop(
    gate,
    generate=None,
    scorer=None,
    stream=None,
    group_size=2,
    max_failures=8,
    backoff_s=1.0,
    saved=(),
    oversample=0,
    least_members=None,
    **parts,
):
    limits = EpisodeLimits(
        sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=4, max_length=10
    )
    loop = RolloutLoop(
        stream or prompts(),
        generate or EchoGenerate(),
        scorer or PositionScorer(),
        gate,
        settings=RolloutSettings(
            group_size=group_size,
            limits=limits,
            max_failures=max_failures,
            backoff_s=backoff_s,
            oversample=oversample,
            least_members=least_members,
        ),
        **parts,
    )
    loop.restore(saved)
    return loop
