"""A stream of messages with one other process."""

from collections.abc import Callable
from typing import Protocol, TypeVar

WireMessage = TypeVar("WireMessage")


class Session(Protocol):
    """A two-way stream of messages (remote.wire.messages) with one other process: ordered, bounded,
    and validated on arrival. Any thread may use it."""

    @property
    def peer(self) -> str:
        """Name of the other side, for messages."""
        ...

    @property
    def ended(self) -> str | None:
        """The reason why it ended; None: it is open."""
        ...

    def send(self, message: object) -> None:
        """Queue a message; block while too many bytes are queued. Raises Disconnected once it has
        ended."""
        ...

    def send_now(self, message: object) -> bool:
        """Queue a message as `send` does if there is room; if not, return False immediately."""
        ...

    def on(self, kind: type[WireMessage], handler: Callable[[WireMessage], None]) -> None:
        """Call a function with each message of a kind, on the session's own thread, in the order of
        sending. A message without a handler waits for one and delays the messages behind it. A
        handler must return soon; if it raises, the session ends with that reason."""
        ...

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Call a function once with the reason when the session has ended, or now if it already
        has.
        No handler is called afterwards."""
        ...

    def end(self, reason: str) -> None:
        """Send what is queued, tell the other side the reason, and close. Idempotent."""
        ...
