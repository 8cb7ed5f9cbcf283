"""Combines the weights of a trainer on several hosts into one offer; each host serves its own part.

    process 0   Offering.offer ──┐
    process 1   Offering.offer ──┴── jax.distributed's store ──> process 0: merged ──> Offer

Each process's outbox runs on a separate thread, so it may not use collectives. A process may skip a
version when a newer one has arrived; the first process then offers the newer version.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jax._src import distributed  # the store has no public name; orbax uses it from there, too

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.locations import merged_offers
from jaxrl_async.remote.weights.protocols import BASE, Offering
from jaxrl_async.weights.channel import WeightChannel

POLL_S = 0.02
"""Interval at which the first process polls for the others' offers, seconds."""
SPARE = 1
"""Number of additional versions that the other processes keep, since a sampler may still fetch the
previous version."""


class HostOffers:
    """The Offering of one process of a trainer over several hosts."""

    def __init__(
        self,
        own: Offering,
        *,
        index: int,
        count: int,
        timeout_s: float,
    ) -> None:
        """Create the offering of this process's part.

        Args:
            own: the transport of this process.
            index: number of this process.
            count: number of processes.
            timeout_s: maximum wait of the first process for the others.
        """
        self._own = own
        self._store: Any = distributed.global_state.client
        self._index, self._count, self._timeout_s = index, count, timeout_s
        self._withdrawn: deque[int] = deque()

    @property
    def address(self) -> str:
        """See Offering; the other processes' addresses are in the offer itself."""
        return self._own.address

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """See Offering. In the first process: raises WeightsError if another process has skipped
        this version or does not offer it in time."""
        own = self._own.offer(version, params)
        if self._index:
            self._store.key_value_set(_offer_key(version, self._index), json.dumps(dict(own)))
            if version != BASE:
                self._store.key_value_set(_newest(self._index), str(version), allow_overwrite=True)
            return own
        until = time.monotonic() + self._timeout_s
        others = [self._wait_for_offer(version, index, until) for index in range(1, self._count)]
        return merged_offers([own, *others])

    def compares(self, params: Params) -> bool:
        """See Offering."""
        return self._own.compares(params)

    def withdraw(self, version: int) -> None:
        """See Offering; the other processes keep one additional version."""
        if not self._index:
            self._own.withdraw(version)
            return
        if version not in self._withdrawn:
            self._withdrawn.append(version)
        while len(self._withdrawn) > SPARE:
            oldest = self._withdrawn.popleft()
            self._own.withdraw(oldest)
            self._store.key_value_delete(_offer_key(oldest, self._index))

    def close(self) -> None:
        """See Offering."""
        self._own.close()

    def _wait_for_offer(self, version: int, index: int, until: float) -> dict[str, Any]:
        """Return another process's offer."""
        while True:
            text = self._read(_offer_key(version, index))
            if text is not None:
                offer: dict[str, Any] = json.loads(text)
                return offer
            newest = None if version == BASE else self._read(_newest(index))
            if newest is not None and int(newest) > version:
                raise WeightsError(
                    f"process {index} of the trainer already has version {newest} and "
                    f"skipped version {version}"
                )
            if time.monotonic() > until:
                raise WeightsError(
                    f"process {index} of the trainer did not offer version {version} within "
                    f"{self._timeout_s:g} s. Check its log."
                )
            time.sleep(POLL_S)

    def _read(self, key: str) -> str | None:
        try:
            text: str = self._store.key_value_try_get(key)
        except Exception as error:  # NOT_FOUND of gRPC, as a JaxRuntimeError
            if "NOT_FOUND" in str(error):
                return None
            raise
        return text


class PartPublisher:
    """The ports.Publisher of a process without samplers. It sends its part of the weights; only the
    first process waits for the samplers."""

    def __init__(self, channel: WeightChannel) -> None:
        """Publish to this channel, which has no samplers in this process."""
        self._channel = channel

    def publish(self, version: int, params: Params, probe_logprobs: object = None) -> None:
        """See Publisher."""
        self._channel.publish(version, params, probe_logprobs)

    def wait_taken(self) -> None:
        """Return immediately: the next program over all processes waits for the first."""

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return immediately: the next program over all processes waits for the first."""


def _offer_key(version: int, index: int) -> str:
    return f"jaxrl_async/offers/{version}/{index}"


def _newest(index: int) -> str:
    return f"jaxrl_async/newest_offer/{index}"
