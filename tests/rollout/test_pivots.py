"""Pivots: where they are, and continuations that are those of a direct call of the sampler."""

import asyncio
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config import schema
from jaxrl_async.errors import RolloutError
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.rollout.env import SingleTurn
from jaxrl_async.rollout.pivots import (
    PivotPlan,
    chosen_members,
    fork_branches,
    pivot_positions,
)
from jaxrl_async.rollout.rollout_loop import RolloutLoop, RolloutSettings
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.trainer.pack import pack_groups
from jaxrl_async.types import EpisodeLimits, Prompt, Request, SamplingParams, Score, Ticket

VOCAB, PAGE = 48, 4
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=32), VOCAB
)
SECTION = schema.SamplerSection(
    slots=8, max_length=64, max_new_tokens=24, block=4, page_tokens=PAGE
)
LIMITS = EpisodeLimits(
    sampling=SamplingParams(), stop_token_ids=(1,), max_new_tokens=24, max_length=64
)
logs = st.lists(st.floats(-9, 0, width=32), min_size=1, max_size=20)


@given(
    logprobs=logs,
    count=st.integers(1, 4),
    where=st.sampled_from(["lowest_logprob", "random", "fractions", "mark"]),
    seed=st.integers(0, 9),
)
def test_pivots_are_within_the_answer_and_where_they_should_be(
    logprobs, count, where, seed
) -> None:
    logs, random = np.array(logprobs, np.float32), np.random.default_rng(seed)
    tokens = random.integers(0, 3, len(logs)).astype(np.int32)
    plan = PivotPlan(
        continuations=2, per_member=count, where=where, marked=lambda token: token == 2
    )
    positions = pivot_positions(tokens, logs, plan, random)
    assert positions == sorted(set(positions)) and len(positions) <= count
    assert all(1 <= position < len(logs) for position in positions)
    rest = [i for i in range(1, len(logs)) if i not in positions]
    if where == "lowest_logprob":
        assert len(positions) == min(count, len(logs) - 1)
        assert all(logs[p] <= logs[r] for p in positions for r in rest)
    if where == "mark":
        marked = [i for i in range(1, len(logs)) if tokens[i - 1] == 2]
        assert set(positions) <= set(marked) and len(positions) == min(count, len(marked))
    if where == "fractions" and len(logs) % (count + 1) == 0:
        step = len(logs) // (count + 1)
        assert positions == [step * (i + 1) for i in range(count)]


def test_a_log_prob_that_is_not_known_is_never_the_lowest() -> None:
    plan = PivotPlan(continuations=1, per_member=3)
    logs = np.array([-9, np.nan, -1, np.nan], np.float32)
    assert pivot_positions(np.zeros(4, np.int32), logs, plan, np.random.default_rng(0)) == [2]


def test_branches_of_a_pivot_and_of_its_neighbours_are_all_different() -> None:
    found = [branch for position in range(200) for branch in fork_branches(position, 8)]
    assert len(set(found)) == len(found) and min(found) > 0 and max(found) < 2**31


class OneGate:
    """Admits some groups and keeps what becomes of them."""

    def __init__(self, groups: int) -> None:
        self.tickets = [Ticket(group=i, version=0) for i in range(groups)]
        self.put_groups: list = []
        self.groups = groups

    def admit(self, timeout_s=None):
        from jaxrl_async.errors import Closed

        if not self.tickets and len(self.put_groups) == self.groups:
            raise Closed("the end")
        given, self.tickets = tuple(self.tickets), []
        return given

    def put(self, group):
        self.put_groups.append(group)

    def watch(self, aged, stop):
        pass


def prompts():
    for i in range(100):
        ids = (np.arange(9) * (i + 3) % VOCAB).astype(np.int32)
        yield Prompt(prompt_id=i, position=i, token_ids=ids, text="", reference="")


class Judge:
    """Rewards long answers; sees them whole."""

    def __init__(self) -> None:
        self.seen: list = []

    async def __call__(self, episodes, prompt):
        self.seen.append(episodes)
        return tuple(Score(reward=float(e.num_drawn)) for e in episodes)


def played(sampler, plan: PivotPlan | None, groups: int = 3, **changes) -> tuple:
    gate, judge, observed = OneGate(groups), Judge(), []
    loop = RolloutLoop(
        prompts(),
        sampler,
        judge,
        gate,
        settings=RolloutSettings(group_size=3, limits=LIMITS, pivots=plan, **changes),
        make_env=SingleTurn,
        observe=observed.append,
    )
    asyncio.run(loop.run())
    return sorted(gate.put_groups, key=lambda g: g.ticket.group), judge, loop.stats(), observed


@pytest.fixture(scope="module")
def sampler():
    params = init_params(SPEC, jax.random.key(0))
    with Sampler((SPEC, params), section=SECTION, seed=3) as one:
        yield one


PLAN = PivotPlan(continuations=3, members=2, per_member=2, where="lowest_logprob")


