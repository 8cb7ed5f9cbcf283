"""Services that are away: environments, tools, judges, rewards and agents' own servers."""

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import threading
import time
import urllib.error
from email.message import Message as Headers

import httpx2
import numpy as np
import pytest
import requests
from outage_clock import QuickOutages
from rollout_rig import EchoGenerate, PositionScorer, ScriptedGate, make_loop
from runs import SMALL_JOB

import jaxrl_async as jr
from jaxrl_async.errors import (
    BadEndpoint,
    OutageTooLong,
    Preempted,
    RetriesExhausted,
    RolloutError,
    RolloutTimeout,
    Unavailable,
)
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.outages import CALL_S, FIRST_S, ONE_PROMPT_S, Outages, duration_text, time_limit
from jaxrl_async.ports.rollout import Reply
from jaxrl_async.rollout.evaluate import EvalEffort, evaluate
from jaxrl_async.scorers.guard import GuardedScorer, try_once
from jaxrl_async.tasks import usercode
from jaxrl_async.tasks.toolbox import Toolbox, ToolLimits
from jaxrl_async.tasks.usercode import Threads, run_async, side_by_side
from jaxrl_async.types import Prompt
from jaxrl_async.unavailable import names_unavailable, retry_wait_s, unavailable_cause

URL = "http://x.example/v1"


def answer(status, **headers):
    return httpx2.Response(status, headers=headers, request=httpx2.Request("POST", URL))


def http_error(status, **headers):
    try:
        answer(status, **headers).raise_for_status()
    except httpx2.HTTPStatusError as error:
        return error


def of_requests(status):
    reply = requests.Response()
    reply.status_code = status
    return requests.HTTPError("x", response=reply)


def caused(error, cause):
    error.__cause__ = cause
    return error


class Status(Exception):
    """As of openai, aiohttp and others."""

    def __init__(self, **fields):
        super().__init__("x")
        self.__dict__ |= fields


AWAY = [
    ConnectionError("x"),
    ConnectionRefusedError(errno.ECONNREFUSED, "x"),
    TimeoutError(),
    OSError("server away"),
    OSError(errno.EHOSTUNREACH, "x"),
    socket.gaierror(socket.EAI_AGAIN, "x"),
    ssl.SSLEOFError(8, "x"),
    httpx2.ConnectError("x"),
    httpx2.ReadTimeout("x"),
    *(http_error(status) for status in (408, 429, 500, 502, 503, 504, 529)),
    requests.ConnectionError("x"),
    requests.Timeout("x"),
    of_requests(503),
    urllib.error.URLError(ConnectionRefusedError()),
    urllib.error.HTTPError(URL, 503, "x", Headers(), None),
    Status(status_code=429),
    Status(status=502),
    caused(RuntimeError("the sandbox does not start"), ConnectionError("x")),
    caused(RolloutError("x"), caused(ValueError("x"), TimeoutError())),
    ExceptionGroup("x", [ConnectionError("x"), httpx2.ReadError("x")]),
    Unavailable("x"),
]
NOT_AWAY = [
    TypeError("x"),
    KeyError("x"),
    FileNotFoundError(errno.ENOENT, "x"),
    FileNotFoundError("x"),
    PermissionError("x"),
    OSError(errno.ENOSPC, "x"),
    OSError(errno.EMFILE, "x"),
    *(http_error(status) for status in (400, 401, 403, 404, 422)),
    of_requests(404),
    requests.exceptions.MissingSchema("x"),
    requests.exceptions.InvalidURL("x"),
    httpx2.UnsupportedProtocol("x"),
    ssl.SSLCertVerificationError(1, "x"),
    urllib.error.HTTPError(URL, 404, "x", Headers(), None),
    Status(status_code=400),
    caused(http_error(404), ConnectionError("x")),
    RolloutTimeout("a limit of ours"),
    BadEndpoint("x"),
    SystemExit(503),
    KeyboardInterrupt(),
    ExceptionGroup("x", [ConnectionError("x"), TypeError("x")]),
    None,
]


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_a_service_that_is_away_is_known_by_what_its_client_raises(error):
    assert unavailable_cause(error) is not None


