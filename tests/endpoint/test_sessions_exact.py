"""From sessions to the update: with branches, rewritten history and swaps in mid-conversation, the
trainer's forward pass on the packed episodes gives the log-probs of the samples."""

import asyncio

import jax
import numpy as np
import pytest
from tiny import OTHER, PARAMS, SECTION, SPEC, VOCAB, Script

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.config import schema
from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramEndpoint
from jaxrl_async.endpoint.sessions import SessionLimits, Sessions
from jaxrl_async.mesh import make_slices
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.step_data import pack_step
from jaxrl_async.types import (
    EpisodeGroup,
    EpisodeLimits,
    SamplingParams,
    Score,
    Ticket,
    VersionedParams,
)

pytestmark = pytest.mark.exhaustive

ROW = 64
LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(0,), max_new_tokens=8, max_length=ROW
)


class Swaps(Script):
    """New weights at every fourth poll of the sampler, the two in turns."""

    def __init__(self):
        super().__init__([])
        self.polls = 0

    def poll(self, *, wait=False):
        self.polls += 1
        version, rest = divmod(self.polls, 4)
        return (
            None if rest else VersionedParams(version=version, params=(PARAMS, OTHER)[version % 2])
        )


def agent(sessions: Sessions):
    """Turns with tools, several answers, a sub-agent and a rewritten history, by the prompt."""

    async def program(task):
        session = sessions.find(task.api_key)
        rng = np.random.default_rng([session.prompt.position, session.member.index])

        def some(n):
            return rng.integers(1, VOCAB, n).astype(np.int32)

        async def sample(tokens):
            done = await session.sample(tokens)
            return np.concatenate([tokens, done.token_ids])

        tokens = session.prompt.token_ids
        for _ in range(int(rng.integers(1, 4))):
            choice = rng.random()
            tokens = await sample(tokens)
            await asyncio.sleep(0.002 * rng.random())
            if choice < 0.25:
                both = await asyncio.gather(sample(tokens), sample(tokens))
                tokens = both[int(rng.integers(2))]
            elif choice < 0.5:
                await sample(some(5))
            elif choice < 0.75:
                tokens = np.concatenate([tokens[: len(tokens) // 2], some(3)])
            tokens = np.concatenate([tokens, some(2)])[: ROW - 12]
        return float(rng.integers(2))

    return program


async def play(sampler, sessions, groups, members):
    endpoint = ProgramEndpoint(address=lambda: "http://127.0.0.1:9")
    programs = AgentPrograms(
        agent(sessions),
        sessions,
        endpoint,
        SessionLimits(),
        judge=lambda value, episode: Score(reward=value),
    )
    requests = [
        (f"g{g}", make_prompt(g, token_ids=range(1, 3 + g % 9)), (SavedEpisode(),) * members)
        for g in range(groups)
    ]
    begun = begin_groups(sampler, programs, requests, LIMITS)
    return await asyncio.gather(
        *(
            play_group(sampler, prompt, group, label=label, limits=LIMITS)
            for (label, prompt, _), group in zip(requests, begun, strict=True)
        )
    )


def test_the_log_probs_of_a_thousand_sessions_are_those_of_the_trainers_forward():
    groups = 250
    section = SECTION.model_copy(update={"on_new_weights": "recompute"})
    with Sampler((SPEC, PARAMS), section=section, weights=Swaps()) as sampler:
        played = asyncio.run(play(sampler, Sessions(), groups, 4))
    made = [
        EpisodeGroup(
            prompt=make_prompt(number),
            episodes=episodes,
            scores=tuple(e.score for e in episodes),
            ticket=Ticket(group=number, version=0),
        )
        for number, episodes in enumerate(played)
    ]
    mesh = make_slices(schema.MeshSection(), jax.devices()).trainer
    trainer = schema.TrainerSection(micro_batch_tokens=16 * ROW, logprob_chunk=64)
    forward = LogprobPass(SPEC, LearningSettings(mesh=mesh, trainer=trainer, row_length=ROW))
    batch = pack_step(shape(step_data(made)), ROW).batch
    by_weights = [forward.logprobs(params, batch) for params in (PARAMS, OTHER)]
    even = batch.versions % 2 == 0
    found = np.where(even, *by_weights)
    difference = np.abs(found - batch.behavior_logprobs)[batch.mask]
    assert difference.max() < 1e-5
    versions = [e.versions[e.drawn] for g in made for e in g.episodes]
    assert batch.num_tokens == sum(map(len, versions))
    assert len(versions) == 4 * groups and sum(len(set(v)) > 1 for v in versions) >= 3
    assert sum(len(e.starts) > 1 for g in made for e in g.episodes) > groups
