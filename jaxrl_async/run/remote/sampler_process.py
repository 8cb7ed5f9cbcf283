"""A sampler in a process of its own: it joins a run, draws until it is told to go, and leaves.

dial ──Welcome──> engine ──the first weights──> Sampler ──Live──> requests, weights
  ^                                                        │
  └────────── the trainer is gone: it may come again ──────┘
SIGTERM, Ctrl-C, Leave: what is running is handed back to the trainer, and the process ends
"""

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic import ValidationError

import jaxrl_async
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import ConfigError, Disconnected, MeshError
from jaxrl_async.mesh import SAMPLER_RULES, check_collective, make_mesh
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.spec import ModelSpec, RopeScaling
from jaxrl_async.run.builders.samplers import sampler_settings, sent_weights, uses_one_thread
from jaxrl_async.run.signals import PREEMPTED_CODE, Stop
from jaxrl_async.run.start import skip_absent_tpu
from jaxrl_async.sampler.remote.server import ReplicaServer
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.weights.manifest import manifest_of
from jaxrl_async.weights.remote.receiver import WeightReceiver
from jaxrl_async.weights.remote.source import RemoteSource
from jaxrl_async.weights.remote.transports import make_fetching
from jaxrl_async.wire.address import locate_trainer
from jaxrl_async.wire.dial import dial
from jaxrl_async.wire.messages import Hello, Prepared, Welcome
from jaxrl_async.wire.secret import read_secret
from jaxrl_async.wire.session import BEATS, WireLimits, WireSession
from jaxrl_async.wire.tls import TlsFiles, read_tls

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a sampler looks whether it was asked to stop, seconds."""
BEAT_S = 0.5
"""Longest time between two reports of the statistics, seconds."""
TLS_FILES = {"tls_certificate", "tls_key", "tls_authority"}
"""Settings of a connection that each side has its own of."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Says whether two processes are on one machine."""


