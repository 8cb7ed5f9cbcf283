"""Recorded schedules: a run at any staleness is followed bit for bit, or the replay says why."""

import json
import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.config.load import load
from jaxrl_async.errors import Closed, ConfigError, ReplayError
from jaxrl_async.ports.run import Intake, NotYet
from jaxrl_async.run.replay.player import Replay, ReplayedBuffer
from jaxrl_async.run.replay.recording import RecordedSchedule, Recording, header_of, read_schedule
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.train_command import main
from jaxrl_async.types import CancelledGroup, Drop

CONFIG = Path(__file__).parents[3] / "configs" / "addition.yaml"
JOIN_S = 60.0


def config(*overrides):
    return load(CONFIG, ["trainer.warmup_steps=1", *overrides])


def recorded(*events, ended=True):
    return RecordedSchedule(
        path=Path("run/schedule.jsonl"),
        lines=tuple(json.dumps(e) for e in events),
        events=tuple(events),
        ended=ended,
    )


def took(block, take=(), cancel=(), version=None, sampler="sampler"):
    return {
        "sampler": sampler,
        "block": block,
        "take": list(take),
        "cancel": list(cancel),
        "version": version,
    }


@pytest.fixture
def replay(tmp_path):
    """A Replay of some events; what it writes is in `again.jsonl`."""

    made = []

    def make(*events, ended=True, **how):
        recording = Recording(tmp_path / "again.jsonl", {"schedule": 1})
        made.append(Replay(recorded(*events, ended=ended), recording, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def lines(path):
    return path.read_text().splitlines()[1:]  # without the header


# ---- a recording prescribes nothing


def test_a_recording_lets_everything_happen_at_once_and_writes_it(tmp_path):
    recording, real, done = Recording(tmp_path / "s.jsonl", {"schedule": 1}), buffer(), []
    assert recording.due("sampler", 3, True) is None and recording.sampler_of("g0/m0/t0") is None
    assert recording.gate(real, curriculum=True) is real
    recording.later("put", 0, lambda: done.append("put"))
    with recording.turn("pause"):
        done.append("pause")
    ends = recording.burst_ends()
    recording.write(admit=4, count=3, version=0)
    recording.close()
    assert done == ["put", "pause"] and ends == {6}
    assert lines(tmp_path / "s.jsonl") == [
        '{"admit": 4, "count": 3, "version": 0}',
        '{"end": true}',
    ]


# ---- the buffer in the recorded order


OPERATIONS = ["admit", "put", "put", "put", "fail", "draw", "live"]


def buffer(**how):
    settings = BufferSettings(
        groups_per_step=2, max_staleness=2, when_too_old="drop", overcommit=1.5
    )
    return ReplayBuffer(settings, **how)


def record(path, schedule):
    """A run from one thread: what it did, and its ledger of results."""
    recording = Recording(path, {"schedule": 1})
    real, tickets, log = buffer(note=recording.write), {}, []
    version = live = 0
    for name, pick in schedule:
        if name == "admit":
            new = real.admit(0)
            tickets |= {t.group: t for t in new}
            log += [("admit", t.group, t.version) for t in new]
        elif name == "live" and live < version:
            live = version
            real.set_live(live)
        elif name == "draw":
            try:
                draw = real.draw(version, 0)
            except TimeoutError:
                continue
            version += 1
            log.append(("draw", [g.ticket.group for g in draw.groups], len(draw.dropped)))
        elif tickets:
            ticket = tickets.pop(sorted(tickets)[pick % len(tickets)])
            if name == "put":
                real.put(make_group(ticket))
            else:
                real.fail(ticket, make_prompt(), Drop.FAILED)
    recording.close()
    return log


@pytest.mark.full
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9)), min_size=30, max_size=60)
)
def test_however_the_threads_run_now_the_buffer_does_what_was_recorded(tmp_path_factory, schedule):
    folder = tmp_path_factory.mktemp("replay")
    log = record(folder / "schedule.jsonl", schedule)
    events = [json.loads(line) for line in lines(folder / "schedule.jsonl")[:-1]]
    replay = Replay(recorded(*events), Recording(folder / "again.jsonl", {"schedule": 1}))
    real = buffer(note=replay.write)
    gate, again = ReplayedBuffer(real, replay, curriculum=False), {}
    fates = {e[f]: f for e in events for f in ("put", "fail") if f in e}
    bursts = sum("admit" in e for e in events)
    for event in events:  # what need not wait comes as soon as it can, or much too early
        if "live" in event:
            gate.set_live(event["live"])

    def rollouts():
        tickets = [t for _ in range(bursts) for t in burst()]
        again["admit"] = [("admit", t.group, t.version) for t in tickets]

    def burst():
        while not (tickets := gate.admit(0.05)):
            pass
        for ticket in reversed(tickets):
            if fates.get(ticket.group) == "fail":
                gate.fail(ticket, make_prompt(), Drop.FAILED)
            else:
                gate.put(make_group(ticket))
        return tickets

    def trainer():
        again["draw"] = []
        with pytest.raises(ReplayError, match="schedule ends at"):
            while True:
                draw = gate.draw(len(again["draw"]))
                numbers = [g.ticket.group for g in draw.groups]
                again["draw"].append(("draw", numbers, len(draw.dropped)))

    threads = [threading.Thread(target=t, daemon=True) for t in (trainer, rollouts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    replay.close()
    assert again["admit"] == [t for t in log if t[0] == "admit"]
    assert again["draw"] == [t for t in log if t[0] == "draw"]
    assert lines(folder / "again.jsonl") == lines(folder / "schedule.jsonl")


@pytest.mark.parametrize("finished", [False, True], ids=["still drawn", "all drawn by now"])
def test_a_group_that_was_cancelled_for_its_age_is_cancelled_where_it_was_recorded(
    finished, replay, tmp_path
):
    """With what was sampled then; whatever is sampled now, and although nothing asks for age."""
    events = [
        {"admit": 0, "count": 9, "version": 0},
        {"put": 1},
        {"fail": 0, "reason": "stale", "oldest": 0, "lengths": [2, 1]},
        {"put": 2},
        {"draw": 0, "groups": [1, 2], "dropped": []},
    ]
    schedule = replay(*events)
    real, aged, stopped = buffer(note=schedule.write), [], []
    gate = ReplayedBuffer(real, schedule, curriculum=False)

    def stop(number):
        stopped.append(number)
        cancelled = CancelledGroup(ticket=tickets[number], prompt_id=4, oldest=0, lengths=())
        gate.cancel(cancelled)

    gate.watch(aged.append, stop)
    tickets = gate.admit()
    if finished:
        gate.put(make_group(tickets[0]))
    gate.put(make_group(tickets[2]))
    assert real.stats().dropped == {}, "not yet"
    gate.put(make_group(tickets[1]))
    draw = gate.draw(0)
    (cancelled,) = draw.cancelled
    assert (cancelled.ticket, cancelled.oldest, cancelled.lengths) == (tickets[0], 0, (2, 1))
    assert stopped == ([] if finished else [0]) and not aged
    assert real.stats().dropped == {"stale": 1}
    assert [json.loads(x) for x in lines(tmp_path / "again.jsonl")] == events


def test_at_the_end_of_the_recording_only_the_trainer_is_stopped(replay):
    schedule = replay({"admit": 0, "count": 9, "version": 0})
    gate = ReplayedBuffer(buffer(note=schedule.write), schedule, curriculum=False)
    assert len(gate.admit()) == 9
    assert gate.admit(0.0) == ()
    gate.pause()
    with pytest.raises(ReplayError, match=r"ends at version 0.*stopped there, was killed"):
        gate.draw(0)


def test_a_buffer_of_another_size_is_found_out(replay):
    schedule = replay({"admit": 0, "count": 4, "version": 0})
    gate = ReplayedBuffer(buffer(note=schedule.write), schedule, curriculum=False)
    with pytest.raises(ReplayError, match=r"line 2: the replay has .*9.* where .*4"):
        gate.admit()


def test_closing_wakes_whoever_waits(replay):
    schedule = replay({"put": 3})
    gate = ReplayedBuffer(buffer(), schedule, curriculum=False)
    ended = []

    def waits():
        try:
            gate.draw(0)
        except Closed:
            ended.append(True)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    schedule.close()
    thread.join(JOIN_S)
    assert ended


# ---- a sampler in the recorded order


def test_a_sampler_takes_what_was_recorded_after_as_many_blocks_and_nothing_else(replay):
    schedule = replay(took(0, ["a"]), {"live": 1}, took(2, ["b"], ["a"], 1))
    assert schedule.due("sampler", 0, working=False) == Intake(requests=("a",))
    schedule.write(**took(0, ["a"]))
    assert schedule.due("sampler", 1, working=True) == Intake()
    assert schedule.due("sampler", 2, working=True) is NotYet.NOT_YET, "live 1 comes before"
    schedule.later("live", 1, lambda: schedule.write(live=1))
    assert schedule.due("sampler", 2, working=True) == Intake(
        requests=("b",), cancelled=("a",), version=1
    )
    schedule.write(**took(2, ["b"], ["a"], 1))
    assert schedule.due("sampler", 3, working=True) == Intake()
    assert schedule.due("sampler", 9, working=False) is NotYet.NOT_YET, "the run is over"


def test_after_the_recording_of_a_killed_run_a_sampler_takes_what_comes(replay):
    schedule = replay(took(0, ["a"]), ended=False)
    schedule.write(**took(0, ["a"]))
    assert schedule.due("sampler", 1, working=True) is None


def test_a_request_goes_to_the_sampler_that_took_it_each_time(replay):
    schedule = replay(
        took(0, ["e", "a"], sampler="sampler-1"),
        took(0, ["b"], sampler="sampler-0"),
        took(4, ["e"], sampler="sampler-0"),
    )
    assert [schedule.sampler_of(i) for i in ("e", "a", "e", "b", "e")] == [1, 1, 0, 0, None]


# ---- what cannot go on says so


def test_what_was_not_recorded_ends_the_replay_for_everybody(replay):
    schedule = replay({"put": 3}, {"put": 4})
    schedule.write(put=3)
    with pytest.raises(ReplayError, match=r'line 3: the replay has {"put": 5} where .*{"put": 4}'):
        schedule.write(put=5)
    with pytest.raises(ReplayError, match="line 3"):
        schedule.due("sampler", 0, working=True)


def test_a_group_that_failed_then_and_is_scored_now_is_named(replay):
    schedule = replay({"pause": True}, {"fail": 7, "reason": "failed"})
    with pytest.raises(ReplayError, match="line 3: group 7 was scored now, and failed in"):
        schedule.later("put", 7, lambda: None)


def test_a_sampler_without_work_before_its_next_event_is_named(replay):
    schedule = replay(took(5, ["a"]))
    with pytest.raises(ReplayError, match="sampler has nothing to decode after 3 blocks"):
        schedule.due("sampler", 3, working=False)


def test_who_waits_too_long_gets_an_error_that_says_for_what(replay):
    now = [0.0]
    schedule = replay(took(5, ["g7/m0/t0"]), stuck_s=10.0, clock=lambda: now[0])
    assert schedule.due("sampler", 5, working=True) == Intake(requests=("g7/m0/t0",))
    now[0] = 9.0
    schedule.due("sampler", 5, working=True)
    now[0] = 11.0
    with pytest.raises(ReplayError, match=r"waited for 10 s.*sampler, after 5 .*g7/m0/t0"):
        schedule.due("sampler", 5, working=True)


def test_a_sampler_that_decodes_is_not_stuck(replay):
    now = [0.0]
    schedule = replay(took(50, ["a"]), stuck_s=10.0, clock=lambda: now[0])
    for block in range(5):
        now[0] += 9.0
        assert schedule.due("sampler", block, working=True) == Intake()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full disk")
def test_a_full_disk_ends_the_recording_and_not_the_run(caplog):
    recording = Recording(Path("/dev/full"), {"schedule": 1})
    recording.write(put=1)
    recording.close()
    assert caplog.text.count("is not written any further") == 1 and "No space left" in caplog.text


# ---- reading


@pytest.fixture
def file(tmp_path):
    def make(*events, first=None, tail=""):
        path = tmp_path / "schedule.jsonl"
        written = [header_of(config(), 0) if first is None else first, *events]
        path.write_text("".join(json.dumps(e) + "\n" for e in written) + tail)
        return path

    return make


def test_a_recording_is_read_up_to_its_end_or_to_where_its_run_was_killed(file):
    events = [{"put": 1}, took(3, ["a"])]
    whole = read_schedule(file(*events, {"end": True}), config("run.name=other", "metrics={}"))
    torn = read_schedule(file(*events, tail='{"pu'), config())
    assert whole.events == torn.events == tuple(events)
    assert (whole.ended, torn.ended) == (True, False)
    assert [json.loads(line) for line in whole.lines] == events


def test_what_a_resumed_run_did_is_left_out_and_logged(file, caplog):
    path = file({"put": 1}, header_of(config(), 4), {"put": 9}, {"end": True})
    with caplog.at_level(logging.WARNING):
        read = read_schedule(path, config())
    assert read.events == ({"put": 1},) and not read.ended
    assert "resumed from a checkpoint at line 3" in caplog.text


@pytest.mark.parametrize(
    ("events", "first", "overrides", "message"),
    [
        ([], None, ["algorithm.learning_rate=0.5"], r"learning_rate was .* and is 0\.5"),
        ([], None, ["run.seed=7", "run.steps=3"], r"run\.seed was 0 and is 7 \(2 differ"),
        ([], {"put": 1}, [], "is no recorded schedule"),
        ([], {"schedule": 9, "made_by": {"jaxrl_async": "9"}}, [], "format 9.*format 1.*'9'"),
        ([took(4), took(0)], None, [], "line 3: sampler was restarted"),
        ([[1]], None, [], r"line 2 is no event: '\[1\]'"),
    ],
)
def test_a_recording_that_does_not_fit_is_refused(file, events, first, overrides, message):
    with pytest.raises(ReplayError, match=message):
        read_schedule(file(*events, first=first), config(*overrides))


def test_a_recording_of_an_older_version_fits_what_it_did(file):
    """The one before engines of JetStream's interface: no engine_class, another name of ours."""
    first = header_of(config(), 0)
    assert first["config"].pop("sampler.engine_class") is None
    assert first["config"]["sampler.engine"] == "native"
    first["config"]["sampler.engine"] = "ours"
    assert read_schedule(file({"put": 1}, first=first), config()).events == ({"put": 1},)
    first["config"]["sampler.engine"] = "vllm"
    with pytest.raises(ReplayError, match=r"sampler\.engine was vllm and is native\. "):
        read_schedule(file(first=first), config())


def test_a_recording_that_began_at_a_checkpoint_is_refused(file):
    with pytest.raises(ReplayError, match="from a checkpoint at version 4"):
        read_schedule(file(first=header_of(config(), 4)), config())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ReplayError, match=r"gone\.jsonl cannot be read.*another run\.name"):
        read_schedule(tmp_path / "gone.jsonl", config())


@pytest.mark.parametrize("other", ["run.resume=true", "run.job=dpo"])
def test_what_cannot_be_replayed_is_refused_at_load(other):
    job = other.replace("dpo", "preference")
    with pytest.raises(ConfigError, match=r"run\.replay_schedule"):
        config("run.replay_schedule=x.jsonl", job)


@pytest.mark.parametrize(
    "flag", [["--replay-schedule", "a b.jsonl"], ["--replay-schedule=a b.jsonl"]]
)
def test_the_command_line_names_the_file(flag, capsys):
    assert main([str(CONFIG), *flag, "--print-config"]) == 0
    assert "replay_schedule: a b.jsonl" in capsys.readouterr().out
    assert main([str(CONFIG), flag[0].partition("=")[0]]) == 2
