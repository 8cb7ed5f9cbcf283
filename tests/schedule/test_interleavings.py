"""Every order in which rollouts, trainer and sampler can meet at the replay buffer: the real one,
driven from one thread, so that hypothesis can shrink what fails.

    admit ──> put | fail ──> draw ──> train ──> publish ──> live
"""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.buffer.select import RANKS
from jaxrl_async.staleness import least_limit, memory_bound
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import Drop

WORK = ["admit"] * 6 + ["put"] * 14 + ["train"] * 8 + ["swap"] * 4 + ["fail"] * 2
EVENTS = [*WORK, *WORK, "pause", "resume", "resume", "restart"]
SETTINGS = settings(deadline=None, max_examples=120)
FEWER = settings(deadline=None, max_examples=60)


class Machine:
    """Rollouts, a trainer and a sampler as plain state around a real buffer.

    Groups draw their first token at admission and may draw more at any later live version.
    `fates` is what the test has seen happen to each group; `trained_at` the version it improved.
    """

    def __init__(self, per_step, max_staleness, lookahead=0, **how):
        self.per_step, self.max_staleness, self.lookahead = per_step, max_staleness, lookahead
        self.how = how
        self.buffer = self._make(0, 0)
        self.version = self.live = 0
        self.admitted, self.fates, self.trained_at, self.order = {}, {}, {}, []
        self.flying = {}  # number -> (ticket, versions drawn so far)
        self.paused, self.restarts = False, 0

    def _make(self, version, next_group):
        made = ReplayBuffer(
            BufferSettings(
                groups_per_step=self.per_step,
                max_staleness=self.max_staleness,
                lookahead=self.lookahead,
                **self.how,
            )
        )
        made.restore(BufferState(next_group=next_group, next_untaken=next_group), version)
        return made

    def do(self, event, pick):
        getattr(self, event)(pick)

    def admit(self, pick):
        tickets = self.buffer.admit(0)
        assert not (tickets and self.paused)
        for ticket in tickets:
            assert ticket.group not in self.admitted, "a number is given once"
            assert ticket.version == self.live
            self.admitted[ticket.group] = ticket
            self.flying[ticket.group] = (ticket, [self.live])
        return tickets

    def put(self, pick):
        if self.flying:
            ticket, versions = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
            self.buffer.put(make_group(ticket, [*versions, self.live]))

    def fail(self, pick):
        if self.flying:
            ticket, _ = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
            self.buffer.fail(ticket, make_prompt(), Drop.FAILED)
            self._ends(ticket.group, "failed")

    def train(self, pick):
        try:
            draw = self.buffer.draw(self.version, 0)
        except TimeoutError:
            return False
        assert len(draw.groups) == self.per_step
        for group, reason in draw.dropped:
            self._ends(group.ticket.group, reason.value)
        for group in draw.groups:
            self._ends(group.ticket.group, "trained")
            self.trained_at[group.ticket.group] = self.version
            assert 0 <= self.version - group.oldest_version <= self.max_staleness
            assert group.newest_version <= self.version
            self.order.append(group.ticket.group)
        self.version += 1
        return True

    def swap(self, pick):
        """The sampler takes the newest weights; some that were published may be skipped."""
        self.live = self.version
        self.buffer.set_live(self.live)

    def pause(self, pick):
        self.paused = True
        self.buffer.pause()

    def resume(self, pick):
        self.paused = False
        self.buffer.resume()

    def restart(self, pick):
        """The run ends and is resumed: what was active is gone, and no number comes again."""
        if self.restarts >= 2:
            return
        self.restarts += 1
        self.buffer.close()
        for number in set(self.admitted) - set(self.fates):
            self._ends(number, "lost")
        self.flying = {}
        self.buffer = self._make(0, 0)
        number = 1 + max(self.admitted, default=-1)
        self.buffer.restore(BufferState(next_group=number, next_untaken=number), self.version)
        self.live, self.paused = self.version, False

    def _ends(self, number, fate):
        assert number in self.admitted and number not in self.fates, "every group ends once"
        self.fates[number] = fate

    def check(self):
        stats = self.buffer.stats()
        assert 0 <= stats.active <= stats.capacity
        assert stats.active == self._active(), "a slot is used by an active group and only by it"
        assert stats.in_flight == len(self.flying)

    def _active(self):
        open_ = set(self.admitted) - set(self.fates)
        waiting_for_live = [n for n, v in self.trained_at.items() if v >= self.live]
        return len(open_) + len(waiting_for_live)


