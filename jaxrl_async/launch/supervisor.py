"""Supervise a trainer and its samplers on a cluster: start, restart, add and remove processes.

    what ends                       what follows
    trainer, code 0                 the samplers are ended; the run is done
    trainer, code 75 (preempted)    it restarts and resumes; also if its host was lost
    trainer, code 2                 the configuration is wrong: the run ends
    trainer, any other code         it restarts, at most max_restarts times
    a sampler                       it restarts, without limit, later after each failure in a row
    everything, after stop()        the trainer saves and ends, then the samplers

The supervisor has neither a thread nor a clock: its owner calls `step` about once a second. It does
not know the cluster either, only groups that a cluster places (a role's processes, one on each
host).
"""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from jaxrl_async.launch.autoscale import demand_of, measured_steps, steps_in, wanted_samplers
from jaxrl_async.launch.hardware import Hardware
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.run.signals import PREEMPTED_CODE

LOST = -1
"""Code of a process whose host was lost."""
CONFIG_CODE = 2
"""Exit code for a wrong command line or configuration."""
STEADY_S = 60.0
"""Lifetime after which a process's failure no longer counts as one in a row, seconds."""
LEAVE_S = 60.0
"""Time that a sampler has to hand its requests back, seconds."""
CHECK_S = 2.0
"""Interval between two reads of the run's metrics, seconds."""
PLACE_S = 60.0
"""Time after which a group without hosts is reported, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTask:
    """The command that one host of a group runs."""

    words: tuple[str, ...]  # the command; "{config}" becomes the path of a file with `config`
    env: Mapping[str, str] = field(repr=False)  # additional variables; may hold a secret
    config: str = ""


class Group(Protocol):
    """The processes of a trainer, or of one sampler, one on each host."""

    def placed(self) -> bool:
        """Return whether the hosts have been found. Does not wait."""

    def address(self) -> str:
        """Return HOST:PORT for the trainer: the first host, and a port that was free on it."""

    def start(self, tasks: Callable[[str], Sequence[HostTask]]) -> None:
        """Start a process on each host. Processes that still run there are killed.

        tasks: the coordinator's HOST:PORT -> one task a host.
        """

    def codes(self) -> tuple[int | None, ...]:
        """Return each process's exit code; None: it is running, LOST: its host is gone."""

    def send(self, number: int) -> None:
        """Send a signal to all running processes."""

    def tail(self, path: str) -> bytes:
        """Return the end of a file on the first host; b"" if there is no such file."""

    def close(self) -> None:
        """End all processes and release the hosts."""


