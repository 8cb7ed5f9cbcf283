"""Which priority each of a run's requests carries."""

import asyncio

import numpy as np
import pytest

from jaxrl_async.endpoint.sessions import PolicySession, SessionLimits, SessionMember
from jaxrl_async.rollout.episode import make_request
from jaxrl_async.rollout.evaluate import evaluate
from jaxrl_async.types import (
    Completion,
    EpisodeLimits,
    Prompt,
    SamplingParams,
    Score,
    StopReason,
    TurnPriority,
)

PROMPT = Prompt(
    prompt_id=3, position=17, token_ids=np.array([5, 6], np.int32), text="", reference=""
)
LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(1,), max_new_tokens=4, max_length=32
)


class Noting:
    """Answers everything at once, and keeps the requests."""

    seed = 0

    def __init__(self) -> None:
        self.requests: list = []

    def submit_many(self, requests):
        self.requests += requests
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            future.set_result(
                Completion(
                    request_id=request.request_id,
                    token_ids=np.array([7], np.int32),
                    logprobs=np.zeros(1, np.float32),
                    versions=np.zeros(1, np.int32),
                    stop=StopReason.LENGTH,
                )
            )
        return futures


@pytest.mark.parametrize(
    "priority, first, later",
    [
        (TurnPriority(), (0, 0), (0, 0)),
        (TurnPriority(later=-1), (0, 0), (-1, 0)),
        (TurnPriority(first=2, later=1, older_first=True), (2, 17), (1, 17)),
    ],
)
def test_a_turn_has_its_level_and_its_groups_place(priority, first, later) -> None:
    limits = EpisodeLimits(
        sampling=SamplingParams(),
        stop_token_ids=(1,),
        max_new_tokens=4,
        max_length=32,
        priority=priority,
    )
    asked = [make_request("g0", PROMPT, 0, turn, PROMPT.token_ids, limits) for turn in (0, 1, 2)]
    assert [r.priority for r in asked] == [first, later, later]

    async def calls() -> list:
        generate = Noting()
        member = SessionMember(prompt=PROMPT, label="g0")
        session = PolicySession(generate, member, limits, SessionLimits())
        await session.sample(PROMPT.token_ids)
        await session.sample(np.array([5, 6, 7, 8], np.int32))
        return generate.requests

    assert [r.priority for r in asyncio.run(calls())] == [first, later]


def test_an_evaluations_requests_have_its_level() -> None:
    async def scorer(episodes, prompt):
        return tuple(Score(reward=1.0) for _ in episodes)

    async def run() -> list:
        generate = Noting()
        await evaluate(
            generate,
            [PROMPT],
            scorer,
            stop_token_ids=(1,),
            max_new_tokens=4,
            max_length=32,
            level=-1,
        )
        return generate.requests

    assert [r.priority for r in asyncio.run(run())] == [(-1, 0)]
