"""A session over any stream of frames: messages in order, both ways, bounded, with an end that both
sides know.

    send ─> Outbox ─> frames() ─> the stream ─> take() ─> FrameInbox ─> handlers, on its thread

The stream (gRPC in grpc_link.py, memory in testing) calls `take` with each frame that comes, draws
those that go from `frames` and calls `stream_ended` when it breaks. Each side sends a beat if it
has nothing else to say, so a side that says nothing is dead, stopped or cut off; one that takes
nothing is no better.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async import codec
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import ConfigError, Disconnected, printable
from jaxrl_async.remote.wire.frames import BEAT_FRAME, Bye, FrameInbox, FrameKind, Outbox, bye_frame
from jaxrl_async.remote.wire.messages import MESSAGES
from jaxrl_async.remote.wire.session_port import WireMessage
from jaxrl_async.remote.wire.validation import check_fits

log = logging.getLogger(__name__)

BEATS = 4
"""Beats in the time after which silence counts as an end."""
MESSAGE_COST = 256
"""Bytes of memory that a message takes beside its own, so that a million tiny ones count, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Bounds of a session, in bytes and seconds."""

    silence_s: float = 20.0  # a side that says or takes nothing for so long is lost
    max_message_bytes: int = 256 << 20
    queue_bytes: int = 64 << 20  # that wait to be sent, and that wait for a handler
    join_s: float = 10.0  # for the handshake, before the secret is proved
    max_joining: int = 64  # simultaneous connections that have not proved it yet
    max_sessions: int = 4096  # at the same time

    @classmethod
    def of(cls, remote: RemoteSection) -> "WireLimits":
        """Return the limits that a configuration asks for."""
        return cls(
            silence_s=remote.silence_s,
            max_message_bytes=remote.max_message_mib << 20,
            join_s=min(10.0, remote.silence_s),
        )


class WireSession:
    """A ports.Session. `start` it once; before, it only queues.

    Args:
        peer: name of the other side, for people.
        close_stream: breaks the stream; called once, when there is nothing more to say on it.
        secret: that both sides have proved; empty: none.
    """

    def __init__(
        self,
        peer: str,
        limits: WireLimits,
        close_stream: Callable[[], None] = lambda: None,
        secret: bytes = b"",
    ) -> None:
        self.secret = secret
        self._peer, self._limits, self._close_stream = peer, limits, close_stream
        self._changed = threading.Condition()
        self._outbox, self._inbox = Outbox(), FrameInbox(limits.max_message_bytes)
        self._arrived: deque[memoryview] = deque()
        self._arrived_bytes = 0
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._callbacks: list[Callable[[str], None]] = []
        self._ended: str | None = None
        self._bye_sent = self._bye_came = self._over = self._told = False
        self._deliver = True  # False: what a handler cannot take is not given to it
        self._heard = self._taken = 0  # frames that came and went, to see whether they still do
        self._full = False  # whether the reader waits for room
        self._seen = (0, 0)  # of those, at the last look
        self._looked_s = time.monotonic()
        self._unheard_s = self._untaken_s = 0.0  # for how long nothing came, or went

    @property
    def peer(self) -> str:
        """See ports.Session."""
        return self._peer

    @property
    def ended(self) -> str | None:
        """See ports.Session."""
        return self._ended

    def start(self) -> None:
        """Start to deliver and to watch."""
        name = f"deliver {self._peer}"
        threading.Thread(target=self._dispatch, name=name, daemon=True).start()
        self._looked_s = time.monotonic()
        WATCH.add(self)

    def use_limits(self, limits: WireLimits) -> None:
        """Keep to the limits of the other side from now on: it waits for beats as often as they
        say."""
        with self._changed:
            self._limits = limits
            self._changed.notify_all()
        WATCH.change(self)

    # ---- for its users

    def send(self, message: Any) -> None:
        """See ports.Session. Raises ConfigError for a message that the other side would refuse as
        too large."""
        self._queue(message, wait=True)

    def send_now(self, message: Any) -> bool:
        """See ports.Session. Raises as `send` does."""
        return self._queue(message, wait=False)

    def _queue(self, message: Any, *, wait: bool) -> bool:
        """Queue a message; return whether there was room for it, or wait until there is."""
        if not isinstance(message, MESSAGES):
            raise TypeError(f"{type(message).__name__} is no message (remote.wire.messages)")
        data = codec.dumps(message).data
        if len(data) > self._limits.max_message_bytes:
            raise ConfigError(
                f"a {type(message).__name__} of {len(data) / 2**20:.0f} MiB to {self._peer} is "
                f"larger than allowed: set remote.max_message_mib above "
                f"{self._limits.max_message_bytes >> 20}"
            )
        with self._changed:
            while self._ended is None and self._no_room(self._outbox.num_bytes, len(data)):
                if not wait:
                    return False
                self._changed.wait()  # the watch ends it if nothing goes
            if self._ended is not None:
                raise Disconnected(f"the session with {self._peer} has ended: {self._ended}")
            self._outbox.put(data)
            self._changed.notify_all()
            return True

    def on(self, kind: type[WireMessage], handler: Callable[[WireMessage], None]) -> None:
        """See ports.Session. Raises ValueError for a second handler of a kind."""
        if kind not in MESSAGES:
            raise ValueError(f"{kind.__name__} is no message (remote.wire.messages)")
        with self._changed:
            if kind in self._handlers:
                raise ValueError(f"{kind.__name__} has a handler already")
            self._handlers[kind] = handler
            self._changed.notify_all()

    def on_end(self, callback: Callable[[str], None]) -> None:
        """See ports.Session."""
        with self._changed:
            if not self._told:
                self._callbacks.append(callback)
                return
        callback(self._ended or "")

    def end(self, reason: str) -> None:
        """See ports.Session. Returns when the other side has everything, or takes nothing for
        silence_s."""
        self.begin_end(reason)
        self.wait_over()

    def begin_end(self, reason: str) -> None:
        """Do what `end` does, without waiting."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
                self._changed.notify_all()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream is closed: the watch closes one on which nothing moves. Return
        False if it is open after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout_s)

    def says_something(self, timeout_s: float) -> bool:
        """Wait for a frame; return False if none comes in this time, or none will any more.

        An honest peer that lives sends a beat in silence_s / BEATS. While this side has no room for
        what comes, the peer counts as alive.
        """
        with self._changed:
            heard = self._heard
            self._changed.wait_for(
                lambda: self._over or self._full or self._heard != heard, timeout_s
            )
            return not self._over and (self._full or self._heard != heard)

    # ---- for the stream

    def frames(self) -> Iterator[bytes]:
        """Return the frames to send, as they come to be; block for the next one."""
        while True:
            with self._changed:
                self._taken += 1
                if not self._outbox and self._ended is None and not self._over:
                    self._changed.wait(self._limits.silence_s / BEATS)
                if self._over or self._bye_sent:
                    break
                if self._outbox:
                    frame = self._outbox.next_frame()
                    self._changed.notify_all()
                elif self._ended is not None:
                    frame, self._bye_sent = bye_frame(self._ended), True
                else:
                    frame = BEAT_FRAME
            yield frame
        with self._changed:
            while not (self._bye_came or self._over):  # the stream stays open for the other side
                self._changed.wait()

    def take(self, frame: bytes) -> None:
        """Take a frame in; block while too many bytes wait for handlers."""
        is_bye = frame[:1] == bytes([FrameKind.BYE])
        try:
            if self._deliver or is_bye:
                for item in self._inbox.take(frame):
                    self._take_item(item)
        except ValueError as error:
            self._refuse_rest(f"{self._peer} sent what is no message: {error}")
        with self._changed:
            # once this side wants no more, only a peer that comes to its end counts as alive: after
            # the last word of this side an honest one sends its rest, and no beats
            over = not self._deliver or (self._bye_sent and frame == BEAT_FRAME)
            self._heard += is_bye or not over
            self._changed.notify_all()

    def stream_ended(self, reason: str) -> None:
        """Take note that no frame will come any more. The reason counts if no Bye came before."""
        self.lost(reason)

    def lost(self, reason: str) -> None:
        """Close the stream at once: nothing can be sent any more. What has come is delivered."""
        with self._changed:
            if self._over:
                return
            self._over = True
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()
        WATCH.remove(self)
        self._close_stream()

    def discard(self, reason: str) -> None:
        """End a session that was never started; its stream stays, for a last word."""
        with self._changed:
            self._ended, self._over = reason, True
            self._changed.notify_all()
        self._tell()

    def _take_item(self, item: memoryview | Bye) -> None:
        with self._changed:
            if isinstance(item, Bye):
                self._bye_came = True
                if self._ended is None:
                    self._ended = item.reason
            else:
                self._full = True
                cost = len(item) + MESSAGE_COST
                while not self._over and self._no_room(self._arrived_bytes, cost):
                    self._changed.wait()
                self._full = False
                if self._deliver:
                    self._arrived.append(item)
                    self._arrived_bytes += cost
            self._changed.notify_all()

    def _no_room(self, waiting_bytes: int, more_bytes: int) -> bool:
        return waiting_bytes > 0 and waiting_bytes + more_bytes > self._limits.queue_bytes

    # ---- its threads

    def _dispatch(self) -> None:
        """Give each message to its handler; tell of the end when nothing more can come."""
        unhandled = 0
        while (data := self._next_arrived()) is not None:
            try:
                message = codec.loads(data, MESSAGES)
                if not isinstance(message, MESSAGES):
                    raise ValueError(f"a {type(message).__name__}")
                check_fits(message)
            except ValueError as error:
                self._refuse_rest(f"{self._peer} sent what is no message: {error}")
                continue
            handler = self._handler(type(message))
            if handler is None:
                unhandled += 1
                continue
            try:
                handler(message)
            except Exception as error:  # whatever a handler raises ends the session
                name = type(message).__name__
                log.exception("a %s from %s could not be handled", name, self._peer)
                self._refuse_rest(f"{type(message).__name__} could not be handled: {error}")
        if unhandled:
            log.warning("%s has ended; %d of its messages had no handler", self._peer, unhandled)
        self._tell()

    def _next_arrived(self) -> memoryview | None:
        with self._changed:
            while not self._arrived and not self._over:
                self._changed.wait()
            if not self._arrived:
                return None
            data = self._arrived.popleft()
            self._arrived_bytes -= len(data) + MESSAGE_COST
            self._changed.notify_all()
            return data

    def _handler(self, kind: type) -> Callable[[Any], None] | None:
        """Wait for the handler of a kind; None: the session was over before one came."""
        with self._changed:
            while kind not in self._handlers and not self._over:
                self._changed.wait()
            return self._handlers.get(kind)

    def _refuse_rest(self, reason: str) -> None:
        self.begin_end(printable(reason))
        with self._changed:
            self._deliver = False
            self._arrived.clear()
            self._arrived_bytes = 0
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._told = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self._ended or "")
            except Exception:  # the others want to know, too
                log.exception("a callback at the end of the session with %s failed", self._peer)

    @property
    def look_s(self) -> float:
        """How often to look whether something comes and goes, seconds."""
        return self._limits.silence_s / (2 * BEATS)

    def look(self) -> None:
        """Close the stream if nothing has come or nothing has gone for silence_s.

        Time in which this process itself stood still counts as one look: it says nothing about the
        other side.
        """
        with self._changed:
            over = self._over
            now_s, now, seen = time.monotonic(), (self._heard, self._taken), self._seen
            full, said_all = self._full, self._bye_sent
        if over:  # it ended before it was started
            WATCH.remove(self)
            return
        passed_s = min(now_s - self._looked_s, 2 * self.look_s)
        self._looked_s, self._seen = now_s, now
        self._unheard_s = 0.0 if now[0] != seen[0] or full else self._unheard_s + passed_s
        self._untaken_s = 0.0 if now[1] != seen[1] or said_all else self._untaken_s + passed_s
        silence_s = self._limits.silence_s
        if self._unheard_s > silence_s:
            self.lost(f"nothing heard of {self._peer} for {silence_s:g} s")
        elif self._untaken_s > silence_s:
            self.lost(f"{self._peer} has taken nothing for {silence_s:g} s")


