"""Sessions and programs, with a policy that answers as it is scripted."""

import asyncio
import contextlib
import itertools
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outage_clock import QuickOutages
from played_programs import LIMITS, Policy, played, programs, through

from jaxrl_async.endpoint.sessions import (
    FINISHED,
    STOPPING,
    PolicySession,
    SessionLimits,
    SessionMember,
    Sessions,
)
from jaxrl_async.errors import Closed, RolloutError, RolloutTimeout, SessionEnded, SessionLimit
from jaxrl_async.rollout.episode_assembly import context_branch
from jaxrl_async.rollout.evaluate import EvalEffort, evaluate
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import SamplingParams, Score, StopReason


def opened(policy=None, *, clock=time.monotonic, **bounds) -> PolicySession:
    member = SessionMember(prompt=make_prompt(3), label="g5", index=2)
    sessions = Sessions(clock=clock)
    return sessions.open(policy or Policy(), member, LIMITS, SessionLimits(**bounds))


def sample(session, *tokens, **options):
    return asyncio.run(session.sample(np.array(tokens), **options))


def test_a_linear_conversation_asks_as_an_environments_turns_do():
    policy = Policy()
    session = opened(policy)
    first = sample(session, 1, 2)
    sample(session, 1, 2, *first.token_ids, 7, stop_token_ids=(5, 0), max_new_tokens=3)
    sample(session, 1, 2)
    ids = [r.request_id for r in policy.requests]
    assert ids == ["g5/m2/t0", "g5/m2/t1", "g5/m2/t2"] and first.request_id == ids[0]
    assert {r.key for r in policy.requests} == {(3, 2)}
    again = context_branch(np.array([1, 2]), 1) + 1
    assert [r.branch for r in policy.requests] == [0, 0, again]
    assert [r.max_new_tokens for r in policy.requests] == [4, 3, 4]
    assert [r.stop_token_ids for r in policy.requests] == [(0,), (0, 5), (0,)]
    session.finish()
    episode = session.episode()
    assert episode.starts == (0, 9) and episode.num_turns == 3 and episode.score is None
    assert episode.stop is StopReason.EOS


def test_the_runs_distribution_holds_unless_callers_may_choose():
    policy, other = Policy(), SamplingParams(temperature=0.1)
    session = opened(policy)
    sample(session, 1, sampling=other, seed=5)
    sample(session, 1, sampling=LIMITS.sampling)
    assert {r.sampling for r in policy.requests} == {LIMITS.sampling}
    assert session.counts().overridden_calls == 1
    free = opened(policy, own_sampling=True)
    one, two = (sample(free, 4, sampling=other, seed=5) for _ in range(2))
    assert policy.requests[-1].sampling == other and policy.requests[-1].key == (5, 0)
    np.testing.assert_array_equal(one.token_ids, two.token_ids)


def test_limits_end_the_episode_as_cut_off_and_say_which():
    session = opened(max_calls=1)
    sample(session, 1)
    with pytest.raises(SessionLimit, match="1 calls"):
        sample(session, 1)
    assert session.episode().stop is StopReason.LENGTH and "max_calls" in session.exhausted
    session = opened(max_tokens=7)
    first = sample(session, 1)
    assert len(first.token_ids) == 3
    assert len(sample(session, 1, *first.token_ids, 8).token_ids) == 2  # what is left
    with pytest.raises(SessionLimit, match=r"7 tokens \(max_tokens\)"):
        sample(session, 1)
    session = opened()
    session.exhaust("too long a prompt")
    with pytest.raises(SessionLimit, match="no room"):
        sample(session, *range(1, 13))
    assert session.exhausted == "too long a prompt"
    assert session.too_long
    unplayed = session.episode()
    assert unplayed.token_ids.tolist() == list(range(1, 13)) and not unplayed.num_drawn
    assert unplayed.stop is StopReason.LENGTH and unplayed.score is None


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1.5], ["a"]], ids=str)
def test_garbage_is_refused_and_leaves_nothing(tokens):
    session = opened()
    with pytest.raises(RolloutError, match="one row of token ids"):
        asyncio.run(session.sample(np.array(tokens)))
    with pytest.raises(RolloutError, match="max_new_tokens"):
        sample(session, 1, max_new_tokens=0)
    assert session.counts().calls == 0


