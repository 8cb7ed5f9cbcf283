"""Agents outside of a run take tasks from a queue; those that leave them cost nothing but time."""

import asyncio
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramEndpoint
from jaxrl_async.endpoint.external_agents import ExternalAgentMembers, OfferedTask, TaskQueue
from jaxrl_async.endpoint.sessions import SessionLimits, SessionMember, Sessions
from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.scorers.results import score_of
from jaxrl_async.testing.fakes import make_completion, make_prompt
from jaxrl_async.types import EpisodeLimits, SamplingParams

LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=4, max_length=12
)


class Answering:
    """A ports.Generate that answers each request with two tokens."""

    seed = None

    def progress(self):
        return ()

    def submit_many(self, requests):
        futures = [asyncio.get_running_loop().create_future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            future.set_result(make_completion(request, [3, 0]))
        return futures


def outside(sessions: Sessions, counted: Counter, **bounds) -> ExternalAgentMembers:
    programs = AgentPrograms(
        "true",
        sessions,
        ProgramEndpoint(address=lambda: "http://127.0.0.1:9"),
        SessionLimits(**bounds),
        judge=score_of,
        count=lambda name, number: counted.update({name: number}),
    )
    return ExternalAgentMembers(programs=programs, tasks=TaskQueue(), tries=3)


async def group(members: ExternalAgentMembers, size: int = 2):
    policy = Answering()
    requests = [("g5", make_prompt(3), (SavedEpisode(),) * size)]
    (begun,) = begin_groups(policy, members, requests, LIMITS)
    return await play_group(policy, make_prompt(3), begun, label="g5", limits=LIMITS)


async def taken(members: ExternalAgentMembers):
    session = await members.tasks.take(5.0)
    assert session is not None
    return session


async def test_who_takes_a_task_plays_its_episode():
    sessions = Sessions()
    members = outside(sessions, Counter())
    playing = asyncio.create_task(group(members))
    for reward in (1.0, 0.25):
        session = await taken(members)
        assert sessions.find(session.key) is session
        await session.sample(np.array([1]))
        session.reward(reward, parts={"style": 1.0})
        session.finish()
    episodes = await playing
    assert [e.score.reward for e in episodes] == [1.0, 0.25]
    assert await members.tasks.take(0.01) is None and not sessions.all()


async def test_a_task_that_is_left_is_offered_again():
    counted = Counter()
    members = outside(Sessions(), counted, idle_s=0.05, max_calls=1)
    playing = asyncio.create_task(group(members, size=1))
    await taken(members)  # and never seen again
    session = await taken(members)
    await session.sample(np.array([1]))
    session.give_up("no disk")
    session = await taken(members)
    await session.sample(np.array([1]))
    with pytest.raises(RolloutError, match="max_calls"):
        await session.sample(np.array([1]))
    (episode,) = await playing  # its last agent went away after a limit: it ends there
    assert episode.stop == "length" and counted["abandoned_sessions"] == 2


async def test_what_all_leave_fails_its_group_and_says_why():
    members = outside(Sessions(), Counter())
    playing = asyncio.create_task(group(members, size=1))
    for _ in range(2):
        (await taken(members)).give_up("no disk")
    (await taken(members)).finish()
    with pytest.raises(RolloutError, match=r"3 consecutive agents .* without a token"):
        await playing


async def test_the_end_of_a_run_ends_those_that_play_and_those_that_wait():
    sessions = Sessions()
    members = outside(sessions, Counter())
    playing = asyncio.create_task(group(members, size=1))
    session = await taken(members)
    waiting = asyncio.create_task(members.tasks.take(30.0))
    await asyncio.sleep(0.01)
    sessions.close()
    members.tasks.close()
    for one in (playing, waiting):
        with pytest.raises(Closed):
            await one
    with pytest.raises(Closed):
        await session.sample(np.array([1]))


async def test_a_cancelled_group_takes_its_tasks_back():
    sessions = Sessions()
    members = outside(sessions, Counter())
    playing = asyncio.create_task(group(members, size=2))
    session = await taken(members)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert session.ended and members.tasks.num_offers == 0 and not sessions.all()
    assert await members.tasks.take(0.0) is None


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_however_many_ask_at_once_each_task_is_given_away_once(seed: int):
    """Agents on threads of their own that come, wait for some time and go; tasks that come and are
    taken back meanwhile."""
    tasks, sessions, rng = TaskQueue(), Sessions(), random.Random(seed)
    opened: Counter[str] = Counter()
    got: list[str] = []
    done = threading.Event()

    def agent(own: random.Random) -> None:
        async def ask() -> None:
            while not done.is_set():
                try:
                    async with asyncio.timeout(own.choice([0.001, 0.01, 1.0])):
                        session = await tasks.take(own.choice([0.0, 0.002, 0.05]))
                except TimeoutError:
                    continue
                if session is not None:
                    got.append(str(session.member))

        asyncio.run(ask())

    async def offer_all() -> list[OfferedTask]:
        offers = []
        for number in range(60):
            member = SessionMember(prompt=make_prompt(), label=f"g{number}")

            def open_session(member=member):
                opened[str(member)] += 1
                return sessions.open(Answering(), member, LIMITS, SessionLimits())

            offers.append(OfferedTask(member, open_session))
            tasks.offer(offers[-1])
            if rng.random() < 0.2:
                rng.choice(offers).withdrawn = True
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.002]))
        end = time.monotonic() + 10
        while tasks.num_offers and time.monotonic() < end:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        return offers

    agents = [threading.Thread(target=agent, args=(random.Random(rng.random()),)) for _ in range(8)]
    for thread in agents:
        thread.start()
    offers = asyncio.run(offer_all())
    done.set()
    for thread in agents:
        thread.join(10)
    assert tasks.num_offers == 0 and max(opened.values()) == 1
    held = [o for o in offers if o.session.done() and not o.session.cancelled()]
    assert len(held) == sum(opened.values()) and set(got) <= set(opened)
    assert all(o.withdrawn or str(o.member) in opened for o in offers), "none is lost"