class Watch:
    """A thread that looks at all sessions of this process, each as often as it asks for; it runs
    while there is one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[WireSession, float] = {}  # when to look, seconds of the monotone clock
        self._runs = False

    def add(self, session: WireSession) -> None:
        """Look at a session from now on."""
        with self._changed:
            self._due[session] = time.monotonic() + session.look_s
            if not self._runs:
                threading.Thread(target=self._run, name="watch sessions", daemon=True).start()
                self._runs = True
            self._changed.notify_all()

    def change(self, session: WireSession) -> None:
        """Look as often as a session asks for now, if it is looked at."""
        with self._changed:
            if session in self._due:
                self._due[session] = time.monotonic() + session.look_s
                self._changed.notify_all()

    def remove(self, session: WireSession) -> None:
        """Stop looking at a session. Idempotent."""
        with self._changed:
            self._due.pop(session, None)
            if not self._due:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                next_s = min(self._due.values(), default=None)
                if next_s is None:
                    self._runs = False
                    return
                if next_s > now_s:
                    self._changed.wait(next_s - now_s)
                    continue
                due = [session for session, at_s in self._due.items() if at_s <= now_s]
                for session in due:  # to the next beat of a clock: many are looked at together
                    look_s = session.look_s
                    self._due[session] = (now_s // look_s + 1) * look_s
            for session in due:
                try:
                    session.look()
                except Exception:  # the others are watched all the same
                    log.exception("the session with %s cannot be looked at", session.peer)


WATCH = Watch()
"""Of this process."""