def test_time_limits_count_from_the_last_call_and_from_the_beginning():
    clock = VirtualClock()
    session = opened(clock=clock, idle_s=10, total_s=25)
    clock.advance(9)
    sample(session, 1)
    clock.advance(9)
    assert session.remaining_s() == 1 and not session.expire()
    clock.advance(1)
    assert session.expire() and "abandoned" in session.ended and not session.expire()
    held = opened(Policy(hold=True), clock=clock, idle_s=10, total_s=25)

    async def sample_late():
        task = asyncio.ensure_future(held.sample(np.array([1])))
        await asyncio.sleep(0)
        clock.advance(24)
        assert held.remaining_s() == 1 and held.sampling_s() == 24
        clock.advance(1)
        assert held.expire()
        with pytest.raises(SessionEnded, match="more than 25 s"):
            await task

    asyncio.run(sample_late())
    assert held.counts().cancelled_calls == 1


def test_a_caller_that_goes_cancels_its_call_alone():
    policy = Policy(hold=True)
    session = opened(policy)

    async def leave():
        tasks = [asyncio.ensure_future(session.sample(np.array([t]))) for t in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert policy.futures[0].cancelled()
        policy.answer(policy.requests[1], policy.futures[1])
        await tasks[1]

    asyncio.run(leave())
    episode = session.episode()
    assert episode.starts == (0,) and episode.token_ids[0] == 2
    assert session.counts().cancelled_calls == 1


def test_running_calls_are_cancelled_before_an_owner_hears_of_the_end():
    policy = Policy(hold=True)
    session = opened(policy)

    def fail(reason: str) -> None:
        raise ValueError(reason)

    session.on_end(fail)

    async def end_early():
        call = asyncio.ensure_future(session.sample(np.array([1])))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="lost"):
            session.end("lost")
        with pytest.raises(SessionEnded, match="lost"):
            await call
        assert policy.futures[0].cancelled()

    asyncio.run(end_early())


def test_late_calls_are_refused_with_the_reason_also_by_key():
    counted = Counter()
    sessions = Sessions(max_open=2, count=lambda name, number: counted.update({name: number}))
    member = SessionMember(prompt=make_prompt(), label="g0")
    session = sessions.open(Policy(), member, LIMITS, SessionLimits())
    assert sessions.find(session.key) is session and len(session.key) >= 32
    reasons = []
    session.on_end(reasons.append)
    session.finish()
    session.end("something else")
    session.on_end(reasons.append)
    assert reasons == ["it was finished"] * 2
    for late in (lambda: sample(session, 1), lambda: session.reward(1)):
        with pytest.raises(SessionEnded, match="it was finished"):
            late()
    assert session.counts().late_calls == 2
    with pytest.raises(SessionEnded, match="it was finished"):
        sessions.find(session.key)
    with pytest.raises(SessionEnded, match="no session has this key"):
        sessions.find("guess")
    assert counted == {"late_calls": 1}  # the two above are the session's own to count
    both = [sessions.open(Policy(), member, LIMITS, SessionLimits()) for _ in range(2)]
    with pytest.raises(RolloutError, match="2 sessions are open"):
        sessions.open(Policy(), member, LIMITS, SessionLimits())
    sessions.close()
    assert {s.ended for s in both} == {"the run is stopping"} and sessions.all() == ()
    with pytest.raises(Closed, match="the run is stopping"):
        sessions.find(both[0].key)
    assert counted == {"late_calls": 1}  # no fault of the program's
    with pytest.raises(Closed):
        sessions.open(Policy(), member, LIMITS, SessionLimits())


def test_why_a_session_ended_is_known_of_the_last_ones():
    sessions = Sessions(max_open=2)
    member = SessionMember(prompt=make_prompt(), label="g0")
    ended = [sessions.open(Policy(), member, LIMITS, SessionLimits()) for _ in range(2)]
    ended[1].finish()
    ended[0].finish()
    ended.append(sessions.open(Policy(), member, LIMITS, SessionLimits()))
    ended[2].finish()
    reasons = ("it was finished", "no session has this key", "it was finished")
    for session, reason in zip(ended, reasons, strict=True):
        with pytest.raises(SessionEnded, match=reason):
            sessions.find(session.key)


