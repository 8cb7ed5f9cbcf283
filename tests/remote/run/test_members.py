"""Which sampler is admitted under which name, and how samplers are asked to leave: over real
connections."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs import config_of
from tiny import SPEC

from jaxrl_async.errors import Disconnected
from jaxrl_async.remote.run.members import Invitation, Members
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.messages import Hello, Profile
from jaxrl_async.remote.wire.session import WireLimits, WireSession

PEER = Path(__file__).parents[2] / "helpers" / "wire_peer.py"
WAIT_S = 90.0


@contextmanager
def members(folder: Path, *settings: str) -> Iterator[Members]:
    config = config_of("addition", folder, "mesh.samplers_in=external", *settings)
    invitation = Invitation(config=config, spec=SPEC, capacity=4)
    nothing: Any = None  # channel, outbox, router, check: no sampler here gets as far as weights
    made = Members(invitation, *[nothing] * 4, secret=b"", tls=None, count=lambda name, n: None)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def a_process(where: Members, silence_s: float = 20.0) -> Iterator["subprocess.Popen[str]"]:
    """Start a sampler called echo."""
    child = subprocess.Popen(
        [sys.executable, str(PEER), str(where.local_address), "echo", str(silence_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAXRL_ASYNC_SECRET": ""},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def next_line(child: "subprocess.Popen[str]") -> str:
    """Return its next line."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def owner(of: Members, name: str = "echo") -> WireSession | None:
    session, _ = of._joined.get(name, (None, None))
    return session


@pytest.mark.full
def test_a_name_is_taken_from_one_that_says_nothing_and_from_no_other(tmp_path: Path) -> None:
    silence_s = 4.0
    with (
        members(tmp_path, f"remote.silence_s={silence_s}") as trainer,
        a_process(trainer, silence_s) as first,
    ):
        assert next_line(first) == "joined addition"
        old = owner(trainer)
        assert old is not None
        with a_process(trainer, silence_s) as rival:
            assert rival.wait(WAIT_S) == 1 and rival.stderr is not None
            assert "'echo' has already joined: give each a different --name" in rival.stderr.read()
        assert owner(trainer) is old and old.ended is None, "two that live: the first stays"
        ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        old.on_end(ends.put)
        first.send_signal(signal.SIGSTOP)
        with a_process(trainer, silence_s) as again:
            assert next_line(again) == "joined addition"
            assert ends.get(timeout=WAIT_S) == "another echo has joined in its place"
            new = owner(trainer)
            assert new is not None and new is not old
            first.send_signal(signal.SIGCONT)
            assert next_line(first).startswith("ended "), "the one that wakes learns it"
            assert owner(trainer) is new and new.ended is None


@pytest.mark.exhaustive
def test_of_two_that_ask_for_the_name_of_one_that_is_lost_one_gets_it(tmp_path: Path) -> None:
    with (
        members(tmp_path, "remote.silence_s=4") as trainer,
        a_process(trainer, 4.0) as first,
    ):
        assert next_line(first) == "joined addition"
        first.send_signal(signal.SIGSTOP)
        with a_process(trainer, 4.0) as one, a_process(trainer, 4.0) as other:
            eventually(lambda: one.poll() is not None or other.poll() is not None)
            lost, there = (one, other) if one.poll() is not None else (other, one)
            assert lost.returncode == 1 and next_line(there) == "joined addition"
            session = owner(trainer)
            assert session is not None and session.ended is None


def test_one_whose_connection_broke_joins_again_at_once(tmp_path: Path) -> None:
    def join(trainer: Members, instance: str) -> WireSession:
        session, _ = dial(
            str(trainer.local_address),
            Hello(name="s", instance=instance),
            secret=b"",
            tls=None,
            limits=WireLimits(silence_s=600.0),
            timeout_s=WAIT_S,
        )
        return session

    with members(tmp_path, "remote.silence_s=600") as trainer:
        join(trainer, "a")
        old = owner(trainer, "s")
        assert old is not None
        new = join(trainer, "a")
        assert owner(trainer, "s") is not old and old.ended == "another s has joined in its place"
        new.end("done")


@pytest.mark.full
def test_samplers_that_receive_nothing_delay_the_end_by_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_async.remote.run.members.LEAVE_S", 0.2)
    with members(tmp_path, "remote.silence_s=600") as trainer, a_process(trainer, 600) as child:
        assert next_line(child) == "joined addition"
        child.send_signal(signal.SIGSTOP)
        closing = threading.Thread(target=trainer.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive() and not trainer._joined


class Line:
    """A sampler's session that has no room, or has ended; None: it takes everything."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault, self.sent = fault, list[Profile]()

    def send_now(self, message: Profile) -> bool:
        if self.fault == "ended":
            raise Disconnected("the session has ended")
        if self.fault == "full":
            return False
        self.sent.append(message)
        return True


def test_a_trace_is_asked_for_without_waiting_for_a_sampler_that_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = {"a": Line("full"), "b": Line(), "c": Line("ended")}
    with members(tmp_path) as trainer:
        trainer._joined.update({name: (line, Hello(name=name)) for name, line in lines.items()})
        trainer._generating.update(lines)
        trainer.profile(3, on=True)
        lines["a"].fault = None
        trainer.profile(3, on=False)
        trainer._joined.clear()
    assert lines["b"].sent == [Profile(step=3, on=True), Profile(step=3, on=False)]
    assert not lines["a"].sent, "it was not asked to begin, and is not asked to end"
    assert "step 3 of a is not traced: its connection is full" in caplog.text
    assert "step 3 of c is not traced: the session has ended" in caplog.text
    assert trainer._profiled == {"a": set(), "b": {3}, "c": set()}
