"""The source of weights of a sampler in a separate process."""

import threading

from jaxrl_async.errors import Closed
from jaxrl_async.remote.weights.receiver import WeightReceiver
from jaxrl_async.types import VersionedParams


class RemoteSource:
    """A ports.WeightSource on a receiver, which fetches on a separate thread."""

    def __init__(self, receiver: WeightReceiver) -> None:
        """Create the source of the sampler that this receiver fetches for."""
        self._receiver, self._number = receiver, receiver.holder

    @property
    def holds(self) -> bool:
        """True if it is still the sampler's source; False once the sampler has left."""
        return self._number == self._receiver.holder

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Take the staged weights, complete and verified; None if no weights are staged.

        Never blocks, regardless of `wait`: a network transfer may take minutes, and the event of
        `attach` wakes an idle sampler when it ends.
        """
        with self._receiver.changed:
            return self._receiver.take() if self.holds else None

    def live(self, version: int) -> None:
        """Report that this sampler generates every new token with this version."""
        with self._receiver.changed:
            if self.holds:
                self._receiver.live(version)

    def attach(self, wake: threading.Event) -> None:
        """Set this event when weights are staged, and now if they already are."""
        with self._receiver.changed:
            if not self.holds:
                return
            self._receiver.wake = wake
            if self._receiver.staged is not None or self._receiver.over:
                wake.set()

    def leave(self) -> None:
        """Stop taking weights; weights that were taken but are not live go to the successor.
        Idempotent and thread-safe."""
        receiver = self._receiver
        with receiver.changed:
            if self.holds:
                receiver.holder += 1
                receiver.staged, receiver.taken = receiver.staged or receiver.taken, None

    def rejoin(self) -> "RemoteSource":
        """Return the source of the sampler that replaces this one, in this process. Raises
        Closed."""
        receiver = self._receiver
        with receiver.changed:
            assert receiver.holder == self._number + 1, "it left, and no successor has rejoined"
            if receiver.over:
                raise Closed("the session with the trainer has ended")
            receiver.wake = threading.Event()
            return RemoteSource(receiver)