def test_a_member_whose_group_ends_as_the_run_stops_ends_for_that_reason():
    """The first member that hears of the stop gives its group up; others hear of that before."""
    sessions, policy = Sessions(), Policy()
    bounds, member = SessionLimits(), SessionMember(prompt=make_prompt(), label="g0")
    first, second, done = (sessions.open(policy, member, LIMITS, bounds) for _ in range(3))
    first.on_end(lambda _: (second.end("its program has ended"), done.finish()))
    sessions.close()
    assert (first.ended, second.ended) == (STOPPING, STOPPING) and done.ended == FINISHED
    with pytest.raises(Closed, match="stopping"):
        sample(second, 1)


def test_rewards_of_the_whole_and_of_calls_become_the_score():
    session = opened()
    first = sample(session, 1)
    sample(session, 1, *first.token_ids, 6)
    session.reward(3.0, parts={"correct": 1.0})
    session.reward(2, parts={"correct": 0.5})  # again: the last word counts
    session.reward(0.25, call=first.request_id)
    score = session.episode().score
    assert score.reward == 2 and score.parts == {"correct": 0.5}
    assert score.token_rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0]
    for value, options in (
        (float("nan"), {}),
        ("1", {}),
        (True, {"parts": {"correct": 2}}),
        (1, {"parts": {"a b": 1}}),
        (1, {"parts": {"mean": 1}}),
        (1, {"parts": {f"p{i}": 1 for i in range(65)}}),
        (1, {"call": "g5/m2/t9"}),
        (1, {"call": "nonsense"}),
        (1, {"call": first.request_id, "parts": {"x": 1}}),
    ):
        with pytest.raises(RolloutError):
            session.reward(value, **options)
    assert session.episode().score.reward == 2


def test_what_comes_after_a_stop_text_was_never_sampled():
    session = opened()
    done = sample(session, 1, cut=lambda ids: 2)
    assert len(done.token_ids) == 2 and done.stop is StopReason.EOS
    assert len(sample(session, 1, *done.token_ids, 5, cut=lambda ids: None).token_ids) == 3
    episode = session.episode()
    assert episode.starts == (0,) and episode.num_drawn == 5