@pytest.mark.parametrize("error", NOT_AWAY, ids=repr)
def test_what_will_not_pass_is_no_outage(error):
    assert unavailable_cause(error) is None


def test_an_exception_in_words_is_known_by_its_name():
    assert names_unavailable("ToolsetError: serve: ConnectError: all connection attempts failed")
    assert not names_unavailable("TaskError: KeyError: 'x'")


def test_retry_after_is_read_of_any_client():
    assert retry_wait_s(http_error(429, **{"Retry-After": "7"})) == 7
    assert retry_wait_s(Unavailable("x", 3.0)) == 3 and retry_wait_s(ConnectionError()) is None
    headers = Headers()
    headers["Retry-After"] = "12"
    assert retry_wait_s(urllib.error.HTTPError(URL, 503, "x", headers, None)) == 12
    assert retry_wait_s(http_error(429, **{"Retry-After": "999999"})) == 3600


# ---- one call


async def beside_another(outages, who, attempt):
    """Make a call while one of another prompt fails, too."""

    async def fails():
        raise ConnectionError("of another prompt")

    other = asyncio.ensure_future(outages.until_answered(who, fails, about="another"))
    try:
        return await outages.until_answered(who, attempt, about="this")
    finally:
        other.cancel()


def failing(*errors):
    """Return an attempt that raises these, and then gives 5; None among them: it gives 5."""
    left = list(errors)

    async def attempt():
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return 5

    return attempt


def test_a_call_is_made_again_with_growing_waits_and_retry_after_is_kept():
    outages = QuickOutages()
    outages.answered("the judge")
    errors = [*[ConnectionError("x")] * 8, http_error(429, **{"Retry-After": "90"})]
    assert asyncio.run(beside_another(outages, "the judge", failing(*errors))) == 5
    waits = [1, 2, 4, 8, 16, 32, 60, 60, 90]
    assert [wait for wait in outages.waits if wait in waits[:7]][:14] == sorted(2 * waits[:7])
    assert outages.waits.count(90) == 1 and outages.counted["outage_retries"] >= 18
    assert outages.total_s() == pytest.approx(273, abs=9) and not outages.active


def test_ten_minutes_are_waited_out_and_told_once_a_minute():
    outages, lines = QuickOutages(), []
    outages.reported = True
    outages.answered("the judge")

    async def away():
        lines.extend((outages.clock.now_s, line) for line in outages.reports())
        if outages.clock.now_s < 600:
            raise ConnectionError("refused")
        return 5

    async def watched():
        call = asyncio.ensure_future(beside_another(outages, "the judge", away))
        while not call.done():
            lines.extend((outages.clock.now_s, line) for line in outages.reports())
            await asyncio.sleep(0)
        return await call

    assert asyncio.run(watched()) == 5
    times = [at for at, _ in lines]
    assert 9 <= len(lines) <= 11 and min(np.diff(times)) >= 60
    first = lines[0][1]
    assert "the judge has been away since" in first and "ConnectionError: refused" in first
    assert ("faults.outage_s" in first and "10 min" in lines[-1][1]) or "9 min" in lines[-1][1]


def test_waits_differ_so_that_calls_do_not_come_back_at_once():
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def go():
        outages = Outages(sleep=sleep)
        outages.answered("x")
        for _ in range(20):
            await outages.until_answered("x", failing(ConnectionError()))

    asyncio.run(go())
    assert len(set(waits)) > 10 and min(waits) >= 0.75 and max(waits) <= 1.25


def test_a_server_that_never_existed_fails_fast_and_says_so():
    outages = QuickOutages()
    with pytest.raises(OutageTooLong, match=r"not answered once.*its address is right"):
        asyncio.run(outages.until_answered("the judge", failing(*[ConnectionError("x")] * 99)))
    assert outages.clock.now_s <= 2 * FIRST_S and not outages.active


def test_a_resumed_run_waits_for_a_server_that_the_earlier_one_knew():
    outages = QuickOutages(known=True)
    attempt = failing(*[ConnectionError("x")] * 9)
    assert asyncio.run(beside_another(outages, "the judge", attempt)) == 5


