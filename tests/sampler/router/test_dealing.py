"""Which replica gets a request: a pure function."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl_async.sampler.router.dealing import REMEMBERED, Candidate, Dealer, choose
from jaxrl_async.sampler.router.fleet import ReplicaSlot
from jaxrl_async.sampler.router.job import RouterJob, job_for_thread
from jaxrl_async.testing.scripted_replica import ScriptedReplica
from jaxrl_async.types import Request


def job(prompt: int, *, died: int = 0, avoid: int | None = None) -> RouterJob:
    tokens = np.array([prompt, 1, 2], np.int32)
    made = job_for_thread(Request(request_id=f"r{prompt}", token_ids=tokens, max_new_tokens=4))
    made.died, made.avoid = [0] * died, avoid
    return made


def slots(*in_flight: int) -> list[Candidate]:
    return [Candidate(slot=i, in_flight=n, capacity=8) for i, n in enumerate(in_flight)]


def test_a_prefix_goes_home_unless_home_is_much_busier() -> None:
    idle, busy = Candidate(in_flight=0, capacity=8), Candidate(in_flight=8, capacity=8)
    some = Candidate(in_flight=1, capacity=8)
    assert choose([some, idle], previous=0) == 0
    assert choose([busy, idle], previous=0) == 1
    assert choose([some, idle], previous=None) == 1
    assert choose([idle, idle], previous=None) == 0


def test_groups_stay_together_and_each_goes_where_there_is_room() -> None:
    jobs = [job(5), job(5), job(6), job(5)]
    deal = Dealer().deal(jobs, slots(1, 0))
    assert deal.shares == {1: [*jobs[:2], jobs[3]], 0: [jobs[2]]}
    assert deal.waiting == []
    together = Dealer().deal(jobs, slots(1, 0), together=True)
    assert together.shares == {1: jobs}


def test_a_prefix_returns_to_its_slot_until_too_many_others_came() -> None:
    dealer, prompt = Dealer(), job(5)
    assert list(dealer.deal([prompt], slots(1, 0)).shares) == [1]
    assert list(dealer.deal([prompt], slots(0, 1)).shares) == [1], "its slot"
    for other in range(100, 100 + REMEMBERED):
        dealer.deal([job(other)], slots(0, 0))
    assert list(dealer.deal([prompt], slots(0, 1)).shares) == [0], "forgotten"


def turn(conversation: int, length: int) -> RouterJob:
    tokens = np.full(length, conversation, np.int32)
    request = Request(
        request_id=f"t{conversation}", token_ids=tokens, max_new_tokens=4, key=(conversation, 0)
    )
    return job_for_thread(request)


@pytest.mark.full
def test_conversations_are_remembered_by_the_places_that_there_are() -> None:
    """4,096 at least, else 16 for each place: one-turn requests do not fill memory for good."""

    def remembered(dealer: Dealer, there: list[Candidate]) -> list[int]:
        for conversation in range(10_000):
            dealer.deal([turn(conversation, 40)], there)
        return [t for t in range(10_000) if not dealer.may_wait(turn(t, 50), lambda slot: True)]

    assert remembered(Dealer(), slots(0, 0)) == list(range(10_000 - 4096, 10_000))
    large = [Candidate(slot=i, in_flight=0, capacity=256) for i in range(2)]
    dealer = Dealer()
    assert remembered(dealer, large) == list(range(10_000 - 16 * 512, 10_000))
    few = [replace(large[0], in_flight=1)]
    dealer.deal([turn(20_000, 40)], few)
    assert not dealer.may_wait(turn(9_000, 50), lambda slot: True), "one left for a while"


def test_a_slot_is_avoided_while_there_is_another_and_a_recorded_one_is_taken() -> None:
    assert list(Dealer().deal([job(5, avoid=0)], slots(0, 3)).shares) == [1]
    assert list(Dealer().deal([job(5, avoid=0)], slots(0)).shares) == [0]
    assert list(Dealer(lambda request_id: 1).deal([job(5)], slots(0, 7)).shares) == [1]


def test_all_wait_where_no_replica_is_at_work() -> None:
    jobs = [job(5), job(6, died=2)]
    deal = Dealer().deal(jobs, [])
    assert deal.shares == {} and deal.waiting == [jobs[1], jobs[0]]


def test_suspects_are_tried_one_at_a_time_on_a_slot_of_their_own() -> None:
    first, second, other = job(5, died=2), job(6, died=3), job(7)
    deal = Dealer().deal([other, first, second], slots(2, 0))
    assert deal.shares == {1: [first], 0: [other]} and deal.waiting == [second]
    trying = [Candidate(slot=0, in_flight=1, capacity=8, tries_suspect=True), *slots(0, 0)[1:]]
    deal = Dealer().deal([second, other], trying)
    assert deal.shares == {1: [other]} and deal.waiting == [second]


def test_the_least_loaded_slot_is_kept_free_for_suspects_that_wait() -> None:
    other = job(7)
    deal = Dealer().deal([other], slots(1, 2), suspects_wait=True)
    assert deal.shares == {1: [other]}
    assert Dealer().deal([other], slots(1), suspects_wait=True).waiting == [other]


def test_what_a_group_costs_does_not_grow_with_the_requests_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, looked = list[Candidate](), list[RouterJob]()

    def replaced(candidate: Candidate, *, in_flight: int) -> Candidate:
        changed.append(candidate)
        return replace(candidate, in_flight=in_flight)

    monkeypatch.setattr("jaxrl_async.sampler.router.dealing.replace", replaced)
    deal = Dealer().deal([job(n) for n in range(20)], slots(*[0] * 50))
    assert len(deal.shares) == 20 and len(changed) == 20, "one candidate for each"
    monkeypatch.setattr(RouterJob, "suspect", property(lambda made: looked.append(made)))
    slot = ReplicaSlot(number=0, replica=ScriptedReplica(), up_at=0.0, moved_at=0.0)
    slot.jobs = dict.fromkeys(job(n) for n in range(20))
    assert slot.candidate.in_flight == 20 and not looked
