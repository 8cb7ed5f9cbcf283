"""Requests to replicas and answers to callers: each caller gets exactly one answer.

submit ──Dealer──> [ seat: replica ] ──Completion──> checked ──> the caller's future
           ^              │ taken out, or a log-prob that is not finite
           └── waiting <──┘
"""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.router.dealing import Dealer
from jaxrl_async.sampler.router.fleet import Fleet, Seat
from jaxrl_async.sampler.router.job import RouterJob
from jaxrl_async.types import Completion


class Dispatcher:
    """Deals jobs to the fleet and settles them, under the fleet's lock."""

    def __init__(self, fleet: Fleet, dealer: Dealer, lifetime: Lifetime) -> None:
        """lifetime: the router's; its thread is woken when a replica needs to be looked after."""
        self._fleet, self._dealer, self._lifetime = fleet, dealer, lifetime

    def submit(self, jobs: Sequence[RouterJob], *, together: bool = False) -> None:
        """Deal new jobs: all of them, or none if it raises.

        Raises Closed, and the error that ended the router.
        """
        with self._fleet.lock:
            self._lifetime.check_open("the samplers are closed")
            try:
                self._deal(jobs, together=together)
            except BaseException:
                for job in jobs:
                    self.withdraw(job)
                raise

    def deal_waiting(self) -> None:
        """Deal the jobs that no replica has, the most urgent first and equal ones in the order of
        asking: what a replica has handed back overtakes what was asked for later."""
        fleet = self._fleet
        with fleet.lock:
            jobs, fleet.waiting = (
                sorted(fleet.waiting, key=lambda j: (j.request.priority, j.order)),
                [],
            )
            try:
                self._deal(jobs)
            except BaseException:
                fleet.waiting += [
                    job for job in jobs if job.inner is None and job not in fleet.waiting
                ]
                raise

    def withdraw(self, job: RouterJob) -> None:
        """Drop a job whose caller no longer waits."""
        with self._fleet.lock:
            if job in self._fleet.waiting:
                self._fleet.waiting.remove(job)
            if job.inner is not None:
                job.inner.cancel()

    def end(self, error: BaseException) -> None:
        """Give every caller the error, and end the router with it unless it is closed."""
        with self._fleet.lock:
            if not self._lifetime.closed:
                self._lifetime.fail(error)
            jobs = self._fleet.drain()
        for job in jobs:
            job.settle(error)

    def _deal(self, jobs: Sequence[RouterJob], *, together: bool = False) -> None:
        """Give each job to a replica at work; it waits if none can take it.

        Raises whatever a healthy replica raises.
        """
        fleet = self._fleet
        deal = self._dealer.deal(
            jobs,
            [seat.candidate for seat in fleet.seats if seat.at_work],
            suspects_wait=any(job.suspect for job in fleet.waiting),
            together=together,
        )
        fleet.waiting += deal.waiting
        for number in sorted(deal.shares):
            seat, share = fleet.seat(number), deal.shares[number]
            if seat is None:  # recorded, and gone
                fleet.waiting += share
                continue
            if not fleet.hand_over(seat, share):
                self._lifetime.wake.set()
                continue
            for job in share:
                assert job.inner is not None
                job.inner.add_done_callback(partial(self._answered, seat, job))

    def _answered(self, seat: Seat, job: RouterJob, inner: "Future[Completion]") -> None:
        """Pass a replica's answer on to the caller. Runs on the replica's thread."""
        fleet = self._fleet
        with fleet.lock:
            if job.inner is not inner:
                return  # the replica was taken out: another has the request
            error = None if inner.cancelled() else inner.exception()
            if error is not None and seat.replica.error is not None and not self._lifetime.closed:
                self._lifetime.wake.set()  # it died: the router gives the request to another
                return
            del seat.jobs[job]
            job.inner = None
            if not seat.jobs and any(waits.suspect for waits in fleet.waiting):
                self._lifetime.wake.set()  # the seat is free for it
            if inner.cancelled():
                return
            result = self._checked(seat, job, inner.result()) if error is None else error
        if result is not None:
            job.settle(result)

    def _checked(
        self, seat: Seat, job: RouterJob, completion: Completion
    ) -> Completion | RolloutError | None:
        """Return the completion if its log-probs are finite. Else return None the first time (it is
        drawn again elsewhere), and an error the second time."""
        if not seat.replica.has_logprobs or np.isfinite(completion.logprobs).all():
            self._fleet.draws_well(seat)
            return completion
        self._fleet.draws_nonfinite(seat)
        if job.avoid is None:
            job.avoid = seat.number
            self._fleet.waiting.append(job)
            self._lifetime.wake.set()
            return None
        return RolloutError(
            f"request {job.request.request_id}: the sampler gave log-probs that are not finite, "
            "twice. The weights are likely to have diverged: look at train/grad_norm, or lower "
            "algorithm.learning_rate."
        )