@st.composite
def shapes(draw, most=3):
    per_step, staleness = draw(st.integers(1, 3)), draw(st.integers(0, most))
    return per_step, staleness, draw(st.integers(0, per_step * staleness))


@st.composite
def schedules(draw, events):
    event = st.tuples(st.sampled_from(events), st.integers(0, 11))
    return draw(st.lists(event, min_size=70, max_size=130))  # short ones train on nothing


def played(shape, schedule, kind=None, **how):
    machine = (kind or Machine)(*shape, **how)
    for event, pick in schedule:
        machine.do(event, pick)
        machine.check()
    return machine


def finish_a_step(machine):
    """A fair world: everything that can happen does. How many steps were trained in one round."""
    machine.resume(0)
    machine.swap(0)
    machine.admit(0)
    while machine.flying:
        machine.put(0)
    return machine.train(0)


@pytest.mark.full
def test_the_schedules_reach_what_they_are_to_test():
    seen = Counter()

    @settings(SETTINGS, derandomize=True, database=None)
    @given(shapes(), schedules(EVENTS))
    def look(shape, schedule):
        machine = played(shape, schedule)
        lags = [v - machine.admitted[n].version for n, v in machine.trained_at.items()]
        seen["runs with steps"] += machine.version > 2
        seen["at the bound"] += machine.max_staleness > 0 and machine.max_staleness in lags
        seen["overtaken"] += machine.order != sorted(machine.order)
        seen["failed and trained"] += "failed" in machine.fates.values() and machine.version > 2
        seen["trained after a restart"] += "lost" in machine.fates.values() and machine.version > 2

    look()
    assert seen["runs with steps"] >= 30
    assert min(seen.values()) >= 5, seen


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS))
def test_no_group_is_trained_on_later_than_the_bound(shape, schedule):
    machine = played(shape, schedule)
    assert "stale" not in machine.fates.values(), "the gate paces: nothing needs dropping"
    assert "from_the_future" not in machine.fates.values()


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS))
def test_each_admitted_group_is_trained_on_or_dropped_or_active_and_only_one(shape, schedule):
    machine = played(shape, schedule)
    stats = machine.buffer.stats()
    fates = list(machine.fates.values())
    assert len(fates) + stats.in_flight + stats.ready == len(machine.admitted)
    assert fates.count("trained") == len(machine.order) == len(set(machine.order))
    assert machine.version == len(machine.order) // machine.per_step


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS))
def test_without_lookahead_order_is_that_of_admission(shape, schedule):
    machine = played((shape[0], shape[1], 0), schedule)
    assert machine.order == sorted(machine.order)


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS))
def test_with_lookahead_nobody_is_overtaken_by_more_than_that(shape, schedule):
    machine = played(shape, schedule)
    for i, number in enumerate(machine.order):
        assert sum(other > number for other in machine.order[:i]) <= machine.lookahead


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS))
def test_from_wherever_it_is_the_run_goes_on(shape, schedule):
    machine = played(shape, schedule)
    for _ in range(3):
        assert finish_a_step(machine)


@pytest.mark.full
@SETTINGS
@given(shapes(0), schedules(WORK))
def test_at_staleness_zero_every_token_is_on_policy_and_failures_never_stall_it(shape, schedule):
    machine = played(shape, schedule)
    assert all(machine.admitted[n].version == v for n, v in machine.trained_at.items())
    assert finish_a_step(machine)