@pytest.mark.full
@pytest.mark.exhaustive
def test_continuations_are_those_of_a_direct_call_on_prefix_key_and_branch(sampler) -> None:
    groups, _, stats, observed = played(sampler, PLAN)
    plain, _, none, _ = played(sampler, None)
    assert (none.forks, none.fork_tokens, none.shared_tokens) == (0, 0, 0)
    forks, requests = [], []
    for group, alone in zip(groups, plain, strict=True):
        for trunk, without in zip(group.episodes[:3], alone.episodes, strict=True):
            np.testing.assert_array_equal(trunk.token_ids, without.token_ids)
        for one in group.episodes[3:]:
            member, position = (int(n) for n in one.peers.removeprefix("fork ").split("@"))
            trunk, at = group.episodes[member], position - len(group.prompt.token_ids)
            assert one.drawn.tolist() == [i >= position for i in range(len(one.token_ids))]
            siblings = [e for e in group.episodes if e.peers == one.peers]
            forks.append((one, position))
            requests.append(
                Request(
                    request_id=f"direct{len(requests)}",
                    token_ids=trunk.token_ids[:position],
                    max_new_tokens=24 - at,
                    stop_token_ids=(1,),
                    key=(group.prompt.position, member),
                    branch=fork_branches(at, 3)[[e is one for e in siblings].index(True)],
                )
            )
    for (one, position), direct in zip(forks, sampler.generate(requests), strict=True):
        np.testing.assert_array_equal(one.token_ids[position:], direct.token_ids)
        np.testing.assert_allclose(one.logprobs[position:], direct.logprobs, atol=2e-6)
        assert one.stop is direct.stop
    assert len(forks) == stats.forks > 12 and stats.lost_forks == 0
    assert all(len(group.episodes) == 3 for group in observed), "a prompt's difficulty"


@pytest.mark.full
def test_what_is_judged_is_the_whole_answer_and_what_is_trained_each_token_once(sampler) -> None:
    groups, judge, stats, _ = played(sampler, PLAN)
    by_prompt = {tuple(e[0].token_ids[:9]): e for e in judge.seen}
    trained, shared = 0, 0
    for group in groups:
        judged = by_prompt[tuple(group.prompt.token_ids)]
        for one, whole, score in zip(group.episodes, judged, group.scores, strict=True):
            assert whole.drawn.tolist() == [False] * 9 + [True] * (len(one.token_ids) - 9)
            assert score.reward == len(one.token_ids) - 9
            assert (whole.versions[whole.drawn] == 0).all()
            shared += whole.num_drawn - one.num_drawn
            trained += one.num_drawn
        counts = Counter(e.peers for e in group.episodes)
        assert len(counts) <= 5 and set(counts.values()) == {3}
    assert (stats.fork_tokens, stats.shared_tokens) == (
        sum(e.num_drawn for g in groups for e in g.episodes[3:]),
        shared,
    )
    batch = pack_groups(groups, None, 64)
    assert batch.num_tokens == trained
    marks = {
        (int(s), int(p))
        for s, p in zip(batch.sequence_ids[batch.mask], batch.positions[batch.mask], strict=True)
    }
    assert len(marks) == trained, "each drawn token once"


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_prefix_is_prefilled_from_its_last_full_page_on_alone() -> None:
    """The sampler's own counters: what continuations computed of their prompts."""
    params = init_params(SPEC, jax.random.key(0))
    plan = replace(PLAN, where="fractions", members=3, per_member=1)
    roomy = SECTION.model_copy(update={"slots": 32})  # a pivot's continuations have slots at once
    with Sampler((SPEC, params), section=roomy, seed=3) as one:
        played(one, None)
        without = one.stats()
    with Sampler((SPEC, params), section=roomy, seed=3) as one:
        groups, _, stats, _ = played(one, plan)
        has = one.stats()
    prefixes = {
        (g.ticket.group, e.peers): int(np.argmax(e.drawn)) for g in groups for e in g.episodes[3:]
    }
    anew = sum(n - (n - 1) // PAGE * PAGE for n in prefixes.values())
    assert has.prefill_tokens - without.prefill_tokens == anew
    assert has.prefix_hit_tokens - without.prefix_hit_tokens == sum(
        (n - 1) // PAGE * PAGE for n in prefixes.values()
    )
    assert stats.shared_tokens == 3 * sum(n - 9 for n in prefixes.values())


class Failing:
    """A sampler that refuses every second continuation."""

    def __init__(self, sampler) -> None:
        self.sampler, self.seed = sampler, sampler.seed

    def submit_many(self, requests):
        futures = self.sampler.submit_many(requests)
        for i, request in enumerate(requests):
            if request.branch and i % 2:
                futures[i].cancel()
                futures[i] = asyncio.get_running_loop().create_future()
                futures[i].set_exception(RolloutError("no"))
        return futures


@pytest.mark.full
def test_a_group_goes_on_without_a_continuation_that_fails(sampler, caplog) -> None:
    groups, _, stats, _ = played(Failing(sampler), PLAN)
    assert len(groups) == 3 and stats.failures == 0
    assert stats.lost_forks > 0 and stats.forks == sum(len(g.episodes) - 3 for g in groups)
    assert caplog.text.count("from its group: no") == stats.lost_forks


def test_the_members_that_are_forked_are_the_same_each_time_and_all_have_their_turn() -> None:
    plan, chosen = PivotPlan(continuations=1, members=2), set()
    for prompt in prompts():
        members = chosen_members(plan, prompt, 4)
        assert members == chosen_members(plan, prompt, 4) and len(members) == 2
        chosen |= set(members)
    assert chosen == {0, 1, 2, 3}
    assert chosen_members(replace(plan, members=9), prompt, 4) == [0, 1, 2, 3]
