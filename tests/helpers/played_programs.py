"""Agent programs that play one group, with a policy that answers as it is told."""

import asyncio
import random
import threading

import numpy as np

from jaxrl_async.endpoint.agent_programs import AgentPrograms, AgentSession, ProgramEndpoint
from jaxrl_async.endpoint.sessions import SessionLimits, Sessions
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.rollout.episode import PlayAgain, SavedEpisode, begin_groups, play_group
from jaxrl_async.scorers.results import score_of
from jaxrl_async.testing.fakes import make_completion, make_prompt
from jaxrl_async.types import EpisodeLimits, SamplingParams

LIMITS = EpisodeLimits(
    sampling=SamplingParams(temperature=0.7), stop_token_ids=(0,), max_new_tokens=4, max_length=12
)


class Policy:
    """A ports.Generate that draws two tokens, made from the request, and a stop token; any loop."""

    seed = None

    def __init__(self, *, hold: bool = False) -> None:
        self.requests, self.futures, self._hold, self._lock = [], [], hold, threading.Lock()

    def submit_many(self, requests):
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        with self._lock:
            self.requests += requests
            self.futures += futures
        for request, future in zip(requests, futures, strict=True):
            if not self._hold:
                loop.call_later(0.001 * random.random(), self.answer, request, future)
        return futures

    def answer(self, request, future):
        seed = [*request.token_ids.tolist(), request.branch, *(request.key or ())]
        drawn = np.random.default_rng([abs(s) for s in seed]).integers(1, 9, 2)
        if not future.done():
            future.set_result(make_completion(request, [*drawn.tolist(), 0]))

    def progress(self):
        return ()


def programs(program, count=None, sessions=None, **bounds):
    made = AgentPrograms(
        program,
        sessions or Sessions(),
        ProgramEndpoint(address=lambda: "http://127.0.0.1:9", model="tiny"),
        SessionLimits(**bounds),
        judge=score_of,
        count=count or (lambda name, number: None),
    )
    return made


def played(made, members=1, policy=None, prompt=None, outages=None):
    """Play one group as a run does, guarded."""
    prompt, policy = prompt or make_prompt(3), policy or Policy()
    spent = []

    async def play():
        guarded = GuardedEnvs(made, timeout_s=0.01, vocab_size=100)
        (begun,) = begin_groups(
            policy, guarded, [("g5", prompt, (SavedEpisode(),) * members)], LIMITS
        )
        assert policy.requests == []
        return await play_group(
            policy,
            prompt,
            begun,
            label="g5",
            limits=LIMITS,
            again=None if outages is None else PlayAgain(make_env=guarded, outages=outages),
            spent_s=spent.append,
        )

    return asyncio.run(play()), spent


def through(sessions, turns=2, result=1.0):
    """A program that draws in the process, as the endpoint would for it."""

    async def program(agent: AgentSession):
        assert agent.base_url == "http://127.0.0.1:9/v1" and agent.model == "tiny"
        session = sessions.find(agent.api_key)
        tokens = [1]
        for _ in range(turns):
            tokens = [*tokens, *(await session.sample(np.array(tokens))).token_ids.tolist(), 5]
            await asyncio.sleep(0.01)
        return result

    return program
