"""Write a first configuration, commented, for `jaxrl-async train`.

    jaxrl-async init                                       asks for model, data, reward and algorithm
    jaxrl-async init --model Qwen/Qwen3-0.6B --data train.jsonl --reward math --algorithm dapo
    jaxrl-async init --model DIR --data train.jsonl        and writes reward.py, a function to change
    jaxrl-async init --task calculator --out calc.yaml     a built-in task, with a small random model

Questions are asked on a terminal only, and only about what no option says. Elsewhere, or with --yes,
the defaults are used: a small model with random weights learns the embedded task, additions. The
devices of this machine decide the sizes and the mesh. Nothing is written that `train` would refuse.

Exit codes: 0 written; 2 a bad command line, or a file that exists (--force replaces it).
"""  # noqa: E501

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_async.command.first_config import (
    ALGORITHMS,
    EMBEDDED,
    LORA_RANK,
    SMALL_TASKS,
    FirstChoices,
    RecordColumns,
    columns_of,
    commented_yaml,
    first_settings,
    reward_skeleton,
)
from jaxrl_async.command.machine import find_devices
from jaxrl_async.config.draft import parse_yaml
from jaxrl_async.config.load import load
from jaxrl_async.data.addresses import is_remote
from jaxrl_async.data.gguf_file import is_gguf
from jaxrl_async.data.hub import hub_records
from jaxrl_async.data.record_files import BadRecord, rows_of_file
from jaxrl_async.errors import ConfigError, JaxrlError
from jaxrl_async.help_format import command_parser, whole_number
from jaxrl_async.metrics.json_logs import lines_for_people
from jaxrl_async.tasks.named_tasks import check_task_name

SKELETON = "reward.py"
"""Name of the file with the reward function to be changed."""
DEVICES_S = 60.0
"""Timeout of JAX's list of devices, seconds."""
TASK = "task:"
"""Begins the answer to the question about data that names a task."""

