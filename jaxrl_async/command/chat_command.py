"""Chat with a policy in the terminal.

    jaxrl-async chat runs/math                            the policy at the end of a run
    jaxrl-async chat runs/math --step 50                  the policy of a checkpoint, also during the run
    jaxrl-async chat Qwen3-0.6B --temperature 0           a directory, a name on the hub, or FILE.gguf
    jaxrl-async chat ADAPTER --base Qwen3-0.6B            an adapter in PEFT's format
    jaxrl-async chat http://127.0.0.1:8000/v1             an OpenAI-compatible endpoint
    jaxrl-async chat runs/math < questions.txt            each line is a message; only answers are printed

The answer is printed while it is sampled. The next message continues the sampled tokens unchanged.
A policy without a chat template continues each message as a separate text.
Type /help for the commands: /reset, /system TEXT, /regenerate, /set temperature 0.7, /exit.
Ctrl-C stops an answer, and Ctrl-D ends the chat.

Exit codes: 0 ended; 1 a failure, explained on stderr (with piped messages: one of them failed);
2 a bad command line or configuration; 130 Ctrl-C while piped messages are answered.
"""  # noqa: E501

import argparse
import importlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxrl_async.command.chat_options import (
    OPTION_NAMES,
    ChatOptions,
    changed_options,
    for_terminal,
    help_text,
    message_of,
    options_text,
    parsed_command,
    token_lines,
    with_checked,
)
from jaxrl_async.errors import ConfigError, JaxrlError, exit_code_after
from jaxrl_async.help_format import command_parser, whole_number
from jaxrl_async.huge_pages import start_with_huge_pages
from jaxrl_async.metrics.json_logs import lines_for_people
from jaxrl_async.shown_environment import hide_secrets
from jaxrl_async.stuck_threads import at_exit_end_with

if TYPE_CHECKING:
    from jaxrl_async.command.chat_backends import ChatBackend, ChatReply

KEY_VARIABLE = "JAXRL_ASYNC_KEY"
PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
"""Begins and ends a message of several lines."""
CHECKPOINTS = "checkpoints"
"""Folder of a run with its checkpoints: RUN/checkpoints/STEP is a policy, too."""