class Outcome(StrEnum):
    """Why a sampler no longer serves a run."""

    FINISHED = "finished"  # the trainer told it to go
    LOST = "lost"  # the connection to the trainer
    STOPPED = "stopped"  # by a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What a sampler process is started with."""

    address: str  # of the trainer: HOST:PORT, file:PATH or a run's folder
    name: str  # "": the machine's name and the process id
    axes: Mapping[str, int]  # of its slice; {}: as mesh.sampler of the run says
    wait_s: float  # longest time without a trainer
    once: bool  # end when the trainer is gone, rather than wait for it
    remote: RemoteSection  # its files of certificates


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What this process shows to others, and asks of them."""

    secret: bytes
    tls: TlsFiles | None


def run_sampler(joining: Joining) -> int:
    """Join the run, again and again while its trainer comes back; return the exit code.

    Raises JoinRefused if the trainer says no, Disconnected if none answers within wait_s, and what
    building a sampler raises.
    """
    shown = Credentials(secret=read_secret(), tls=read_tls(joining.remote))
    rejoins = False
    with Stop() as stop:
        stop.answer = "handing back what is running, and leaving"
        while True:
            outcome = _join_once(joining, shown, stop, rejoins=rejoins)
            if outcome is Outcome.STOPPED:
                return PREEMPTED_CODE if stop.preempted else 0
            if outcome is Outcome.FINISHED:
                return 0
            if joining.once:
                log.error("the trainer is gone: this sampler ends, too (--once)")
                return 1
            rejoins = True
            log.warning("the trainer is gone; waiting %.0f s for it to come back", joining.wait_s)


def _join_once(joining: Joining, shown: Credentials, stop: Stop, *, rejoins: bool) -> Outcome:
    """Join, serve until the session ends, and tell how that was."""
    with ExitStack() as closing:
        hello = Hello(
            name=joining.name or f"{socket.gethostname()}-{os.getpid()}",
            package=jaxrl_async.__version__,
            host=boot_id(),
            process=os.getpid(),
            mesh=joining.axes,
            rejoins=rejoins,
        )
        session, welcome = _dialled(joining, hello, shown, stop)
        if session is None or welcome is None:
            return Outcome.STOPPED
        closing.callback(session.end, "the sampler has ended")
        try:
            return _serve(joining, shown, session, welcome, stop, closing)
        except Disconnected as error:
            log.warning("%s", error)
            return Outcome.STOPPED if stop.is_set() else Outcome.LOST


def _dialled(
    joining: Joining, hello: Hello, shown: Credentials, stop: Stop
) -> tuple[WireSession | None, Welcome | None]:
    """Dial in short tries, so that a signal ends them; (None, None): it did."""
    end = time.monotonic() + joining.wait_s
    while not stop.is_set():
        left_s = end - time.monotonic()
        try:
            return dial(
                joining.address,
                hello,
                secret=shown.secret,
                tls=shown.tls,
                limits=WireLimits(),
                timeout_s=max(0.1, min(1.0, left_s)),
            )
        except Disconnected:
            if time.monotonic() > end:
                raise
    return None, None


def _serve(
    joining: Joining,
    shown: Credentials,
    session: WireSession,
    welcome: Welcome,
    stop: Stop,
    closing: ExitStack,
) -> Outcome:
    """Build the sampler, and serve the trainer until the session ends or a signal comes."""
    config, spec = _config_of(welcome), spec_of(welcome.spec)
    mesh = sampler_mesh(welcome.mesh)
    check_experts(spec, mesh, "--mesh")
    sent = sent_weights(config.weights, config.model, spec)
    target = sent.on(mesh, SAMPLER_RULES)
    files = joining.remote.model_dump(include=TLS_FILES)
    host = own_host(joining.address)
    fetching = make_fetching(
        config.remote.model_copy(update=files),
        target,
        listen=f"{host}:0",
        advertise=host,
        secret=shown.secret,
    )
    receiver = WeightReceiver(session, fetching, layout_hash=manifest_of(target).layout_hash)
    closing.callback(receiver.close)
    session.send(Prepared(data_address=fetching.address))
    first = receiver.first(config.remote.wait_s)
    settings = replace(
        sampler_settings(config, spec), one_thread=uses_one_thread(mesh, colocated=False)
    )
    sampler = closing.enter_context(
        Sampler(
            (spec, first.params),
            section=config.sampler,
            mesh=mesh,
            seed=welcome.seed,
            weights=RemoteSource(receiver),
            version=first.version,
            settings=settings,
        )
    )
    server = ReplicaServer(session, sampler, beat_s=min(BEAT_S, config.remote.silence_s / BEATS))
    server.start()
    receiver.live(first.version)
    log.info("draws for %s with weights of version %d", welcome.run, first.version)
    while not server.over.wait(LOOK_S):
        if stop.is_set():
            server.leave(f"{stop.reason}: the machine is needed for something else")
            return Outcome.STOPPED
    log.info("the session has ended: %s", server.reason)
    return Outcome.FINISHED if server.dismissed else Outcome.LOST


def sampler_mesh(axes: Mapping[str, int]) -> Mesh:
    """Return the mesh of a sampler on this process's devices; asks JAX's CPU backend, before its
    first use, for as many. Raises MeshError if they are too few."""
    skip_absent_tpu()
    needed = math.prod(axes.values())
    if needed > 1:
        os.environ.setdefault("PJRT_NPROC", "32")  # CPU collectives hang with fewer threads
    try:
        jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        log.info("JAX was started before; the slice uses the devices that are there")
    devices = jax.devices()
    if len(devices) < needed:
        shape = ", ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
        raise MeshError(
            f"the sampler's slice needs {needed} devices ({shape}), and this process has "
            f"{len(devices)}: {devices[0].platform}. Give --mesh other axes, such as "
            f"tensor={len(devices)}, or change mesh.sampler of the run."
        )
    mesh = make_mesh(AxesSection(**axes), devices[:needed])
    if devices[0].platform == "tpu":
        check_collective(mesh, "--mesh")
    return mesh


def spec_of(fields: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a Welcome describes. Raises ConfigError."""
    try:
        spec = ModelSpec(**fields)
        scaling: Any = spec.rope_scaling
        return replace(spec, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    except (TypeError, ValueError) as error:
        raise _other_version(error) from None


def _config_of(welcome: Welcome) -> Config:
    try:
        return Config.model_validate(welcome.config)
    except ValidationError as error:
        raise _other_version(error) from None


def _other_version(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the trainer sent cannot be read ({error}). Run the same version of jaxrl_async on "
        "both sides."
    )


def own_host(trainer: str) -> str:
    """Return the address of this machine that other samplers reach: of the interface that leads to
    the trainer."""
    try:
        host = locate_trainer(trainer).address.host
        family = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the interface
            host = str(probe.getsockname()[0])
            return f"[{host}]" if ":" in host else host
    except (OSError, Disconnected):
        return "127.0.0.1"


def boot_id() -> str:
    """Return what tells this machine from others; "": unknown."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
