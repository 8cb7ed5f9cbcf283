"""The weights of a trainer over several hosts, as one offer: each host hands out its own part.

    process 0   Offering.offer ──┐
    process 1   Offering.offer ──┴── jax.distributed's store ──> process 0: merged ──> Offer

Each process's outbox works on a thread of its own, so that no collective may be used. A process
may leave a version out because a newer one has come; the first process then offers the newer.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from jax._src import distributed  # the store has no public name; orbax uses it from there, too

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.locations import merged_offers
from jaxrl_async.remote.weights.protocols import BASE, Offering
from jaxrl_async.weights.channel import WeightChannel

LOOK_S = 0.02
"""How often the first process looks whether the others have offered, seconds."""
SPARE = 1
"""Versions that the other processes keep beyond those that they need themselves: a sampler may
still fetch the one before."""


class KeyValueStore(Protocol):
    """What is used of jax.distributed's store."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set a key."""
        ...

    def key_value_try_get(self, key: str) -> str:
        """Return the value of a key. Raises if there is none."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key."""
        ...


def distributed_store() -> KeyValueStore:
    """Return the store of this JAX world."""
    store: Any = distributed.global_state.client
    return cast(KeyValueStore, store)


class HostOffers:
    """The Offering of one process of a trainer over several hosts."""

    def __init__(
        self,
        own: Offering,
        store: KeyValueStore,
        *,
        index: int,
        count: int,
        timeout_s: float,
    ) -> None:
        """Offer this process's part.

        Args:
            own: the transport of this process.
            store: through which the others' offers reach the first process.
            index: number of this process.
            count: number of processes.
            timeout_s: longest wait of the first process for the others.
        """
        self._own, self._store = own, store
        self._index, self._count, self._timeout_s = index, count, timeout_s
        self._withdrawn: deque[int] = deque()

    @property
    def address(self) -> str:
        """See Offering; the other processes' addresses are in the offer itself."""
        return self._own.address

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """See Offering. In the first process: raises WeightsError if another one has left this
        version out, or does not come."""
        own = self._own.offer(version, params)
        if self._index:
            self._store.key_value_set(_key(version, self._index), json.dumps(dict(own)))
            if version != BASE:
                self._store.key_value_set(_newest(self._index), str(version), allow_overwrite=True)
            return own
        until = time.monotonic() + self._timeout_s
        others = [self._of(version, index, until) for index in range(1, self._count)]
        return merged_offers([own, *others])

    def compares(self, params: Params) -> bool:
        """See Offering."""
        return self._own.compares(params)

    def withdraw(self, version: int) -> None:
        """See Offering; the other processes keep one version more."""
        if not self._index:
            self._own.withdraw(version)
            return
        if version not in self._withdrawn:
            self._withdrawn.append(version)
        while len(self._withdrawn) > SPARE:
            gone = self._withdrawn.popleft()
            self._own.withdraw(gone)
            self._store.key_value_delete(_key(gone, self._index))

    def close(self) -> None:
        """See Offering."""
        self._own.close()

    def _of(self, version: int, index: int, until: float) -> dict[str, Any]:
        """Return another process's offer."""
        while True:
            text = _read(self._store, _key(version, index))
            if text is not None:
                offer: dict[str, Any] = json.loads(text)
                return offer
            newest = None if version == BASE else _read(self._store, _newest(index))
            if newest is not None and int(newest) > version:
                raise WeightsError(
                    f"process {index} of the trainer has version {newest} already, and left "
                    f"version {version} out"
                )
            if time.monotonic() > until:
                raise WeightsError(
                    f"process {index} of the trainer did not offer version {version} within "
                    f"{self._timeout_s:g} s. Look at its log."
                )
            time.sleep(LOOK_S)


class PartPublisher:
    """The ports.Publisher of a process without samplers: it sends its part of the weights, and
    leaves it to the first process to wait for those who draw from them."""

    def __init__(self, channel: WeightChannel) -> None:
        """Publish to this channel, which nobody joins here."""
        self._channel = channel

    def publish(self, version: int, params: Params, probe_logprobs: Any = None) -> None:
        """See Publisher."""
        self._channel.publish(version, params, probe_logprobs)

    def wait_taken(self) -> None:
        """Return: the next program over all processes waits for the first one."""

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Return: the next program over all processes waits for the first one."""


def _key(version: int, index: int) -> str:
    return f"jaxrl_async/offers/{version}/{index}"


def _newest(index: int) -> str:
    return f"jaxrl_async/newest_offer/{index}"


def _read(store: KeyValueStore, key: str) -> str | None:
    try:
        return store.key_value_try_get(key)
    except Exception as error:  # NOT_FOUND of gRPC, as a JaxRuntimeError
        if "NOT_FOUND" in str(error):
            return None
        raise
