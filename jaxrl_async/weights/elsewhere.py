"""What the weight channel knows of samplers in other processes (the wing `remote`)."""

from typing import Protocol

from jaxrl_async.model.spec import Params
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.traffic import Traffic


class RemoteSamplers(Protocol):
    """What serves weights to samplers in processes of their own."""

    @property
    def may_come(self) -> bool:
        """Whether samplers come and go, so that there may be none for a while."""
        ...

    @property
    def wait_s(self) -> float:
        """Longest wait while there is none, seconds."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a transfer may take with all its tries, seconds."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of what one sampler gets."""
        ...

    def begin(self, base: Params) -> None:
        """Offer what the published adapters change, too, from the first publish on."""
        ...

    def publish(self, update: VersionedParams) -> None:
        """Copy the trainer's weights and return at once; the samplers get the newest copy. Raises
        WeightsError if earlier ones could not be offered."""
        ...

    def traffic(self) -> Traffic:
        """Return what was transferred so far."""
        ...

    def close(self) -> None:
        """Offer nothing any more. Idempotent."""
        ...


class _NoRemote:
    """The RemoteSamplers of a run that has none."""

    may_come = False
    wait_s = 0.0
    patience_s = 0.0
    num_bytes = 0

    def begin(self, base: Params) -> None:
        """Do nothing."""

    def publish(self, update: VersionedParams) -> None:
        """Do nothing."""

    def traffic(self) -> Traffic:
        """Return that nothing was transferred."""
        return Traffic()

    def close(self) -> None:
        """Do nothing."""


NO_REMOTE = _NoRemote()