@SETTINGS
@given(st.integers(1, 4), st.integers(1, 5))
def test_at_staleness_zero_a_step_starts_in_one_burst(per_step, steps):
    machine = Machine(per_step, 0)
    for _ in range(steps):
        assert len(machine.admit(0)) == per_step
        while machine.flying:
            assert machine.admit(0) == ()
            machine.put(0)
        assert machine.train(0) and machine.admit(0) == ()
        machine.swap(0)


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules([*WORK, *["spoil"] * 4]))
def test_groups_that_must_be_dropped_are_replaced_and_the_run_goes_on(shape, schedule):
    """What the gate cannot prevent: groups with tokens from the past or from the future."""

    class Spoiled(Machine):
        def spoil(self, pick):
            if self.flying:
                ticket, _ = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
                far = self.max_staleness + 2 + 100 * (pick % 2)
                version = ticket.version + far if pick % 2 else ticket.version - far
                self.buffer.put(make_group(ticket, [version]))
                self.spoilt.add(ticket.group)

        def train(self, pick):
            done = super().train(pick)
            assert not self.spoilt & set(self.order)
            return done

        def check(self):  # a dropped group is told at the next draw only
            assert self.buffer.stats().active <= self.buffer.stats().capacity

    machine = Spoiled(*shape)
    machine.spoilt = set()
    for event, pick in schedule:
        machine.do(event, pick)
        machine.check()
    steps = sum(finish_a_step(machine) for _ in range(6))
    assert steps >= 3, "at most one round is lost to each draw that only drops"


class Resampled(Machine):
    """Some groups have one episode only: no signal, and the buffer drops them when they are put."""

    def __init__(self, *shape, **how):
        super().__init__(*shape, has_signal=lambda g: len(g.episodes) > 1, **how)

    def put(self, pick):
        if self.flying:
            ticket, versions = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
            self.buffer.put(make_group(ticket, [*versions, self.live], [self.live]))

    def flat(self, pick):
        if self.flying:
            ticket, _ = self.flying.pop(sorted(self.flying)[pick % len(self.flying)])
            assert self.buffer.put(make_group(ticket, [self.live])) is Drop.NO_SIGNAL
            self._ends(ticket.group, "no_signal")

    def train(self, pick):
        told, self._ends = self._ends, lambda n, fate: fate == "no_signal" or told(n, fate)
        try:
            return super().train(pick)
        finally:
            del self._ends


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules([*WORK, *["flat"] * 12]), st.sampled_from(sorted(RANKS)))
def test_groups_without_a_signal_are_replaced_within_the_bound(shape, schedule, rank):
    machine = played(shape, schedule, Resampled, rank=RANKS[rank])
    assert not {"stale", "from_the_future"} & set(machine.fates.values())
    for _ in range(3):
        assert finish_a_step(machine)


@pytest.mark.full
@SETTINGS
@given(shapes(), schedules(EVENTS), st.sampled_from(sorted(RANKS)))
def test_whatever_is_drawn_first_the_bound_and_the_window_hold(shape, schedule, rank):
    machine = played(shape, schedule, rank=RANKS[rank])
    assert not {"stale", "from_the_future"} & set(machine.fates.values())
    for i, number in enumerate(machine.order):
        assert sum(other > number for other in machine.order[:i]) <= machine.lookahead


class Reused(Machine):
    """A group may be drawn for `reuse` steps; `uses` are the versions that each one improved."""

    def __init__(self, *shape, reuse, **how):
        super().__init__(*shape, reuse=reuse, **how)
        self.reuse, self.uses = reuse, {}

    def train(self, pick):
        try:
            draw = self.buffer.draw(self.version, 0)
        except TimeoutError:
            return False
        assert not draw.dropped, "neither fresh nor kept groups are dropped"
        assert len({g.ticket.group for g in draw.groups}) == self.per_step
        for group in draw.groups:
            assert 0 <= self.version - group.oldest_version <= self.max_staleness
            uses = self.uses.setdefault(group.ticket.group, [])
            if not uses:
                self._ends(group.ticket.group, "trained")
                self.order.append(group.ticket.group)
            uses.append(self.version)
            assert len(uses) <= self.reuse
        self.version += 1
        return True

    def check(self):
        stats = self.buffer.stats()
        assert self._not_live() <= stats.active <= stats.capacity
        assert stats.in_flight == len(self.flying)
        assert stats.trained + stats.reused == sum(map(len, self.uses.values()))

    def _not_live(self):
        return sum(v >= self.live for uses in self.uses.values() for v in uses)

    def restart(self, pick):
        """Not here: a resumed buffer counts from what was saved."""


