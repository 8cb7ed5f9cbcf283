"""The requests on a sampler's device, from admission to their last token.

    queue ──admit──> slot and pages ──prefill, in chunks──> running ──┬─> rows [ decode block ]
      ^               (groups share one prefill and its pages)        └─> reserve: takes rows over
      └── preempted: pages ran out; continues later from its sampled tokens

Every decision is a function of the queue, the pages and the sampled tokens, never of time: the same
requests submitted together always run the same way.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_async.data.images import ImageStore
from jaxrl_async.model.moe import id_dtype
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots, WeightsInUse
from jaxrl_async.sampler.batch.admission import Admission, Content, content_of
from jaxrl_async.sampler.batch.decoding import decode_args, form_of, named_ids
from jaxrl_async.sampler.batch.expert_routing import NoRoutes, Routes
from jaxrl_async.sampler.batch.kv_cache import KvCache, Table
from jaxrl_async.sampler.batch.prefill import (
    Chunk,
    Part,
    chunks_of,
    divided_parts,
    expect_scores,
    filled,
    has_usable_kv,
    insert_args,
    inserts_of,
    keep_pages,
    leaders,
    plan_parts,
    saved_chunk,
    saved_tokens,
    score_args,
)
from jaxrl_async.sampler.batch.sequence import (
    Admitted,
    BatchStats,
    LiveRequest,
    Prefilling,
    Running,
    Stage,
    live_of,
    running_of,
    unfollow,
)
from jaxrl_async.sampler.batch.shaping_args import shaping_of, take_masks
from jaxrl_async.sampler.batch.slots import Slots, Span
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import Block, DecodeState, EngineWeights, Prefix
from jaxrl_async.sampler.device.sampling import Mix, mix_of, union_of
from jaxrl_async.sampler.grammar import Grammars
from jaxrl_async.types import IntArray, PositionLogprobs, TokenRecord

log = logging.getLogger(__name__)

T = TypeVar("T")


class _StartedBlock(NamedTuple):
    """A decode block that was dispatched."""

    on_device: Block
    versions: IntArray  # [S] of the weights that compute it, by slot
    running: dict[int, Running]  # by slot index: rows and reserve slots


class Batch:
    """Waiting, prefilling and running requests with their pages and slots. Changed only by the
    sampler's thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_new: int,
        seed: int,
        prefill_chunk: int = 2048,
        prefix_cache: bool = True,
        one_version: bool = False,
        adapters: AdapterSlots | None = None,
        images: ImageStore | None = None,
        mixes: Sequence[Mix] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """Set up empty slots and pages on the engine's device.

        Args:
            engine: the compiled programs.
            max_new: maximum new tokens of a request.
            seed: of the run; random numbers are keyed by it and the request's key.
            prefill_chunk: maximum tokens prefilled in a round.
            prefix_cache: keep the KV of finished requests for prompts with the same beginning.
            one_version: discard a request's tokens if other weights sampled them than the weights
                at its admission.
            adapters: that requests may name; None: no adapters.
            images: that token ids of prompts name; None: no images.
            mixes: the kinds of sampling that requests will ask for, if known.
            grammars: of requests' constraints; None: no request has any.
        """
        self._images, self._mixes = images, mixes
        self._grammars = Grammars(None, engine.spec.model.vocab) if grammars is None else grammars
        self.engine, self.spec = engine, engine.spec
        self.seed, self._chunk, self._one_version = seed, prefill_chunk, one_version
        self.weights = WeightsInUse(AdapterSlots() if adapters is None else adapters)
        stores = prefix_cache and not self.spec.model.delta  # whose states are not in pages
        self.cache = KvCache(form_of(self.spec), self.spec.pages, stores=stores)
        self.slots = Slots(
            self.spec.total_slots, max_new=max_new, cache=self.cache, vocab=self.spec.model.vocab
        )
        self._routes = _routes_of(self.spec)
        self.state: DecodeState = engine.init_decode_state()
        self.admission = Admission(
            self.cache, self.spec.total_slots, separate=not self.spec.model.delta
        )
        self.queue, self.enqueue = self.admission.queue, self.admission.enqueue
        self.admitted: dict[int, Admitted] = {}  # by slot index, in order of admission
        self.stats = BatchStats()
        self._failed: list[tuple[LiveRequest, Exception]] = []
        self._scored: list[Prefilling] = []  # that only score, and are done
        self._block: _StartedBlock | None = None

    # ---- queries

    @property
    def prefilling(self) -> list[Prefilling]:
        """Requests whose prompt is not computed yet, oldest first, without followers."""
        return leaders(self.admitted.values())

    @property
    def version(self) -> int:
        """Version of the base weights, which serve requests without an adapter."""
        return self.weights.base.version

    def guarded(self, stage: Stage, work: Callable[..., T]) -> T | None:
        """Do host work for one request; if it raises, end that request and return None."""
        live = live_of(stage)
        try:
            return work(stage)
        except Exception as error:
            log.error("request %s failed: %s", live.request.request_id, error, exc_info=error)
            self._failed.append((live, error))
            self.cancel(live)
            return None

    def take_failed(self) -> list[tuple[LiveRequest, Exception]]:
        """Return the requests that failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def check_integrity(self) -> None:
        """Raise AssertionError unless each page is held once by each table that names it."""
        self.cache.check_integrity(_table_of(p, self.slots) for p in self.admitted.values())

    # ---- admission

    def admit(self, held: frozenset[str] = frozenset()) -> None:
        """Give slots and pages to the next requests (WaitingQueue), while both last.

        held: adapters for which only requests with tokens of the current weights are admitted.
        """
        S = self.spec.total_slots
        free = deque(i for i in range(S) if i not in self.admitted)
        by_content = _by_content(self.prefilling, self.weights)
        following = self.admission.order(held, self.weights.version_of)
        while free and S - len(free) < self.admission.limit.requests:
            live = following()
            if live is None:
                break
            done = self.guarded(live, partial(self._admit, by_content, free[0]))
            if done is False:
                break
            if done:
                free.popleft()
        self._admit_scores(held, by_content)

    def _admit_scores(self, held: frozenset[str], by_content: dict[Content, Prefilling]) -> None:
        """Admit the next requests that only score, at indices after the slots: one at any time, and
        more while the tokens to prefill are fewer than a round's. So later requests with slots wait
        for one round and one such prompt at most."""
        S = self.spec.total_slots
        for index in range(S, 2 * S):
            left = sum(len(p.token_ids) - p.prefilled for p in self.prefilling)
            live, scoring = self.admission.next_score(held), any(i >= S for i in self.admitted)
            if live is None or (scoring and left >= self._chunk):
                return
            if index in self.admitted:
                continue
            if self.guarded(live, partial(self._admit, by_content, index)) is False:
                return

    def _admit(
        self, by_content: dict[Content, Prefilling], slot_index: int, live: LiveRequest
    ) -> bool:
        """Give a slot and pages to a waiting request; return False if there are no pages."""
        saved, used = live.partial, self.weights.of(live.request)
        if self._one_version and saved is not None and (saved.versions != used.version).any():
            self.stats = self.stats.plus(restarted=1, discarded_tokens=len(saved.token_ids))
            live.partial = None
        spare = len(self.admitted) * self.cache.form.groups
        prefilling = self.admission.admit(live, slot_index, by_content, weights=used, spare=spare)
        if prefilling is None:
            return False
        self.admitted[slot_index] = prefilling
        return True

    # ---- prefill

    def prefill(self, weights: EngineWeights) -> None:
        """Prefill one round: up to prefill_chunk tokens of the longest-waiting requests."""
        for prefilling in self.prefilling:
            if prefilling.live.partial is not None and not prefilling.prefilled:
                self.guarded(prefilling, self._restore_kv)
        plain, scored = divided_parts(self._parts())
        for chunk in chunks_of(plain, self._chunk, self.spec, self._images):
            self._insert(chunk, self._prefill_chunk(weights, chunk))
        for chunk in chunks_of(scored, self._chunk, self.spec, self._images):
            self._insert(chunk, self._score_chunk(weights, chunk))

    def _insert(self, chunk: Chunk, prefix: Prefix) -> None:
        """Insert a computed chunk, and start the requests that it completes."""
        self.stats = self.stats.plus(prefill_tokens=chunk.num_tokens)
        done = chunk.advance()
        inserts = inserts_of(chunk, done, self.spec, self.seed)
        for args in inserts:  # all but the first find the chunk's KV in the pages
            self.state = self.engine.insert(prefix._replace(routes=None), self.state, args)
        pages, offsets = chunk.cells
        copied = zip(*((each.sources, each.targets) for each in inserts), strict=True)
        sources, targets = (np.concatenate(pages) for pages in copied)
        self._routes.expect(prefix.routes, pages[0], offsets, sources, targets)
        keep_pages(self.cache, self.weights, chunk)
        for _, leader in done:
            followers, leader.followers = leader.followers, []
            for follower in followers:
                self.cache.share(leader.table, follower.table, len(leader.token_ids))
            for prefilling in (leader, *followers):  # all have the leader's KV and log-probs
                prefilling.kv_version, prefilling.scores = leader.kv_version, leader.scores
                only_scores = prefilling.live.only_scores
                self.guarded(prefilling, self._end_scored if only_scores else self._start_running)

    def _prefill_chunk(self, weights: EngineWeights, chunk: Chunk) -> Prefix:
        """Compute a chunk. Chunks with cells have their KV in the pages already."""
        if chunk.args.cells is None:
            return self.engine.prefill(weights, self.state, chunk.args)
        prefix, self.state = self.engine.prefill_in_pages(weights, self.state, chunk.args)
        return prefix

    def _score_chunk(self, weights: EngineWeights, chunk: Chunk) -> Prefix:
        """Compute a chunk with the log-probs of their prompts that its requests ask for."""
        args, top = score_args(chunk, self._images)
        prefix, self.state, scores = self.engine.score(
            weights, self.state, chunk.args, args, top=top
        )
        expect_scores(chunk, scores)
        self.stats = self.stats.plus(scored_tokens=int(args.count))
        return prefix

    def _end_scored(self, prefilling: Prefilling) -> None:
        """Take out a request that only scores."""
        self.leave(prefilling)
        self._scored.append(prefilling)

    def take_scored(self) -> list[tuple[Prefilling, TokenRecord]]:
        """Return the requests that only score and are done since the last call, with their
        log-probs. Waits for their prefill."""
        scored, self._scored = self._scored, []
        return [(p, replace(self.output(p), prompt_logprobs=_prompt_logprobs(p))) for p in scored]

    def _parts(self) -> list[Part]:
        """Return the parts to prefill in this round, with pages. Pages that a window hides before
        the prompt ends are taken only now.

        If pages run out, requests are preempted, as for a block."""
        parts = plan_parts(self.prefilling, self._chunk, self._images)
        while not all(filled(self.cache, part) for part in parts):
            self._preempt_one()
            parts = plan_parts(self.prefilling, self._chunk, self._images)
        if self.cache.prefixes.enabled:
            for part in parts:  # also pages that no later token sees, for equal beginnings
                filled(self.cache, part, hidden=True)
        return parts

    def _start_running(self, prefilling: Prefilling) -> None:
        """Move a prefilled request to its slot; it decodes from the next block on."""
        slot, num_prefilled = prefilling.slot_index, len(prefilling.token_ids)
        used = self.weights.of(prefilling.request)
        known = prefilling.live.saved_output.token_ids.tolist()
        self.admitted[slot] = prefilling.running(self._grammars.matching(prefilling.request, known))
        self.slots.occupy(slot, num_prefilled, prefilling.table, used.version, used.slot)
        if prefilling.live.partial is not None:
            self.slots.recall(slot, prefilling.live.partial)

    def _restore_kv(self, prefilling: Prefilling) -> None:
        """Write saved KV back into pages if the current weights computed it."""
        saved = prefilling.live.partial
        version = self.weights.of(prefilling.request).version
        if saved is None or saved.kv is None or not has_usable_kv(prefilling, self.spec, version):
            return
        if not self._routes.cover(saved):
            return  # prefilled again, for its experts
        n = saved_tokens(prefilling, saved.kv)
        if not self.cache.fill(prefilling.table, self.cache.form.first_pages(n + 1), n):
            return
        n, prefix, cells = saved_chunk(prefilling, saved.kv, self.spec)
        args = insert_args(cells, [], self.spec, self.seed)
        self.state = self.engine.insert(prefix, self.state, args)
        self._routes.restore(saved, n, cells.pages[0], cells.offsets)
        prefilling.prefilled = n

    # ---- decode

    def start_block(self, weights: EngineWeights) -> None:
        """Dispatch one decode block of the running requests."""
        for one in running_of(self.admitted.values()):
            if one.matching is not None:
                self.guarded(one, lambda r: r.matching.mask())
        rows, reserve = self._with_pages(self.spec.block)
        self._block = None
        if not rows:
            return
        running = {r.slot_index: r for r in (*rows, *reserve)}
        mix = mix_of(r.request for r in running.values())
        # sampling in every way costs a TPU less than another program
        mix = union_of([mix, *self._mixes]) if self.spec.ragged else mix
        shaping = shaping_of(running, self.slots, self.spec, mix)
        args, context_pages = decode_args(rows, reserve, self.slots, self.spec, shaping)
        if mix.ids:
            args = args._replace(ids=named_ids(running, self.spec.total_slots, mix.ids))
        self.state, block = self.engine.generate(
            weights, self.state, args, context_pages=context_pages, mix=mix
        )
        versions = {slot: self.weights.of(one.request).version for slot, one in running.items()}
        by_slot = [versions.get(slot, self.version) for slot in range(self.spec.total_slots)]
        self._block = _StartedBlock(block, np.asarray(by_slot, np.int32), running)

    def _with_pages(self, steps: int) -> tuple[list[Running], list[Running]]:
        """Return the rows and the reserve of the next block, with pages for `steps` more tokens.

        If pages run out, requests are preempted: the least urgent, and among equals the youngest.
        """

        def has_pages(running: Running) -> bool:
            left = running.live.max_new - int(self.slots.num_sampled[running.slot_index])
            return self.slots.grow(running.slot_index, steps, left)

        for running in running_of(self.admitted.values()):
            self.slots.release_hidden(running.slot_index)
        spec, rows = self.spec, []
        for running in running_of(self.admitted.values())[: spec.slots]:
            while self.admitted.get(running.slot_index) is running and not has_pages(running):
                self._preempt_one()
            rows.append(running)
        rows = [r for r in rows if self.admitted.get(r.slot_index) is r]
        later = running_of(self.admitted.values())[spec.slots : spec.total_slots]
        reserve = list(takewhile(has_pages, later))
        self.admission.adjust(len(self.admitted), self.stats.preempted)
        return rows, reserve

    def _preempt_one(self) -> None:
        self.preempt(max(self.admitted.values(), key=lambda p: (p.request.priority, p.order)))

    def wait_for_block(self) -> Block | None:
        """Return the started block on the host, or None if none was started. Changes nothing."""
        return None if self._block is None else Block(*jax.device_get(tuple(self._block.on_device)))

    def finish_block(self, block: Block | None) -> list[Running]:
        """Take a block's tokens; return the requests that ended. The caller takes each out with
        finish.ended."""
        if block is None or self._block is None:
            return []
        started, self._block = self._block, None
        spans = _take_tokens(self.slots, block, started)
        for span in spans:
            one = started.running[span.slot]
            if one.matching is not None:
                self.guarded(one, partial(take_masks, span, self.slots))
        self._routes.take(block.routes, block.owners, spans, self.slots)
        waits, slots = bool(self.queue), self.spec.slots
        self.stats = self.stats.plus(**_counts_of(block, spans, started.running, slots, waits))
        ended = [started.running[int(slot)] for slot in block.owners[block.ends]]
        return sorted(
            (r for r in ended if self.admitted.get(r.slot_index) is r), key=lambda r: r.order
        )

    # ---- sampled tokens

    def num_sampled(self, stage: Admitted) -> int:
        """Return the number of tokens that a request has sampled in its slot."""
        return int(self.slots.num_sampled[stage.slot_index]) if isinstance(stage, Running) else 0

    def output(self, stage: Stage) -> TokenRecord:
        """Return the tokens that a request has sampled so far."""
        if not isinstance(stage, Running):
            return live_of(stage).saved_output
        return _output_of(stage, self.slots, self.cache, self._routes)

    # ---- leaving early

    def leave(self, stage: Admitted) -> None:
        """Free a slot and its pages; followers of an unfinished prefill return to the queue."""
        del self.admitted[stage.slot_index]
        if isinstance(stage, Running):
            self.cache.release(self.slots.free(stage.slot_index))
            return
        self.cache.release(stage.table)
        for follower in stage.followers:
            self.leave(follower)
        self.queue.put_back([follower.live for follower in stage.followers])
        unfollow(stage, self.admitted.values())

    def preempt(self, stage: Admitted) -> None:
        """Take a request off the device; it continues first, from its sampled tokens."""
        output = self.output(stage)
        again = stage.num_prefilled + len(output.token_ids) if isinstance(stage, Running) else 0
        stage.live.partial = stage.live.as_partial(output, self.seed)
        self.leave(stage)
        self.queue.put_back([stage.live])
        self.stats = self.stats.plus(preempted=1, recomputed_tokens=again)

    def cancel(self, stage: Stage) -> None:
        """Drop a request at any stage."""
        live = live_of(stage)
        admitted = next((p for p in self.admitted.values() if p.live is live), None)
        if admitted is not None:
            self.leave(admitted)
        elif live in self.queue:
            self.queue.remove(live)


def _table_of(stage: Admitted, slots: Slots) -> Table:
    return slots.tables[stage.slot_index] if isinstance(stage, Running) else stage.table


def _by_content(
    prefilling: Sequence[Prefilling], weights: WeightsInUse
) -> dict[Content, Prefilling]:
    """Return the requests whose KV the current weights compute, by what they compute."""
    return {
        content_of(used.salt, p.token_ids, p.scores): p
        for p in prefilling
        if p.kv_version == (used := weights.of(p.request)).version  # no older KV
    }


def _take_tokens(slots: Slots, block: Block, started: _StartedBlock) -> list[Span]:
    """Store the tokens of a finished block in their slots; return them as spans."""
    return slots.take(
        block.tokens,
        block.logprobs,
        block.owners,
        started.versions,
        block.extras,
        masked={slot for slot, r in started.running.items() if r.request.needs_extras},
        named={slot for slot, r in started.running.items() if r.request.logprobs},
    )


def _counts_of(
    block: Block,
    spans: Sequence[Span],
    running: Mapping[int, Running],
    slots: int,
    waiting: bool,
) -> dict[str, int]:
    """Return what a block adds to BatchStats.

    Args:
        block: on the host.
        spans: its tokens that count, by slot.
        running: its requests by slot index.
        slots: number of rows that could decode.
        waiting: whether requests wait for a slot.
    """
    used, steps = sum(s.end - s.start for s in spans), int(block.steps)
    untrained = (s for s in spans if not running[s.slot].request.for_training)
    return {
        "blocks": 1,
        "slot_steps": steps * slots,
        "row_steps": steps * block.tokens.shape[0],
        "used_slot_steps": used,
        "aside_tokens": sum(s.end - s.start for s in untrained),
        "waiting_slot_steps": steps * slots * waiting,
        "waiting_used_slot_steps": used * waiting,
    }


def _output_of(
    running: Running, slots: Slots, cache: KvCache, routes: Routes | NoRoutes
) -> TokenRecord:
    """Return the tokens that a running request has sampled so far, with the requested extras."""
    slot, request, saved = running.slot_index, running.request, running.live.partial
    output = slots.output(
        slot,
        extras=request.extras,
        masks=request.constraint is not None,
        logprobs=request.logprobs,
    )
    count = len(output.token_ids)
    tokens = len(request.token_ids) + count - 1 if count else 0
    pages = slots.tables[slot, 0, : cache.form.num_pages(tokens)]
    experts = routes.of_request(pages, tokens, saved)
    scores = None if saved is None else saved.prompt_logprobs
    if running.scores is not None:
        scores = running.scores.result()
    return replace(output, expert_ids=experts, prompt_logprobs=scores)


def _prompt_logprobs(prefilling: Prefilling) -> PositionLogprobs | None:
    return None if prefilling.scores is None else prefilling.scores.result()


def _routes_of(spec: EngineSpec) -> Routes | NoRoutes:
    if not spec.keeps_routes:
        return NoRoutes()
    return Routes(
        spec.pages,
        spec.page_tokens,
        layers=spec.model.layers,
        chosen=spec.model.experts_per_token,
        dtype=id_dtype(spec.model.experts),
    )