def test_without_a_reporter_each_outage_is_logged_each_minute(caplog):
    outages = QuickOutages(known=True)
    attempt = failing(*[ConnectionError("x")] * 12)
    with caplog.at_level(logging.WARNING):
        asyncio.run(beside_another(outages, "the judge", attempt))
    told = [r.getMessage() for r in caplog.records if "has been away since" in r.getMessage()]
    assert 5 <= len(told) <= 9 and "is back after" in caplog.text


def test_a_setting_ends_a_run_after_its_time():
    outages = QuickOutages(longest_s=300.0)
    outages.answered("the judge")
    with pytest.raises(OutageTooLong, match=r"faults\.outage_s \(300\).*--resume"):
        attempt = failing(*[ConnectionError("x")] * 99)
        asyncio.run(beside_another(outages, "the judge", attempt))
    assert 300 <= outages.clock.now_s <= 400


def test_a_bug_is_raised_at_once():
    outages = QuickOutages()
    with pytest.raises(TypeError):
        asyncio.run(outages.until_answered("x", failing(TypeError("x"))))
    assert not outages.waits and not outages.counted


@pytest.mark.parametrize("others", ["meanwhile", "just after", "never"])
def test_a_call_that_alone_fails_is_given_up_and_not_the_run(others):
    outages = QuickOutages()
    outages.answered("x")

    async def go():
        bad = asyncio.ensure_future(
            outages.until_answered("x", failing(*[TimeoutError()] * 99), about=1)
        )
        await asyncio.sleep(0)
        outages.clock.advance(0.1)
        while not bad.done():
            if others != "never":
                await outages.until_answered("x", failing(), about=2)
            if others == "just after":
                return await bad
            await asyncio.sleep(0.001)
        return await bad

    with pytest.raises(RetriesExhausted, match="TimeoutError"):
        asyncio.run(go())
    assert outages.clock.now_s <= (ONE_PROMPT_S + 65 if others == "never" else 35)


@pytest.mark.full
def test_calls_of_several_prompts_wait_for_longer_than_one_alone():
    outages = QuickOutages()
    outages.answered("x")

    async def go():
        calls = (
            outages.until_answered("x", failing(*[TimeoutError()] * 99), about=n) for n in range(3)
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(e, RetriesExhausted) for e in asyncio.run(go()))
    assert outages.clock.now_s >= CALL_S


@pytest.mark.full
def test_an_outage_puts_off_the_time_limits_round_it_on_other_loops_too():
    async def sleep(seconds):
        await asyncio.sleep(0.3)  # longer than the limit

    outages = Outages(sleep=sleep)
    outages.answered("x")

    async def inner():
        return await outages.until_answered("x", failing(*[ConnectionError()] * 3))

    async def go():
        async with time_limit(0.2):
            return (await run_async(inner, 0.2)).get()

    assert asyncio.run(asyncio.wait_for(go(), 20)) == 5

    async def late():
        async with time_limit(0.05):
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        asyncio.run(late())


@pytest.mark.parametrize("turns", range(8))
def test_a_run_that_ends_in_the_moment_in_which_calls_fail_ends(turns):
    """Before, a cancellation between the failure of a task and the end of its group was lost."""

    async def go():
        outages = QuickOutages(known=True)
        answers = asyncio.get_running_loop().create_future()

        async def call():
            await answers
            raise ConnectionError("gone")

        def attempt():
            return side_by_side([call(), call()])

        waiting = asyncio.ensure_future(outages.until_answered("the reward", attempt))
        await asyncio.sleep(0.01)
        answers.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        return waiting.cancelled()

    assert asyncio.run(go())


def test_what_runs_side_by_side_leaves_no_count_of_cancellations():
    async def fails(error):
        raise error

    async def go():
        with pytest.raises(KeyError):
            await side_by_side([asyncio.sleep(9), fails(KeyError()), fails(ValueError())])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(9)
        assert await side_by_side([]) == []
        assert await side_by_side([asyncio.sleep(0.01, 1), asyncio.sleep(0, 2)]) == [1, 2]
        return asyncio.current_task().cancelling()

    assert asyncio.run(go()) == 0


