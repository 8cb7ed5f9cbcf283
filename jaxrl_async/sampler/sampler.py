"""The sampler: one thread that decodes without ever stopping while there is work.

        submit ──> queue ──admit──> prefill ──> [ decode block ] ──> finished ──> futures
                                                  ^      │ 13 bytes a token
        WeightSource.poll ──between two blocks────┘      v
                                          host work while the next block runs

Other threads use Sampler; decode_loop.py is the thread's side, one round for each block. batch.py
decides what runs on the device, intake.py what is taken in, and swap.py swaps weights. Only the
sampler's thread changes the batch, and only under `DecodeLoop.changing`. It releases that lock
while it waits for a block, when any thread may read the batch (`progress`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.errors import Closed, ConfigError
from jaxrl_async.mesh import spans_processes
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS, FixedWeights, WeightSource
from jaxrl_async.sampler.adapter_sources import AdapterSources
from jaxrl_async.sampler.adapters import SamplerAdapters
from jaxrl_async.sampler.decode_loop import DecodeLoop
from jaxrl_async.sampler.intake import NO_FOLLOWERS
from jaxrl_async.sampler.lifetime import Lifetime, Living
from jaxrl_async.sampler.partial import branches
from jaxrl_async.sampler.requests import (
    CLOSED_TOO_EARLY,
    cancelled_on_error,
)
from jaxrl_async.sampler.setup import SamplerSettings, SamplerSetup, set_up
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import (
    Completion,
    Constraint,
    Partial,
    Request,
)

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Maximum wait for the thread to end, seconds; a thread that hangs is left running."""