Ask = Callable[[str], str]
"""Shows a question and returns the answer, "" for the default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    try:
        with lines_for_people():
            _check_out(args.out, force=args.force)
            if not args.yes and sys.stdin.isatty() and sys.stdout.isatty():
                args = ask_missing(args, input)
            else:
                _print_defaults(args)
            print("\n".join(written(args)))
    except EOFError:
        print("\nnothing is written", file=sys.stderr)
        return 2
    except (JaxrlError, OSError) as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    return 0


def ask_missing(args: argparse.Namespace, ask: Ask) -> argparse.Namespace:
    """Return the options with answers in place of those that are not given. Raises EOFError at the
    end of the input."""
    options = argparse.Namespace(**vars(args))

    def reply(question: str) -> str | None:
        return ask(question).strip() or None

    if options.model is None:
        options.model = reply(
            "Model: a directory, a name on the hub, FILE.gguf [small and random]: "
        )
    if options.data is None and options.task is None:
        kinds = f"{TASK}NAME" if options.model else ", ".join(f"{TASK}{n}" for n in SMALL_TASKS)
        files = "a file of records, " if options.model else ""
        answer = reply(f"Data: {files}{kinds} [additions of numbers]: ")
        if answer is not None and answer.startswith(TASK):
            options.task = answer.removeprefix(TASK)
        else:
            options.data = answer
    if options.reward is None and options.data is not None:
        options.reward = reply(f"Reward: exact, gsm8k, math, FILE.py:NAME [a new {SKELETON}]: ")
    if options.algorithm is None:
        options.algorithm = reply(f"Algorithm: {', '.join(ALGORITHMS)} [grpo]: ")
    return options


def _print_defaults(args: argparse.Namespace) -> None:
    """Print what is chosen where no option is given and no question is asked."""
    usual = {
        "--model": ("a small model with random weights", args.model),
        "--data": ("the embedded task, additions", args.data or args.task),
        "--algorithm": ("grpo", args.algorithm),
    }
    defaults = [f"{text} ({option})" for option, (text, value) in usual.items() if value is None]
    if defaults:
        print(f"by default: {', '.join(defaults)}", file=sys.stderr)


def written(args: argparse.Namespace) -> list[str]:
    """Write the configuration, and a reward function if none is given; return what to say. Raises
    JaxrlErrors before anything is written."""
    out: Path = args.out
    choices, skeleton = _choices(args)
    first_settings(choices)  # refuses them before the devices are looked at
    devices, diagnostics = find_devices(DEVICES_S)
    if devices is not None:
        choices = replace(choices, platform=devices.platform, devices=devices.count)
    tree = first_settings(choices)
    text = commented_yaml(tree, _head(choices, out, None if devices is None else devices.kind))
    load(parse_yaml(text, str(out)), where=str(out))
    messages = [str(line) for line in diagnostics if line.level != "ok"]
    if skeleton is not None:
        has_answers = choices.columns is None or choices.columns.answer is not None
        text_of_reward = reward_skeleton(out.name, with_answer=has_answers)
        skeleton.write_text(text_of_reward, encoding="utf-8")
        messages.append(f"{skeleton}: a reward function, to be changed")
    out.write_text(text, encoding="utf-8")
    return [
        *messages,
        f"{out}: {_summary(choices)}",
        "",
        f"check it:  jaxrl-async doctor {out}",
        f"train:     jaxrl-async train {out}",
    ]


def _choices(args: argparse.Namespace) -> tuple[FirstChoices, Path | None]:
    """Return what the options choose, and the file of a new reward function; None: none is needed.
    Raises ConfigError and DataError."""
    out: Path = args.out
    if args.model is not None:
        _check_model(args.model)
    reward, skeleton = args.reward, None
    if reward is None and args.data is not None:
        skeleton = out.parent / SKELETON
        if skeleton.exists() and not args.force:
            raise ConfigError(
                f"{skeleton} already exists. Use it with --reward {skeleton}:NAME, or replace it "
                "with --force."
            )
        reward = f"{skeleton}:reward"
    elif reward is not None:
        _check_reward(reward, args.task)
    columns = None
    if args.data is not None:
        columns = _columns(args.data, args.prompt_field, args.answer_field)
    elif args.prompt_field is not None or args.answer_field is not None:
        raise ConfigError("--prompt-field and --answer-field are columns of --data. Give it, too.")
    if args.task is not None and args.task != EMBEDDED:
        check_task_name(args.task)
    if args.name is not None and run_name(args.name) != args.name:
        raise ConfigError(
            f"--name {args.name}: a run's name has letters, digits, _ . and -, does not begin with "
            f"a period, and has at most 128 characters. Such as --name {run_name(args.name)}."
        )
    if args.lora_rank is not None and args.lora_rank < 0:
        raise ConfigError(f"--lora-rank {args.lora_rank}: give 0 (all weights) or more.")
    choices = FirstChoices(
        name=args.name or run_name(out.stem),
        model=args.model,
        max_positions=None if args.model is None else max_positions(args.model),
        data=args.data,
        columns=columns,
        task=args.task,
        reward=reward,
        algorithm=args.algorithm or "grpo",
        lora_rank=args.lora_rank,
        steps=args.steps,
    )
    return choices, skeleton


def run_name(stem: str) -> str:
    """Return the name of a file as the name of a run, with _ for what a name cannot have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stem)[:128]
    return name if re.match(r"[A-Za-z0-9_-]", name) else f"_{name}"[:128]


def _check_out(out: Path, *, force: bool) -> None:
    """Raise ConfigError for a file that exists, or whose folder does not."""
    if out.is_dir() or (out.exists() and not force):
        raise ConfigError(f"{out} already exists. Give another --out, or replace it with --force.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}. Make it, or correct --out.")


