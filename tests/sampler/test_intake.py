"""What is taken in between two blocks: live whatever has come, in a replay what was recorded."""

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from tiny import PARAMS, Script, request

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports.run import UNRECORDED, Intake, NotYet
from jaxrl_async.ports.weights import FixedWeights
from jaxrl_async.sampler.batch.sequence import BatchStats
from jaxrl_async.sampler.intake import Receiver
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.request_checks import RequestLimits
from jaxrl_async.sampler.requests import Inbox
from jaxrl_async.types import VersionedParams

NEW = VersionedParams(version=1, params=PARAMS)


class Part:
    """Something with a thread that never starts."""

    def close(self) -> None:
        pass


class Prescribed:
    """A ports.Schedule that prescribes one thing after another."""

    def __init__(self, *due: Intake | NotYet | None) -> None:
        self.coming, self.written = list(due), []

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        return self.coming.pop(0)

    def write(self, **event: object) -> None:
        self.written.append(event)


@pytest.fixture
def lifetime():
    part = Part()
    lifetime = Lifetime(part, lambda part: None, name="test")
    lifetime.start = lambda: None
    yield lifetime
    del part


@pytest.fixture
def inbox(lifetime):
    return Inbox(lifetime, RequestLimits(max_length=64), lambda: 0.0, itertools.count())


def empty_batch() -> SimpleNamespace:
    engine = SimpleNamespace(spec=SimpleNamespace(total_slots=3))
    batch = SimpleNamespace(queue=deque(), admitted={}, engine=engine, stats=BatchStats())
    batch.cancel, batch.enqueue = batch.queue.remove, batch.queue.extend
    batch.output = lambda stage: SimpleNamespace(token_ids=())
    return batch


def asked(inbox: Inbox, *names: str) -> list[Future]:
    futures = [Future() for _ in names]
    inbox.submit([request(0, request_id=name) for name in names], futures)
    return futures


def take(receiver: Receiver, batch, *, wants_weights: bool = True):
    return receiver.take(batch, block=3, idle=False, wants_weights=wants_weights)


def queued(batch) -> list[str]:
    return [s.request.request_id for s in batch.queue]


def test_live_it_takes_whatever_has_come_and_writes_it_down(inbox) -> None:
    schedule, batch = Prescribed(None, None), empty_batch()
    receiver = Receiver("s", inbox, Script([NEW], after=0), schedule)
    first, _ = asked(inbox, "a", "b")
    first.cancel()
    taken = take(receiver, batch)
    assert (len(taken.cancelled), taken.update, taken.prescribed) == (1, NEW, False)
    assert queued(batch) == ["b"]
    assert schedule.written == [
        {"sampler": "s", "block": 3, "take": ["a", "b"], "cancel": ["a"], "version": 1}
    ]
    assert take(receiver, batch).update is None and len(schedule.written) == 1


def test_while_a_version_waits_no_other_is_polled(inbox) -> None:
    receiver = Receiver("s", inbox, Script([NEW], after=0), UNRECORDED)
    assert take(receiver, empty_batch(), wants_weights=False).update is None
    assert take(receiver, empty_batch()).update is NEW


def test_in_a_replay_nothing_is_taken_before_all_that_was_recorded_is_here(inbox) -> None:
    due = Intake(requests=("b", "a", "c"), cancelled=("c",), version=1)
    schedule, batch = Prescribed(NotYet.NOT_YET, due, due, due, due), empty_batch()
    source = Script([], after=0)
    receiver = Receiver("s", inbox, source, schedule)
    assert take(receiver, batch) is NotYet.NOT_YET
    _, _, cancelled = asked(inbox, "x", "a", "c")
    assert take(receiver, batch) is NotYet.NOT_YET, "b has not come"
    asked(inbox, "b")
    assert take(receiver, batch) is NotYet.NOT_YET, "c is not cancelled"
    cancelled.cancel()
    assert take(receiver, batch) is NotYet.NOT_YET, "the weights have not come"
    source.updates.append(NEW)
    taken = take(receiver, batch)
    assert (len(taken.cancelled), taken.update, taken.prescribed) == (1, NEW, True)
    assert queued(batch) == ["b", "a"], "in the recorded order"
    assert [s.request.request_id for s in inbox.requests()] == ["x"]


def test_commands_run_in_either_case_and_see_what_was_submitted_before(inbox, lifetime) -> None:
    schedule, batch, seen = Prescribed(NotYet.NOT_YET, None), empty_batch(), []
    receiver = Receiver("s", inbox, FixedWeights(), schedule)
    asked(inbox, "a")
    for wanted in ([], ["a"]):
        lifetime.wake.clear()
        caller = threading.Thread(target=inbox.run, args=[lambda: seen.append(queued(batch))])
        caller.start()
        lifetime.wake.wait(60)
        take(receiver, batch)
        caller.join(60)
        assert seen.pop() == wanted


def test_after_the_end_nothing_is_queued(inbox, lifetime) -> None:
    with pytest.raises(RolloutError, match="max_new_tokens"):
        inbox.submit([request(0, max_new_tokens=0)], [Future()])
    lifetime.closed = True
    with pytest.raises(Closed):
        asked(inbox, "a")
    lifetime.fail(ValueError("why"))
    with pytest.raises(ValueError, match="why"):
        asked(inbox, "a")
    assert not inbox