@pytest.mark.parametrize("seed", range(6))
def test_threads_with_loops_of_their_own_and_an_end_lose_and_invent_no_call(seed):
    session, got, lock = opened(max_calls=10_000), [], threading.Lock()
    rng = random.Random(seed)
    begin = threading.Barrier(5)

    async def agent(choose):
        known = [[1]]
        while True:
            prompt = [*choose.choice(known), *choose.choices(range(1, 5), k=choose.randint(0, 2))]
            with contextlib.suppress(SessionLimit, TimeoutError):
                async with asyncio.timeout(choose.choice([0.0005, 5])):
                    done = await session.sample(np.array(prompt[:11]))
                with lock:
                    got.append((prompt[:11], done.token_ids.tolist()))
                known.append([*prompt[:11], *done.token_ids.tolist()][:10])

    def run(number):
        begin.wait()
        with pytest.raises(SessionEnded):
            asyncio.run(agent(random.Random(seed * 10 + number)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    begin.wait()
    while len(got) < 40:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.003)
    session.end("enough")
    for thread in threads:
        thread.join(10)
    episode = session.episode()
    # A call may have been recorded just before its caller's own time limit: never the reverse.
    recorded = calls_in(episode)
    for call in got:
        recorded.remove(call)
    counts = session.counts()
    assert counts.calls == episode.num_turns + counts.cancelled_calls
    assert len(recorded) <= 4 * 2 + counts.cancelled_calls


def calls_in(episode):
    """What each call saw and sampled, from the episode alone."""
    calls = []
    bounds = [*episode.starts, len(episode.token_ids)]
    for a, b in itertools.pairwise(bounds):
        tokens, mask = episode.token_ids[a:b].tolist(), episode.drawn[a:b]
        # every call samples three tokens, the last of which ends it, or is cut by the length
        start = 0
        while start < len(tokens):
            if not mask[start]:
                start += 1
                continue
            end = start
            while end < len(tokens) and mask[end]:
                end += 1
                if tokens[end - 1] == 0 or end == LIMITS.max_length:
                    break
            calls.append((tokens[:start], tokens[start:end]))
            start = end
    return calls


# ---- programs


def test_programs_play_members_of_a_group_each_with_a_session_of_its_own():
    sessions, policy = Sessions(), Policy()
    episodes, spent = played(programs(through(sessions), sessions=sessions), 3, policy)
    assert [e.num_turns for e in episodes] == [2, 2, 2] and sessions.all() == ()
    assert {r.key for r in policy.requests} == {(3, 0), (3, 1), (3, 2)}
    assert all(e.score == Score(reward=1.0) for e in episodes)
    assert len(spent) == 3 and all(0.02 <= s < 2 for s in spent)


def test_a_program_that_is_not_async_runs_in_a_thread():
    sessions = Sessions()

    def program(agent):
        assert threading.current_thread().name == "program-g5/m0"
        asyncio.run(sessions.find(agent.api_key).sample(np.array([1])))
        return {"correct": 1, "short": -0.5}

    ((episode,), _) = played(programs(program, sessions=sessions))
    assert episode.score.reward == 0.5 and episode.score.parts["correct"] == 1


def test_what_is_returned_replaces_the_reward_of_the_whole_and_none_keeps_it():
    sessions = Sessions()

    def saying(result):
        async def program(agent):
            session = sessions.find(agent.api_key)
            done = await session.sample(np.array([1]))
            session.reward(0.5, call=done.request_id)
            session.reward(7.0)
            return result

        ((episode,), _) = played(programs(program, sessions=sessions))
        return episode.score

    kept, replaced = saying(None), saying(2)
    assert kept.reward == 7 and replaced.reward == 2
    assert kept.token_rewards.tolist() == replaced.token_rewards.tolist() == [0, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("program", "error", "text", "counted"),
    [
        ("raises", RolloutError, "ValueError: no", {"failed_programs": 1}),
        ("exits", RolloutError, "SystemExit", {"failed_programs": 1}),
        ("cancels itself", RolloutError, "CancelledError", {"failed_programs": 1}),
        ("samples nothing", RolloutError, "no call sampled any token", {}),
        ("sleeps", RolloutTimeout, "0.05 s \\(abandoned\\)", {"session_timeouts": 1}),
        ("returns words", RolloutError, "finite number", {}),
    ],
)
def test_how_programs_fail(program, error, text, counted):
    sessions, counts = Sessions(), {}

    async def run(agent):
        session = sessions.find(agent.api_key)
        if program == "samples nothing":
            return 1.0
        await session.sample(np.array([1]))
        if program == "raises":
            raise ValueError("no")
        if program == "exits":
            sys.exit(0)
        if program == "cancels itself":
            raise asyncio.CancelledError
        if program == "sleeps":
            await asyncio.sleep(30)
        return "words"

    def count(name, number):
        counts[name] = counts.get(name, 0) + number

    with pytest.raises(error, match=text):
        played(programs(run, count, sessions, idle_s=0.05))
    assert counts == counted and sessions.all() == ()


@pytest.mark.parametrize(
    "error", [ValueError("no"), StopIteration(), SystemExit(0), asyncio.CancelledError()], ids=repr
)
def test_a_function_that_raises_in_its_thread_fails_at_once(error):
    def program(agent):
        raise error

    with pytest.raises(RolloutError, match=f"failed: .*{type(error).__name__}"):
        played(programs(program, total_s=20.0))


@pytest.mark.parametrize("swallows", [False, True])
def test_a_record_that_is_too_long_for_a_program_is_an_episode_without_an_answer(swallows):
    sessions, counts = Sessions(), {}

    async def program(agent):
        with contextlib.suppress(SessionLimit) if swallows else contextlib.nullcontext():
            await sessions.find(agent.api_key).sample(np.arange(1, 30))
        return 0.25

    ((episode,), _) = played(programs(program, counts.__setitem__, sessions))
    assert episode.token_ids.tolist() == list(range(1, 13)) and not episode.num_drawn
    assert episode.stop is StopReason.LENGTH
    assert episode.score is None or (swallows and episode.score.total == 0.25)
    exhausted = {"exhausted_sessions": 1, "long_openings": 1}
    assert counts == (exhausted if swallows else {"failed_programs": 1, **exhausted})


def test_a_program_gets_the_system_prompt_with_its_messages():
    received = []
    system = {"role": "system", "content": "be brief"}

    def messages_with(**change):
        sessions = Sessions()

        async def program(agent):
            received.append(agent.messages)
            await sessions.find(agent.api_key).sample(np.array([1]))

        made = programs(program, sessions=sessions)
        made.system_prompt = "be brief"
        played(made, prompt=replace(make_prompt(3), text="hi", **change))
        return received[-1]

    user, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    assert messages_with() == (system, user)
    assert messages_with(messages=(user, user)) == (system, user, user)
    assert messages_with(messages=(own, user)) == (own, user)


def test_a_limit_ends_the_episode_whatever_the_program_does_then():
    sessions, counts = Sessions(), {}
    made = programs(through(sessions, turns=9), counts.__setitem__, sessions, max_calls=2)
    ((episode,), _) = played(made)
    assert episode.num_turns == 2 and episode.stop is StopReason.LENGTH and episode.score is None
    assert counts == {"failed_programs": 1, "exhausted_sessions": 1}


def test_one_members_failure_ends_the_others_programs_and_sessions():
    sessions, asleep, ended = Sessions(), [], []

    async def program(agent):
        session = sessions.find(agent.api_key)
        await session.sample(np.array([1]))
        if session.member.index == 1:
            while len(asleep) < 2:
                await asyncio.sleep(0.001)
            raise ValueError("no")
        try:
            asleep.append(session.label)
            await asyncio.sleep(30)
        finally:
            ended.append(session.label)

    with pytest.raises(RolloutError, match="g5/m1 failed"):
        played(programs(program, sessions=sessions), members=3)
    assert sorted(ended) == ["g5/m0", "g5/m2"] and sessions.all() == ()


AGENT = """
import json, os, sys
expected = dict(OPENAI_BASE_URL="http://127.0.0.1:9/v1", ANTHROPIC_BASE_URL="http://127.0.0.1:9")
assert all(os.environ[k] == v for k, v in expected.items())
assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
assert json.loads(os.environ["JAXRL_RECORD"]) == {"a": 1}
with open(sys.argv[1], "w") as file:
    file.write(os.environ["OPENAI_API_KEY"])
while not os.path.exists(sys.argv[1] + ".go"):
    pass
print("the last words")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_finds_its_session_in_the_environment_and_its_exit_code_counts(tmp_path, code):
    sessions, key = Sessions(), tmp_path / "key"
    made = programs([sys.executable, "-c", AGENT, str(key), str(code)], sessions=sessions)
    prompt = make_prompt(3)
    object.__setattr__(prompt, "columns", {"a": 1})

    def endpoint():
        while not key.exists() or not key.read_text():
            time.sleep(0.01)
        session = sessions.find(key.read_text())
        asyncio.run(session.sample(np.array([1])))
        session.reward(0.5)
        (tmp_path / "key.go").touch()

    thread = threading.Thread(target=endpoint)
    thread.start()
    try:
        if code:
            with pytest.raises(RolloutError, match=r"exit code 3.*the last words"):
                played(made, prompt=prompt)
        else:
            ((episode,), _) = played(made, prompt=prompt)
            assert episode.score == Score(reward=0.5) and episode.num_turns == 1
    finally:
        thread.join(10)


@pytest.mark.parametrize("error", [ConnectionError("its server is away"), SystemExit(75)])
def test_a_program_whose_own_server_is_away_is_run_again(error, tmp_path):
    sessions, outages, begun = Sessions(), QuickOutages(known=True), []
    sample_through = through(sessions)

    async def program(agent):
        begun.append(agent.api_key)
        await sample_through(agent)
        if len(begun) < 3:
            raise error
        return 1.0

    if isinstance(error, SystemExit):  # of a command
        mark = tmp_path / "runs"
        code = "import sys; f = open(sys.argv[1], 'a+'); f.write('x'); f.seek(0); "
        code += "sys.exit(75 if len(f.read()) < 3 else 4)"
        made = programs([sys.executable, "-c", code, str(mark)], sessions=sessions)
        with pytest.raises(RolloutError, match="exit code 4"):
            played(made, outages=outages)
        assert mark.read_text() == "xxx"
    else:
        ((episode,), _) = played(programs(program, sessions=sessions), outages=outages)
        assert episode.score == Score(reward=1.0) and episode.num_turns == 2
        assert len(set(begun)) == 3, "each time with a session of its own"
    assert outages.counted["outage_retries"] == 2


def test_a_programs_own_time_limit_is_no_outage():
    outages = QuickOutages(known=True)

    async def program(agent):
        raise TimeoutError("the policy writes on and on")

    with pytest.raises(RolloutError, match="TimeoutError: the policy writes"):
        played(programs(program), outages=outages)
    assert not outages.counted


PARENT = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
child.wait()
"""


@pytest.mark.full
def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(RolloutTimeout, match=r"more than 1\.5 s"):
        played(programs([sys.executable, "-c", PARENT, str(pids)], total_s=1.5))
    left = pids.read_text().split()
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_alive(pid)]
    assert not left


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # killed, and its parent has yet to notice


