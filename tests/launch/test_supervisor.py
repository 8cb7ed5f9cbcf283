"""What follows when a trainer, a sampler or a host ends: a fleet on a cluster and clock of ours."""

import itertools
import json
import signal
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.launch.hardware import parse_hardware
from jaxrl_async.launch.supervisor import (
    LOST,
    HostTask,
    Supervisor,
    SupervisorPlan,
    outcome,
    restart_wait_s,
)


@dataclass
class FakeGroup:
    """Hosts whose processes end as the test says."""

    name: str
    number: int  # of the group, in the order of placing
    is_placed: bool = True
    ended: list[int | None] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    started: list[tuple[HostTask, ...]] = field(default_factory=list)
    closed: bool = False
    metrics: bytes = b""
    obeys: bool = True  # ends on a signal

    def placed(self):
        return self.is_placed

    def address(self):
        return f"host{self.number}:1"

    def start(self, tasks):
        self.started.append(tuple(tasks(f"host{self.number}:2")))
        self.ended = [None] * len(self.started[-1])

    def codes(self):
        return tuple(self.ended)

    def send(self, number):
        self.signals.append(number)
        if self.obeys:
            self.ended = [75 if code is None else code for code in self.ended]

    def tail(self, path):
        return self.metrics

    def close(self):
        self.closed = True


class FakeCluster:
    def __init__(self):
        self.groups, self.is_placed = [], True

    def place(self, hardware, name):
        self.groups.append(FakeGroup(name, len(self.groups), is_placed=self.is_placed))
        return self.groups[-1]

    def living(self, name):
        return [g for g in self.groups if g.name.startswith(name) and not g.closed]

    @property
    def trainer(self):
        (found,) = self.living("trainer")
        return found

    @property
    def samplers(self):
        return self.living("sampler")


class Run:
    """A fleet with a clock."""

    def __init__(self, least=2, most=2, max_restarts=2, trainer="cpu:1", sampler="cpu:1"):
        self.cluster, self.now, self.reports = FakeCluster(), 0.0, []
        plan = SupervisorPlan(
            trainer=parse_hardware(trainer),
            sampler=parse_hardware(sampler),
            least=least,
            most=most,
            max_restarts=max_restarts,
            metrics="metrics.jsonl",
            trainer_tasks=self.tasks(parse_hardware(trainer)),
            sampler_tasks=self.tasks(parse_hardware(sampler)),
        )
        self.fleet = Supervisor(plan, self.cluster, report=self.reports.append)

    def tasks(self, hardware):
        return lambda at, meet: [
            HostTask(words=(at, meet, str(n)), env={}) for n in range(hardware.hosts)
        ]

    def go(self, seconds=5.0):
        """Let time pass; return the code if the run ends."""
        end = self.now + seconds
        while self.now < end:
            code = self.fleet.step(self.now)
            if code is not None:
                return code
            self.now += 1.0
        return None


def test_samplers_start_after_the_trainer_and_get_its_address():
    run = Run(least=3, most=3)
    run.cluster.is_placed = False
    run.go()
    assert not run.cluster.samplers and not run.cluster.trainer.started
    run.cluster.is_placed = run.cluster.trainer.is_placed = True
    run.go()
    assert len(run.cluster.trainer.started) == 1
    assert [g.started[0][0].words[0] for g in run.cluster.samplers] == ["host0:1"] * 3
    assert run.fleet.samplers == 3


def test_each_host_has_a_number():
    run = Run(least=1, most=1, trainer="gpu:8x3", sampler="gpu:4x2")
    run.go()
    assert [t.words[1:] for t in run.cluster.trainer.started[0]] == [
        ("host0:2", str(n)) for n in range(3)
    ]
    (sampler,) = run.cluster.samplers
    assert [t.words[1:] for t in sampler.started[0]] == [("host1:2", "0"), ("host1:2", "1")]


@pytest.mark.parametrize("code", [0, 2])
def test_the_run_ends_with_its_trainer_and_samplers_hand_back_first(code):
    run = Run()
    run.go()
    samplers = run.cluster.samplers
    run.cluster.trainer.ended = [code]
    assert run.go() == code
    assert all(g.signals == [signal.SIGTERM] and g.closed for g in samplers)
    assert not run.cluster.living("")


@pytest.mark.parametrize(("code", "counts"), [(75, False), (1, True), (134, True)])
def test_a_trainer_that_ends_early_starts_again_where_samplers_find_it(code, counts):
    run = Run(max_restarts=2)
    run.go()
    samplers = run.cluster.samplers
    for _ in range(2):
        run.cluster.trainer.ended = [code]
        assert run.go(20) is None
    assert len(run.cluster.trainer.started) == 3
    assert run.cluster.samplers == samplers and not any(g.signals for g in samplers)
    run.cluster.trainer.ended = [code]
    assert run.go(20) == (code if counts else None)