class Cluster(Protocol):
    """Finds hosts."""

    def place(self, hardware: Hardware, name: str) -> Group:
        """Request the hosts of a group. Does not wait for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorPlan:
    """The processes to keep running."""

    trainer: Hardware
    sampler: Hardware
    least: int  # samplers
    most: int
    max_restarts: int  # of the trainer after failures
    metrics: str  # path of the run's metrics.jsonl on the trainer's host
    trainer_tasks: Callable[[str, str], Sequence[HostTask]]  # (listen address, coordinator)
    sampler_tasks: Callable[[str, str], Sequence[HostTask]]  # (address to join, coordinator)


class Phase(StrEnum):
    WAITING = "waiting"  # until it may start
    PLACING = "placing"  # until there are hosts
    RUNNING = "running"
    LEAVING = "leaving"  # got the signal to end


@dataclass(slots=True)
class SupervisedSampler:
    """A sampler to keep running, with hosts or without."""

    number: int
    phase: Phase = Phase.WAITING
    group: Group | None = None
    since_s: float = 0.0  # start of the phase
    start_at_s: float = 0.0
    failures: int = 0  # in a row
    trainer_address: str = ""  # address of the trainer that it got
    overdue: bool = False  # was reported to have no hosts
    retired: bool = False  # no longer wanted


def restart_wait_s(failures: int) -> float:
    """Return the wait after this many failures in a row: 2, 4, 8 ... 60 seconds."""
    return backoff_s(1.0, failures) if failures else 0.0


def outcome(codes: Sequence[int | None]) -> int | None:
    """Return a group's exit code: its first failure's, if any; None while the others run."""
    failed = [code for code in codes if code not in (None, 0)]
    if LOST in failed:
        return LOST
    if failed:
        return failed[0]
    return None if None in codes else 0


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Supervisor:
    """Runs a plan; `step` does what is due and returns the exit code once everything has ended."""

    def __init__(
        self, plan: SupervisorPlan, cluster: Cluster, *, report: Callable[[str], None] = _report
    ) -> None:
        """Place nothing yet. report: called with each line to report."""
        self._plan, self._cluster, self._report = plan, cluster, report
        self._trainer: Group | None = None
        self._started = False  # whether the trainer's processes were started
        self._restarts, self._trainer_at_s = 0, 0.0
        self._trainer_since_s, self._trainer_overdue = 0.0, False  # since it waits for hosts
        self._samplers = [SupervisedSampler(number=n) for n in range(plan.least)]
        self._stopped = False
        self._result: int | None = None
        self._next_check_s = 0.0

    @property
    def samplers(self) -> int:
        """Number of running samplers."""
        return sum(sampler.phase is Phase.RUNNING for sampler in self._samplers)

    def stop(self, number: int) -> None:
        """Send this signal to the trainer, which saves and ends; then end the samplers."""
        self._stopped = True
        if self._trainer is not None and self._started:
            self._trainer.send(number)
        elif self._result is None:
            self._result = PREEMPTED_CODE if number == signal.SIGTERM else 0

    def step(self, now_s: float) -> int | None:
        """Do what is due; return the run's exit code when everything has ended."""
        if self._result is None:
            self._step_trainer(now_s)
        for sampler in tuple(self._samplers):
            self._step_sampler(sampler, now_s)
        if self._result is None:
            self._scale(now_s)
            return None
        if any(sampler.group is not None for sampler in self._samplers):
            return None
        self.close()
        return self._result

    def close(self) -> None:
        """End everything immediately."""
        for group in [self._trainer, *(sampler.group for sampler in self._samplers)]:
            if group is not None:
                group.close()
        self._trainer, self._samplers = None, []

    # ---- the trainer

    def _step_trainer(self, now_s: float) -> None:
        if now_s < self._trainer_at_s:
            return
        if self._trainer is None:
            self._trainer = self._cluster.place(self._plan.trainer, "trainer")
            self._trainer_since_s, self._trainer_overdue = now_s, False
        if not self._started:
            if self._trainer.placed():
                address = self._trainer.address()
                self._report(f"trainer: starts, and waits for samplers at {address}")
                self._trainer.start(lambda at: self._plan.trainer_tasks(address, at))
                self._started = True
            elif now_s - self._trainer_since_s > PLACE_S and not self._trainer_overdue:
                self._trainer_overdue = True
                self._report_overdue("trainer", self._plan.trainer)
            return
        code = outcome(self._trainer.codes())
        if code is not None:
            self._trainer_ended(code, now_s)

    def _trainer_ended(self, code: int, now_s: float) -> None:
        """Decide what follows; release the hosts if one is lost, or none is needed."""
        assert self._trainer is not None
        self._started = False
        what = "its host was lost" if code == LOST else f"ended with code {code}"
        failed = code not in (0, PREEMPTED_CODE, LOST)
        self._restarts += failed
        must_end = self._restarts > self._plan.max_restarts
        if self._stopped or code in (0, CONFIG_CODE) or must_end:
            limit = f" after {self._plan.max_restarts} restarts" if must_end and code else ""
            self._report(f"trainer: {what}{limit}; ending the samplers")
            self._result = PREEMPTED_CODE if code == LOST else code
        else:
            wait_s = restart_wait_s(self._restarts) if failed else 0.0
            self._trainer_at_s = now_s + wait_s
            count = f"restart {self._restarts} of {self._plan.max_restarts}" if failed else ""
            self._report(f"trainer: {what}; it restarts and resumes in {wait_s:.0f} s {count}")
        if code == LOST or self._result is not None:
            self._trainer.close()
            self._trainer = None

    # ---- the samplers

    def _step_sampler(self, sampler: SupervisedSampler, now_s: float) -> None:
        must_end = self._result is not None or sampler.retired
        if sampler.phase is Phase.WAITING:
            if must_end:
                self._samplers.remove(sampler)
            elif self._started and now_s >= sampler.start_at_s:
                sampler.group = self._cluster.place(self._plan.sampler, f"sampler-{sampler.number}")
                self._enter(sampler, Phase.PLACING, now_s)
        assert sampler.group is not None or sampler.phase is Phase.WAITING
        if sampler.group is None:
            return
        if sampler.phase is Phase.PLACING:
            self._step_placing(sampler, sampler.group, now_s, must_end=must_end)
        elif sampler.phase is Phase.RUNNING:
            self._step_running(sampler, sampler.group, now_s, must_end=must_end)
        elif outcome(sampler.group.codes()) is not None or now_s - sampler.since_s > LEAVE_S:
            self._release(sampler, now_s)

    def _enter(self, sampler: SupervisedSampler, phase: Phase, now_s: float) -> None:
        sampler.phase, sampler.since_s, sampler.overdue = phase, now_s, False

    def _release(self, sampler: SupervisedSampler, now_s: float) -> None:
        """Release a sampler's hosts; it waits to restart."""
        if sampler.group is not None:
            sampler.group.close()
        sampler.group = None
        self._enter(sampler, Phase.WAITING, now_s)

    def _step_placing(
        self, sampler: SupervisedSampler, group: Group, now_s: float, *, must_end: bool
    ) -> None:
        if must_end:
            self._release(sampler, now_s)
        elif self._started and self._trainer is not None and group.placed():
            sampler.trainer_address = address = self._trainer.address()
            group.start(lambda at: self._plan.sampler_tasks(address, at))
            self._report(f"sampler {sampler.number}: starts, and joins {address}")
            self._enter(sampler, Phase.RUNNING, now_s)
        elif self._started and now_s - sampler.since_s > PLACE_S and not sampler.overdue:
            sampler.overdue = True  # its hosts may be ready while the trainer is down
            self._report_overdue(f"sampler {sampler.number}", self._plan.sampler)

    def _report_overdue(self, who: str, hardware: Hardware) -> None:
        self._report(f"{who}: no hosts of {hardware} for {PLACE_S:.0f} s; still waiting")

    def _step_running(
        self, sampler: SupervisedSampler, group: Group, now_s: float, *, must_end: bool
    ) -> None:
        code = outcome(group.codes())
        moved = self._started and self._trainer is not None and (
            self._trainer.address() != sampler.trainer_address
        )  # fmt: skip
        if code is None and (must_end or moved):
            group.send(signal.SIGTERM)  # it hands unfinished requests back
            self._enter(sampler, Phase.LEAVING, now_s)
        elif code is not None:
            failed = code not in (0, PREEMPTED_CODE)
            steady = now_s - sampler.since_s >= STEADY_S
            sampler.failures = (0 if steady else sampler.failures) + failed
            sampler.start_at_s = now_s + restart_wait_s(sampler.failures)
            what = "its host was lost" if code == LOST else f"ended with code {code}"
            again = "" if must_end else f"; restarts in {restart_wait_s(sampler.failures):.0f} s"
            self._report(f"sampler {sampler.number}: {what}{again}")
            self._release(sampler, now_s)

    # ---- number of samplers

    def _scale(self, now_s: float) -> None:
        """Change the number of samplers once enough steps were measured with the present one."""
        if self._plan.least == self._plan.most or not self._started or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_S
        assert self._trainer is not None
        staying = [sampler for sampler in self._samplers if not sampler.retired]
        staying.sort(key=lambda sampler: sampler.overdue)  # those without hosts last
        now = sum(not sampler.overdue for sampler in staying)
        seen = measured_steps(steps_in(self._trainer.tail(self._plan.metrics)), now)
        if not seen:
            return  # some are still joining or leaving
        demand = demand_of(seen)
        wanted = wanted_samplers(demand, now, self._plan.least, self._plan.most)
        if wanted == now or now < wanted <= len(staying):
            return
        self._report(
            f"samplers: {now} -> {wanted} (the trainer waits {demand.trainer_waits:.0%} of the "
            f"time, samplers idle {demand.sampler_idles:.0%})"
        )
        used = {sampler.number for sampler in self._samplers}
        free = (n for n in range(self._plan.most + len(used)) if n not in used)
        self._samplers += [
            SupervisedSampler(number=next(free)) for _ in range(wanted - len(staying))
        ]
        for sampler in staying[wanted:]:
            sampler.retired = True