def test_a_command_that_does_not_exist_and_one_of_no_words():
    with pytest.raises(RolloutError, match="'no-such-agent' is not found"):
        programs("no-such-agent --fast")
    with pytest.raises(RolloutError, match="at least one word"):
        programs([])


def test_a_record_that_no_command_can_receive_is_named():
    prompt = replace(make_prompt(3), columns={"document": "x" * 2**17})
    with pytest.raises(RolloutError, match=r"JAXRL_RECORD would have 131\d+ characters"):
        played(programs([sys.executable, "-c", "0"]), prompt=prompt)


def test_the_end_of_the_run_ends_the_programs_quietly():
    sessions = Sessions()

    async def program(agent):
        await sessions.find(agent.api_key).sample(np.array([1]))
        threading.Timer(0.02, sessions.close).start()
        await asyncio.sleep(30)

    with pytest.raises(Closed):
        played(programs(program, sessions=sessions))


def test_an_evaluation_plays_so_many_programs_at_once_in_order_and_those_that_fail_again():
    sessions, began, counted, open_at_once = Sessions(max_open=2), [], [], []

    async def program(agent):
        session = sessions.find(agent.api_key)
        began.append(session.member.prompt.prompt_id)
        open_at_once.append(len(sessions.all()))
        if began.count(session.member.prompt.prompt_id) == 1 and session.prompt.prompt_id % 3 == 1:
            raise OSError("flaky")
        await session.sample(np.array([1]))

    async def judge(episodes, prompt):
        return tuple(Score(reward=float(prompt.prompt_id)) for _ in episodes)

    def ask(**effort):
        return evaluate(
            Policy(),
            [make_prompt(i) for i in range(7)],
            judge,
            stop_token_ids=(0,),
            max_new_tokens=4,
            max_length=12,
            make_env=programs(program, sessions=sessions),
            effort=EvalEffort(at_once=2, backoff_s=0.0, count=counted.append, **effort),
        )

    result = asyncio.run(ask())
    assert result.num_prompts == 5 and result.mean_reward == 3.2, "prompts 1 and 4 are left out"
    assert counted == ["eval_left_out"] * 2
    began.clear()
    counted.clear()
    result = asyncio.run(ask(retries=1))
    assert result.num_prompts == 7 and result.mean_reward == 3.0
    assert counted == ["eval_retries"] * 2 and max(open_at_once) == 2
    assert [i for n, i in enumerate(began) if i not in began[:n]] == list(range(7))
    assert sorted(began) == [0, 1, 1, 2, 3, 4, 4, 5, 6]


def test_an_evaluation_plays_programs_too():
    sessions = Sessions()

    class Judge:
        async def __call__(self, episodes, prompt):
            return tuple(e.score for e in episodes)

    result = asyncio.run(
        evaluate(
            Policy(),
            [make_prompt(i) for i in range(3)],
            Judge(),
            stop_token_ids=(0,),
            max_new_tokens=4,
            max_length=12,
            make_env=programs(through(sessions), sessions=sessions),
        )
    )
    assert result.num_prompts == 3 and result.mean_reward == 1
