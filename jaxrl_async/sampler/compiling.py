"""A thread that compiles what a sampler may need later, while the sampler draws."""

import logging
import threading
import time

from jaxrl_async.sampler.batch.ahead import compile_all, shapes_of
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.device.arguments import EngineWeights
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.lifetime import close_at_exit

log = logging.getLogger(__name__)


class CompilingAhead:
    """Compiles all programs that a batch can need and that are known beforehand (batch/ahead.py).
    What goes wrong is logged, and shows again when the program is needed."""

    def __init__(
        self, batch: Batch, weights: EngineWeights, budget: int, mixes: tuple[Mix, ...], name: str
    ) -> None:
        """Begin.

        Args:
            batch: whose programs they are; it is not touched later.
            weights: of Engine.prepare; only their shapes are kept.
            budget: tokens that are prefilled between two blocks.
            mixes: the samplings that requests will ask for.
            name: of the sampler.
        """
        self._engine, self._seed, self._name = batch.engine, batch.seed, name
        self._weights, self._state = shapes_of(weights), shapes_of(batch.state)
        self._budget, self._mixes, self._images = budget, mixes, batch.takes_images
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} compiles", daemon=True)
        close_at_exit(self)
        self._thread.start()

    def leave(self) -> None:
        """Have it end after the program that is being compiled; do not wait."""
        self._over.set()

    def close(self) -> None:
        """End after the program that is being compiled; wait for it."""
        self.leave()
        self._thread.join()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            made = compile_all(
                self._engine,
                self._weights,
                self._state,
                self._budget,
                self._mixes,
                self._seed,
                images=self._images,
                stops=self._over.is_set,
            )
        except Exception as error:
            log.warning("%s: no more is compiled ahead: %s", self._name, error, exc_info=True)
            return
        if made:
            took = time.perf_counter() - begin
            log.info("%s: %d programs were ready in %.1f s", self._name, made, took)