class Sampler(Living):
    """Continuous batching over slots and pages. Thread safe.

    A context manager: leaving it closes it. A sampler without references ends once its requests are
    done.
    """

    has_logprobs: bool = True  # see ports.Replica
    replaceable: bool = True
    departure: None = None

    def __init__(
        self,
        policy: Policy | tuple[ModelSpec, Params],
        *,
        section: schema.SamplerSection | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        weights: WeightSource = FIXED_WEIGHTS,
        version: int = 0,
        settings: SamplerSettings = SamplerSettings(),  # noqa: B008 (frozen)
    ) -> None:
        """Place the parameters on the mesh by SAMPLER_RULES, and make the engine. The first request
        starts the thread. Raises ConfigError.

        Args:
            policy: a Policy, or its spec and parameters.
            section: the settings of `sampler` in a configuration. None: any prompt and answer of up
                to LONGEST tokens together, or the model's maximum if that is less, in the KV memory
                of the section's defaults.
            mesh: None takes the default device.
            seed: of all random numbers, 32 bits.
            weights: source of new weights.
            version: of the policy's weights.
            settings: all other settings.
        """
        setup, params = set_up(policy, section, mesh, seed, settings)
        self._begin(setup, setup.engine.prepare(params), version, weights)

    @classmethod
    def from_setup(
        cls,
        setup: SamplerSetup,
        prepared: object,
        version: int,
        weights: WeightSource,
        sources: AdapterSources | None = None,
    ) -> "Sampler":
        """Return a sampler that starts with prepared weights (Engine.prepare).

        sources: of its adapters' new weights.
        """
        sampler = cls.__new__(cls)
        sampler._begin(setup, prepared, version, weights, sources)
        return sampler

    def _begin(
        self,
        setup: SamplerSetup,
        prepared: object,
        version: int,
        weights: WeightSource,
        sources: AdapterSources | None = None,
    ) -> None:
        if spans_processes(setup.engine.spec.mesh) and setup.settings.followers is NO_FOLLOWERS:
            raise ConfigError(
                "a sampler whose mesh spans several processes needs followers in the others, which "
                "repeat its actions: see remote/sampler/leader.py."
            )
        if setup.settings.adapters is not None and not isinstance(weights, FixedWeights):
            raise ConfigError(
                "a sampler with places for adapters (SamplerSettings.adapters) has a base that "
                "never changes. Leave `weights` out, and load adapters by name."
            )
        sources = sources or AdapterSources()
        self.setup, self.engine, self.section = setup, setup.engine, setup.section
        self.seed = setup.seed
        self.capacity, self.rows = setup.engine.spec.total_slots, setup.engine.spec.slots
        self.lifetime = Lifetime(self, lambda s: s.loop.step(), name=setup.settings.name)
        self.loop = DecodeLoop(
            setup, self.lifetime, weights, version=version, prepared=prepared, sources=sources
        )
        self._inbox, self.weights = self.loop.inbox, weights
        self.adapters = SamplerAdapters(
            setup.spec,
            setup.settings.adapters,
            setup.adapter_slots,
            self._inbox,
            self.loop.changes,
            sources,
        )
        # sources of a successor that could not be made yet
        self._rejoined: tuple[WeightSource, AdapterSources] | None = None
        weights.attach(self.lifetime.wake)
        sources.attach(self.lifetime.wake)

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that were on the device when the thread ended with `error`."""
        return self.loop.blamed

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.loop.weights.version

    def stats(self) -> SamplerStats:
        """Return a consistent reading of the statistics."""
        return self.loop.stats

    # ---- lifetime

    def close(self) -> None:
        """Stop at the next block boundary; unfinished requests fail with Closed. Idempotent."""
        if self.lifetime.is_forked:
            return  # the thread and its callers are in the other process
        if not self.lifetime.stop(CLOSE_S):
            name = self.setup.settings.name
            log.error("the thread of %s did not end within %.0f s", name, CLOSE_S)
        if not self.lifetime.is_current:  # otherwise in a callback: the thread fails the others
            self.loop.fail_all(self.error or Closed(CLOSED_TOO_EARLY))
        self.setup.settings.followers.dismiss()

    def abandon(self) -> None:
        """Detach from the thread, which is dead or hung: ignore its results, stop weight updates
        from waiting for it, and let it exit if it wakes up."""
        self.lifetime.detach()
        self.weights.leave()
        self.loop.sources.leave()
        error = self.error or Closed("the sampler was taken out: it hangs")
        self._inbox.fail_commands(error)
        self.loop.changes.fail(error)

    def successor(self) -> "Sampler":
        """Return a replacement for this abandoned sampler: the same setup, the newest weights, no
        requests. Waits for weights in transfer.

        Raises Closed and WeightsError, as the weight source does.
        """
        if self.error is not None:  # it holds the KV, and there is no memory for another
            self.lifetime.forget_frames()
            self.loop.batch = None
        before, adapter_sources = self._rejoined or (self.weights, self.loop.sources)
        source, sources = self._rejoined = before.rejoin(), adapter_sources.rejoined()
        try:
            version, prepared = self.version, self.loop.weights.prepared
            update = source.poll(wait=True)
            if update is not None:
                version = update.version
                prepared = self.engine.prepare(update.params, prepared)
            assert prepared is not None, "weights that were taken and are not live are staged again"
            prepared = sources.renewed(self.engine, self.setup.adapter_slots, prepared)
            successor = Sampler.from_setup(self.setup, prepared, version, source, sources)
            if update is not None:
                source.live(version)
            return successor
        except BaseException:
            source.leave()
            sources.leave()
            raise

    # ---- requests

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as this sampler will serve them; requests without a key get a fresh
        one. Raises RolloutError, which names the field, for a request that cannot be served."""
        return self._inbox.checked(requests)

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint; see ports.PreparesConstraints."""
        if self.setup.limits.grammars is not None:
            self.setup.limits.grammars.prepare(constraint)

    def generate(self, requests: Sequence[Request | Partial]) -> list[Completion]:
        """Complete all requests, in order; blocks. Raises RolloutError for a request that cannot
        be served. After any exception, Ctrl-C's included, the others are cancelled."""
        self.check_waits()
        with cancelled_on_error([Future() for _ in requests]) as futures:
            self._inbox.submit(requests, futures)
            return [f.result() for f in futures]

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Queue all requests together; return futures for threads."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._inbox.submit(requests, futures)
        return futures

    async def submit(self, request: Request) -> Completion:
        """Complete one request; cancelling the task frees its slot at the next block."""
        return await self.submit_many([request])[0]

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> list[asyncio.Future[Completion]]:
        """Queue all requests together; return futures of the running event loop."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        self._inbox.submit(requests, futures, loop)
        return futures

    def resume(self, partials: Sequence[Partial]) -> list[Completion]:
        """Continue saved requests; blocks. Completions include the tokens sampled before.

        With the same weights as before, the tokens equal an uninterrupted run's. Raises
        RolloutError for a request of another seed, and for one that may sample no further token.
        """
        return self.generate(partials)

    def fork(self, partial: Partial, count: int) -> list[Completion]:
        """Continue one saved prefix `count` times; blocks. Its KV is restored once and shared."""
        return self.resume(branches(partial, count))

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have sampled a token, without KV, as of the last
        block; does not wait. Raises TimeoutError if the batch keeps changing."""
        self.check_waits()
        return self.loop.progress()

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data, between two blocks; blocks until then. Raises
        RolloutError if it is not running here.

        Args:
            request_id: of the request.
            stop: end it, with its tokens so far and StopReason.CANCELLED.
            with_kv: include its KV if one version of the weights computed all of it, and the mesh
                is in this process.
        """
        saved: Partial = self._inbox.run(lambda: self.loop.save(request_id, stop, with_kv))
        return saved

    def unfinished(self) -> tuple[Partial, ...]:
        """Return every request that is not done, with or without sampled tokens, without KV. Runs
        between two blocks, when no token is in flight: a missing request is done. Blocks."""
        found: tuple[Partial, ...] = self._inbox.run(self.loop.unfinished)
        return found

    def has(self, request_id: str) -> bool:
        """Return whether a request with this id is running, checked between two blocks."""
        return bool(self._inbox.run(lambda: self.loop.find(request_id) is not None))

    def between_blocks(self, command: Callable[[], object]) -> Any:
        """Run a command on the sampler's thread between two blocks, and return its result. Blocks.
        For tests and tools that read `loop.batch`."""
        return self._inbox.run(command)
