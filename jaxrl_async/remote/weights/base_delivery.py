"""The frozen base under a sampler's adapters: it comes once, with the first version.

Offer.where["base"] ──same checksums?──> read from model.path here
                          │ no ──> fetched as any version is
                          └──> beside the first adapter ──> the engine; then it is let go of
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_async.errors import JaxrlError, WeightsError
from jaxrl_async.model.lora import beside
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.protocols import BASE
from jaxrl_async.remote.weights.verification import SoundFetching, compare_with_offer

log = logging.getLogger(__name__)


class BaseBringer:
    """What a joined sampler's adapters change, until the sampler has begun with it. One thread
    brings it, another one lets go of it."""

    def __init__(self, fetching: SoundFetching, read: Callable[[], Params] | None = None) -> None:
        """Nothing is brought yet.

        Args:
            fetching: the transport, made for the base (Fetching.for_base).
            read: returns the base from a directory of this machine, all arrays whole in this
                process; None: there is none.
        """
        self._fetching, self._read = fetching, read
        self._params: Params | None = None
        self._brought = False

    def bring(
        self, where: Mapping[str, Any], sources: Sequence[str], abort: threading.Event
    ) -> int:
        """Have the base, which is offered beside an adapter at where["base"]; return how many bytes
        were fetched for it, 0 if it was here or was read. Arguments as Fetching.fetch's, which
        raises WeightsError."""
        if self._brought:
            return 0
        of_base = where.get("base")
        if not isinstance(of_base, Mapping):
            raise WeightsError(
                "the trainer offers an adapter, and does not say where the weights are that it "
                "changes: run the same version of jaxrl_async on both sides"
            )
        num_bytes = 0
        params = self._from_directory(of_base)
        if params is None:
            fetched = self._fetching.fetch(BASE, of_base, sources, abort)
            params, num_bytes = fetched.params, fetched.num_bytes
        self._params, self._brought = params, True
        return num_bytes

    def whole(self, adapter: Params) -> Params:
        """Return an adapter with the base beside it, until `release`; no array is copied."""
        base = self._params
        return adapter if base is None else beside(base, adapter)

    def release(self) -> None:
        """Let go of the base: the sampler's engine has it. Idempotent."""
        if self._brought:
            self._params = None

    def _from_directory(self, where: Mapping[str, Any]) -> Params | None:
        """Return the base as read here, if it is the trainer's."""
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
        """Stop passing it on, and let go of it. Idempotent."""
        self._params = None
        self._fetching.fetching.close()
