"""Statistics of the weights' way to samplers in processes of their own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts since the start; `transfer_s` and the bytes sum over all transfers."""

    transfers: int = 0  # to one sampler each, complete
    transfer_s: float = 0.0  # from the offer until a sampler had everything, seconds
    sent_bytes: int = 0  # that samplers fetched from the trainer
    passed_bytes: int = 0  # that samplers fetched from each other
    base_bytes: int = 0  # of a frozen base that samplers fetched when they joined, from anybody
    repeats: int = 0  # transfers begun again: torn, or not done in time
    joins: int = 0  # samplers that have entered
    late: int = 0  # times that a sampler came to join with weights older than the live ones

    @property
    def fetched_bytes(self) -> int:
        """All bytes that samplers fetched."""
        return self.sent_bytes + self.passed_bytes
