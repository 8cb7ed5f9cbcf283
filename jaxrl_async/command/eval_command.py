"""Evaluate a policy: a table with 95 % intervals, a JSON file, and all answers.

    jaxrl-async eval runs/addition                                   a run's policy, on its own held-out records
    jaxrl-async eval Qwen3-0.6B --data test.jsonl --reward math --samples 16 --temperature 0.7
    jaxrl-async eval ADAPTER --base Qwen3-0.6B --task reasoning_gym:chain_sum
    jaxrl-async eval http://127.0.0.1:8000/v1 --data test.jsonl      a policy behind an endpoint
    jaxrl-async eval runs/b --compare runs/a                         the paired difference on the same prompts

POLICY is a policy's directory or name on the hub, the folder of a run or of an adapter, or the
address of an OpenAI-compatible endpoint, whose key is in JAXRL_ASYNC_KEY (--key-variable).
Further arguments are settings: section.key=value.

Exit codes: 0 evaluated; 1 a failure, explained on stderr; 2 a bad command line or configuration.
"""  # noqa: E501

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError, JaxrlError, exit_code_after
from jaxrl_async.help_format import command_parser
from jaxrl_async.huge_pages import start_with_huge_pages
from jaxrl_async.metrics.json_logs import lines_for_people
from jaxrl_async.shown_environment import hide_secrets
from jaxrl_async.stuck_threads import at_exit_end_with

KEY_VARIABLE = "JAXRL_ASYNC_KEY"


@lines_for_people("jaxrl_async.evals")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_intermixed_args(argv)
    hide_secrets((args.key_variable,))
    try:
        folder = _folder_of(args)
        arguments = vars(args) | {"task": _choice(args.task), "reward": _choice(args.reward)}
        arguments["overrides"] = arguments.pop("settings")
        del arguments["out"]
        result: Any = importlib.import_module("jaxrl_async.api.evaluating").evaluate(**arguments)
        print(result.table())
        print(f"\nevaluation and all answers: {result.save(folder)}")
        return 0
    except (JaxrlError, OSError) as error:
        return exit_code_after(error)


def _choice(text: str | None) -> Any:
    """Return a choice of the command line: a name, or a name with arguments in YAML."""
    if text is None or not text.lstrip().startswith(("{", "[")):
        return text
    return importlib.import_module("jaxrl_async.config.draft").parse_yaml(text, "command line")


def _folder_of(args: argparse.Namespace) -> Path:
    """Return the folder for the results. Raises ConfigError if it holds something."""
    if args.out is not None:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise ConfigError(f"{args.out} already exists. Give a new folder, or an empty one.")
        return Path(args.out)
    name = args.policy.rstrip("/").rpartition("/")[2] or "policy"
    if args.policy.startswith(("http://", "https://")):
        name = args.model or "endpoint"
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    wanted = Path("evaluations") / name
    if not wanted.exists():
        return wanted
    free: Path = importlib.import_module("jaxrl_async.run.folder").free_name(wanted)
    return free


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", __doc__)
    add = parser.add_argument
    add("policy", metavar="POLICY", help="directory, hub name, run, adapter, or endpoint's address")
    add("settings", nargs="*", metavar="section.key=value", help="settings of a configuration")
    add("--data", metavar="FILE", help="file of held-out records (default: the run's)")
    add("--task", metavar="NAME", help="task, as in the setting `task` (default: the run's)")
    add("--reward", metavar="NAME", help="as in reward.function (default: the run's)")
    add("--samples", type=int, default=1, metavar="N", help="answers to each prompt")
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this sum")
    add("--top-k", type=int, default=0, help="sample from this many likeliest tokens; 0: all")
    add("--max-new-tokens", type=int, metavar="N", help="longest answer (default: the run's, 1024)")
    add("--prompts", type=int, metavar="N", help="number of prompts, the first ones (default: all)")
    add("--pass-reward", type=float, default=1.0, metavar="R", help="least reward that passes")
    add("--seed", type=int, default=0, help="seed of the random numbers")
    add("--compare", metavar="OTHER", help="another policy, asked the same")
    add("--base", metavar="DIR", help="base of an adapter (default: the base that it names)")
    add("--model", metavar="NAME", help="model at an endpoint (default: its only one)")
    add("--key-variable", default=KEY_VARIABLE, metavar="NAME", help="variable with its key")
    add("--concurrency", type=int, default=32, metavar="N", help="calls of an endpoint at a time")
    add("--out", type=Path, metavar="DIR", help="folder of the results (default: evaluations/NAME)")
    return parser


if __name__ == "__main__":
    start_with_huge_pages()
    sys.exit(at_exit_end_with(main()))
