"""python -m jaxrl_async.launch.ray CONFIG [section.key=value ...]: a run on a Ray cluster.

    --trainer HARDWARE     of the trainer (default cpu:1)
    --sampler HARDWARE     of each sampler (default cpu:1)
    --samplers LEAST:MOST  number of samplers (default 1); within this range it follows demand
    --address ADDRESS      the cluster: auto, HOST:PORT, or local for a new one on this machine;
                           default: RAY_ADDRESS, a cluster running on this machine, or a new one
    --max-restarts N       of the trainer, after failures (default 3); samplers: no limit

HARDWARE is cpu:CORES or gpu:COUNT, with xHOSTS if there are several (gpu:8x2: 8 on each of 2
hosts), or tpu:GENERATION:TOPOLOGY (tpu:v6e:4x4), a whole slice.

Trainer and samplers are actors in placement groups. Each runs the same commands as on any host
(jaxrl_async.train, jaxrl_async.sample), so the package must be installed on all hosts, and
run.dir must be storage that the trainer's hosts share. They authenticate each other with
JAXRL_ASYNC_SECRET; without it a secret is created. launch/supervisor.py describes what happens
when a process ends. The same command starts the run and resumes it. Ctrl-C ends the run with
everything saved; a second Ctrl-C ends it immediately.

Exit codes are the same as for jaxrl_async.train.
"""

import argparse
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from jaxrl_async.config.load import RESTARTED, dump, load
from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, JaxrlError
from jaxrl_async.help_format import DefaultsHelp
from jaxrl_async.launch.hardware import Hardware, parse_hardware, parse_range
from jaxrl_async.launch.ray_cluster import RayCluster
from jaxrl_async.launch.supervisor import HostTask, Supervisor, SupervisorPlan
from jaxrl_async.metrics.recorder import METRICS_FILE
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE
from jaxrl_async.run.signals import EXIT_CODE