def test_rollouts_whose_tasks_lose_a_cancellation_are_cancelled_again(monkeypatch):
    monkeypatch.setattr(usercode, "CANCEL_AGAIN_S", 0.05)
    lost = []

    class Deaf:
        def __init__(self, prompt):
            pass

        async def step(self, prompt, completion):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost.append(1)
            await asyncio.sleep(60)

    async def go():
        run = asyncio.ensure_future(make_loop(ScriptedGate(2), make_env=Deaf).run())
        await asyncio.sleep(0.1)
        run.cancel()
        await asyncio.wait([run], timeout=5)
        return run.cancelled()

    assert asyncio.run(go()) and lost


# ---- who makes calls


class Server:
    """Is away from its `first` call on until it has refused so many."""

    def __init__(self, first, refuses, error=None):
        error = error or ConnectionError("server away")
        self.asked, self.first, self.refuses, self.error = 0, first, refuses, error

    def ask(self):
        self.asked += 1
        if self.first <= self.asked < self.first + self.refuses:
            raise self.error


@pytest.mark.parametrize("error", [ConnectionError("x"), TimeoutError(), http_error(503)], ids=repr)
def test_episodes_in_flight_in_an_outage_are_played_again_with_the_same_prompts(error):
    server = Server(5, 20, error)

    class Remote:
        def __init__(self, prompt):
            self.prompt = prompt

        async def step(self, prompt, completion):
            server.ask()
            return Reply(token_ids=np.zeros(0, np.int32), done=True)

    outages = QuickOutages()
    gate = ScriptedGate(4, 4)
    asyncio.run(make_loop(gate, make_env=Remote, outages=outages, max_failures=2).run())
    assert not gate.failed
    assert sorted(g.prompt.position for g in gate.put_groups) == list(range(8))
    assert outages.counted["outage_retries"] >= 20 and not outages.active


def test_an_outage_changes_no_request():
    """The same prompt, member and position: the same random numbers."""
    calls = []
    for refuses in (0, 3):
        server = Server(1, refuses)

        class Remote:
            def __init__(self, prompt):
                pass

            async def step(self, prompt, completion, server=server):
                server.ask()
                return Reply(token_ids=np.zeros(0, np.int32), done=True)

        generate, outages = EchoGenerate(), QuickOutages()
        outages.answered("the environment")
        loop = make_loop(ScriptedGate(2), generate, make_env=Remote, outages=outages)
        asyncio.run(loop.run())
        calls.append({one for call in generate.calls for one in call})
    assert calls[0] == calls[1]


def test_rewards_wait_for_an_outage_and_a_bug_ends_the_run():
    server = Server(3, 10, http_error(429, **{"Retry-After": "3"}))

    class Remote(PositionScorer):
        async def __call__(self, episodes, prompt):
            server.ask()
            return await super().__call__(episodes, prompt)

    outages, gate = QuickOutages(), ScriptedGate(4, 4)
    scorer = GuardedScorer(Remote(), timeout_s=5, outages=outages)
    asyncio.run(make_loop(gate, scorer=scorer, max_failures=2).run())
    assert not gate.failed and len(gate.put_groups) == 8 and min(outages.waits) >= 3
    scorer = GuardedScorer(Server(0, 0).ask, timeout_s=5, outages=QuickOutages())
    loop = make_loop(ScriptedGate(*[1] * 40), scorer=scorer, max_failures=3)
    with pytest.raises(RolloutError, match=r"3 groups failed in a row.*TypeError"):
        asyncio.run(asyncio.wait_for(loop.run(), 30))


def test_held_out_episodes_wait_as_those_for_training_do():
    server = Server(2, 30)

    class Remote:
        def __init__(self, prompt):
            pass

        async def step(self, prompt, completion):
            server.ask()
            return Reply(token_ids=np.zeros(0, np.int32), done=True)

    outages = QuickOutages()
    outages.knows("the environment")
    prompts = [
        Prompt(prompt_id=i, token_ids=np.array([1, 2], np.int32), text="", reference="", position=i)
        for i in range(4)
    ]
    result = asyncio.run(
        evaluate(
            EchoGenerate(),
            prompts,
            PositionScorer(),
            stop_token_ids=(0,),
            max_new_tokens=4,
            max_length=10,
            make_env=Remote,
            effort=EvalEffort(outages=outages),
        )
    )
    assert result.num_prompts == 4 and result.mean_reward == 1.5


