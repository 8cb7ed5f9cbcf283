"""A session over any stream of frames: ordered messages in both directions, bounded, with an end
that both sides know.

    send ─> Outbox ─> frames() ─> the stream ─> take() ─> FrameInbox ─> handlers, on its thread

The stream (gRPC in grpc_link.py, memory in testing) calls `take` with each received frame, iterates
over `frames` for the frames to send, and calls `lost` when it breaks. Each side sends a beat if it
has nothing else to send. A side that sends nothing is therefore dead, stopped or disconnected; a
side that receives nothing is treated the same.
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
"""Number of beats in silence_s."""
MESSAGE_COST = 256
"""Memory overhead counted per message, bytes, to bound the number of tiny messages as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Bounds of a session, in bytes and seconds."""

    silence_s: float = 20.0  # a side that sends or receives nothing for this time is lost
    max_message_bytes: int = 256 << 20
    queue_bytes: int = 64 << 20  # waiting to be sent; the same for those that wait for a handler
    join_s: float = 10.0  # for the handshake, until the secret is proved
    max_joining: int = 64  # simultaneous connections that have not proved it yet
    max_sessions: int = 4096  # at the same time

    @classmethod
    def of(cls, remote: RemoteSection) -> "WireLimits":
        """Return the limits of a configuration."""
        return cls(
            silence_s=remote.silence_s,
            max_message_bytes=remote.max_message_mib << 20,
            join_s=min(10.0, remote.silence_s),
        )


class WireSession:
    """A session_port.Session. Call `start` once; before that it only queues.

    Args:
        peer: name of the other side, for messages.
        close_stream: closes the stream; called once, when there is nothing more to send.
        secret: proved by both sides; empty: none.
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
        self._bye_sent = self._bye_received = self._over = self._end_reported = False
        self._deliver = True  # False: received messages are dropped
        self._num_received = self._num_sent = 0  # frames received and sent, to detect progress
        self._inbox_full = False  # True while the reader waits for space
        self._seen = (0, 0)  # _num_received and _num_sent at the last check
        self._checked_s = time.monotonic()
        self._receive_idle_s = self._send_idle_s = 0.0  # time without a received or sent frame

    @property
    def peer(self) -> str:
        """See Session."""
        return self._peer

    @property
    def ended(self) -> str | None:
        """See Session."""
        return self._ended

    def start(self) -> None:
        """Start delivering and watching."""
        name = f"deliver {self._peer}"
        threading.Thread(target=self._dispatch, name=name, daemon=True).start()
        self._checked_s = time.monotonic()
        WATCH.add(self)

    def use_limits(self, limits: WireLimits) -> None:
        """Use the limits of the other side from now on: they determine how often it expects
        beats."""
        with self._changed:
            self._limits = limits
            self._changed.notify_all()
        WATCH.add(self)

    # ---- for its users

    def send(self, message: object) -> None:
        """See Session. Raises ConfigError for a message that is too large for the other
        side."""
        self._queue(message, wait=True)

    def send_now(self, message: object) -> bool:
        """See Session. Raises as `send` does."""
        return self._queue(message, wait=False)

    def _queue(self, message: object, *, wait: bool) -> bool:
        """Queue a message. Return True, or False if the queue is full and `wait` is False."""
        if not isinstance(message, MESSAGES):
            raise TypeError(f"{type(message).__name__} is not a message (remote.wire.messages)")
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
                self._changed.wait()  # the watch ends the session if nothing is sent
            if self._ended is not None:
                raise Disconnected(f"the session with {self._peer} has ended: {self._ended}")
            self._outbox.put(data)
            self._changed.notify_all()
            return True

    def on(self, kind: type[WireMessage], handler: Callable[[WireMessage], None]) -> None:
        """See Session. Raises ValueError for a second handler of a kind."""
        if kind not in MESSAGES:
            raise ValueError(f"{kind.__name__} is not a message (remote.wire.messages)")
        with self._changed:
            if kind in self._handlers:
                raise ValueError(f"{kind.__name__} has a handler already")
            self._handlers[kind] = handler
            self._changed.notify_all()

    def on_end(self, callback: Callable[[str], None]) -> None:
        """See Session."""
        with self._changed:
            if not self._end_reported:
                self._callbacks.append(callback)
                return
        callback(self._ended or "")

    def end(self, reason: str) -> None:
        """See Session. Returns when the other side has received everything, or has received
        nothing for silence_s."""
        self.begin_end(reason)
        self.wait_over()

    def begin_end(self, reason: str) -> None:
        """Begin to end the session; do not wait."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
                self._changed.notify_all()

    def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until the stream is closed; the watch closes a stream without traffic. Return False
        if it is still open after timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout_s)

    def wait_for_frame(self, timeout_s: float) -> bool:
        """Wait for a frame; return False if none arrives in this time or the session is over.

        A correct, live peer sends a beat within silence_s / BEATS. While this side has no space for
        received messages, the peer counts as alive.
        """
        with self._changed:
            before = self._num_received
            self._changed.wait_for(
                lambda: self._over or self._inbox_full or self._num_received != before, timeout_s
            )
            return not self._over and (self._inbox_full or self._num_received != before)

    # ---- for the stream

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send; block until the next one is ready."""
        while True:
            with self._changed:
                self._num_sent += 1
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
            while not (self._bye_received or self._over):  # the other side may still send
                self._changed.wait()

    def take(self, frame: bytes) -> None:
        """Process a received frame; block while too many bytes wait for handlers."""
        is_bye = frame[:1] == bytes([FrameKind.BYE])
        try:
            if self._deliver or is_bye:
                for item in self._inbox.take(frame):
                    self._take_item(item)
        except ValueError as error:
            self._refuse_rest(f"{self._peer} sent an invalid message: {error}")
        with self._changed:
            # once this side accepts no more messages, only a peer that ends the session counts as
            # alive: after this side's last frame, a correct peer sends its remaining messages and
            # no beats
            over = not self._deliver or (self._bye_sent and frame == BEAT_FRAME)
            self._num_received += is_bye or not over
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        """Close the stream immediately, or note that it has ended: nothing more can be sent.
        Received messages are still delivered. The reason is kept if the session has no other."""
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
        """End a session that was never started; its stream stays open for a last frame."""
        with self._changed:
            self._ended, self._over = reason, True
            self._changed.notify_all()
        self._report_end()

    def _take_item(self, item: memoryview | Bye) -> None:
        with self._changed:
            if isinstance(item, Bye):
                self._bye_received = True
                if self._ended is None:
                    self._ended = item.reason
            else:
                self._inbox_full = True
                cost = len(item) + MESSAGE_COST
                while not self._over and self._no_room(self._arrived_bytes, cost):
                    self._changed.wait()
                self._inbox_full = False
                if self._deliver:
                    self._arrived.append(item)
                    self._arrived_bytes += cost
            self._changed.notify_all()

    def _no_room(self, waiting_bytes: int, more_bytes: int) -> bool:
        return waiting_bytes > 0 and waiting_bytes + more_bytes > self._limits.queue_bytes

    # ---- its threads

    def _dispatch(self) -> None:
        """Pass each message to its handler; call the end callbacks when no more messages can
        arrive."""
        unhandled = 0
        while (data := self._next_arrived()) is not None:
            try:
                message = codec.loads(data, MESSAGES)
                if not isinstance(message, MESSAGES):
                    raise ValueError(f"a {type(message).__name__}")
                check_fits(message)
            except ValueError as error:
                self._refuse_rest(f"{self._peer} sent an invalid message: {error}")
                continue
            handler = self._handler(type(message))
            if handler is None:
                unhandled += 1
                continue
            try:
                handler(message)
            except Exception as error:  # an error of a handler ends the session
                name = type(message).__name__
                log.exception("handling a %s from %s failed", name, self._peer)
                self._refuse_rest(f"handling of a {type(message).__name__} failed: {error}")
        if unhandled:
            log.warning("%s has ended; %d of its messages had no handler", self._peer, unhandled)
        self._report_end()

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
        """Wait for the handler of a message type; None: the session ended before one was
        registered."""
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

    def _report_end(self) -> None:
        with self._changed:
            self._end_reported = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self._ended or "")
            except Exception:  # the other callbacks are still called
                log.exception("a callback at the end of the session with %s failed", self._peer)

    @property
    def check_s(self) -> float:
        """Interval between two checks for traffic, seconds."""
        return self._limits.silence_s / (2 * BEATS)

    def check(self) -> None:
        """Close the stream if nothing has been received or nothing sent for silence_s.

        Time in which this process itself was stopped counts as one interval: it says nothing about
        the other side.
        """
        with self._changed:
            over = self._over
            now_s, now, seen = time.monotonic(), (self._num_received, self._num_sent), self._seen
            full, bye_sent = self._inbox_full, self._bye_sent
        if over:  # it ended before it was added
            WATCH.remove(self)
            return
        passed_s = min(now_s - self._checked_s, 2 * self.check_s)
        self._checked_s, self._seen = now_s, now
        self._receive_idle_s = 0.0 if now[0] != seen[0] or full else self._receive_idle_s + passed_s
        self._send_idle_s = 0.0 if now[1] != seen[1] or bye_sent else self._send_idle_s + passed_s
        silence_s = self._limits.silence_s
        if self._receive_idle_s > silence_s:
            self.lost(f"nothing received from {self._peer} for {silence_s:g} s")
        elif self._send_idle_s > silence_s:
            self.lost(f"{self._peer} has taken nothing for {silence_s:g} s")


class Watch:
    """A thread that checks all sessions of this process, each at its own interval. It runs while
    there are sessions."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[WireSession, float] = {}  # next check, time.monotonic()
        self._runs = False

    def add(self, session: WireSession) -> None:
        """Start checking a session, or apply its new interval."""
        with self._changed:
            self._due[session] = time.monotonic() + session.check_s
            if not self._runs:
                threading.Thread(target=self._run, name="watch sessions", daemon=True).start()
                self._runs = True
            self._changed.notify_all()

    def remove(self, session: WireSession) -> None:
        """Stop checking a session. Idempotent."""
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
                for session in due:  # rounded to a multiple: many are checked together
                    check_s = session.check_s
                    self._due[session] = (now_s // check_s + 1) * check_s
            for session in due:
                try:
                    session.check()
                except Exception:  # the others are still checked
                    log.exception("checking the session with %s failed", session.peer)


WATCH = Watch()
"""The watch of this process."""
