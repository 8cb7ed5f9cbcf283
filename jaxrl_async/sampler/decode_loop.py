"""The sampler's thread: one round for each decode block.

    queue ──admit──> prefill ──> [ decode block ] ──> finished ──> futures

It decodes without ever stopping while there is work. sampler.py is what other threads use.
"""

import logging
import math
import time
import weakref
from dataclasses import replace
from threading import Lock
from typing import Any

from jaxrl_async.errors import Closed, JaxrlError, RolloutError, WeightsError
from jaxrl_async.mesh import spans_processes
from jaxrl_async.metrics.spans import add_span, span
from jaxrl_async.ports.run import NotYet
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.sampler.adapter_sources import AdapterSources
from jaxrl_async.sampler.adapters import AdapterChanges
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.finish import ended, request_as_data
from jaxrl_async.sampler.batch.new_weights import new_version
from jaxrl_async.sampler.batch.sequence import Prefilling, Running, Stage, live_of
from jaxrl_async.sampler.compile_ahead import CompilingAhead
from jaxrl_async.sampler.device.program_arguments import Block
from jaxrl_async.sampler.intake import Receiver, TakesIn
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.requests import (
    CLOSED,
    CLOSED_TOO_EARLY,
    Inbox,
    completion_of,
    resolve,
)
from jaxrl_async.sampler.setup import SamplerSetup
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.sampler.swap import SwapCheck, SwappedWeights
from jaxrl_async.types import (
    Partial,
    StopReason,
    TokenRecord,
    VersionedParams,
)

log = logging.getLogger(__name__)

PROGRESS_S = 30.0
"""Maximum wait of `progress` for a moment when the batch does not change, seconds."""
CHECK_S = 0.1
"""Interval at which `progress` checks whether the sampler was abandoned, seconds."""
POLL_S = 0.002
"""Interval at which a replay checks whether the recorded events have arrived, seconds."""


