"""python -m jaxrl_async.sample --join ADDRESS: a sampler that joins a run, on its own devices.

The trainer's run sets mesh.samplers_in=external. If it listens on anything but loopback, both
sides need the same secret in the environment variable JAXRL_ASYNC_SECRET. On loopback the trainer
creates one at each start; this command finds it if the same user starts it on the same machine.

Exit codes: 0 the run is finished, or one Ctrl-C; 1 a failure, explained on stderr; 2 a bad command
line or configuration; 69 no trainer answered within --wait; 75 ended by SIGTERM or SIGHUP, with
running requests handed back to the trainer.
"""

import argparse
import importlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import AxesSection, DistributedSection
from jaxrl_async.errors import ConfigError, Disconnected, JaxrlError, is_out_of_memory, shown
from jaxrl_async.help_format import command_parser, whole_number
from jaxrl_async.host import has_nvidia, limit_arenas, more_of_a_gpu
from jaxrl_async.huge_pages import start_with_huge_pages
from jaxrl_async.metrics.guarded_stream import guarded_output
from jaxrl_async.metrics.health import health_endpoint
from jaxrl_async.metrics.json_logs import (
    FORMS,
    LOGS_VARIABLE,
    OWN,
    lines_for_people,
    logs_as,
    print_exception,
)
from jaxrl_async.metrics.spans import TRACE_VARIABLE, recorded_spans
from jaxrl_async.run import distributed
from jaxrl_async.run.signals import NO_TRAINER_CODE, end_on_ctrl_c
from jaxrl_async.shown_environment import hide_secrets
from jaxrl_async.stuck_threads import at_exit_end_with

AXES = tuple(AxesSection.model_fields)
"""Axes of a slice, as the settings of mesh.sampler name them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    hide_secrets()
    limit_arenas()
    with guarded_output(), lines_for_people(OWN):
        return _sample(args)


def _sample(args: argparse.Namespace) -> int:
    name = args.name or f"{socket.gethostname()}-{os.getpid()}"
    form = os.environ.get(LOGS_VARIABLE) or "text"
    if form not in FORMS:
        print(f"{LOGS_VARIABLE}={form}: set it to {' or '.join(FORMS)}", file=sys.stderr)
        return 2
    trace = os.environ.get(TRACE_VARIABLE)
    with logs_as(form, role="sampler", sampler=name):
        with recorded_spans(Path(trace) if trace else None, f"sampler {name}"):
            code = _run(args)
        return distributed.leave(code)


def _run(args: argparse.Namespace) -> int:
    end_on_ctrl_c()
    try:
        with health_endpoint():
            return _joined(args)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    except Disconnected as error:
        print(f"{type(error).__name__}: {shown(str(error))}", file=sys.stderr)
        return NO_TRAINER_CODE
    except JaxrlError as error:
        print(f"{type(error).__name__}: {shown(str(error))}", file=sys.stderr)
        return 1
    except Exception as error:
        if not is_out_of_memory(error):
            if print_exception():
                return 1
            raise
        more = more_of_a_gpu() if has_nvidia() else ""
        print(
            f"out of memory: {error}\n{more}Lower sampler.slots, or give --mesh more devices.",
            file=sys.stderr,
        )
        return 1


def _joined(args: argparse.Namespace) -> int:
    """Join the run, and return the exit code."""
    axes, cores = axes_of(args.mesh), cores_of(args.cores)
    if cores:
        os.sched_setaffinity(0, cores)  # before JAX, whose threads inherit it
    # Loaded late: --help and errors in the command line do not import JAX.
    processes = distributed.join_sampler_processes(section_of(args))
    if args.decoder:
        importlib.import_module("jaxrl_async.model.own_code").load_code(args.decoder, "--decoder")
    process = importlib.import_module("jaxrl_async.remote.run.sampler_process")
    options = process.JoinOptions(
        address=args.join,
        name=args.name,
        axes=axes,
        wait_s=args.wait,
        once=args.once,
        process=0 if processes is None else processes.process_id,
        processes=1 if processes is None else processes.num_processes,
        remote=connections_of(args),
    )
    code: int = process.run_sampler(options)
    return code


def section_of(args: argparse.Namespace) -> DistributedSection:
    """Return the settings by which this sampler's processes find each other. Raises ConfigError."""
    if args.process is None:
        return DistributedSection()
    index, slash, count = args.process.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and args.coordinator):
        raise ConfigError(
            f"--process {args.process}: give INDEX/COUNT, such as 0/4, and --coordinator HOST:PORT "
            "of the first process, the same in all."
        )
    return DistributedSection(
        coordinator=args.coordinator, num_processes=int(count), process_id=int(index)
    )


