"""Statistics of weight transfers to samplers in separate processes."""

from dataclasses import dataclass


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
