"""A sampler in a separate process: it joins a run, generates until it is asked to leave, and
leaves.

dial ──Welcome──> engine ──the first weights──> Sampler ──Live──> requests, weights
  ^                                                        │
  └───────── the trainer is gone: it may come back ────────┘
SIGTERM, Ctrl-C, Leave: running requests are handed back to the trainer, and the process ends
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import Disconnected
from jaxrl_async.host import only_new_garbage
from jaxrl_async.metrics.health import Progress, checked_health
from jaxrl_async.metrics.json_logs import add_labels
from jaxrl_async.private_folder import private_folder
from jaxrl_async.remote.run.sampler_parts import (
    check_code,
    claim_sampler_devices,
    config_of,
    parts_of,
)
from jaxrl_async.remote.run.sampler_world import follow_sampler, lead_sampler
from jaxrl_async.remote.sampler.rendezvous import LeaderAddress
from jaxrl_async.remote.sampler.request_server import ReplicaServer
from jaxrl_async.remote.weights.shared_memory import machine_boot_id
from jaxrl_async.remote.wire.address import locate_trainer
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.messages import Hello, Prepared, Welcome
from jaxrl_async.remote.wire.secret import read_secret
from jaxrl_async.remote.wire.session import BEATS, WireLimits, WireSession
from jaxrl_async.remote.wire.tls import read_tls
from jaxrl_async.run.builders.devices import keep_compiled_programs
from jaxrl_async.run.builders.program_cache import keep_used
from jaxrl_async.run.signals import PREEMPTED_CODE, Stop
from jaxrl_async.sampler.sampler import Sampler

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Interval at which a sampler checks for a stop, seconds."""
BEAT_S = 0.5
"""Maximum time between two reports of the statistics, seconds."""


PROGRAMS = "programs"
"""Folder of compiled programs (private_folder), unless JAX_COMPILATION_CACHE_DIR is set."""


class Outcome(StrEnum):
    """Reason why a sampler no longer serves a run."""

    FINISHED = "finished"  # the trainer asked it to leave
    LOST = "lost"  # the connection to the trainer was lost
    STOPPED = "stopped"  # stopped by a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Arguments of a sampler process."""

    address: str  # of the trainer: HOST:PORT, file:PATH or a run's folder
    name: str  # "": the machine's name and the process id
    axes: Mapping[str, int]  # of its slice; {}: mesh.sampler of the run
    wait_s: float  # maximum time without a trainer
    once: bool  # end when the trainer is gone instead of waiting for it
    remote: RemoteSection  # its certificate files, and its data_port if set
    process: int = 0  # index of this process within the sampler
    processes: int = 1  # processes of the sampler: one per host of its slice


def run_sampler(options: JoinOptions) -> int:
    """Join the run, and rejoin whenever its trainer comes back; return the exit code.

    Raises JoinRefused if the trainer refuses, Disconnected if no trainer answers within wait_s, and
    the errors of building a sampler.
    """
    programs = private_folder(PROGRAMS)
    keep_used(programs)
    keep_compiled_programs(programs)
    secret, tls = read_secret(), read_tls(options.remote)  # empty secret: use the trainer's file
    instance = secrets.token_hex(8)
    with Stop() as stop:
        join = partial(
            dial,
            options.address,
            secret=secret,
            tls=tls,
            limits=WireLimits(),
            timeout_s=options.wait_s,
            stopped=stop.is_set,
        )
        stop.answer = "handing back running requests and leaving"
        if options.processes > 1:
            claim_sampler_devices(options.axes, options.processes)
        if options.process:
            follow_sampler(options.remote, stop=stop, wait_s=options.wait_s)
            return PREEMPTED_CODE if stop.preempted else 0
        while True:
            outcome = _join_once(options, join, stop, instance)
            if outcome is Outcome.STOPPED or (outcome is Outcome.LOST and stop.is_set()):
                return PREEMPTED_CODE if stop.preempted else 0
            if outcome is Outcome.FINISHED:
                return 0
            if options.once or options.processes > 1:
                why = "--once" if options.once else "all its processes must be restarted"
                log.error("the trainer is gone: this sampler also ends (%s)", why)
                return 1
            log.warning("the trainer is gone; waiting %.0f s for it to come back", options.wait_s)