def test_one_failed_host_of_a_trainer_starts_all_again():
    run = Run(trainer="gpu:8x2")
    run.go()
    run.cluster.trainer.ended = [None, 134]
    assert run.go(20) is None
    assert len(run.cluster.trainer.started) == 2


def test_a_trainer_on_another_host_is_joined_there():
    run = Run(least=1, most=1)
    run.go()
    (old,) = run.cluster.samplers
    run.cluster.trainer.ended = [LOST]
    assert run.go(20) is None
    (new,) = run.cluster.samplers
    assert old.closed and old.signals == [signal.SIGTERM]
    address = run.cluster.trainer.address()
    assert address != "host0:1" and new.started[0][0].words[0] == address


def test_a_sampler_comes_back_later_after_each_failure_in_a_row():
    run = Run(least=1, most=1)
    run.go()
    starts = [run.now]
    for _ in range(4):
        (group,) = run.cluster.samplers
        group.ended = [1]
        before = len(run.cluster.groups)
        while len(run.cluster.groups) == before:
            run.go(1)
        starts.append(run.now)
        run.go(3)
    waits = [b - a for a, b in itertools.pairwise(starts)]
    assert waits == sorted(waits) and waits[-1] >= 16


@pytest.mark.parametrize("code", [0, 75])
def test_a_sampler_that_was_preempted_comes_back_at_once(code):
    run = Run(least=1, most=1)
    for _ in range(6):
        run.go(4)
        (group,) = run.cluster.samplers
        group.ended = [code]
        run.go(3)
    assert len(run.cluster.living("sampler")) == 1 and len(run.cluster.groups) >= 7


def test_a_sampler_that_ran_well_has_not_failed_in_a_row():
    run = Run(least=1, most=1)
    for _ in range(8):
        run.go(100)
        (group,) = run.cluster.samplers
        group.ended = [1]
        run.go(5)
        assert run.cluster.samplers, "2 s after each failure"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_the_trainer_save_and_then_ends_the_samplers(number):
    run = Run()
    run.go()
    trainer, samplers = run.cluster.trainer, run.cluster.samplers
    trainer.obeys = False  # it takes its time to save
    run.fleet.stop(number)
    assert run.go(20) is None
    assert trainer.signals == [number] and not any(g.signals for g in samplers)
    trainer.ended = [0 if number == signal.SIGINT else 75]
    assert run.go() == trainer.ended[0]
    assert not run.cluster.living("")


def test_a_stop_before_there_are_hosts_ends_the_run():
    run = Run()
    run.cluster.is_placed = False
    run.go()
    run.fleet.stop(signal.SIGINT)
    assert run.go() == 0 and not run.cluster.living("")


def test_a_sampler_that_does_not_leave_is_closed_in_the_end():
    run = Run(least=1, most=1)
    run.go()
    (group,) = run.cluster.samplers
    group.obeys = False
    run.cluster.trainer.ended = [0]
    assert run.go(30) is None and not group.closed
    assert run.go(60) == 0 and group.closed


def lines(count, living, waits=0.0, idles=0.0):
    """Return so many steps of a metrics.jsonl."""
    values = {"time/step_s": 2.0, "time/wait_data_s": 2.0 * waits, "sampler/idle_share": idles}
    return (json.dumps({"step": 1, **values, "sampler/living": living}) + "\n").encode() * count


def test_the_number_of_samplers_follows_the_need():
    run = Run(least=1, most=4)
    run.go(10)
    assert run.fleet.samplers == 1
    trainer = run.cluster.trainer
    trainer.metrics += lines(5, 1, waits=0.5)
    run.go(10)
    assert run.fleet.samplers == 2
    trainer.metrics += lines(6, 2, waits=0.45)
    run.go(10)
    assert run.fleet.samplers == 4
    trainer.metrics += lines(20, 4, waits=0.5)
    run.go(20)
    assert run.fleet.samplers == 4, "no more than the most"
    trainer.metrics += lines(25, 4, idles=0.4)
    run.go(10)
    assert run.fleet.samplers == 3, "one by one, and those that stay suffice"
    assert any("samplers: 4 -> 3" in text for text in run.reports)
    trainer.metrics += lines(25, 3, idles=0.2)
    run.go(10)
    assert run.fleet.samplers == 3
    for living in (3, 2, 1, 1):
        trainer.metrics += lines(25, living, idles=1.0)
        run.go(10)
    assert run.fleet.samplers == len(run.cluster.samplers) == 1


def test_a_sampler_counts_once_it_has_joined():
    """It starts, compiles and gets the weights first: until then the trainer waits as before."""
    run = Run(least=1, most=8)
    run.go(10)
    run.cluster.trainer.metrics += lines(5, 1, waits=0.5)
    run.go(10)
    assert run.fleet.samplers == 2
    run.cluster.trainer.metrics += lines(50, 1, waits=0.5)
    run.go(60)
    assert run.fleet.samplers == 2
    run.cluster.trainer.metrics += lines(5, 2, waits=0.1)
    run.go(20)
    assert run.fleet.samplers == 2