def fetch_of(server, bad):
    """Return a tool whose addresses of `bad` raise its exception; others ask the server."""

    def fetch(url: str) -> str:
        """Fetch a page."""
        if url.startswith("bad"):
            raise bad
        server.ask()
        return "page"

    return fetch


def fetches(*urls, server=None, bad=None, outages=None, side_by_side=False):
    """Return what the policy is told of each call, and the outages."""
    outages = outages or QuickOutages()
    tool = fetch_of(server or Server(0, 0), bad)

    async def go():
        box = Toolbox([tool], Threads(16), ToolLimits(), outages=outages)
        asked = [{"function": {"name": "fetch", "arguments": {"url": url}}} for url in urls]
        groups = [asked] if side_by_side else [[one] for one in asked]
        return [
            m["content"] for g in groups for m in await box({"role": "assistant", "tool_calls": g})
        ]

    return asyncio.run(go()), outages


REFUSED = [
    ConnectionRefusedError(errno.ECONNREFUSED, "x"),
    ConnectionError("no server"),
    Unavailable("x", 1.0),
    http_error(429),
    http_error(503),
    Status(status=503),
    httpx2.ConnectError("x"),
    urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "x")),
    urllib.error.HTTPError(URL, 503, "x", Headers(), None),
    caused(RuntimeError("x"), ConnectionRefusedError("x")),
]
NOT_TAKEN_BACK = [
    socket.gaierror(socket.EAI_NONAME, "x"),
    caused(httpx2.ConnectError("x"), socket.gaierror(socket.EAI_NONAME, "x")),
    requests.ConnectionError(socket.gaierror(socket.EAI_AGAIN, "x")),
    urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "x")),
    TimeoutError(),
    httpx2.ReadTimeout("x"),
    httpx2.ConnectTimeout("x"),
    requests.Timeout("x"),
    ConnectionResetError(errno.ECONNRESET, "x"),
    BrokenPipeError(errno.EPIPE, "x"),
    httpx2.RemoteProtocolError("x"),
    http_error(500),
    http_error(504),
    http_error(404),
]


@pytest.mark.parametrize("error", REFUSED, ids=repr)
def test_a_tool_whose_service_did_not_take_the_call_is_called_twice_more(error):
    (said,), outages = fetches("good", server=Server(1, 2, error))
    assert said == "page" and outages.counted["outage_retries"] == 2
    said, outages = fetches("good", "bad", bad=error)
    assert said[0] == "page" and said[1].startswith(f"error: fetch: {type(error).__name__}")
    assert outages.counted["outage_retries"] == 2 and outages.clock.now_s <= 20


@pytest.mark.parametrize("error", NOT_TAKEN_BACK, ids=repr)
def test_a_tool_that_may_have_acted_or_has_a_made_up_address_is_not_called_again(error):
    (_, said), outages = fetches("good", "bad", bad=error)
    assert said.startswith("error: fetch: ") and not outages.waits and not outages.counted


def test_tools_with_bad_addresses_hold_no_turn_up_for_long():
    """Before, one waited for 126 s, and eight at once for ten minutes."""
    error = ConnectionRefusedError(errno.ECONNREFUSED, "x")
    outages = QuickOutages()
    fetches("good", bad=error, outages=outages)
    fetches(*[f"bad{i}" for i in range(8)], bad=error, outages=outages, side_by_side=True)
    assert outages.clock.now_s <= 40 and not outages.active
    (said,), outages = fetches("bad", bad=http_error(429, **{"Retry-After": "3000"}))
    assert "HTTPStatusError" in said and not outages.waits


# ---- an outage that is over for some calls