@st.composite
def reusing(draw):
    per_step, reuse = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    staleness = draw(st.integers(reuse - 1, 4))
    most = (staleness + 1) * per_step // reuse - per_step
    return (per_step, staleness, draw(st.integers(0, most))), reuse


@pytest.mark.full
@SETTINGS
@given(reusing(), schedules(EVENTS), st.sampled_from(sorted(RANKS)))
def test_with_reuse_no_use_is_later_than_the_bound_and_the_run_goes_on(how, schedule, rank):
    shape, reuse = how
    machine = played(shape, schedule, Reused, reuse=reuse, rank=RANKS[rank])
    if machine.lookahead == 0:
        assert machine.order == sorted(machine.order), "first uses are in order of admission"
    for uses in machine.uses.values():
        assert len(set(uses)) == len(uses) <= reuse
    for _ in range(3):
        assert finish_a_step(machine)


class Limited(Machine):
    """The staleness aimed at may change at any time; `aimed` is the limit at each admission."""

    def __init__(self, *shape, **how):
        super().__init__(*shape, **how)
        self.limit, self.aimed = self.max_staleness, {}

    def aim(self, pick):
        least = least_limit(self.per_step, self.lookahead, self.how.get("reuse", 1))
        self.limit = least + pick % (self.max_staleness - least + 1)
        self.buffer.set_limit(self.limit)

    def admit(self, pick):
        tickets = super().admit(pick)
        stats = self.buffer.stats()
        assert not tickets or stats.active <= stats.capacity
        self.aimed |= {t.group: self.limit for t in tickets}

    def restart(self, pick):
        before = self.buffer
        super().restart(pick)
        if self.buffer is not before:
            self.limit = self.max_staleness

    def check(self):  # what is active stays when the capacity falls
        stats = self.buffer.stats()
        assert stats.in_flight == len(self.flying)
        if "reuse" not in self.how:
            assert stats.active == self._active()


@pytest.mark.full
@FEWER
@given(shapes(), schedules([*EVENTS, *["aim"] * 6]), st.sampled_from(sorted(RANKS)))
def test_whenever_the_limit_changes_no_group_is_later_than_the_one_it_was_admitted_under(
    shape, schedule, rank
):
    machine = played(shape, schedule, Limited, rank=RANKS[rank])
    assert not {"stale", "from_the_future"} & set(machine.fates.values()), "nothing is dropped"
    for number, version in machine.trained_at.items():
        assert version - machine.admitted[number].version <= machine.aimed[number]
    for _ in range(3):
        assert finish_a_step(machine)


class ReusedAndLimited(Reused, Limited):
    """Both."""

    def check(self):
        Limited.check(self)


@pytest.mark.full
@FEWER
@given(reusing(), schedules([*EVENTS, *["aim"] * 6]))
@example(((1, 3, 0), 2), [*[("admit", 0)] * 26, ("aim", 0)])
def test_with_reuse_too_the_limit_may_change_at_any_time(how, schedule):
    shape, reuse = how
    machine = played(shape, schedule, ReusedAndLimited, reuse=reuse)
    for number, uses in machine.uses.items():
        assert uses[0] - machine.admitted[number].version <= machine.aimed[number]
    for _ in range(3):  # a draw may find that kept groups are too old by now: their slots are free
        assert finish_a_step(machine) or finish_a_step(machine)