def test_the_steps_without_a_sampler_that_was_lost_add_none():
    run = Run(least=2, most=8)
    run.go(10)
    run.cluster.trainer.metrics += lines(10, 2, waits=0.1)
    run.cluster.samplers[0].ended = [137]
    run.cluster.trainer.metrics += lines(10, 1, waits=0.6)
    run.go(60)
    assert run.fleet.samplers == 2
    assert not any(text.startswith("samplers:") for text in run.reports)


def test_samplers_for_which_there_are_no_hosts_do_not_stop_the_count():
    run = Run(least=1, most=8)
    run.go(10)
    trainer = run.cluster.trainer
    trainer.metrics += lines(5, 1, waits=0.5)
    run.go(10)
    run.cluster.is_placed = False
    trainer.metrics += lines(5, 2, waits=0.5)
    run.go(100)
    assert run.fleet.samplers == 2 and len(run.cluster.samplers) == 4
    trainer.metrics += lines(20, 2, waits=0.5)
    run.go(10)
    assert len(run.cluster.samplers) == 4, "two wait for hosts already"
    trainer.metrics += lines(20, 2, idles=0.6)
    run.go(10)
    assert run.fleet.samplers == len(run.cluster.samplers) == 1


def test_a_resumed_run_whose_file_became_shorter_is_followed_at_once():
    run = Run(least=1, most=4)
    run.go(10)
    run.cluster.trainer.metrics = lines(500, 1, waits=0.1)
    run.go(10)
    run.cluster.trainer.ended = [1]
    run.cluster.trainer.metrics = lines(100, 1, waits=0.1)
    run.go(20)
    run.cluster.trainer.metrics += lines(5, 1, waits=0.5)
    run.go(10)
    assert run.fleet.samplers == 2


def test_who_finds_no_hosts_is_named_once():
    run = Run(least=1, most=1, sampler="gpu:8x2")
    run.cluster.is_placed = False
    run.go(100)
    assert run.reports == ["trainer: no hosts of cpu:1 for 60 s; still waiting"]
    run.cluster.trainer.is_placed = True
    run.go(100)
    overdue = [text for text in run.reports if "no hosts" in text]
    assert overdue[1:] == ["sampler 0: no hosts of gpu:8x2 for 60 s; still waiting"]
    run.cluster.samplers[0].is_placed = True
    run.go(5)
    assert run.fleet.samplers == 1


def test_a_sampler_that_waits_for_the_trainer_is_not_reported_without_hosts():
    run = Run(least=1, most=1)
    run.go(3)
    (sampler,) = run.cluster.samplers
    sampler.ended = [0]  # it starts again
    run.cluster.is_placed = False
    run.go(2)
    run.cluster.trainer.ended = [LOST]
    run.go(3)
    run.cluster.samplers[0].is_placed = True
    run.go(100)
    overdue = [text for text in run.reports if "no hosts" in text]
    assert overdue == ["trainer: no hosts of cpu:1 for 60 s; still waiting"]


def test_numbers_of_samplers_are_used_again():
    run = Run(least=1, most=3)
    run.go(10)
    for _ in range(4):
        run.cluster.trainer.metrics += lines(5, 1, waits=0.6)
        run.go(10)
        run.cluster.trainer.metrics += lines(6, 2, idles=0.9)
        run.go(20)
        run.cluster.trainer.metrics += lines(1, 1)  # its last has left
    names = {g.name for g in run.cluster.groups}
    assert names == {"trainer", "sampler-0", "sampler-1"}


def test_a_failure_counts_over_those_that_run():
    assert outcome([None, None]) is None
    assert outcome([0, None]) is None
    assert outcome([0, 0]) == 0
    assert outcome([None, 1]) == 1
    assert outcome([134, LOST, None]) == LOST


def test_waits_grow_and_stay_bounded():
    waits = [restart_wait_s(n) for n in range(12)]
    assert waits[0] == 0 and waits == sorted(waits) and waits[-1] == 60


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 75, 134, LOST]), st.booleans()),
        max_size=30,
    )
)
def test_whatever_dies_there_are_never_more_groups_than_samplers_and_the_end_frees_all(events):
    run = Run(least=2, most=3, max_restarts=100)
    for which, code, is_placed in events:
        run.cluster.is_placed = is_placed
        living = run.cluster.living("")
        if which < len(living) and (living[which].name != "trainer" or code not in (0,)):
            group = living[which]
            group.ended = [code for _ in group.ended]
        assert run.go(7) is None
        for group in run.cluster.living(""):
            group.is_placed = True
        assert len(run.cluster.living("trainer")) <= 1
        names = [g.name for g in run.cluster.samplers]
        assert len(names) == len(set(names)) <= 3
    run.go(100)
    run.cluster.trainer.ended = [0]
    assert run.go(100) == 0
    assert not run.cluster.living("")