def test_calls_that_wait_as_they_were_asked_to_count_while_others_are_answered():
    """Before, an outage was over with the first answer, and the watchdog blamed the scorer."""
    naps = []

    async def sleep(seconds):
        naps.append(seconds)
        await gate.wait()

    gate = asyncio.Event()
    outages = Outages(sleep=sleep, known=True)
    outages.reported = True

    async def go():
        asked = failing(Unavailable("429", 3000.0))
        waits = asyncio.ensure_future(outages.until_answered("the reward", asked, about=1))
        await asyncio.sleep(0)
        first = outages.reports()
        assert await outages.until_answered("the reward", failing(), about=2) == 5
        outages._reported_s.clear()  # a minute later
        over, away, total_s = outages.reports(), outages.active, outages.total_s()
        await asyncio.sleep(0.02)
        assert outages.total_s() == total_s  # the service is there
        gate.set()
        assert await waits == 5 and not outages.active and not outages.reports()
        return first, over, away

    first, over, away = asyncio.run(go())
    assert naps == [3000] and away and "has been away since" in first[0]
    assert (
        over[0].startswith("the reward answers again")
        and "wait: 1, the newest for 50 min" in (over[0])
    )


def test_an_outage_that_begins_anew_while_a_call_waits_is_counted_from_there():
    outages = QuickOutages(known=True, longest_s=100.0)
    outages.reported = True
    left = [ConnectionError("x")]

    async def long_wait():
        if left:
            raise Unavailable("429", left.pop() and 1000.0)
        return 5

    async def go():
        waits = asyncio.ensure_future(outages.until_answered("x", long_wait, about=1))
        await asyncio.sleep(0.005)
        assert await outages.until_answered("x", failing(), about=2) == 5
        outages.clock.advance(500.0)
        assert await outages.until_answered("x", failing(ConnectionError("x")), about=3) == 5
        waits.cancel()

    asyncio.run(go())
    assert outages.counted["outages"] == 2


@pytest.mark.full
@pytest.mark.parametrize("longest_s", [3.0, 600.0, 3600.0])
def test_the_end_that_is_set_holds_for_the_first_contact_too(longest_s):
    """As of a judge's server that loads its model while the run begins."""
    outages = QuickOutages(longest_s=longest_s)
    with pytest.raises(OutageTooLong, match=r"not answered once.*faults\.outage_s waits for lon"):
        asyncio.run(outages.until_answered("the judge", failing(*[ConnectionError("x")] * 99)))
    assert longest_s <= outages.clock.now_s <= longest_s + 65


def test_a_reward_that_is_away_at_the_start_is_no_error_of_the_configuration():
    class Gone(PositionScorer):
        async def __call__(self, episodes, prompt):
            raise ConnectionError("refused")

    scorer = GuardedScorer(Gone(), timeout_s=5, outages=QuickOutages())
    prompt = Prompt(prompt_id=0, token_ids=np.ones(2, np.int32), text="", reference="", position=0)
    with pytest.raises(OutageTooLong, match=r"reward\.function, tried.*not answered once"):
        try_once(scorer, prompt, lambda text: np.zeros(0, np.int32), "reward.function")


def test_durations_are_for_people():
    seconds = [0.0, 0.0501, 0.762, 1.5, 9.04, 31.2, 119.6, 126.0, 12240.0]
    assert [duration_text(s) for s in seconds] == [
        *["less than 1 s"] * 3,
        *["1.5 s", "9 s", "31 s", "120 s", "2 min", "3.4 h"],
    ]
    outages = QuickOutages(known=True, backoff_first_s=0.762)
    outages.reported, told = True, []

    async def go():
        attempt = failing(*[ConnectionError("y")] * 3)
        waits = asyncio.ensure_future(outages.until_answered("x", attempt))
        await asyncio.sleep(0)
        told.extend(outages.reports())
        waits.cancel()

    asyncio.run(go())
    assert "(0" not in told[0] and "each made again every 1 s;" in told[0]


# ---- failures in a row


def test_groups_in_flight_when_one_fails_are_no_failures_in_a_row():
    """Before, eight groups of one moment were eight in a row."""
    gate = ScriptedGate(12, 2)
    scorer = PositionScorer(broken=range(12))
    asyncio.run(make_loop(gate, scorer=scorer, max_failures=2).run())
    assert len(gate.failed) == 12 and len(gate.put_groups) == 2


