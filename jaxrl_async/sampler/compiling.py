"""Compile what a sampler may need later, while it draws."""

import logging
import threading
import time
from collections.abc import Callable

from jaxrl_async.sampler.batch.compile_ahead import compile_all, shapes_of
from jaxrl_async.sampler.device.program_arguments import DecodeState, EngineWeights
from jaxrl_async.sampler.lifetime import close_at_exit
from jaxrl_async.sampler.setup import SamplerSetup

log = logging.getLogger(__name__)


def compile_for(
    setup: SamplerSetup, weights: EngineWeights, state: DecodeState, stops: Callable[[], bool]
) -> int:
    """Compile the programs that samplers of this setup can need (ahead.compile_all, of the same
    arguments); return how many."""
    return compile_all(
        setup.engine,
        weights,
        state,
        setup.section.prefill_chunk,
        setup.settings.mixes,
        setup.seed,
        images=setup.settings.images is not None,
        stops=stops,
    )


class CompilingAhead:
    """A thread that compiles for a sampler (compile_for). What goes wrong is logged, and shows
    again when the program is needed."""

    def __init__(self, setup: SamplerSetup, weights: EngineWeights, state: DecodeState) -> None:
        """Begin. Of the weights (Engine.prepare) and the state only the shapes are kept."""
        self._setup, self._name = setup, setup.settings.name
        self._weights, self._state = shapes_of(weights), shapes_of(state)
        self._over = threading.Event()
        name = f"{self._name} compiles"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
            made = compile_for(self._setup, self._weights, self._state, self._over.is_set)
        except Exception as error:
            log.warning("%s: no more is compiled ahead: %s", self._name, error, exc_info=True)
            return
        if made:
            took = time.perf_counter() - begin
            log.info("%s: %d programs were ready in %.1f s", self._name, made, took)