def connections_of(args: argparse.Namespace) -> RemoteSection:
    """Return this side's own settings: the certificates, and the port if one is given."""
    own = RemoteSection(
        tls_certificate=args.tls_certificate,
        tls_key=args.tls_key,
        tls_authority=args.tls_authority,
    )
    if args.data_port is None:
        return own
    return own.model_copy(update={"data_port": args.data_port})


def axes_of(text: str) -> dict[str, int]:
    """Parse axes such as `tensor=4,expert=2`; {} for an empty text. Raises ConfigError."""
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdigit() or not int(size):
            raise ConfigError(
                f"--mesh {text}: {part!r} is not an axis. Give AXIS=SIZE, separated by commas, of "
                f"{', '.join(AXES)}: for example --mesh tensor=4."
            )
        axes[name] = int(size)
    return axes


def cores_of(text: str) -> set[int]:
    """Parse cores such as `0,3`. Raises ConfigError for a core that this process may not use."""
    if not text:
        return set()
    allowed = os.sched_getaffinity(0)
    parts = text.split(",")
    if not all(part.isdigit() and int(part) in allowed for part in parts):
        raise ConfigError(
            f"--cores {text}: give cores that this process may use, separated by commas: "
            f"{', '.join(map(str, sorted(allowed)))}."
        )
    return {int(part) for part in parts}


def seconds_of(text: str) -> float:
    """Parse a time in seconds, finite and not negative. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, such as 600")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("sample", __doc__)
    add = parser.add_argument
    add(
        "--join",
        required=True,
        metavar="ADDRESS",
        help="address of the trainer: HOST:PORT, the run's folder or file:PATH of its join.json",
    )
    add(
        "--mesh",
        default="",
        metavar="AXES",
        help="the sampler's mesh (default: mesh.sampler of the run)",
    )
    add("--name", default="", help="for logs (default: the machine's name and the process id)")
    add("--process", metavar="I/N", help="index on a slice of N hosts (default: detected)")
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="the first process, with --process (default: detected)",
    )
    add(
        "--wait",
        type=seconds_of,
        default=600.0,
        metavar="S",
        help="maximum time without a trainer, seconds",
    )
    add(
        "--data-port",
        type=whole_number("a port from 0 to 65535", 0, 65535),
        metavar="PORT",
        help="port at which it passes weights on, or the next free one (default: remote.data_port "
        "of the run); 0: any",
    )
    add(
        "--decoder",
        metavar="FILE:CLASS",
        help="the run's custom decoder, for a trainer that has proved no secret",
    )
    add("--once", action="store_true", help="exit when the trainer is gone, without waiting for it")
    add(
        "--cores",
        default="",
        metavar="LIST",
        help="use these cores, such as 2,3 (CPU; default: all)",
    )
    for name, what in (
        ("certificate", "this side's certificate"),
        ("key", "its private key"),
        ("authority", "the authority that signed the trainer's certificate"),
    ):
        add(f"--tls-{name}", metavar="PEM", help=f"file with {what}")
    return parser


if __name__ == "__main__":
    start_with_huge_pages()
    sys.exit(at_exit_end_with(main()))
