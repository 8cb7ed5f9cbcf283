"""Train: jaxrl-async train CONFIG [section.key=value ...]. CONFIG is a YAML file or recipe:NAME.

    --help [SECTION]   print this, and every setting, or the settings of a section, with unit, range
                     and default
    --print-config   print the resolved configuration, as YAML
    --resume         continue from the newest good checkpoint of the run (run.resume=true)
    --replay-schedule FILE   follow another run's schedule.jsonl bit for bit (run.replay_schedule)

Exit codes: 0 finished, or stopped by one Ctrl-C with everything saved; 1 a failure, explained on
stderr; 2 a bad command line or configuration; 75 ended by SIGTERM or SIGHUP, with everything saved
within checkpoint.grace_s: continue with --resume; 130 a second Ctrl-C, or one before the run was
started.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import runs_of
from jaxrl_async.errors import ConfigError, JaxrlError, Preempted, is_out_of_memory, shown
from jaxrl_async.host import has_nvidia, more_of_a_gpu
from jaxrl_async.metrics.guarded_stream import guarded_output
from jaxrl_async.metrics.health import health_endpoint
from jaxrl_async.metrics.json_logs import lines_for_people, logs_as, print_exception
from jaxrl_async.run import distributed
from jaxrl_async.run.signals import PREEMPTED_CODE

USAGE = (
    "usage: jaxrl-async train CONFIG [section.key=value ...] [--resume] "
    "[--replay-schedule FILE] [--print-config]"
)
SMALLER = (
    "Lower sampler.slots, sampler.max_length, trainer.micro_batch_tokens or the model's size, or "
    "give the mesh more devices."
)


RESUME = ("run.resume=true", "run.overwrite=false")
"""Overrides of --resume: an example's run.overwrite is for new runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    with ExitStack() as stack:
        return _run(argv, stack)


def _run(argv: Sequence[str] | None, stack: ExitStack) -> int:
    """Run the command line; stack: restores stdout and stderr and the log's format at the end."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        return _help([word for word in args if word not in ("--help", "-h")])
    args, replayed = _without_value(args, "--replay-schedule")
    flags = {a for a in args if a.startswith("-")}
    words = [a for a in args if not a.startswith("-")]
    unknown = flags - {"--resume", "--print-config"}
    if unknown or not words or "=" in words[0]:
        wrong = (
            f"unknown option {sorted(unknown)[0]}"
            if unknown
            else "the configuration file is missing"
        )
        print(f"{wrong}\n{USAGE}", file=sys.stderr)
        return 2
    stack.enter_context(lines_for_people())
    try:
        overrides = [*words[1:], *(RESUME if "--resume" in flags else [])]
        overrides += [f"run.replay_schedule={json.dumps(file)}" for file in replayed]
        config = load(words[0], overrides)
        if "--print-config" in flags:
            _print_config(config)
            return 0
        stack.enter_context(guarded_output())
        stack.enter_context(health_endpoint())
        # Imported late: --help and an error in a configuration need no JAX.
        stack.enter_context(logs_as(config.run.logs, run=config.run.name, role="trainer"))
        config = distributed.join_processes(config)
        importlib.import_module("jaxrl_async.run.loop").train(config)
    except Preempted as error:
        print(error, file=sys.stderr)
        return PREEMPTED_CODE
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return distributed.leave(2)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {shown(str(error))}", file=sys.stderr)
        return distributed.leave(1)
    except OSError as error:  # a path that is too long, not permitted or missing; a full disk
        print(
            f"{type(error).__name__}: {error}. Check that the path is right, permitted and not "
            "on a full disk.",
            file=sys.stderr,
        )
        return distributed.leave(1)
    except Exception as error:
        if is_out_of_memory(error):
            more = more_of_a_gpu() if has_nvidia() else ""
            print(f"out of memory: {str(error)[:200]}\n{more}{SMALLER}", file=sys.stderr)
        elif not print_exception():
            if not distributed.is_shared():
                raise
            traceback.print_exc()
        return distributed.leave(1)
    return 0


def _print_config(config: Config) -> None:
    """Print the whole configuration, after a check of the names in it."""
    start = importlib.import_module("jaxrl_async.run.start_checks")
    for run in (config, *runs_of(config).values()):
        start.check_names(run)
    preflight = importlib.import_module("jaxrl_async.algorithms.preflight")
    print(dump(preflight.with_correction(config)), end="")


def _help(words: list[str]) -> int:
    """Print the usage, or the help of the section or setting that is the only word; return the exit
    code."""
    help_text = importlib.import_module("jaxrl_async.config.field_help").help_text
    try:
        if len(words) == 1 and not words[0].startswith("-") and "/" not in words[0]:
            print(help_text(words[0].rstrip("=.")))
        else:
            print(USAGE, "", __doc__, help_text(), sep="\n")
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    return 0


def _without_value(args: list[str], option: str) -> tuple[list[str], list[str]]:
    """Split "OPTION VALUE" and "OPTION=VALUE" from `args`; return the rest and the values. An
    option without a value stays."""
    rest: list[str] = []
    values: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == option:
            value = value if equals else next(words, "")
        if name == option and value:
            values.append(value)
        else:
            rest.append(word)
    return rest, values
