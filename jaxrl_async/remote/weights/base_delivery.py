"""The frozen base of a sampler's adapters. It is delivered once, with the first version.

Offer.where["base"] ──same checksums?──> read from model.path here
                          │ no ──> fetched like any version
                          └──> with the first adapter ──> the engine; then it is released
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from jaxrl_async.errors import JaxrlError, WeightsError
from jaxrl_async.model.lora import combined
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.protocols import BASE, Fetching
from jaxrl_async.remote.weights.verification import compare_with_offer, fetch_verified

log = logging.getLogger(__name__)


class BaseLoader:
    """Loads the frozen base of a sampler's adapters, and holds it until the sampler's engine has
    it. One thread loads it, another one releases it."""

    def __init__(self, fetching: Fetching, read: Callable[[], Params] | None = None) -> None:
        """Start without loading the base.

        Args:
            fetching: the transport, created for the base (Fetching.for_base).
            read: returns the base from a local directory, with all arrays fully in this process;
                None: there is no such directory.
        """
        self._fetching, self._read = fetching, read
        self._params: Params | None = None
        self._loaded = False

    def load(
        self, where: Mapping[str, object], sources: Sequence[str], abort: threading.Event
    ) -> int:
        """Load the base, which is offered with an adapter at where["base"]. Returns the number of
        fetched bytes, 0 if it was already loaded or read from disk. Takes the arguments of
        Fetching.fetch. Raises WeightsError."""
        if self._loaded:
            return 0
        base_offer = where.get("base")
        if not isinstance(base_offer, Mapping):
            raise WeightsError(
                "the trainer offers an adapter without its base weights: run the same version of "
                "jaxrl_async on both sides"
            )
        num_bytes = 0
        params = self._read_directory(base_offer)
        if params is None:
            fetched = fetch_verified(self._fetching, BASE, base_offer, sources, abort)
            params, num_bytes = fetched.params, fetched.num_bytes
        self._params, self._loaded = params, True
        return num_bytes

    def merge(self, adapter: Params) -> Params:
        """Return an adapter merged with the base, until `release`; no array is copied."""
        base = self._params
        return adapter if base is None else combined(base, adapter)

    def release(self) -> None:
        """Release the base: the sampler's engine has it. Idempotent."""
        if self._loaded:
            self._params = None

    def _read_directory(self, where: Mapping[str, object]) -> Params | None:
        """Return the base as read from disk, if it equals the trainer's."""
        if self._read is None:
            return None
        try:
            params = self._read()
            compare_with_offer(params, where)
        except (JaxrlError, OSError) as error:
            log.info("the frozen base is fetched from the trainer, not read: %s", error)
            self._read = None
            return None
        log.info("the frozen base was read from model.path")
        return params

    def close(self) -> None:
        """Stop relaying the base, and release it. Idempotent."""
        self._params = None
        self._fetching.close()