def _check_model(model: str) -> None:
    """Raise ConfigError for a path without a model; names and addresses are not looked up."""
    if is_gguf(model) and not model.startswith("package:") and "://" not in model:
        if not os.path.isfile(model):
            raise ConfigError(f"--model {model}: there is no such file here.")
    elif not is_remote(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise ConfigError(
            f"--model {model}: there is no folder with a config.json here, looked for from "
            f"{Path.cwd()}. Give a directory, OWNER/NAME on the hub, or FILE.gguf."
        )


def max_positions(model: str) -> int | None:
    """Return the longest sequence of a model in a folder, tokens; None: not known."""
    try:
        found = json.loads(Path(model, "config.json").read_text("utf-8"))
        found = found.get("text_config") or found
        most = found.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return most if isinstance(most, int) and most > 1 else None


def _check_reward(reward: str, task: str | None) -> None:
    """Raise ConfigError for an unknown reward, or one next to a task's own."""
    if task is not None and (task in SMALL_TASKS or ".py" not in task):
        raise ConfigError(f"--reward {reward}: the task {task} has its own. Leave --reward out.")
    rewards: Any = importlib.import_module("jaxrl_async.scorers.rewards")
    rewards.find_reward(reward)


def _columns(data: str, prompt: str | None, answer: str | None) -> RecordColumns | None:
    """Return the columns of a file of records; None: the file is not here. Raises ConfigError and
    DataError."""
    if hub_records(data) is not None or "://" in data:
        if prompt is None and answer is None:
            return None
        return RecordColumns(prompt=prompt, messages=None, answer=answer)
    if not os.path.exists(data):
        raise ConfigError(f"--data {data}: there is no such file, looked for from {Path.cwd()}.")
    for row in rows_of_file(data):
        if not isinstance(row.fields, BadRecord):
            return columns_of(row.fields, data, prompt, answer)
    raise ConfigError(f"--data {data}: there is no record that can be read.")


def _summary(choices: FirstChoices) -> str:
    """Return what the configuration trains, on one line."""
    what = choices.data or choices.task or "additions"
    return f"{choices.algorithm} of {choices.model or 'a small random model'} on {what}"


def _head(choices: FirstChoices, out: Path, kind: str | None) -> str:
    """Return the comment at the beginning of the file."""
    devices = "unknown devices" if kind is None else f"{choices.devices} x {kind}"
    return (
        f"jaxrl-async train {out}\n"
        f"{_summary(choices)}, sized for {devices}.\n"
        "All other settings have their defaults: jaxrl-async train --help lists them, and\n"
        "jaxrl-async train --help SECTION the settings of a section."
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("init", __doc__)
    add = parser.add_argument
    add(
        "--model",
        metavar="MODEL",
        help="directory, name on the hub, or FILE.gguf (default: a small one, random weights)",
    )
    add("--data", metavar="FILE", help="records: a file, or a name on the hub (default: --task)")
    add("--task", metavar="NAME", help=f"task by name, or FILE.py:NAME (default: {EMBEDDED})")
    add(
        "--reward",
        metavar="NAME",
        help=f"exact, gsm8k, math, or FILE.py:NAME (default: the task's, or a new {SKELETON})",
    )
    add("--algorithm", metavar="NAME", help=f"{', '.join(ALGORITHMS)} (default: grpo)")
    add(
        "--lora-rank",
        type=int,
        metavar="N",
        help=f"rank of the adapter of --model; 0: train all weights (default: {LORA_RANK})",
    )
    add("--prompt-field", metavar="NAME", help="column with the question (default: by its name)")
    add("--answer-field", metavar="NAME", help="column with the answer (default: by its name)")
    add("--name", metavar="NAME", help="name of the run (default: the name of the file)")
    steps = whole_number("a number of updates from 1 on", 1)
    add("--steps", type=steps, metavar="N", help="number of updates (default: 100, or the task's)")
    add("--out", type=Path, default=Path("config.yaml"), metavar="FILE", help="file to write")
    add("--force", action="store_true", help="replace files that exist")
    add("--yes", action="store_true", help="ask nothing: use the defaults")
    return parser


if __name__ == "__main__":
    sys.exit(main())
