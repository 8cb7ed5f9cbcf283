"""Runs that would draw for ever: groups without a signal, pairs that never come, callers that keep
the run; and slow ones, which are no stall."""

import asyncio
import io
import logging
import time
from dataclasses import replace

import numpy as np
import pytest
from outage_clock import QuickOutages
from rollout_rig import prompts
from runs import SMALL_JOB

import jaxrl_async as jr
from jaxrl_async.buffer.contents import BufferStats
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import StalledError, TrainingError
from jaxrl_async.metrics.console import Console
from jaxrl_async.run.builders.observers import count_rejected, within_limits
from jaxrl_async.run.builders.rollouts import buffer_settings
from jaxrl_async.run.watchdog import FLOOD, Notices, Reading, Watchdog
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.types import Drop, Episode, EpisodeGroup, Score, StopReason

# ---- groups without a signal


def finished(ticket, *rewards):
    two = np.zeros(2, np.int32)
    episode = Episode(
        token_ids=two,
        drawn=np.array([False, True]),
        logprobs=two.astype(np.float32),
        versions=np.array([-1, 0], np.int32),
        stop=StopReason.EOS,
    )
    return EpisodeGroup(
        prompt=next(prompts()),
        episodes=(episode,) * len(rewards),
        scores=tuple(Score(reward=r) for r in rewards),
        ticket=ticket,
    )


def differs(group):
    return len({score.total for score in group.scores}) > 1


def fill(buffer, *rewards, groups):
    """Hand in so many groups with these rewards."""
    fates = []
    while len(fates) < groups:
        fates += [buffer.put(finished(ticket, *rewards)) for ticket in buffer.admit()]
    return fates


@pytest.mark.parametrize(
    ("wanted", "groups", "steps"), [(1, 128, 128), (2, 128, 64), (16, 160, 10), (20, 200, 10)]
)
def test_ten_steps_worth_and_128_groups_without_a_signal_end_a_run_by_default(
    wanted, groups, steps
):
    settings = BufferSettings(groups_per_step=wanted, max_staleness=0, has_signal=differs)
    buffer = ReplayBuffer(settings)
    short = (groups - 1) // wanted * wanted  # groups come in bursts of a step
    assert set(fill(buffer, 1.0, 1.0, groups=short)) == {Drop.NO_SIGNAL}
    with pytest.raises(TimeoutError):
        buffer.draw(0, 0.01)
    fill(buffer, 1.0, 1.0, groups=wanted)
    with pytest.raises(TrainingError, match=f" groups in a row, {steps} steps' worth.*are 1 to 1"):
        buffer.draw(0, 0.01)


def test_groups_without_a_signal_are_left_to_their_own_limit():
    """Before, max_resampled=0, "no limit", was one of ten steps' worth in faults.watchdog_s."""
    assert count_rejected({"no_signal": 500, "stale": 3, "failed": 4}) == 7


def test_one_group_with_a_signal_begins_the_count_anew():
    buffer = ReplayBuffer(BufferSettings(groups_per_step=2, max_staleness=0, has_signal=differs))
    fill(buffer, 0.0, 0.0, groups=126)
    (first, second) = buffer.admit()
    assert buffer.put(finished(first, 0.0, 1.0)) is None
    assert buffer.put(finished(second, 0.0, 0.0)) is Drop.NO_SIGNAL
    fill(buffer, 0.0, 0.0, groups=126)
    with pytest.raises(TimeoutError):
        buffer.draw(0, 0.01)
    assert buffer.stats().without_signal == 127


def test_0_is_no_limit_and_the_default_of_the_settings_is_ten_steps_worth():
    assert buffer_settings(Config(), 1).max_resampled is None
    settings = BufferSettings(
        groups_per_step=1, max_staleness=0, has_signal=differs, max_resampled=0
    )
    buffer = ReplayBuffer(settings)
    fill(buffer, 0.0, 0.0, groups=200)
    with pytest.raises(TimeoutError):
        buffer.draw(0, 0.01)


def test_each_steps_worth_of_dropped_groups_is_told_once_on_the_console_and_in_the_log(caplog):
    shown = []
    readings = [0, 3, 4, 7, 8, 0, 4]

    def read():
        return BufferStats(
            capacity=4,
            active=0,
            in_flight=0,
            ready=0,
            admitted=0,
            trained=0,
            dropped={},
            without_signal=readings.pop(0),
            no_signal="no pair; the last rewards are 0 to 0",
        )

    notices = Notices(QuickOutages(), read, shown.append, groups_per_step=4)
    with caplog.at_level(logging.WARNING):
        while readings:
            notices.look()
    assert [line.split()[0] for line in shown] == ["4", "8", "4"]
    assert all("no pair; the last rewards are 0 to 0" in line for line in shown)
    assert [r.getMessage() for r in caplog.records] == shown


@pytest.mark.parametrize("live", [False, True])
def test_what_the_run_waits_for_is_shown_once(live, caplog):
    """Before, a plain console printed each line next to the log's warning."""
    stream = io.StringIO()
    console = Console(3, stream=stream, live=live)
    outages = QuickOutages(known=True)

    async def away():
        raise ConnectionError("gone")

    async def go():
        waits = asyncio.ensure_future(outages.until_answered("the reward", away))
        await asyncio.sleep(0)
        counts = dict.fromkeys(
            ("capacity", "active", "in_flight", "ready", "admitted", "trained"), 0
        )
        stats = BufferStats(**counts, dropped={})
        Notices(outages, lambda: stats, console.notice, groups_per_step=4).look()
        waits.cancel()

    outages.reported = True
    with caplog.at_level(logging.INFO):
        asyncio.run(go())
    console.close()
    levels = [r.levelno for r in caplog.records if "has been away" in r.getMessage()]
    assert levels == [logging.WARNING if live else logging.INFO]
    assert live or stream.getvalue().count("waiting: the reward has been away since") == 1