def _join_once(
    options: JoinOptions,
    join: Callable[[Hello], tuple[WireSession, Welcome]],
    stop: Stop,
    instance: str,
) -> Outcome:
    """Join, serve until the session ends, and return the outcome."""
    with ExitStack() as closing:
        hello = Hello(
            name=options.name or f"{socket.gethostname()}-{os.getpid()}",
            host=machine_boot_id(),
            process=os.getpid(),
            mesh=options.axes,
            instance=instance,
        )
        with ExitStack() as without_trainer:
            if options.processes > 1:
                without_trainer.callback(LeaderAddress.broadcast, None, leads=True)
            try:
                session, welcome = join(hello)
            except Disconnected:
                if stop.is_set():
                    return Outcome.STOPPED
                raise
            without_trainer.pop_all()
        closing.callback(session.end, "the sampler has ended")
        try:
            return _serve(options, session, welcome, stop, closing)
        except Disconnected as error:
            log.warning("%s", error)
            return Outcome.STOPPED if stop.is_set() else Outcome.LOST


def _serve(
    options: JoinOptions,
    session: WireSession,
    welcome: Welcome,
    stop: Stop,
    closing: ExitStack,
) -> Outcome:
    """Build the sampler, and serve the trainer until the session ends or a signal arrives."""
    config = config_of(welcome)
    check_code(welcome, session.secret)
    add_labels(run=config.run.name)
    remote, host = config.remote_settings, own_host(options.address)
    session.use_limits(WireLimits.of(remote))
    # Before it generates there is nothing to hand back: ending the session ends any wait for
    # weights.
    with stop.acting_on(lambda: session.end(f"{stop.reason}, before it generated anything")):
        if options.processes > 1:
            sampler = lead_sampler(
                session,
                welcome,
                options.remote,
                host=host,
                secret=session.secret,
                stop=stop,
                closing=closing,
            )
        else:
            sampler = _own_sampler(options, session, welcome, host, closing)
    server = ReplicaServer(session, sampler, beat_s=min(BEAT_S, remote.silence_s / BEATS))
    server.start()
    log.info("generating for %s with weights of version %d", welcome.run, sampler.version)
    check = Progress(
        lambda: _progress(sampler), config.faults.sampler_hang_s, time.monotonic, "the sampler"
    )
    with only_new_garbage(), checked_health(check):
        while not server.over.wait(POLL_S):
            if stop.is_set():
                server.leave(f"{stop.reason}: the machine is needed for something else")
                return Outcome.STOPPED
    log.info("the session has ended: %s", server.reason)
    return Outcome.FINISHED if server.dismissed else Outcome.LOST


def _progress(sampler: Sampler) -> tuple[int, bool]:
    """Return the number of blocks of the sampler, and whether it has requests."""
    stats = sampler.stats()
    return stats.blocks, stats.in_flight + stats.waiting > 0


def _own_sampler(
    options: JoinOptions,
    session: WireSession,
    welcome: Welcome,
    host: str,
    closing: ExitStack,
) -> Sampler:
    """Return the sampler of this single process once it has weights; it reports them as live."""
    parts = parts_of(welcome)
    setup = parts.setup()
    receiver, address = parts.receiver(session, options.remote, host=host, secret=session.secret)
    closing.callback(receiver.close)
    session.send(Prepared(data_address=address))
    first = receiver.first(parts.config.remote_settings.wait_s)
    sampler = closing.enter_context(
        Sampler.from_setup(setup, setup.engine.prepare(first.params), first.version, receiver)
    )
    receiver.live(first.version)
    receiver.begun()
    return sampler


def own_host(trainer: str) -> str:
    """Return this machine's address for other samplers, on the interface towards the trainer."""
    try:
        host = locate_trainer(trainer).address.host
        family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the interface
            host = str(probe.getsockname()[0])
            return f"[{host}]" if ":" in host else host
    except (OSError, Disconnected):
        return "127.0.0.1"