TICK_S = 1.0
"""Interval between two checks of all processes, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPrograms:
    """The commands that python runs on the hosts."""

    train: tuple[str, ...] = ("-m", "jaxrl_async.train", "{config}")
    sample: tuple[str, ...] = ("-m", "jaxrl_async.sample")


def ray_config(path: str, overrides: Sequence[str], samplers: int) -> Config:
    """Load the configuration in the form that the trainer runs. Raises ConfigError.

    Args:
        path: Of the file.
        overrides: section.key=value each.
        samplers: Initial number of samplers.
    """
    fixed = ["mesh.samplers_in=external", f"mesh.samplers={samplers}", *RESTARTED]
    return load(path, [*overrides, *fixed])


def check_hardware(config: Config, trainer: Hardware, sampler: Hardware) -> None:
    """Raise ConfigError unless both meshes match the size of their hardware."""
    needed = run_devices_per_process(config, trainer.hosts) * trainer.hosts
    of_sampler = config.mesh.sampler.num_devices
    for option, hardware, count, section in (
        ("--trainer", trainer, needed, "mesh.trainer"),
        ("--sampler", sampler, of_sampler, "mesh.sampler"),
    ):
        devices = hardware.devices
        if devices is not None and count != devices:
            raise ConfigError(
                f"{section} has {count} devices, and {option} {devices}. Make the product of its "
                f"axes (data * fsdp * expert * context * tensor) {devices}, or change {option}."
            )


def fleet_plan(
    config: Config,
    hardware: tuple[Hardware, Hardware],
    bounds: tuple[int, int],
    *,
    secret: str,
    max_restarts: int = 3,
    programs: RayPrograms | None = None,
) -> SupervisorPlan:
    """Return the commands and their hosts.

    Args:
        config: From ray_config.
        hardware: The trainer's, and each sampler's.
        bounds: Minimum and maximum number of samplers.
        secret: With which trainer and samplers authenticate each other.
        max_restarts: Of the trainer, after failures.
        programs: The commands for python; None: the run's own commands.
    """
    programs = programs or RayPrograms()
    trainer, sampler = hardware
    return SupervisorPlan(
        trainer=trainer,
        sampler=sampler,
        least=bounds[0],
        most=bounds[1],
        max_restarts=max_restarts,
        metrics=str(Path(config.run.dir) / config.run.name / METRICS_FILE),
        trainer_tasks=partial(_trainer_tasks, config, trainer, secret, programs),
        sampler_tasks=partial(_sampler_tasks, sampler, secret, programs),
    )


def _trainer_tasks(
    config: Config, hardware: Hardware, secret: str, programs: RayPrograms, listen: str, leader: str
) -> list[HostTask]:
    host, _, port = listen.rpartition(":")
    remote = config.remote_settings.model_copy(
        update={"listen": f"0.0.0.0:{port}", "advertise": host}
    )
    text = dump(config.model_copy(update={"remote": remote}))
    return [
        HostTask(words=programs.train, env=_environment(hardware, secret, leader, n), config=text)
        for n in range(hardware.hosts)
    ]


def _sampler_tasks(
    hardware: Hardware, secret: str, programs: RayPrograms, join: str, leader: str
) -> list[HostTask]:
    words = (*programs.sample, "--join", join)
    return [
        HostTask(words=words, env=_environment(hardware, secret, leader, n))
        for n in range(hardware.hosts)
    ]


def _environment(hardware: Hardware, secret: str, leader: str, number: int) -> dict[str, str]:
    """Return a host's variables: the secret, and the coordinator if there are several hosts.

    Hosts of a TPU slice find each other themselves (run/distributed.py).
    """
    env = {SECRET_VARIABLE: secret}
    if hardware.kind == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    if hardware.kind != "tpu" and hardware.hosts > 1:
        env |= {
            "JAX_COORDINATOR_ADDRESS": leader,
            "JAX_NUM_PROCESSES": str(hardware.hosts),
            "JAX_PROCESS_ID": str(number),
        }
    return env


def run_fleet(plan: SupervisorPlan, cluster: RayCluster, tick_s: float = TICK_S) -> int:
    """Run a plan on a cluster until it ends; return the exit code.

    The first SIGINT or SIGTERM lets the trainer save and end; the second ends everything.
    """
    supervisor = Supervisor(plan, cluster)
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt

    handlers = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    stopping = False
    try:
        while True:
            if signals and not stopping:
                stopping = True
                print("ending: the trainer saves, then all others end", file=sys.stderr, flush=True)
                supervisor.stop(signals[0])
            code = supervisor.step(time.monotonic())
            if code is not None:
                return code
            time.sleep(tick_s)
    except KeyboardInterrupt:
        print("ending immediately; unsaved work is lost", file=sys.stderr, flush=True)
        return EXIT_CODE
    finally:
        supervisor.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        bounds = parse_range(args.samplers)
        hardware = parse_hardware(args.trainer), parse_hardware(args.sampler)
        config = ray_config(args.config, args.overrides, bounds[0])
        check_hardware(config, *hardware)
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        plan = fleet_plan(config, hardware, bounds, secret=secret, max_restarts=args.max_restarts)
        cluster = RayCluster(args.address, os.getcwd())
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ConnectionError as error:
        print(f"no Ray cluster at {args.address}: {error}. Start one, or leave --address out.",
              file=sys.stderr)  # fmt: skip
        return 1
    try:
        return run_fleet(plan, cluster)
    finally:
        cluster.close()


def _parser() -> argparse.ArgumentParser:
    what, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_async.launch.ray",
        description=what.partition(": ")[2],
        epilog=rest.partition("\n\n")[2],
        formatter_class=DefaultsHelp,
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--trainer", default="cpu:1", metavar="HARDWARE", help="of the trainer")
    parser.add_argument("--sampler", default="cpu:1", metavar="HARDWARE", help="of each sampler")
    parser.add_argument("--samplers", default="1", metavar="LEAST:MOST", help="number of samplers")
    parser.add_argument("--address", help="auto, HOST:PORT or local; default: chosen by Ray")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="N", help="of the trainer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
