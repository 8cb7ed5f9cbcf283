"""jaxrl-async COMMAND ...: the entry point of all commands. Imports only what a command needs.

jaxrl-async train recipe:addition      = python -m jaxrl_async.train recipe:addition
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from jaxrl_async import __version__
from jaxrl_async.huge_pages import start_with_huge_pages
from jaxrl_async.stuck_threads import at_exit_end_with

PROGRAM = "jaxrl-async"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module with its `main(argv) -> exit code`, and its description."""

    module: str  # below jaxrl_async
    about: str
    main: str = "main"
    computes: bool = False  # enough to benefit from huge pages


COMMANDS = {
    "init": Command("command.init_command", "write a first configuration, from a few questions"),
    "train": Command(
        "train", "train a policy or a reward model: CONFIG [section.key=value ...]", computes=True
    ),
    "recipes": Command("command.recipe_list", "list the configurations that come with the package"),
    "convert": Command("command.convert", "write a configuration of TRL or verl as ours: FILE"),
    "plan": Command(
        "plan.__main__", "compile a run for TPU slices or NVIDIA cards that need not exist"
    ),
    "doctor": Command("command.doctor", "check this machine, and what a configuration needs"),
    "view": Command("view.__main__", "show runs on a page that updates as they run: RUN ..."),
    "diff": Command("command.diff_command", "compare two runs: RUN RUN"),
    "audit": Command("audit", "check that a run's ledger adds up: RUN"),
    "sample": Command("sample", "join a run as a sampler: --join ADDRESS", computes=True),
    "serve": Command("serve", "serve a policy to OpenAI and Anthropic clients: DIR", computes=True),
    "chat": Command("command.chat_command", "chat with a policy: POLICY", computes=True),
    "eval": Command(
        "command.eval_command", "evaluate a policy, with intervals: POLICY", computes=True
    ),
    "export": Command("command.export", "write a policy, or an adapter, for other programs"),
    "completion": Command("command.completion", "print a shell's completion script"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (without the program's name); return the command's own exit code, or 2 for an
    unknown command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    name, *rest = words
    if name in ("--help", "-h", "help") and not rest:
        return _printed(_help())
    if name in ("--version", "-V", "version") and not rest:
        return _printed(f"{PROGRAM} {__version__}")
    if name == "help":
        name, rest = rest[0], ["--help"]
    if name not in COMMANDS:
        print(f"{unknown(name, rest)}\n`{PROGRAM} --help` lists all commands.", file=sys.stderr)
        return 2
    command, before = COMMANDS[name], signal.getsignal(signal.SIGINT)
    if argv is None and command.computes:
        start_with_huge_pages()
    try:
        if name == "train":
            importlib.import_module("jaxrl_async.run.signals").end_on_ctrl_c()
        module = importlib.import_module(f"jaxrl_async.{command.module}")
        run: Callable[[Sequence[str]], int] = getattr(module, command.main)
        return run(rest) if argv is not None else at_exit_end_with(run(rest))
    except KeyboardInterrupt:
        print("\nended by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output is gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if name == "train":
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def unknown(name: str, rest: Sequence[str]) -> str:
    """Return a message about an unknown command or option, with suggestions."""
    if name.startswith("-"):
        return f"unknown option {name} before a command; options follow it: {PROGRAM} COMMAND ..."
    if name.startswith("recipe:") or name.endswith((".yaml", ".yml")):
        meant = " ".join([PROGRAM, "train", name, *rest])
        return f"{name} is a configuration, not a command; did you mean `{meant}`?"
    near = get_close_matches(name.lower(), COMMANDS, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"unknown command {name!r}{hint}"


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND ...",
            "",
            "Asynchronous reinforcement learning of language models in JAX.",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help   shows a command's help",
            f"{PROGRAM} --version        prints the version",
            "",
            f"To begin: {PROGRAM} train recipe:addition     (three minutes on two CPU cores)",
            f"or, with a model and data of yours: {PROGRAM} init",
        ]
    )


def _printed(text: str) -> int:
    print(text)
    return 0