ReadLine = Callable[[str], str]
"""Shows a prompt and returns a line. Raises EOFError at the end of the input."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    hide_secrets((args.key_variable,))
    try:
        values = {name: getattr(args, name) for name in OPTION_NAMES}
        options = with_checked(ChatOptions(**values))
        with lines_for_people(), _backend(chosen := with_options_of_run(args)) as backend:
            system = chosen.system or None
            backend.begin(system)
            interactive = sys.stdin.isatty()
            chat = Chat(
                backend,
                options,
                system=system,
                read_line=line_reader(interactive=interactive),
                out=sys.stdout,
                err=sys.stderr,
                interactive=interactive,
            )
            return chat.run()
    except (JaxrlError, OSError) as error:
        return exit_code_after(error)


class Chat:
    """A chat in the terminal: reads messages and commands, and prints answers."""

    def __init__(
        self,
        backend: "ChatBackend",
        options: ChatOptions,
        *,
        system: str | None,
        read_line: ReadLine,
        out: TextIO,
        err: TextIO,
        interactive: bool,
    ) -> None:
        """Chat with a backend, which has begun its conversation with this system message.

        interactive: a person types; False: messages are piped, and only answers are printed.
        """
        self._backend, self._options, self._system = backend, options, system
        self._read_line, self._out, self._err = read_line, out, err
        self._interactive = interactive
        self._unfinished = False  # the input ended within a message of several lines

    def run(self) -> int:
        """Answer until the input ends; return the exit code."""
        failed = False
        if self._interactive:
            self._print(f"{self._backend.about}\n/help lists the commands; Ctrl-D ends.")
        while (line := self._next_message()) is not None:
            try:
                command = parsed_command(line)
                if command is None:
                    self._answer(partial(self._backend.ask, message_of(line)))
                elif command[0] == "exit":
                    break
                else:
                    self._execute(*command)
            except JaxrlError as error:
                failed = True
                print(f"{for_terminal(str(error))}", file=self._err, flush=True)
        return 1 if (failed or self._unfinished) and not self._interactive else 0

    def _next_message(self) -> str | None:
        """Return the next message that is not empty; None: the input has ended."""
        while True:
            try:
                text = self._read_line(PROMPT)
                if text.lstrip().startswith(QUOTES):
                    text = self._rest_of(text.lstrip().removeprefix(QUOTES))
                if text.strip():
                    return text.strip()
            except EOFError:
                if self._interactive:
                    self._print("")
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._print("\n(Ctrl-D or /exit ends)")

    def _rest_of(self, text: str) -> str:
        """Return a message of several lines, up to its closing quotes."""
        lines = [text]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._read_line(MORE))
            except EOFError:
                self._unfinished = True
                self._note(f"the last message is not answered: its closing {QUOTES} is missing")
                raise
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines)

    def _execute(self, name: str, argument: str) -> None:
        """Carry out a command. Raises JaxrlErrors."""
        if name == "regenerate":
            self._answer(self._backend.regenerate)
        elif name in ("reset", "system"):
            system = self._system if name == "reset" else argument or None
            self._backend.begin(system)
            self._system = system
            self._note("a new conversation begins")
        elif name == "set" and argument:
            self._options = changed_options(self._options, argument)
        else:
            self._print(options_text(self._options) if name == "set" else help_text())

    def _answer(self, answer: Callable[..., "ChatReply"]) -> None:
        """Print an answer while it is sampled. Raises JaxrlErrors, and KeyboardInterrupt if Ctrl-C
        stopped it while messages are piped."""
        ended_line = True

        def show(text: str) -> None:
            nonlocal ended_line
            shown = for_terminal(text)
            print(shown, end="", file=self._out, flush=True)
            ended_line = shown.endswith("\n")

        with ctrl_c_sets() as stopped:
            try:
                done = answer(self._options, show, stopped)
            finally:
                if not ended_line:
                    self._print("")
        if done.num_tokens == 0 and not done.stopped:
            self._note("the answer is empty")
        if done.tokens:
            self._print("\n".join(map(for_terminal, token_lines(done.tokens))))
        if done.stopped and not self._interactive:
            raise KeyboardInterrupt
        if done.stopped:
            self._note("stopped")
        elif done.cut:
            self._note(f"cut off after {done.num_tokens} tokens; see /set max_new_tokens")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _note(self, text: str) -> None:
        """Print something that is no part of an answer."""
        print(f"({text})", file=self._out if self._interactive else self._err, flush=True)


@contextmanager
def ctrl_c_sets() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, instead of raising KeyboardInterrupt in the sampler's code.
    On another thread than the main one signals are left alone."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def line_reader(*, interactive: bool) -> ReadLine:
    """Return a reader of stdin; for a person one with a history and the usual keys."""
    if interactive:
        with suppress(ImportError):
            importlib.import_module("readline")  # input() uses it
        return input

    def read(_: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


# ---- what answers


def _backend(args: argparse.Namespace) -> Any:
    """Return a context manager with what answers. Raises JaxrlErrors."""
    backends: Any = importlib.import_module("jaxrl_async.command.chat_backends")
    if args.policy.startswith(("http://", "https://")):
        _refuse(args, "an endpoint", ("step", "base", "max_length", "chat_arguments", "decoder"))
        endpoint = backends.EndpointSettings(
            url=args.policy,
            model=args.model,
            key_variable=args.key_variable,
            concurrency=1,
            timeout_s=args.timeout,
        )
        return nullcontext(backends.EndpointBackend(endpoint))
    _refuse(args, "a policy that is loaded here", ("model",))
    return _loaded(args, backends)


def _refuse(args: argparse.Namespace, what: str, names: Sequence[str]) -> None:
    """Raise ConfigError if options are given that would not be used."""
    unused = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if unused:
        raise ConfigError(f"{', '.join(unused)}: {args.policy} is {what}. Leave it out.")


@contextmanager
def _loaded(args: argparse.Namespace, backends: Any) -> Iterator["ChatBackend"]:
    """Load a policy, and open a sampler of it."""
    if sys.stdin.isatty():
        print(f"loading {args.policy} ...", file=sys.stderr, flush=True)
    module: Any = importlib.import_module("jaxrl_async.api.asker")
    setup: Any = importlib.import_module("jaxrl_async.sampler.setup")
    arguments = _chat_arguments(args.chat_arguments)
    policy = loaded_policy(args)
    usual = setup.roomy_section(policy.spec, "float32")
    length = args.max_length or usual.max_length
    section = usual.model_copy(
        update={
            "slots": 1,
            "max_length": length,
            "max_new_tokens": length - 1,
            "kv_memory_mib": None if args.max_length else usual.kv_memory_mib,
        }
    )
    with module.Asker(policy, section=section, seed=args.seed, chat_arguments=arguments) as asker:
        yield backends.PolicyBackend(asker, f"{args.policy}: {policy!r}")


def with_options_of_run(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options; where none are given, the system message and the variables of the chat
    template are as in the run whose policy it is. Raises ConfigError."""
    folder, _ = run_and_step(args.policy)
    file = folder / "config.yaml"
    options = argparse.Namespace(**vars(args))
    if not args.policy.startswith(("http://", "https://")) and file.is_file():
        data = importlib.import_module("jaxrl_async.config.load").load(file).data
        if args.system is None:
            options.system = data.system_prompt
        if args.chat_arguments is None and data.chat_arguments:
            options.chat_arguments = json.dumps(data.chat_arguments)
    return options