class OneAtATime(ScriptedGate):
    """Gives the next ticket once the last one is back; `at` has the time of each."""

    def __init__(self, *bursts, clock):
        super().__init__(*bursts)
        self.clock, self.at = clock, []

    def admit(self, timeout_s=None):
        if len(self.put_groups) + len(self.failed) < self.given:
            self.clock.advance(0.5)
            return ()
        tickets = super().admit(timeout_s)
        self.at += [self.clock.now_s] * bool(tickets)
        return tickets


def test_after_a_failure_the_next_ticket_waits_twice_as_long_each_time():
    outages, begun = QuickOutages(), []
    gate = OneAtATime(*[1] * 8, clock=outages.clock)
    loop = make_loop(
        gate,
        scorer=PositionScorer(broken=range(1, 7)),
        begins=lambda ticket, prompt: begun.append(outages.clock.now_s),
        clock=outages.clock,
    )
    asyncio.run(loop.run())
    assert len(gate.failed) == 6 and len(gate.put_groups) == 2
    waits = np.diff(begun)[1:7]
    assert all(2**n <= wait <= 2**n + 2 for n, wait in enumerate(waits))


def test_before_the_first_success_a_bug_ends_the_run_without_a_wait():
    outages = QuickOutages()
    gate = OneAtATime(*[1] * 20, clock=outages.clock)
    loop = make_loop(gate, scorer=PositionScorer(broken=range(99)), clock=outages.clock)
    with pytest.raises(
        RolloutError, match="8 groups failed in a row, each started after the previous"
    ):
        asyncio.run(loop.run())
    assert outages.clock.now_s < 60 and len(gate.failed) == 7


# ---- whole runs

SMALL = {**SMALL_JOB, "faults": {"backoff_s": 0.2, "watchdog_s": 60.0}}


class RemoteReward:
    """A reward that is away from its call `first` on, for so many seconds."""

    def __init__(self, first, away_s, told=lambda: None):
        self.asked, self.first, self.away_s, self.told, self.since = 0, first, away_s, told, None

    def __call__(self, completion):
        self.asked += 1
        if self.asked >= self.first and self.since is None:
            self.since = time.monotonic()
            self.told()
        if self.since is not None and time.monotonic() - self.since < self.away_s:
            raise ConnectionError("server away")
        return float(len(completion) % 3)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_waits_for_a_reward_that_is_away_and_makes_every_step(tmp_path, capsys):
    config = {**SMALL, "run": {"dir": str(tmp_path), "steps": 4}}
    run = jr.train(reward=RemoteReward(20, 4.0), config=config)
    lines = read_lines(run.path / "metrics.jsonl")
    assert [line["step"] for line in lines][-1] == 4
    assert sum(line.get("faults/outage_s", 0) for line in lines) >= 3
    assert not sum(line.get("faults/failed_groups", 0) for line in lines)
    shown = capsys.readouterr()
    assert "waiting: the reward has been away since" in shown.out


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("every", [0, 1], ids=["training", "evaluating"])
def test_a_stop_during_an_outage_saves_and_ends_as_usual(tmp_path, number, every):
    def stop():
        threading.Timer(2.0, lambda: os.kill(os.getpid(), number)).start()

    config = {**SMALL, "run": {"dir": str(tmp_path), "steps": 40}, "eval": {"every": every}}
    reward = RemoteReward(26, 10_000.0, stop)
    try:
        jr.train(reward=reward, config=config)
        ended = signal.SIGINT
    except Preempted:
        ended = signal.SIGTERM
    assert ended == number and time.monotonic() - reward.since < 60
    assert any((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.full
@pytest.mark.exhaustive
def test_an_end_of_outages_that_is_set_ends_the_run_saved(tmp_path):
    config = {**SMALL, "run": {"dir": str(tmp_path), "steps": 40}}
    config["faults"] = {**SMALL["faults"], "outage_s": 3.0}
    with pytest.raises(OutageTooLong, match=r"has been away for.*faults\.outage_s \(3\)"):
        jr.train(reward=RemoteReward(20, 10_000.0), config=config)
    assert any((tmp_path / "run/checkpoints").iterdir())
