"""The rollout loop: bursts, order, failures, the end."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from outage_clock import QuickOutages
from rollout_rig import EchoGenerate, PositionScorer, ScriptedGate, make_loop, prompts

from jaxrl_async.codec import dumps, loads
from jaxrl_async.endpoint.agent_programs import AgentPrograms, ProgramEndpoint
from jaxrl_async.endpoint.sessions import SessionLimits, Sessions
from jaxrl_async.errors import BadEndpoint, Closed, RolloutError, StartOver
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.env import GuardedEnvs, SingleTurn
from jaxrl_async.rollout.episode import SavedEpisode
from jaxrl_async.rollout.running_groups import SAVED_KINDS
from jaxrl_async.scorers.guard import GuardedScorer
from jaxrl_async.types import (
    Completion,
    Drop,
    Partial,
    Score,
    StopReason,
)


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


FAILURES = (
    ValueError("bad"),
    asyncio.CancelledError("of a task of its own"),
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    RecursionError(),
    TimeoutError(),
    Closed("a sampler of its own"),
)


def on_a_thread(work):
    """As in a run: Ctrl-C never comes to this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(60)


@pytest.mark.parametrize("where", ["constructor", "step", "state", "scorer"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_whatever_a_users_code_raises_fails_its_group_and_gives_the_ticket_back(failure, where):
    class Broken:
        def __init__(self, prompt):
            self.breaks = prompt.position == 1
            self.fail("constructor")

        def fail(self, at):
            if at == where and self.breaks:
                raise failure

        async def step(self, prompt, completion):
            self.fail("step")
            return Reply(token_ids=np.zeros(0, np.int32), done=True)

        def state(self):
            self.fail("state")
            return {}

        def restore(self, state):
            pass

    class BrokenScorer(PositionScorer):
        async def __call__(self, episodes, prompt):
            if where == "scorer" and prompt.position == 1:
                raise failure
            return await super().__call__(episodes, prompt)

    if where == "scorer" and isinstance(failure, Closed):
        return  # a scorer says so where the run ends
    gate = ScriptedGate(3, 1)
    loop = make_loop(
        gate,
        make_env=GuardedEnvs(Broken, timeout_s=20, vocab_size=10),
        scorer=GuardedScorer(BrokenScorer(), timeout_s=20, outages=QuickOutages()),
    )
    on_a_thread(lambda: asyncio.run(asyncio.wait_for(loop.run(), 30)))
    assert gate.failed == [(1, 1, Drop.FAILED)]
    assert sorted(g.ticket.group for g in gate.put_groups) == [0, 2, 3]
    assert (loop.stats().groups, loop.stats().failures, loop.stats().active) == (3, 1, 0)


@pytest.mark.parametrize("unguarded", ["environment", "scorer", "completion"])
def test_a_cancellation_that_nobody_asked_for_never_makes_a_group_vanish(unguarded):
    class Cancels:
        def __init__(self, prompt):
            pass

        async def step(self, prompt, completion):
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            if unguarded == "environment":
                await task
            return Reply(token_ids=np.zeros(0, np.int32), done=True)

    async def scorer(episodes, prompt):
        if unguarded == "scorer":
            raise asyncio.CancelledError
        return tuple(Score(reward=0.0) for _ in episodes)

    class Drops(EchoGenerate):
        def submit_many(self, requests):
            futures = super().submit_many(requests)
            if unguarded == "completion":
                futures[-1].cancel()
            return futures

    gate = ScriptedGate(2)
    loop = make_loop(gate, Drops(), scorer, make_env=Cancels)
    asyncio.run(asyncio.wait_for(loop.run(), 20))
    failed = [group for group, *_ in gate.failed]
    assert sorted(failed) == ([1] if unguarded == "completion" else [0, 1])
    assert loop.stats().failures == len(failed) and loop.stats().active == 0


def test_each_scored_group_is_observed_before_the_gate_has_it():
    gate, seen = ScriptedGate(4), []

    def observe(group):
        assert group.ticket.group not in [g.ticket.group for g in gate.put_groups]
        seen.append(group.prompt.position)

    asyncio.run(make_loop(gate, scorer=PositionScorer(broken=[1]), observe=observe).run())
    assert sorted(seen) == [0, 2, 3]


class OneAtATime(ScriptedGate):
    def admit(self, timeout_s=None):
        while len(self.put_groups) + len(self.failed) < self.given:
            return ()
        return super().admit(timeout_s)


def test_too_many_failures_in_a_row_end_the_run_with_the_first_cause():
    gate = OneAtATime(*[1] * 20)
    loop = make_loop(gate, scorer=PositionScorer(broken=range(100)), max_failures=3)
    with pytest.raises(
        RolloutError, match=r"3 groups failed in a row.*The first failure was: no reward for 0"
    ):
        asyncio.run(asyncio.wait_for(loop.run(), 20))
    assert len(gate.failed) == 2


@pytest.mark.parametrize("size", [1, 3])
def test_an_endpoint_that_will_serve_no_call_ends_the_run_at_once(size):
    class Misset(PositionScorer):
        async def __call__(self, episodes, prompt):
            raise BadEndpoint("401. Correct the key.")

    class MissetSeat:
        def __init__(self, prompt):
            self.prompt = prompt

        async def step(self, prompt, completion):
            raise BadEndpoint("401. Correct the key.")

    for parts in ({"scorer": Misset()}, {"make_env": MissetSeat, "least_members": 1}):
        gate = ScriptedGate(*[1] * 20)
        loop = make_loop(gate, group_size=size, max_failures=5, **parts)
        with pytest.raises(BadEndpoint, match=r"401\. Correct the key"):
            asyncio.run(asyncio.wait_for(loop.run(), 20))
        assert not gate.failed and not gate.put_groups


def test_a_success_between_failures_forgives_them():
    gate = OneAtATime(*[1] * 9)
    broken = [i for i in range(9) if i % 3]
    loop = make_loop(gate, scorer=PositionScorer(broken=broken), max_failures=3, backoff_s=0.01)
    asyncio.run(loop.run())
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
        seed = None

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


@pytest.mark.full
def test_rollouts_need_no_jax():
    code = (
        "import sys, jaxrl_async.rollout.rollout_loop, jaxrl_async.rollout.evaluate; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- saved and resumed


class SavingGenerate(EchoGenerate):
    """One whose requests can be saved: the first members have drawn a 7, the others nothing."""

    seed = 5

    def __init__(self, **how):
        super().__init__(**how)
        self.asked, self.fails = [], False

    def submit_many(self, requests):
        self.asked += requests
        return super().submit_many([getattr(r, "request", r) for r in requests])

    def progress(self):
        if self.fails:
            raise RuntimeError("asleep")
        under_way = [r for r, f in zip(self.asked, self.futures, strict=True) if not f.done()]
        return tuple(
            Partial(
                request=r,
                token_ids=np.array([7], np.int32),
                logprobs=np.zeros(1, np.float32),
                versions=np.zeros(1, np.int32),
                seed=self.seed,
            )
            for r in under_way
            if "/m0/" in r.request_id
        )


def saved_while(generate, gate, until, **change):
    """Play until `until(loop)`, read what is under way from another thread, and end the loop."""
    loop = make_loop(gate, generate, **change)
    found = []

    async def go():
        running = asyncio.create_task(loop.run())
        while not until(loop):
            await asyncio.sleep(0.001)
        found.append(await asyncio.to_thread(loop.progress))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(go())
    return loads(dumps(found[0]), SAVED_KINDS), loop


def test_groups_under_way_are_saved_and_a_resumed_loop_goes_on_with_what_was_drawn():
    gate, slow = ScriptedGate(2), SavingGenerate(never=("g0", "g1"))
    saved, loop = saved_while(slow, gate, lambda loop: slow.asked)
    assert [g.ticket.group for g in saved] == [0, 1]
    assert [[e.partial is not None for e in g.episodes] for g in saved] == [[True, False]] * 2
    assert [g.prompt.position for g in saved] == [0, 1]
    assert [g.ticket for g in loop.progress()] == [g.ticket for g in saved], "also when it is over"

    gate, generate = ScriptedGate(1), SavingGenerate()
    gate.given, gate.total = 2, 3
    stream = prompts()
    for _ in range(2):
        next(stream)
    asyncio.run(make_loop(gate, generate, stream=stream, saved=saved).run())
    assert generate.calls[0] == ["g0/m0/t0", "g0/m1/t0", "g1/m0/t0", "g1/m1/t0"]
    assert [isinstance(r, Partial) for r in generate.asked[:4]] == [True, False] * 2
    assert sorted(g.ticket.group for g in gate.put_groups) == [0, 1, 2]
    assert {g.prompt.position for g in gate.put_groups} == {0, 1, 2}


def test_members_that_are_done_are_not_played_again():
    gate, generate = ScriptedGate(1), SavingGenerate(delay=lambda r: 9.0 * ("/m1/" in r.request_id))
    saved, _ = saved_while(
        generate, gate, lambda loop: generate.futures and generate.futures[0].done()
    )
    (group,) = saved
    done, waiting = group.episodes
    assert waiting.partial is None and waiting.stop is None
    assert done.stop is StopReason.EOS or done.completion is not None

    gate, again = ScriptedGate(), SavingGenerate()
    gate.total = 1
    gate.all_back.clear()
    asyncio.run(make_loop(gate, again, saved=saved).run())
    assert again.calls == [["g0/m1/t0"]]
    (played,) = gate.put_groups
    assert [e.token_ids.tolist() for e in played.episodes] == [[1, 0, 9, 0]] * 2


def test_a_group_that_waits_for_its_scorer_is_scored_after_a_resume():
    class Stuck(PositionScorer):
        async def __call__(self, episodes, prompt):
            self.asked = True
            await asyncio.sleep(60)

    gate, scorer, generate = ScriptedGate(1), Stuck(), SavingGenerate()
    saved, _ = saved_while(generate, gate, lambda loop: hasattr(scorer, "asked"), scorer=scorer)
    assert [e.stop for e in saved[0].episodes] == [StopReason.EOS] * 2
    gate, again = ScriptedGate(), SavingGenerate()
    gate.total = 1
    gate.all_back.clear()
    asyncio.run(make_loop(gate, again, saved=saved).run())
    assert again.calls in ([], [[]]) and len(gate.put_groups) == 1


def test_what_the_sampler_does_not_tell_is_drawn_again_with_a_warning(caplog):
    gate, generate = ScriptedGate(1), SavingGenerate(never=("g0",))
    generate.fails = True
    saved, _ = saved_while(generate, gate, lambda loop: generate.asked)
    assert [e.partial for e in saved[0].episodes] == [None, None]
    assert "asleep" in caplog.text


class Counting:
    """Two turns; remembers how many there were, and can be saved."""

    def __init__(self, prompt):
        self.turns = 0

    async def step(self, prompt, completion):
        self.turns += 1
        reply = np.array([5] * self.turns, np.int32)
        return Reply(token_ids=reply[: 0 if self.turns == 2 else None], done=self.turns == 2)

    def state(self):
        return {"turns": self.turns}

    def restore(self, state):
        self.turns = state["turns"]


class Forgetful(Counting):
    """The same without."""

    state = restore = None


@pytest.mark.full
@pytest.mark.parametrize("env", [Counting, Forgetful])
def test_an_environment_goes_on_where_it_was_or_its_episode_starts_over(env):
    gate = ScriptedGate(1)
    generate = SavingGenerate(delay=lambda r: 9.0 * r.request_id.endswith("t1"))
    saved, _ = saved_while(generate, gate, lambda loop: len(generate.asked) == 4, make_env=env)
    goes_on = env is Counting
    assert [len(e.turns) for e in saved[0].episodes] == [int(goes_on)] * 2
    gate, again = ScriptedGate(), SavingGenerate()
    gate.total = 1
    gate.all_back.clear()
    resumed = make_loop(gate, again, saved=saved, make_env=env)
    asyncio.run(resumed.run())
    counted = resumed.stats().continued_episodes, resumed.stats().restarted_episodes
    assert counted == ((2, 0) if goes_on else (0, 2))
    turn = 1 if goes_on else 0
    assert again.calls[0] == [f"g0/m0/t{turn}", f"g0/m1/t{turn}"]
    (played,) = gate.put_groups
    assert [e.token_ids.tolist() for e in played.episodes] == [[1, 0, 9, 0, 5, 9, 0]] * 2


class Gone(Counting):
    """The same, on a server that has forgotten the episode."""

    restored = False

    def restore(self, state):
        self.restored = True

    async def step(self, prompt, completion):
        if self.restored:
            raise StartOver("The server answers in another way.")
        return await super().step(prompt, completion)


def test_an_episode_whose_environment_cannot_be_restored_starts_over_and_is_counted(caplog):
    gate = ScriptedGate(1)
    generate = SavingGenerate(delay=lambda r: 9.0 * r.request_id.endswith("t1"))
    saved, _ = saved_while(generate, gate, lambda loop: len(generate.asked) == 4, make_env=Gone)
    gate, again = ScriptedGate(), SavingGenerate()
    gate.total = 1
    gate.all_back.clear()
    resumed = make_loop(gate, again, saved=saved, make_env=Gone, outages=QuickOutages())
    asyncio.run(resumed.run())
    asked = [getattr(r, "request", r).request_id for r in again.asked]
    assert sorted(asked) == sorted(f"g0/m{m}/t{t}" for m in (0, 1) for t in (1, 0, 1))
    assert resumed.stats().restarted_episodes == 2 and "It starts over." in caplog.text
    (played,) = gate.put_groups
    assert [e.token_ids.tolist() for e in played.episodes] == [[1, 0, 9, 0, 5, 9, 0]] * 2


# ---- programs


def program_envs(sessions, *, stays=0, calls=2, turn=3, count=lambda name, number: None):
    """Members that draw `calls` turns through their sessions; with `stays` they wait for ever after
    so many. `turn` is the token that the program writes between two turns."""

    async def program(agent):
        session, tokens = sessions.find(agent.api_key), np.array([1], np.int32)
        for number in range(calls):
            if stays and number == stays:
                await asyncio.sleep(60)
            done = await session.sample(tokens)
            tokens = np.concatenate([tokens, done.token_ids, [turn]]).astype(np.int32)
        if stays:
            await asyncio.sleep(60)

    endpoint = ProgramEndpoint(address=lambda: "http://127.0.0.1:9")
    return AgentPrograms(
        program,
        sessions,
        endpoint,
        SessionLimits(),
        judge=lambda value, episode: None,
        count=count,
    )


def programs_resumed(saved, total=2, **program):
    """Play saved groups of programs; return the gate, the sampler, the loop, and the counts."""
    gate, again, counts = ScriptedGate(), SavingGenerate(), Counter()
    gate.total = total
    gate.all_back.clear()

    def count(name, number):
        counts[name] += number

    resumed = make_loop(
        gate, again, saved=saved, make_env=program_envs(Sessions(), count=count, **program)
    )
    asyncio.run(resumed.run())
    return gate, again, resumed, counts


def test_groups_of_programs_without_a_finished_call_hold_their_tickets_and_restart(caplog):
    gate, generate, sessions = ScriptedGate(2), SavingGenerate(delay=lambda r: 9.0), Sessions()
    saved, loop = saved_while(
        generate,
        gate,
        lambda loop: len(generate.asked) == 4,
        make_env=program_envs(sessions, stays=1),
    )
    assert gate.put_groups == [] and sessions.all() == () and loop.stats().active == 0
    assert [g.episodes for g in saved] == [(SavedEpisode(),) * 2] * 2
    gate, again, resumed, _ = programs_resumed(saved)
    assert {r.key for r in again.asked} == {r.key for r in generate.asked}
    assert sorted(g.ticket.group for g in gate.put_groups) == [0, 1]
    assert resumed.stats().restarts == 2 and resumed.stats().continued_episodes == 0
    assert "2 groups with open sessions or games start over" in caplog.text
    assert loop.stats().restarts == 0


def test_programs_continue_from_their_last_complete_turn_in_a_resumed_run(caplog):
    gate, generate, sessions = ScriptedGate(2), SavingGenerate(), Sessions()
    saved, _ = saved_while(
        generate,
        gate,
        lambda loop: (
            len(generate.asked) == 8 and not any(s._trace.num_running for s in sessions.all())
        ),
        make_env=program_envs(sessions, stays=2, calls=3),
    )
    assert [[len(e.calls[0].completions) for e in g.episodes] for g in saved] == [[2, 2]] * 2
    sampled = {r.request_id for r in generate.asked}

    # The first two calls are answered as before; only the third is sampled.
    gate, again, resumed, counts = programs_resumed(saved, calls=3)
    assert sorted(r.request_id for r in again.asked) == [
        f"g{g}/m{m}/t2" for g in range(2) for m in range(2)
    ]
    assert not sampled & {r.request_id for r in again.asked}
    stats = resumed.stats()
    assert stats.continued_episodes == 4 and stats.restarts == stats.restarted_episodes == 0
    assert not counts["unrepeated_calls"] and "start over" not in caplog.text
    whole, plain, _, _ = programs_resumed(
        tuple(replace(g, episodes=(SavedEpisode(),) * 2) for g in saved), calls=3
    )
    assert len(plain.asked) == 12
    before = {g.ticket.group: g for g in whole.put_groups}
    for group in gate.put_groups:
        for played, other in zip(group.episodes, before[group.ticket.group].episodes, strict=True):
            assert np.array_equal(played.token_ids, other.token_ids)
            assert np.array_equal(played.drawn, other.drawn) and played.drawn.sum() == 6
            assert np.array_equal(played.logprobs, other.logprobs)
            assert np.array_equal(played.versions, other.versions)


def test_a_program_that_does_not_repeat_its_calls_is_sampled_anew_and_counted():
    gate, generate = ScriptedGate(1), SavingGenerate()
    saved, _ = saved_while(
        generate,
        gate,
        lambda loop: len(generate.asked) == 4 and not any(not f.done() for f in generate.futures),
        make_env=program_envs(Sessions(), stays=2, calls=3),
    )
    # The first call is the same; what the program writes behind it is not.
    gate, again, _, counts = programs_resumed(saved, total=1, calls=3, turn=4)
    assert sorted(r.request_id for r in again.asked) == [
        f"g0/m{m}/t{t}" for m in range(2) for t in (1, 2)
    ]
    assert counts["unrepeated_calls"] == 2  # the second of each member
    (group,) = gate.put_groups
    assert all(e.token_ids.tolist()[:4] == [1, 9, 0, 4] for e in group.episodes)


def test_a_run_that_is_killed_again_before_a_program_has_repeated_its_calls_keeps_them():
    gate, generate = ScriptedGate(1), SavingGenerate()
    first, _ = saved_while(
        generate,
        gate,
        lambda loop: len(generate.asked) == 4 and not any(not f.done() for f in generate.futures),
        make_env=program_envs(Sessions(), stays=2, calls=3),
    )
    gate, generate = ScriptedGate(), SavingGenerate()
    gate.total = 1
    gate.all_back.clear()
    loops = []

    def until(loop):  # one of two calls is repeated
        loops.append(loop)
        members = [m.env for p in loop._running._groups.values() for m in p.members]
        return bool(members) and all(m._session and m._session.counts().calls for m in members)

    second, _ = saved_while(
        generate, gate, until, saved=first, make_env=program_envs(Sessions(), stays=1, calls=3)
    )
    assert generate.asked == []
    for of_first, of_second in zip(first[0].episodes, second[0].episodes, strict=True):
        numbers = [n for calls in of_second.calls for n in calls.numbers]
        assert sorted(numbers) == [0, 1] == sorted(of_first.calls[0].numbers)
    gate, again, _, counts = programs_resumed(second, total=1, calls=3)
    assert sorted(r.request_id for r in again.asked) == ["g0/m0/t2", "g0/m1/t2"]
    assert not counts["unrepeated_calls"]


# ---- more members than are needed, and fewer


def members_of(group):
    """Which members a group is made of: EchoMember says it in its answers."""
    return [int(e.token_ids[-2]) for e in group.episodes]


class EchoMember(EchoGenerate):
    """Answers with the member's number; members in `stuck` never."""

    def __init__(self, order=(), stuck=()):
        super().__init__(never=stuck)
        self.order = order

    def submit_many(self, requests):
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        by_member = {r.key[1]: (f, r) for f, r in zip(futures, requests, strict=True)}
        order = self.order or sorted(by_member)
        answered = [by_member[m] for m in order if m not in self.never and m in by_member]

        def answer(rounds):
            """After rounds of the event loop, not a time: each member waits for its answer then."""
            if rounds:
                loop.call_soon(answer, rounds - 1)
                return
            for future, request in answered:
                self._answer(future, request)

        loop.call_soon(answer, 20)
        self.futures += futures
        self.calls.append([r.request_id for r in requests])
        return futures

    @staticmethod
    def _answer(future, request):
        if not future.done():
            one = np.zeros(2, np.int32)
            sampled = np.array([20 + request.key[1], 0], np.int32)
            completion = Completion(
                request_id=request.request_id,
                token_ids=sampled,
                logprobs=one.astype(np.float32),
                versions=one,
                stop=StopReason.EOS,
            )
            future.set_result(completion)


def test_the_first_to_end_make_the_group_in_the_order_of_members_and_the_others_are_cancelled():
    gate, generate = ScriptedGate(1), EchoMember(order=(4, 2, 0), stuck=(1, 3))
    loop = make_loop(gate, generate, group_size=3, oversample=2)
    asyncio.run(loop.run())
    assert [members_of(g) for g in gate.put_groups] == [[20, 22, 24]]
    assert len(gate.put_groups[0].scores) == 3
    assert [f.cancelled() for f in generate.futures] == [False, True, False, True, False]
    stats = loop.stats()
    assert (stats.groups, stats.failures, stats.cancelled_members) == (1, 0, 2)
    assert (stats.lost_members, stats.cancelled_turn_tokens) == (0, 0)


def test_of_members_that_end_together_the_earlier_ones_count_and_the_others_tokens_are_wasted():
    gate = ScriptedGate(1)
    loop = make_loop(gate, EchoMember(order=(3, 1, 2, 0)), group_size=2, oversample=2)
    asyncio.run(loop.run())
    assert [members_of(g) for g in gate.put_groups] == [[21, 23]]
    stats = loop.stats()
    assert (stats.cancelled_members, stats.cancelled_turn_tokens) == (2, 4)


class FailsFor(SingleTurn):
    """The environments made with these numbers fail."""

    made = 0

    @classmethod
    def of(cls, *failing):
        count = itertools.count()

        def make(prompt):
            env = cls(prompt)
            env.fails = next(count) in failing
            return env

        return make

    async def step(self, prompt, completion):
        if self.fails:
            raise OSError("down")
        return await super().step(prompt, completion)


@pytest.mark.parametrize(
    ("how", "failing", "made"),
    [
        ({"least_members": 2}, (0,), [21, 22]),
        ({"least_members": 2}, (0, 2), None),
        ({"least_members": 1}, (0, 2), [21]),
        ({"oversample": 1}, (1,), [20, 22, 23]),  # one that was begun beyond takes its place
        ({"oversample": 1}, (1, 3), None),
        ({"oversample": 1, "least_members": 2}, (1, 3), [20, 22]),
        ({}, (1,), None),
    ],
)
def test_a_group_goes_on_with_as_many_members_as_were_asked_for(how, failing, made):
    gate = ScriptedGate(1)
    loop = make_loop(gate, EchoMember(), group_size=3, make_env=FailsFor.of(*failing), **how)
    asyncio.run(loop.run())
    assert [members_of(g) for g in gate.put_groups] == ([] if made is None else [made])
    stats = loop.stats()
    assert (stats.failures, len(gate.failed)) == ((1, 1) if made is None else (0, 0))
    if made is not None:
        assert stats.lost_members == len(failing)
        assert [s.reward for s in gate.put_groups[0].scores] == [0.0] * len(made)


def test_a_resumed_group_goes_on_without_the_members_that_it_has_left_out():
    gate, slow = ScriptedGate(1), EchoMember(stuck=(2,))
    change = {"group_size": 3, "least_members": 2, "make_env": FailsFor.of(0)}
    saved, _ = saved_while(slow, gate, lambda loop: loop.stats().lost_members, **change)
    assert [e.left_out for e in saved[0].episodes] == [True, False, False]
    again, quick = ScriptedGate(), EchoMember()
    again.total = 1
    again.all_back.clear()
    loop = make_loop(again, quick, saved=saved, group_size=3, least_members=2)
    asyncio.run(loop.run())
    assert quick.calls == [["g0/m2/t0"]] or quick.calls == [["g0/m1/t0", "g0/m2/t0"]]
    assert [members_of(g) for g in again.put_groups] == [[21, 22]]
    assert loop.stats().lost_members == 0, "counted where it was lost"


# ---- too old while drawn


class AgedGenerate(SavingGenerate):
    """Its requests have drawn tokens of the versions in `drawn`, by request id; none ends."""

    def __init__(self, sampled):
        super().__init__(never=[f"g{i}" for i in range(9)])
        self.drawn = sampled

    def progress(self):
        return tuple(
            Partial(
                request=request,
                token_ids=np.zeros(len(self.drawn[request.request_id]), np.int32),
                logprobs=np.zeros(len(self.drawn[request.request_id]), np.float32),
                versions=np.array(self.drawn[request.request_id], np.int32),
                seed=self.seed,
            )
            for request, future in zip(self.asked, self.futures, strict=True)
            if request.request_id in self.drawn and not future.done()
        )


def test_what_is_too_old_is_cancelled_as_soon_as_the_gate_says_so_and_nothing_else():
    gate = ScriptedGate(4)
    generate = AgedGenerate(
        {
            "g0/m0/t0": [0, 0, 1],
            "g0/m1/t0": [1],
            "g1/m0/t0": [1, 1],  # admitted at version 0, begun at 1
            "g2/m1/t0": [0],  # its other member has drawn nothing
        }
    )
    loop = make_loop(gate, generate)

    async def go():
        running = asyncio.create_task(loop.run())
        while len(generate.asked) < 8:
            await asyncio.sleep(0.001)
        gate.aged(0)
        await asyncio.sleep(0.02)
        assert not gate.cancelled, "all may still be trained on"
        gate.aged(1)
        while len(gate.cancelled) < 2 or loop.stats().active > 2:
            await asyncio.sleep(0.001)
        gone = [f.cancelled() for f in generate.futures]
        assert [g.ticket.group for g in await asyncio.to_thread(loop.progress)] == [1, 3]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return gone

    gone = asyncio.run(asyncio.wait_for(go(), 20))
    assert gone == [True, True, False, False, True, True, False, False]
    assert [(g.ticket.group, g.prompt_id, g.oldest, g.lengths) for g in gate.cancelled] == [
        (0, 0, 0, (3, 1)),
        (2, 2, 0, (0, 1)),
    ]
    assert not gate.put_groups and not gate.failed and loop.stats().failures == 0


def test_a_group_whose_scorer_works_too_long_is_cancelled_too():
    entered = []

    async def slow(episodes, prompt):
        entered.append(prompt)
        await asyncio.sleep(60)

    gate = ScriptedGate(1)
    loop = make_loop(gate, EchoGenerate(), slow)

    async def go():
        running = asyncio.create_task(loop.run())
        while not entered:
            await asyncio.sleep(0.001)
        gate.aged(1)
        await running

    asyncio.run(asyncio.wait_for(go(), 20))
    assert [(g.oldest, g.lengths) for g in gate.cancelled] == [(0, (2, 2))]
    assert loop.stats().groups == loop.stats().failures == loop.stats().active == 0


def test_programs_beyond_the_group_are_ended_and_what_they_drew_is_counted():
    made = itertools.count()
    sessions = Sessions()

    def make(prompt):
        return program_envs(sessions, stays=2 * (next(made) == 1))(prompt)

    gate, generate = ScriptedGate(1), EchoGenerate()
    loop = make_loop(gate, generate, make_env=make, group_size=2, oversample=1)
    asyncio.run(asyncio.wait_for(loop.run(), 20))
    assert [e.num_drawn for e in gate.put_groups[0].episodes] == [4, 4]
    stats = loop.stats()
    assert (stats.cancelled_members, stats.cancelled_turn_tokens) == (1, 4)
    assert sessions.all() == (), "its session has ended"


def test_a_group_that_programs_play_is_as_old_as_the_calls_that_they_have_made():
    class OneVersion(EchoGenerate):
        def progress(self):
            return ()

    sessions, gate = Sessions(), ScriptedGate(1)
    loop = make_loop(gate, OneVersion(), make_env=program_envs(sessions, stays=2))

    async def go():
        running = asyncio.create_task(loop.run())
        while sum(s.counts().calls for s in sessions.all()) < 4 or loop.stats().active < 1:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        gate.aged(1)
        await running

    asyncio.run(asyncio.wait_for(go(), 20))
    assert [(g.oldest, g.lengths) for g in gate.cancelled] == [(0, (4, 4))]
    assert sessions.all() == ()