def run_and_step(policy: str) -> tuple[Path, int | None]:
    """Return the folder that is named, and the step in RUN/checkpoints/STEP; None: it names no
    checkpoint."""
    path = Path(policy)
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        return path.parent.parent, int(path.name)
    return path, None


def loaded_policy(args: argparse.Namespace) -> Any:
    """Load a policy as the command line names it. Raises CheckpointError, ConfigError and
    DataError."""
    path, step = run_and_step(args.policy)
    step = step if args.step is None else args.step
    evals: Any = importlib.import_module("jaxrl_async.evals.policy_eval")
    if step is None:
        source = evals.PolicySource(policy=args.policy, base=args.base)
        if args.decoder is not None:
            loader: Any = importlib.import_module("jaxrl_async.model.own_code")
            loader.load_code(args.decoder, "--decoder")
        return source.loaded()
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"--step {step}: {path} is no run's folder. Leave it out.")
    if args.base is not None:
        raise ConfigError("--base: a run's checkpoint has its base. Leave it out.")
    saved: Any = importlib.import_module("jaxrl_async.run.saved_policy")
    paths = importlib.import_module("jaxrl_async.run.folder").Paths(path)
    return saved.policy_at_step(paths, step, None).merged()


def _chat_arguments(text: str | None) -> dict[str, Any]:
    """Parse the variables of the chat template. Raises ConfigError."""
    if text is None:
        return {}
    parse = importlib.import_module("jaxrl_async.config.draft").parse_yaml
    arguments = parse(text, "--chat-arguments")
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise ConfigError(
            f"--chat-arguments {text}: give {{NAME: VALUE}}, such as '{{enable_thinking: false}}'."
        )
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("chat", __doc__)
    usual, add = ChatOptions(), parser.add_argument
    add("policy", metavar="POLICY", help="run, directory, hub name, adapter, or endpoint's address")
    add("--step", type=int, metavar="N", help="the checkpoint after N updates (default: the end)")
    add("--base", metavar="DIR", help="base of an adapter (default: the base that it names)")
    add("--system", metavar="TEXT", help="system message (default: the run's, or none)")
    add("--temperature", type=float, default=usual.temperature, help="0: greedy")
    add("--top-p", type=float, default=usual.top_p, help="sample from tokens of this probability")
    add("--top-k", type=int, default=usual.top_k, help="sample from so many tokens; 0: all")
    add(
        "--max-new-tokens",
        type=int,
        default=usual.max_new_tokens,
        metavar="N",
        help="longest answer",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="print each token's log-prob, and the N likeliest tokens (default: not printed)",
    )
    add("--seed", type=int, default=0, help="seed of the random numbers")
    add(
        "--max-length",
        type=whole_number("a number of tokens from 2 on", 2),
        metavar="N",
        help="longest conversation, tokens (default: the model's, at most 2048)",
    )
    add(
        "--chat-arguments",
        metavar="YAML",
        help="variables of the chat template: {enable_thinking: false} (default: the run's)",
    )
    add("--decoder", metavar="FILE.py:CLASS", help="custom decoder")
    add("--model", metavar="NAME", help="model at an endpoint (default: its only one)")
    add("--key-variable", default=KEY_VARIABLE, metavar="NAME", help="variable with its key")
    add("--timeout", type=float, default=600.0, metavar="S", help="its timeout, seconds")
    return parser


if __name__ == "__main__":
    start_with_huge_pages()
    sys.exit(at_exit_end_with(main()))