# ---- the watchdog


HOUR = 3600.0
DRAWING = Reading(
    trainer="waiting for groups", requests=8, playing=2, slots_free=0, groups_per_step=4
)


def watched(tmp_path, readings, *, limit_s=1800.0, look_s=90.0):
    """Look at these readings, one each 90 s; return the seconds that passed."""
    clock, left = VirtualClock(), list(readings)
    dog = Watchdog(lambda: left[0], limit_s=limit_s, stacks=tmp_path / "stacks.txt", clock=clock)
    while left:
        dog.look()
        left.pop(0)
        clock.advance(look_s)
    return clock.now_s


def test_groups_that_are_drawn_and_dropped_are_no_progress(tmp_path):
    """Before, blocks and dropped groups were progress."""
    flood = [replace(DRAWING, blocks=100 * i, rejected=50 * i) for i in range(100)]
    with pytest.raises(StalledError, match=r"1000 groups were dropped or failed, and none was acc"):
        watched(tmp_path, flood)
    assert "none was accepted" in (tmp_path / "stacks.txt").read_text()


SLOW = {
    "a long first generation": [replace(DRAWING, blocks=i) for i in range(200)],
    "programs are compiled, one after another": [
        replace(DRAWING, compiled=i // 10) for i in range(200)
    ],
    "slow groups, each dropped": [
        replace(DRAWING, blocks=i, rejected=i * FLOOD * 4 // 201) for i in range(200)
    ],
    "one in a thousand accepted": [
        replace(DRAWING, blocks=i, rejected=100 * i, accepted=i // 15) for i in range(200)
    ],
    "a long evaluation": [
        replace(DRAWING, trainer="evaluating", blocks=i, rejected=99 * i) for i in range(200)
    ],
    "a slow reward within its limit": [
        replace(DRAWING, requests=0, score_s=90.0 * i, within_limits=True) for i in range(200)
    ],
    "an outage": [replace(DRAWING, outage=True)] * 200,
    "the caller thinks": [replace(DRAWING, with_caller=True)] * 200,
}


@pytest.mark.parametrize("readings", SLOW.values(), ids=SLOW.keys())
def test_what_is_slow_is_no_stall(tmp_path, readings):
    assert watched(tmp_path, readings) > 4 * HOUR


def test_a_stall_after_an_outage_is_found_and_the_outage_does_not_count(tmp_path):
    still = [replace(DRAWING, outage=True)] * 100 + [DRAWING] * 19
    watched(tmp_path, still)
    with pytest.raises(StalledError, match="stuck part: sampler"):
        watched(tmp_path, [*still, DRAWING, DRAWING, DRAWING])


def test_a_stale_loop_whose_ready_groups_come_and_go_is_no_progress(tmp_path):
    loop = [
        replace(DRAWING, blocks=i, accepted=i % 4, rejected=20 * i, ready=i % 4) for i in range(200)
    ]
    with pytest.raises(StalledError, match="none was accepted"):
        watched(tmp_path, loop)


def test_the_caller_is_named_once_each_limit_and_never_blamed(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        watched(tmp_path, [replace(DRAWING, with_caller=True)] * 45)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and all("in the caller's code for" in line for line in told)


@pytest.mark.parametrize(
    ("score_s", "env_s", "program_s", "within"),
    [
        (0, 0, 0, False),
        (1700, 0, 0, True),
        (2000, 0, 0, False),
        (0, 599, 0, True),
        (0, 700, 0, False),
        (0, 0, 3500, True),
        (0, 0, 3700, False),
    ],
)
def test_a_call_is_left_to_its_own_time_limit(score_s, env_s, program_s, within):
    limits = Config().faults, Config().env.program_timeout_s
    assert within_limits(*limits, score_s, env_s, program_s) is within


def test_the_console_says_whether_the_callers_function_is_under_way(capsys):
    seen = []
    console = Console(2, live=False, on_step=lambda *_: seen.append(console.with_caller))
    console.step(1, {})
    assert seen == [True] and not console.with_caller
    console.notice("the judge has been away")
    assert "waiting: the judge has been away" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_without_a_signal_ends_and_says_what_it_saw(tmp_path, capsys):
    config = {**SMALL_JOB, "run": {"dir": str(tmp_path), "steps": 2}}
    config["algorithm"] = {**SMALL_JOB["algorithm"], "dynamic_sampling": True}
    with pytest.raises(TrainingError, match="steps' worth"):
        jr.train(reward=lambda completion: 1.0, config=config)
    assert "they have no training signal" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_user_who_thinks_for_longer_than_the_watchdog_waits_is_not_blamed(tmp_path):
    made = []
    config = {
        **SMALL_JOB,
        "run": {"dir": str(tmp_path), "steps": 3},
        "faults": {"watchdog_s": 15.0},
    }
    for update in jr.steps(config=config):
        made.append(update.number)
        if update.number == 1:
            time.sleep(20)
    assert made == [0, 1, 2, 3]
