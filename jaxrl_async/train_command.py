"""The command line of the main job; its help and exit codes are in train.py."""

import importlib
import json
import sys
import traceback
from collections.abc import Sequence

from jaxrl_async.config.load import dump, help_text, load
from jaxrl_async.config.several import runs_of
from jaxrl_async.errors import ConfigError, JaxrlError, Preempted, is_out_of_memory
from jaxrl_async.launch import distributed
from jaxrl_async.run.signals import PREEMPTED_CODE

USAGE = (
    "usage: python -m jaxrl_async.train CONFIG [section.key=value ...] [--resume] "
    "[--replay-schedule FILE] [--print-config]"
)
SMALLER = (
    "Lower sampler.slots, sampler.max_length, trainer.micro_batch_tokens or the model's size, or "
    "give the mesh more devices."
)


RESUME = ("run.resume=true", "run.overwrite=false")
"""What --resume sets: an example's run.overwrite is for new runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(USAGE, "", help_text(), sep="\n")
        return 0
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
    try:
        overrides = [*words[1:], *(RESUME if "--resume" in flags else [])]
        overrides += [f"run.replay_schedule={json.dumps(file)}" for file in replayed]
        config = load(words[0], overrides)
        if "--print-config" in flags:
            start = importlib.import_module("jaxrl_async.run.start")
            for one in (config, *runs_of(config).values()):
                start.check_names(one)
            whole = importlib.import_module("jaxrl_async.algorithms.preflight").with_correction(
                config
            )
            print(dump(whole), end="")
            return 0
        # Loaded late, so that --help and a typo in a config answer without importing JAX.
        config = distributed.join_processes(config)
        importlib.import_module("jaxrl_async.run.loop").train(config)
    except Preempted as error:
        print(error, file=sys.stderr)
        return PREEMPTED_CODE
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return distributed.leave(2)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
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
            print(f"out of memory: {str(error)[:200]}\n{SMALLER}", file=sys.stderr)
        elif distributed.is_shared():
            traceback.print_exc()
        else:
            raise
        return distributed.leave(1)
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
