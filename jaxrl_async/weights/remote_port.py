"""The weight channel's interface to samplers in other processes (the package `remote`)."""

from dataclasses import dataclass
from typing import Protocol

from jaxrl_async.model.spec import Params
from jaxrl_async.types import VersionedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts since the start; `transfer_s` and the bytes are sums over all transfers."""

    transfers: int = 0  # completed, to one sampler each
    transfer_s: float = 0.0  # from offer to completion, seconds
    sent_bytes: int = 0  # fetched by samplers from the trainer
    passed_bytes: int = 0  # fetched by samplers from each other
    base_bytes: int = 0  # of frozen bases, fetched by joining samplers from any source
    repeats: int = 0  # transfers restarted: corrupted, or timed out
    joins: int = 0  # samplers that have entered
    late: int = 0  # times a sampler tried to join with weights older than the live ones

    @property
    def fetched_bytes(self) -> int:
        """All bytes that samplers fetched."""
        return self.sent_bytes + self.passed_bytes


class RemoteSamplers(Protocol):
    """Serves weights to samplers in separate processes."""

    @property
    def may_join(self) -> bool:
        """True if samplers join and leave, so there may be none for a while."""

    @property
    def wait_s(self) -> float:
        """Maximum wait while there are no samplers, seconds."""

    @property
    def transfer_limit_s(self) -> float:
        """Maximum time of a transfer including its retries, seconds."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes sent to one sampler."""

    def begin(self, base: Params) -> None:
        """Also offer the base of the published adapters, from the first publish on."""

    def publish(self, update: VersionedParams) -> None:
        """Copy the trainer's weights and return immediately; the samplers get the newest copy.
        Raises WeightsError if earlier weights could not be offered."""

    def traffic(self) -> Traffic:
        """Return the transfer statistics so far."""

    def close(self) -> None:
        """Stop offering weights. Idempotent."""


class _NoRemote:
    """The RemoteSamplers of a run without remote samplers."""

    may_join = False
    wait_s = 0.0
    transfer_limit_s = 0.0
    num_bytes = 0

    def begin(self, base: Params) -> None:
        """Do nothing."""

    def publish(self, update: VersionedParams) -> None:
        """Do nothing."""

    def traffic(self) -> Traffic:
        """Return empty statistics."""
        return Traffic()

    def close(self) -> None:
        """Do nothing."""


NO_REMOTE = _NoRemote()