class Dropping(Machine):
    """Rollouts run ahead; what is too old when drawn is dropped. The limit may change too.

    A buffer tells of a drop at the next draw that succeeds: `limits` are those since the last one.
    """

    def __init__(self, *shape, overcommit, **how):
        how |= {"when_too_old": "drop", "overcommit": overcommit}
        super().__init__(*shape, **how)
        self.places = memory_bound(self.max_staleness, self.per_step, overcommit)
        self.limits, self.dropped = [self.max_staleness], []

    def aim(self, pick):
        self.limits.append(pick % (self.max_staleness + 1))
        self.buffer.set_limit(self.limits[-1])

    def admit(self, pick):
        tickets = super().admit(pick)
        stats = self.buffer.stats()
        assert self.paused or stats.active == stats.capacity == self.places, "nobody waits else"
        return tickets

    def train(self, pick):
        version, real = self.version, self.buffer.draw

        def draw(*args):
            drawn = real(*args)
            for group, reason in drawn.dropped:
                self.dropped.append(group)
                assert reason is Drop.STALE
                assert version - group.oldest_version > min(self.limits)
            for group in drawn.groups:
                assert version - group.oldest_version <= self.limits[-1] <= self.max_staleness
            self.limits = self.limits[-1:]
            return drawn

        self.buffer.draw = draw
        try:
            return super().train(pick)
        finally:
            del self.buffer.draw

    def restart(self, pick):
        before = self.buffer
        super().restart(pick)
        if self.buffer is not before:
            self.limits = [self.max_staleness]

    def check(self):
        stats = self.buffer.stats()
        assert stats.in_flight == len(self.flying)
        assert stats.active == stats.in_flight + stats.ready <= stats.capacity


@st.composite
def dropping(draw):
    """Any window: the bound does not hang on it."""
    per_step, staleness = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    overcommit = draw(st.sampled_from([1.0, 1.5, 2.0, 4.0]))
    return (per_step, staleness, draw(st.integers(0, 9))), overcommit


@pytest.mark.full
def test_the_schedules_with_drops_reach_what_they_are_to_test():
    seen = Counter()

    @settings(SETTINGS, derandomize=True, database=None, max_examples=50)
    @given(dropping(), schedules([*EVENTS, *["aim"] * 3]))
    def look(how, schedule):
        machine = played(how[0], schedule, Dropping, overcommit=how[1])
        lags = [v - machine.admitted[n].version for n, v in machine.trained_at.items()]
        seen["steps"] += machine.version > 2
        seen["dropped"] += len(machine.dropped) > 0 and machine.version > 2
        seen["at the bound"] += machine.max_staleness > 0 and machine.max_staleness in lags
        seen["overtaken"] += machine.order != sorted(machine.order)

    look()
    assert min(seen.values()) >= 10, seen


@pytest.mark.full
@FEWER
@given(dropping(), schedules([*EVENTS, *["aim"] * 3]), st.sampled_from(sorted(RANKS)))
def test_where_the_too_old_are_dropped_none_is_trained_on_and_the_run_goes_on(how, schedule, rank):
    shape, overcommit = how
    machine = played(shape, schedule, Dropping, overcommit=overcommit, rank=RANKS[rank])
    for i, number in enumerate(machine.order):
        assert sum(other > number for other in machine.order[:i]) <= machine.lookahead
    steps = sum(finish_a_step(machine) for _ in range(6))
    assert steps >= 3, "at most one round is lost to each draw that only drops"


@pytest.mark.full
@FEWER
@given(dropping(), schedules(EVENTS))
def test_where_the_too_old_are_dropped_each_group_still_has_one_fate(how, schedule):
    machine = played(how[0], schedule, Dropping, overcommit=how[1])
    while not finish_a_step(machine):  # its draw tells of all drops before
        pass
    stats = machine.buffer.stats()
    fates = list(machine.fates.values())
    assert len(fates) + stats.in_flight + stats.ready == len(machine.admitted)
    assert fates.count("stale") == len(machine.dropped)
    if not machine.restarts:
        assert stats.dropped.get("stale", 0) == len(machine.dropped)