class DecodeLoop:
    """The thread's side of a sampler: the batch, and a round for every block.

    Any thread may call `progress` and `fail_all` and read `stats`; the rest is for the sampler's
    thread.
    """

    def __init__(
        self,
        setup: SamplerSetup,
        lifetime: Lifetime,
        source: WeightSource,
        *,
        version: int,
        prepared: Any,
        receiver: TakesIn | None = None,
        sources: AdapterSources | None = None,
    ) -> None:
        """Start with prepared weights (Engine.prepare) of this version.

        receiver: decides what is taken in; None: everything from the inbox and the source.
        sources: of adapters' new weights; None: no sources.
        """
        settings = setup.settings
        self._setup, self._lifetime, self._source = setup, lifetime, source
        self._clock, self._device_lock = settings.clock, settings.device_lock
        self.inbox = Inbox(
            lifetime, setup.limits, settings.clock, setup.fresh_keys, setup.adapter_slots
        )
        check = SwapCheck(setup.spec, settings.dtype, settings.probe, settings.device_lock)
        self.weights = SwappedWeights(
            setup.engine,
            check,
            mode=setup.section.on_new_weights,
            device_lock=settings.device_lock,
            version=version,
            prepared=prepared,
        )
        self.changes = AdapterChanges(
            setup.engine,
            check,
            setup.adapter_slots,
            mode=setup.section.on_new_weights,
            device_lock=settings.device_lock,
        )
        self.sources = sources or AdapterSources()
        self._receiver = receiver or settings.followers.led(
            Receiver(settings.name, self.inbox, source, settings.schedule)
        )
        self._one_process = not spans_processes(setup.engine.spec.mesh)
        self.batch: Batch | None = None  # made by the thread
        self.changing = Lock()  # held while the batch, or `finished`, changes
        # not handed out yet
        self.finished: list[tuple[Running | Prefilling, TokenRecord]] = []
        self.stats = SamplerStats()
        self.blamed: frozenset[str] = frozenset()
        self._compiling: CompilingAhead | None = None  # started after the first block
        self._blocks = 0  # decoded so far
        self._idle_from: float | None = None  # start of the idle time; None: busy
        self._longest_sleep_s = math.inf  # short in a replay, where a wake-up may be missed

    def step(self) -> float | None:
        """Run one round; return the time to sleep after it (Lifetime), None at the end.

        consumes      requests and commands of other threads, weights from the source
        waits for     lifetime.wake, only when idle: set by submit, by new weights and by close
        produces      completions into the waiters' futures
        on failure    an exception of one request fails that request; any other fails all requests
                      and becomes `Sampler.error`
        """
        took_in = True
        try:
            if self._lifetime.closed:
                self.fail_all(self._lifetime.error or Closed(CLOSED_TOO_EARLY))
                self._end_compiling()
                return None
            if self.batch is None:
                batch = self.open_batch()
                if self._setup.settings.possible:
                    self._begin_compiling(batch)
            else:
                took_in = self.round(self.batch)
        except BaseException as error:
            self.blamed = frozenset(s.request.request_id for s in self._on_device())
            self._lifetime.fail(error)
            _log_end(error)
            self.fail_all(error)
            self._setup.settings.followers.fail(error)
            self._end_compiling()
            return None
        if self.busy:
            return 0.0 if took_in else POLL_S
        self._idle_from = self._clock()
        return self._longest_sleep_s if took_in else POLL_S

    @property
    def busy(self) -> bool:
        """Whether there is work to do."""
        work = self.batch is not None and (self.batch.admitted or self.batch.queue)
        waits = self.weights.waiting or self.changes.waiting
        return bool(work or self.inbox or self._lifetime.closed or waits)

    def open_batch(self) -> Batch:
        """Make the batch, whose KV takes most of the device's memory."""
        section = self._setup.section
        with self._device_lock:
            self.batch = Batch(
                self._setup.engine,
                max_new=section.max_new_tokens,
                seed=self._setup.seed,
                prefill_chunk=section.prefill_chunk,
                prefix_cache=section.prefix_cache,
                one_version=section.on_new_weights == "restart",
                adapters=self._setup.adapter_slots,
                images=self._setup.settings.images,
                mixes=self._setup.settings.mixes,
                grammars=self._setup.limits.grammars,
            )
        new_version(self.batch, self.weights.version)
        return self.batch

    # ---- one round

    def round(self, batch: Batch) -> bool:
        """Take in what has arrived, and decode one block. Return False if a replay has to wait for
        a recorded event."""
        start, idle_since, self._idle_from = self._clock(), self._idle_from, None
        if not self._take_in(batch, idle=idle_since is not None):
            return False
        if batch.admitted or batch.queue:
            with self._device_lock:
                self._start_block(batch)
                with span("wait for the block"):
                    block = batch.wait_for_block()
                self._finish_block(batch, block)
            if self._blocks == 1 and self._compiling is None:
                self._begin_compiling(batch)
        with self.changing:
            self._note_first_tokens(batch)
            if not batch.admitted:  # no block will run to overlap with
                self._hand_out(batch)
            idle_s = 0.0 if idle_since is None else start - idle_since
            end = self._clock()
            self._count(batch, idle_s=idle_s, busy_s=end - start)
        version, running = self.weights.version, len(batch.admitted)
        add_span("block", start, end, version=version, sequences=running)
        return True

    def _begin_compiling(self, batch: Batch) -> None:
        """Compile the programs that the first block did not need, while others decode."""
        if self._setup.settings.mixes and self._one_process:
            self._compiling = CompilingAhead(self._setup, self.weights.prepared, batch.state)
            weakref.finalize(self, self._compiling.leave)  # the sampler is no longer referenced

    def _end_compiling(self) -> None:
        if self._compiling is not None:
            self._compiling.close()

    def _take_in(self, batch: Batch, *, idle: bool) -> bool:
        """Take in requests, commands, cancellations and weights; False: not yet, in a replay."""
        with self.changing:
            taken = self._receiver.take(
                batch, block=self._blocks, idle=idle, wants_weights=not self.weights.waiting
            )
            if isinstance(taken, NotYet):
                self._swap(batch, None)  # waiting weights: recorded at their arrival
                self._hand_out(batch)  # the next block may be late, and `progress` waits for this
                return False
            self._longest_sleep_s = POLL_S if taken.prescribed else math.inf
            self._count(batch, cancelled=len(taken.cancelled))
            self._swap(batch, taken.update)
            self.sources.poll(self.changes, wait=idle)
            self._change_adapters(batch)
            return True

    def _change_adapters(self, batch: Batch) -> None:
        """Load, swap and unload adapters, if running sequences allow it."""
        if not self.changes.waiting:
            return
        start = self._clock()
        queued = {live.request.adapter for live in self.inbox.requests()}
        swaps = self.changes.make(batch, self.weights, queued)
        self.sources.check()
        if swaps:
            pause_s = self._note_swaps(batch, swaps, self.changes.probe_error, start)
            add_span("swap of adapters", start, start + pause_s)

    def _note_swaps(self, batch: Batch, swaps: int, error: float, start: float) -> float:
        """Count swaps with their probe's error; return the pause since `start`, seconds."""
        pause_s, known = self._clock() - start, self.stats
        self.stats = replace(
            known,
            swap_pause_s=pause_s,
            max_swap_pause_s=max(pause_s, known.max_swap_pause_s),
            probe_error=error,
            max_probe_error=max(error, known.max_probe_error),
        )
        self._count(batch, swaps=swaps)
        return pause_s

    def _swap(self, batch: Batch, update: VersionedParams | None) -> None:
        """Swap to new or waiting weights if running sequences allow it. The pause is the time from
        here until the next block can start."""
        start = self._clock()
        error = self.weights.swap(update, batch)
        if error is None:
            return
        pause_s = self._note_swaps(batch, 1, error, start)
        add_span("swap", start, start + pause_s, version=self.weights.version)
        self._source.live(self.weights.version)

    def _start_block(self, batch: Batch) -> None:
        """Admit, prefill and start a block; hand out completions while it runs."""
        self._blocks += 1
        with self.changing:
            held = frozenset({""}) if self.weights.waiting else frozenset()
            batch.admit(held | self.changes.held)
            self._note_starts(batch)
            with span("prefill"):
                batch.prefill(self.weights.prepared)
            batch.start_block(self.weights.prepared)
            self.finished += batch.take_scored()
            self._hand_out(batch)

    def _finish_block(self, batch: Batch, block: Block | None) -> None:
        """Take the block's tokens, and take ended sequences out of the batch."""
        with self.changing:
            for sequence in batch.finish_block(block):
                batch.guarded(sequence, lambda s: self.finished.append((s, ended(batch, s))))

    def _note_starts(self, batch: Batch) -> None:
        now = self._clock()
        for sequence in batch.admitted.values():
            if sequence.owner.started_at is None:
                sequence.owner.started_at = now

    def _note_first_tokens(self, batch: Batch) -> None:
        now = self._clock()
        for sequence in batch.admitted.values():
            if sequence.owner.first_token_at is None and batch.num_sampled(sequence):
                sequence.owner.first_token_at = now

    def _hand_out(self, batch: Batch) -> None:
        """Put completions into futures, with one wake-up per event loop."""
        finished, self.finished = self.finished, []
        failed = batch.take_failed()
        if not finished and not failed:
            return
        now = self._clock()
        done = [(s.owner, completion_of(s, output, now)) for s, output in finished]
        self._count(
            batch,
            requests_done=len(done),
            truncated=sum(c.stop is StopReason.LENGTH and len(c.token_ids) > 0 for _, c in done),
            failed=len(failed),
        )
        resolve([*done, *((s.owner, error) for s, error in failed)])

    def _count(self, batch: Batch, **more: float) -> None:
        """Add to the counters and read the gauges. The record is replaced as a whole: readers never
        see half a change."""
        prefixes = batch.cache.prefixes.stats()
        self.stats = replace(
            self.stats.plus(**more).updated(batch.stats),
            generated_tokens=batch.stats.used_slot_steps,
            prefix_hit_tokens=prefixes.hit_tokens,
            prefix_hidden_tokens=prefixes.hidden_tokens,
            prefix_asked_tokens=prefixes.asked_tokens,
            evicted_pages=prefixes.evicted_pages,
            in_flight=len(batch.admitted),
            waiting=len(batch.queue),
            used_page_share=batch.cache.pages.used_share,
            compiled_programs=self._setup.engine.num_compiled,
        )

    # ---- requests as data

    def find(self, request_id: str) -> Stage | None:
        """Return the running request with this id, or None."""
        if self.batch is None:
            return None
        known = (*self.batch.admitted.values(), *self.batch.queue)
        return next((s for s in known if s.request.request_id == request_id), None)

    def save(self, request_id: str, stop: bool, with_kv: bool) -> Partial:
        """See Sampler.save; a command."""
        batch, sequence = self.batch, self.find(request_id)
        if batch is None or sequence is None:
            raise RolloutError(
                f"request {request_id!r} is not running: it is done, cancelled, or was never "
                "submitted to this sampler."
            )
        with self._device_lock:
            partial = request_as_data(batch, sequence, with_kv=with_kv and self._one_process)
        if stop:
            output = batch.output(sequence)
            batch.cancel(sequence)
            self._receiver.stopped(live_of(sequence))
            done = completion_of(sequence, output, self._clock())
            resolve([(sequence.owner, replace(done, stop=StopReason.CANCELLED))])
            self._count(batch, cancelled=1)
        return partial

    def progress(self) -> tuple[Partial, ...]:
        """See Sampler.progress; from any thread."""
        until = time.monotonic() + PROGRESS_S
        while time.monotonic() < until:
            held = self.changing.acquire(timeout=CHECK_S)
            try:
                if self._lifetime.closed:  # also if a hung thread never releases the lock
                    raise self._lifetime.error or Closed(CLOSED)
                if held and not self.finished:  # otherwise handed out soon, also in a replay
                    return tuple(p for p in self.unfinished() if len(p.token_ids))
            finally:
                if held:
                    self.changing.release()
            time.sleep(POLL_S)
        name = self._setup.settings.name
        raise TimeoutError(f"{name} did not reach the end of a block within {PROGRESS_S:.0f} s")

    def unfinished(self) -> tuple[Partial, ...]:
        """See Sampler.unfinished; while the batch does not change."""
        queued, admitted = self.inbox.requests(), []
        if self.batch is not None:
            batch = self.batch
            admitted = [request_as_data(batch, s, with_kv=False) for s in batch.admitted.values()]
            queued += batch.queue
        seed = self._setup.seed
        return (*admitted, *(s.as_partial(s.saved_output, seed) for s in queued))

    # ---- the end

    def _on_device(self) -> list[Stage]:
        """Return the requests that have a slot, or had one in the last block."""
        admitted = () if self.batch is None else self.batch.admitted.values()
        return [*admitted, *(s for s, _ in self.finished)]

    def fail_all(self, error: BaseException) -> None:
        """Fail every request and command with this error; from any thread, after the end."""
        batch, stages = self.batch, list[Stage](self.inbox.take())
        held = self.changing.acquire(timeout=CHECK_S)  # a hung thread may hold it
        if batch is not None:
            stages += [*batch.queue, *self._on_device()]
            stages += [live for live, _ in batch.take_failed()]
            batch.queue.clear()
            batch.admitted.clear()
        if held:
            self.changing.release()
        resolve([(stage.owner, error) for stage in stages])
        self.inbox.fail_commands(error)
        self.changes.fail(error)


def _log_end(error: BaseException) -> None:
    """Log the error that ended a sampler: WeightsError at debug level, because it ends the run with
    the same message; another JaxrlError without, and any other error with its traceback."""
    if isinstance(error, WeightsError):
        log.debug("the sampler stopped: %s", error)
    elif isinstance(error, JaxrlError):
        log.error("the sampler stopped: %s", error)
    else:
        log.error("the sampler stopped: %s", error, exc_info=error)
