"""The sequences that a sampler has on its device, from admission to their last token.

    queue ──admit──> places and pages ──prefill, in chunks──> ready ──┬─> rows [ decode block ]
      ^               (groups share one prefill and its pages)        └─> reserve: takes rows over
      └── preempted: memory was short; goes on later from what it drew

A *place* is a slot or a reserve place. Every decision is a function of the queue, the pages and
what was drawn, never of time: the same requests given at once always run the same way.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.model import cache
from jaxrl_async.model.cache import NewKV
from jaxrl_async.model.moe import id_dtype
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.concurrency import LOW, Limit, SamplerLoad, next_limit
from jaxrl_async.sampler.batch.pages import Pages
from jaxrl_async.sampler.batch.prefix import PrefixStore
from jaxrl_async.sampler.batch.routes import Routes
from jaxrl_async.sampler.batch.slots import Slots, Span
from jaxrl_async.sampler.device.engine import (
    Block,
    DecodeArgs,
    DecodeState,
    Engine,
    EngineWeights,
    InsertArgs,
    PrefillArgs,
    Prefix,
    SlotParams,
    pad_stop_ids,
    request_keys,
)
from jaxrl_async.sampler.device.sampling import Controls, Mix
from jaxrl_async.sampler.request_checks import MAX_STOP_TOKENS
from jaxrl_async.types import ExpertIds, FloatArray, IntArray, KeptTokens, Partial, Request

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence_:
    """A request on its way through the sampler."""

    request: Request
    max_new: int
    owner: Any = None  # whoever waits for it
    partial: Partial | None = None  # where it goes on from
    order: int = -1  # of admission
    place: int | None = None
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # to prefill
    prefilled: int = 0
    pages: list[int] = field(default_factory=list)  # until it is ready; then the slots' business
    kv_version: int | None = None  # the one version that made all its KV; None: several did
    followers: list["Sequence_"] = field(default_factory=list)  # same tokens, share the prefill
    ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a sequence has drawn, as arrays of its own."""

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    full_logprobs: FloatArray | None
    kept: KeptTokens | None
    expert_ids: ExpertIds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """Totals since the start."""

    blocks: int = 0
    slot_steps: int = 0  # slots times decode steps
    row_steps: int = 0  # rows that were computed times decode steps
    used_slot_steps: int = 0  # of slot_steps, those that drew a token
    waiting_slot_steps: int = 0  # slot_steps of blocks at whose end requests still waited
    waiting_used_slot_steps: int = 0
    prefill_tokens: int = 0  # computed, padding not counted
    recomputed_tokens: int = 0  # of those, a second time: after a swap or a preemption
    preempted: int = 0
    restarted: int = 0
    discarded_tokens: int = 0  # drawn, then thrown away by a restart


class Batch:
    """Changed by the sampler's thread alone."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_new: int,
        seed: int,
        prefill_chunk: int = 2048,
        prefix_cache: bool = True,
        one_version: bool = False,
    ) -> None:
        """one_version: what a sequence drew from other weights than those it is admitted under is
        drawn again."""
        self._one_version = one_version
        self._failed: list[tuple[Sequence_, Exception]] = []
        self.engine, self._seed, self._chunk = engine, seed, prefill_chunk
        self.pages = Pages(engine.pages)
        self.store = PrefixStore(self.pages, engine.page_tokens, enabled=prefix_cache)
        self.slots = Slots(
            engine.places,
            max_length=engine.max_length,
            max_new=max_new,
            page_tokens=engine.page_tokens,
            no_page=engine.pages,
        )
        self.routes = _routes_of(engine) if engine.keeps_routes else None
        self.state: DecodeState = engine.init_decode_state()
        self.queue: deque[Sequence_] = deque()
        self.placed: dict[int, Sequence_] = {}  # by place, in order of admission
        self.limit = Limit(value=engine.places, least=1, most=engine.places)
        self.stats = BatchStats()
        self._admitted = 0
        self._version = 0
        self._block: Block | None = None
        self._block_version = 0
        self._preempted_seen = 0

    # ---- what there is

    @property
    def ready(self) -> list[Sequence_]:
        """Sequences that can decode, oldest first."""
        return [s for s in self.placed.values() if s.ready]

    @property
    def prefilling(self) -> list[Sequence_]:
        """Sequences whose prompt is not computed yet, oldest first; followers left out."""
        following = {id(f) for s in self.placed.values() for f in s.followers}
        return [s for s in self.placed.values() if not s.ready and id(s) not in following]

    @property
    def under_way(self) -> bool:
        """Whether anybody is placed, or was preempted with tokens of the weights at hand."""
        return bool(self.placed) or any(map(self._begun, self.queue))

    def _begun(self, sequence: Sequence_) -> bool:
        """Whether a sequence that waits goes on from tokens that the weights at hand drew."""
        saved = sequence.partial
        return saved is not None and self._version in saved.versions[-1:]

    def guarded(self, sequence: Sequence_, work: Callable[[Sequence_], Any]) -> Any:
        """Host work for one sequence: what it raises ends that one alone. None where it did."""
        try:
            return work(sequence)
        except Exception as error:
            log.error(
                "request %s failed, alone: %s", sequence.request.request_id, error, exc_info=error
            )
            self._failed.append((sequence, error))
            self.cancel(sequence)
            return None

    def take_failed(self) -> list[tuple[Sequence_, Exception]]:
        """Who failed alone since the last look."""
        failed, self._failed = self._failed, []
        return failed

    def count(self, **more: int) -> None:
        """Add to the totals; the tuple is replaced whole, so readers never see half a change."""
        self.stats = replace(self.stats, **{k: getattr(self.stats, k) + v for k, v in more.items()})

    def check_integrity(self) -> None:
        """AssertionError unless every page is held by exactly those who say so."""
        placed = [self.slots.pages[p] if s.ready else s.pages for p, s in self.placed.items()]
        self.pages.check_integrity([*placed, self.store.held])

    # ---- admission

    def admit(self, *, only_begun: bool = False) -> None:
        """Give places and pages to those who waited longest, as far as both go.

        only_begun: to those alone who have tokens of the weights at hand.
        """
        free = deque(p for p in range(self.engine.places) if p not in self.placed)
        begun = [s for s in self.prefilling if s.kv_version == self._version]  # nobody shares older
        leaders = {_content(s.token_ids): s for s in begun}
        waiting = [s for s in self.queue if self._begun(s)] if only_begun else self.queue
        while waiting and free and len(self.placed) < self.limit.requests:
            sequence = waiting[0]
            admitted = self.guarded(sequence, partial(self._admit, leaders, free[0]))
            if admitted is False:
                break
            if only_begun:
                del waiting[0]
            if admitted:
                free.popleft()

    def _admit(self, leaders: dict[bytes, Sequence_], place: int, sequence: Sequence_) -> bool:
        """One from the queue to a place; False: there are no pages for it."""
        if self._one_version:
            self._forget_other_versions(sequence)
        sequence.token_ids = _to_prefill(sequence)
        leader = leaders.get(_content(sequence.token_ids))
        if not (self._follow(sequence, leader) if leader else self._lead(sequence)):
            return False
        self.queue.remove(sequence)
        sequence.place, sequence.order = place, self._admitted
        self._admitted += 1
        self.placed[place] = sequence
        leaders.setdefault(_content(sequence.token_ids), sequence)
        return True

    def _forget_other_versions(self, sequence: Sequence_) -> None:
        """Begin again where other weights drew some of it."""
        saved = sequence.partial
        if saved is not None and (saved.versions != self._version).any():
            self.count(restarted=1, discarded_tokens=len(saved.token_ids))
            sequence.partial = None

    def _lead(self, sequence: Sequence_) -> bool:
        """Pages for a sequence of its own, those found in the prefix store included."""
        matched = self.store.match(sequence.token_ids)
        needed = self._pages_of(len(sequence.token_ids)) - len(matched)
        own = self._get(needed, spare=len(self.placed))
        if own is None:
            self.pages.release(matched)
            return False
        self.store.count(found=len(matched), asked_tokens=len(sequence.token_ids))
        sequence.pages = matched + own
        sequence.prefilled = len(matched) * self.engine.page_tokens
        sequence.kv_version = self._version
        return True

    def _follow(self, sequence: Sequence_, leader: Sequence_) -> bool:
        """The leader's full pages, and one for what will differ."""
        full, rest = divmod(len(sequence.token_ids), self.engine.page_tokens)
        own = self._get(1 if rest else 0, spare=len(self.placed))
        if own is None:
            return False
        shared = leader.pages[:full]
        self.pages.hold(shared)
        sequence.pages = shared + own
        sequence.kv_version = self._version
        leader.followers.append(sequence)
        return True

    def _get(self, count: int, *, spare: int = 0) -> list[int] | None:
        """Free pages, from the prefix store where there are too few; None where `spare` more would
        not be left."""
        short = count + spare - self.pages.num_free
        if short > 0:
            short -= self.store.evict(short)
        return None if short > 0 else self.pages.allocate(count)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.engine.page_tokens)

    # ---- prefill

    def prefill(self, weights: EngineWeights) -> None:
        """One round: up to prefill_chunk tokens of those who wait longest."""
        for sequence in self.prefilling:
            if sequence.partial is not None and not sequence.prefilled:
                self.guarded(sequence, self._restore_kv)
        waiting = self.prefilling
        pieces = shapes.plan_pieces([(s.prefilled, len(s.token_ids)) for s in waiting], self._chunk)
        for length, together in shapes.by_bucket(pieces):
            self._prefill(weights, length, [(waiting[p.index], p.count) for p in together])

    def _prefill(
        self, weights: EngineWeights, length: int, parts: list[tuple[Sequence_, int]]
    ) -> None:
        """One prefill program and one insert."""
        rows = shapes.rows_bucket(len(parts))
        total = sum(count for _, count in parts)
        n = shapes.tokens_bucket(total, rows * length)
        page_tokens = self.engine.page_tokens
        tokens, positions, back = (np.zeros(n, np.int32) for _ in range(3))
        pages, in_page = np.full(n, self.engine.pages, np.int32), np.zeros(n, np.int32)
        places = np.zeros((rows, length), np.int32)
        starts, lengths = np.zeros(rows, np.int32), np.ones(rows, np.int32)
        begin = 0
        for row, (sequence, count) in enumerate(parts):
            start, end = sequence.prefilled, begin + count
            where = np.arange(start, start + count)
            tokens[begin:end] = sequence.token_ids[start : start + count]
            positions[begin:end] = where
            back[begin:end] = row * length + np.arange(count)
            places[row, :count] = np.arange(begin, end)
            pages[begin:end] = np.asarray(sequence.pages, np.int32)[where // page_tokens]
            in_page[begin:end] = where % page_tokens
            starts[row], lengths[row] = start, count
            begin = end
        width = shapes.steps_of_half(self._pages_of(int(starts.max())))
        tables = np.full((rows, width), self.engine.pages, np.int32)
        for row, (sequence, _) in enumerate(parts):
            tables[row] = self.slots.table(sequence.pages, width)
        prefix = self.engine.prefill_multisampling(
            weights,
            self.state,
            PrefillArgs(tokens, positions, places, back, starts, lengths, tables),
        )
        self.count(prefill_tokens=total)
        done = []
        for row, (sequence, count) in enumerate(parts):
            sequence.prefilled += count
            if sequence.prefilled == len(sequence.token_ids):
                done.append((row, sequence))
        into, routes = self._into(pages, in_page, done), prefix.routes
        self.state = self.engine.bulk_insert(prefix._replace(routes=None), self.state, into)
        if self.routes is not None:
            self.routes.expect(routes, pages, in_page, into.sources, into.targets)
        for _, sequence in done:
            self._make_ready(sequence)

    def _into(
        self, pages: IntArray, in_page: IntArray, done: list[tuple[int, Sequence_]]
    ) -> InsertArgs:
        """Where a chunk goes: tokens into pages, last pages to followers, logits to places."""
        pairs = [(row, s) for row, leader in done for s in (leader, *leader.followers)]
        copies = [
            (leader.pages[-1], s.pages[-1])
            for _, leader in done
            for s in leader.followers
            if len(leader.token_ids) % self.engine.page_tokens
        ]
        size = shapes.rows_bucket(max(1, len(pairs)))
        many = size if copies else 0  # as many as slots, not one more shape to compile for
        return InsertArgs(
            pages=pages,
            places=in_page,
            sources=padded([a for a, _ in copies], many, 0),
            targets=padded([b for _, b in copies], many, self.engine.pages),
            rows=padded([row for row, _ in pairs], size, 0),
            slots=padded([s.place for _, s in pairs], size, self.engine.places),
            ask=ask_of([s for _, s in pairs], size, self._seed),
        )

    def _make_ready(self, leader: Sequence_) -> None:
        """The leader and its followers, who have the same KV, can decode from the next block on."""
        followers, leader.followers = leader.followers, []
        if leader.kv_version == self._version:
            self.store.put(leader.token_ids, leader.pages)
        for sequence in (leader, *followers):
            sequence.prefilled, sequence.kv_version = leader.prefilled, leader.kv_version
            self.guarded(sequence, self._occupy)

    def _occupy(self, sequence: Sequence_) -> None:
        """What a prefilled sequence has goes to its slot."""
        place = sequence.place
        assert place is not None
        pages, sequence.pages, sequence.ready = sequence.pages, [], True
        self.slots.occupy(place, len(sequence.token_ids), pages, self._version)
        if sequence.partial is not None:
            self.slots.recall(place, sequence.partial)

    def _restore_kv(self, sequence: Sequence_) -> None:
        """Saved KV back into pages, all but the last token's, where these weights made it."""
        partial = sequence.partial
        assert partial is not None
        if partial.kv is None or partial.kv_version != self._version:
            return
        if self.routes is not None and not _tells_experts(partial):
            return  # made again, with its experts
        n = min(partial.kv.shape[2], len(sequence.token_ids) - 1)
        size = shapes.tokens_bucket(max(n, 1), 1 << 30)
        where = np.arange(n)
        page_tokens = self.engine.page_tokens
        pages = padded(
            np.asarray(sequence.pages, np.int32)[where // page_tokens], size, self.engine.pages
        )
        kv = np.zeros((*partial.kv.shape[:2], size, *partial.kv.shape[3:]), partial.kv.dtype)
        kv[:, :, :n] = partial.kv[:, :, :n]
        layers = range(len(kv))
        prefix = Prefix(
            NewKV(
                tuple(jnp.asarray(kv[i, 0]) for i in layers),
                tuple(jnp.asarray(kv[i, 1]) for i in layers),
            ),
            jnp.zeros((1, self.engine.spec.vocab), jnp.float32),
        )
        into = self._into(pages, padded(where % page_tokens, size, 0), [])
        self.state = self.engine.bulk_insert(prefix, self.state, into)
        if self.routes is not None and partial.expert_ids is not None:
            self.routes.put(partial.expert_ids[:n], pages[:n], where % page_tokens)
        sequence.prefilled = n

    # ---- decode

    def start_block(self, weights: EngineWeights) -> None:
        """Dispatch one decode block of whoever is ready."""
        steps = self.engine.block
        rows, reserve = self._with_pages(steps)
        self._block = None
        if not rows:
            return
        running = [*rows, *reserve]
        longest = max(int(self.slots.lengths[s.place]) for s in running)
        context_pages = shapes.steps_of_half(self._pages_of(longest))
        width = context_pages + self._pages_of(steps) + 1
        count = shapes.decode_rows(len(rows), self.engine.slots)
        places = self.engine.places
        run = DecodeArgs(
            rows=padded([s.place for s in rows], count, places),
            reserve=padded([s.place for s in reserve], self.engine.reserve, 0),
            num_reserve=np.int32(len(reserve)),
            lengths=self.slots.lengths.copy(),
            drawn=self.slots.drawn.copy(),
            tables=self.slots.tables(width),
            steps=np.int32(steps),
        )
        self._block_version = self._version
        self.state, self._block = self.engine.generate(
            weights,
            self.state,
            run,
            context_pages=context_pages,
            mix=Mix(
                truncated=any(_truncates(s.request) for s in running),
                greedy=any(s.request.sampling.temperature == 0 for s in running),
                extras=any(s.request.extras for s in running),
            ),
        )

    def wait_for_block(self) -> Block | None:
        """What the block drew, on the host; the batch stays as it is. None: none was started."""
        return None if self._block is None else Block(*jax.device_get(tuple(self._block)))

    def finish_block(self, block: Block | None) -> list[Sequence_]:
        """Take what was drawn; the sequences that ended, each to be taken out with `end`."""
        if block is None:
            return []
        self._block = None
        rows = block.tokens.shape[0]
        spans = self.slots.take(
            block.tokens,
            block.logprobs,
            block.owners,
            self._block_version,
            block.full_logprobs,
            block.kept,
        )
        self._note_routes(block, spans)
        used, steps = sum(s.end - s.start for s in spans), int(block.steps)
        slot_steps = steps * self.engine.slots
        waiting = bool(self.queue)
        self.count(
            blocks=1,
            slot_steps=slot_steps,
            row_steps=steps * rows,
            used_slot_steps=used,
            waiting_slot_steps=slot_steps * waiting,
            waiting_used_slot_steps=used * waiting,
        )
        ended = [self.placed[int(place)] for place in block.owners[block.ends]]
        return sorted(ended, key=lambda s: s.order)

    def _note_routes(self, block: Block, spans: Sequence[Span]) -> None:
        """The experts of what a block drew, where its KV went."""
        if self.routes is None:
            return
        owners, routes = block.owners.reshape(-1), block.routes.reshape(-1, *block.routes.shape[2:])
        for span in spans:
            length = int(self.slots.lengths[span.slot])
            where = np.arange(length - (span.end - span.start), length, dtype=np.int32)
            pages = np.asarray(self.slots.pages[span.slot], np.int32)
            page_tokens = self.engine.page_tokens
            of_slot = routes[owners == span.slot]
            self.routes.put(of_slot, pages[where // page_tokens], where % page_tokens)

    def _experts(self, sequence: Sequence_, drawn: int) -> ExpertIds | None:
        """As Completion.expert_ids, of a sequence that is ready. What was told before it left the
        device stays: of the passes that drew its tokens, not of those that made its KV again."""
        if self.routes is None:
            return None
        assert sequence.place is not None
        tokens = len(sequence.request.token_ids) + drawn - 1 if drawn else 0
        experts = self.routes.of(self.slots.pages[sequence.place], tokens)
        if sequence.partial is not None and sequence.partial.expert_ids is not None:
            known = len(sequence.partial.expert_ids)
            experts[:known] = sequence.partial.expert_ids
        return experts

    def end(self, sequence: Sequence_) -> Output:
        """Take out what was drawn; keep the KV for later turns, free the rest."""
        output = self.output(sequence)
        assert sequence.place is not None
        if sequence.kv_version is not None and sequence.kv_version == self._version:
            whole = np.concatenate([sequence.request.token_ids, output.token_ids])
            self.store.put(whole, self.slots.pages[sequence.place])
        self.leave(sequence)
        return output

    def output(self, sequence: Sequence_) -> Output:
        """What a sequence has drawn so far."""
        if not sequence.ready:
            partial = sequence.partial
            empty = np.zeros(0, np.int32)
            return Output(
                token_ids=partial.token_ids if partial else empty,
                logprobs=partial.logprobs if partial else empty.astype(np.float32),
                versions=partial.versions if partial else empty,
                full_logprobs=partial.full_logprobs if partial else None,
                kept=partial.kept if partial else None,
                expert_ids=partial.expert_ids if partial else None,
            )
        place, extras = sequence.place, sequence.request.extras
        assert place is not None
        n = int(self.slots.drawn[place])
        return Output(
            token_ids=self.slots.tokens[place, :n].copy(),
            logprobs=self.slots.logprobs[place, :n].copy(),
            versions=self.slots.versions[place, :n].copy(),
            full_logprobs=self.slots.full_logprobs[place, :n].copy() if extras else None,
            kept=_kept(self.slots.kept[place]) if extras else None,
            expert_ids=self._experts(sequence, n),
        )

    def num_drawn(self, sequence: Sequence_) -> int:
        """Tokens that a sequence with a place has drawn."""
        return int(self.slots.drawn[sequence.place]) if sequence.ready else 0

    def _with_pages(self, steps: int) -> tuple[list[Sequence_], list[Sequence_]]:
        """Who decodes now, and who takes over; all have the pages for `steps` more tokens."""
        rows: list[Sequence_] = []
        for sequence in self.ready[: self.engine.slots]:
            if sequence.ready and self._grow(sequence, steps):
                rows.append(sequence)
        rows = [s for s in rows if s.ready]  # a later one may have pushed out nobody older
        reserve = []
        for sequence in self.ready[self.engine.slots :][: self.engine.reserve]:
            if not self._add_pages(sequence, steps):
                break
            reserve.append(sequence)
        self._set_limit()
        return rows, reserve

    def _grow(self, sequence: Sequence_, steps: int) -> bool:
        """Pages for a running sequence; the youngest gives way where there are none."""
        while not self._add_pages(sequence, steps):
            victim = max(self.placed.values(), key=lambda s: s.order)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _add_pages(self, sequence: Sequence_, steps: int) -> bool:
        place = sequence.place
        assert place is not None
        left = sequence.max_new - int(self.slots.drawn[place])
        more = self._get(self.slots.missing_pages(place, steps, left))
        if more is None:
            return False
        self.slots.pages[place] += more
        return True

    def _set_limit(self) -> None:
        """How many may be in flight: fewer where memory was short, more where it is plenty."""
        share = self.pages.used_share
        if share > LOW:
            idle = sum(self.pages.holders(p) == 1 for p in self.store.held)
            share -= idle / self.pages.count
        preempted = self.stats.preempted - self._preempted_seen
        self._preempted_seen = self.stats.preempted
        self.limit = next_limit(
            self.limit,
            SamplerLoad(
                running=len(self.placed),
                waiting=len(self.queue),
                used_share=share,
                preempted=preempted,
            ),
        )

    # ---- leaving early, and new weights

    def leave(self, sequence: Sequence_) -> None:
        """Free a place and its pages; followers of an unfinished prefill wait again."""
        assert sequence.place is not None
        del self.placed[sequence.place]
        pages = self.slots.free(sequence.place) if sequence.ready else sequence.pages
        self.pages.release(pages)
        sequence.place, sequence.pages, sequence.ready, sequence.prefilled = None, [], False, 0
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            self.leave(follower)
        self.queue.extendleft(reversed(followers))
        for other in self.placed.values():
            if sequence in other.followers:
                other.followers.remove(sequence)

    def preempt(self, sequence: Sequence_) -> None:
        """Take a sequence off the device; it goes on first of all, from what it has drawn."""
        output = self.output(sequence)
        lost = len(sequence.token_ids) + len(output.token_ids) if sequence.ready else 0
        sequence.partial = self._partial(sequence, output)
        self.leave(sequence)
        self.queue.appendleft(sequence)
        self.count(preempted=1, recomputed_tokens=lost)

    def cancel(self, sequence: Sequence_) -> None:
        """Forget a sequence, wherever it is."""
        if sequence.place is not None:
            self.leave(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)

    def new_version(self, version: int) -> None:
        """Other weights from now on: what they did not make is no longer shared."""
        self.store.clear()
        self._version = version
        for sequence in self.placed.values():
            sequence.kv_version = None if sequence.prefilled else version

    def recompute(self) -> None:
        """Every KV is to be made again by the weights at hand; tokens stay."""
        for sequence in list(self.placed.values()):
            assert sequence.place is not None
            if sequence.ready:
                sequence.prefilled = int(self.slots.lengths[sequence.place])
                output = self.output(sequence)
                sequence.partial = self._partial(sequence, output)
                sequence.pages = self.slots.free(sequence.place)
                sequence.token_ids, sequence.ready = _to_prefill(sequence), False
            self.count(recomputed_tokens=sequence.prefilled)
            sequence.prefilled, sequence.kv_version = 0, self._version

    def restart(self) -> None:
        """Every unfinished sequence begins again from its prompt, oldest first."""
        sequences = list(self.placed.values())
        for sequence in sequences:
            self.count(restarted=1, discarded_tokens=len(self.output(sequence).token_ids))
            sequence.followers = []
        for sequence in sequences:
            self.leave(sequence)
            sequence.partial = None
        self.queue.extendleft(sorted(sequences, key=lambda s: -s.order))

    # ---- partial rollouts

    def snapshot(self, sequence: Sequence_, *, with_kv: bool) -> Partial:
        """A running sequence as data."""
        output = self.output(sequence)
        partial = self._partial(sequence, output)
        if not (with_kv and sequence.ready and sequence.kv_version is not None):
            return partial
        assert sequence.place is not None
        tokens = int(self.slots.lengths[sequence.place])
        width = shapes.steps_of_half(self._pages_of(tokens))
        table = self.slots.table(self.slots.pages[sequence.place], width)
        keys, values = jax.device_get(
            read_kv(self.state.kv, table[None], self.engine.spec.head_dim)
        )
        kv = np.stack([keys, values], axis=1)[:, :, :tokens]
        return replace(partial, kv=kv, kv_version=sequence.kv_version)

    def _partial(self, sequence: Sequence_, output: Output) -> Partial:
        return Partial(
            request=sequence.request,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            versions=output.versions,
            seed=self._seed,
            full_logprobs=output.full_logprobs,
            kept=output.kept,
            expert_ids=output.expert_ids,
        )


def _routes_of(engine: Engine) -> Routes:
    spec = engine.spec
    k, dtype = spec.experts_per_token, id_dtype(spec.experts)
    return Routes(engine.pages, engine.page_tokens, layers=spec.layers, chosen=k, dtype=dtype)


def _tells_experts(partial: Partial) -> bool:
    """Whether a saved request has the experts of all whose KV it has."""
    tokens = len(partial.request.token_ids) + len(partial.token_ids) - 1
    return partial.expert_ids is not None and len(partial.expert_ids) == tokens


@partial(jax.jit, static_argnums=2)
def read_kv(kv: Any, table: Any, head_dim: int) -> tuple[Any, Any]:
    """Pages of one sequence as [layers, tokens, N, K], keys and values."""
    context = cache.gather(kv, table, head_dim)
    keys = jnp.stack([jnp.moveaxis(k[0], 2, 0) for k in context.k])
    values = jnp.stack([jnp.swapaxes(v[0], 0, 1) for v in context.v])
    return keys, values


def _content(token_ids: IntArray) -> bytes:
    return token_ids.tobytes()


def _to_prefill(sequence: Sequence_) -> IntArray:
    """The prompt, and what was drawn before."""
    partial = sequence.partial
    if partial is None or not len(partial.token_ids):
        return np.ascontiguousarray(sequence.request.token_ids, np.int32)
    return np.concatenate([sequence.request.token_ids, partial.token_ids]).astype(np.int32)


def _kept(masks: Sequence[IntArray]) -> KeptTokens:
    ids = np.concatenate(masks) if masks else np.zeros(0, np.int32)
    starts = np.cumsum([0, *map(len, masks)], dtype=np.int32)
    return KeptTokens(ids=ids.astype(np.int32), starts=starts)


def _truncates(request: Request) -> bool:
    s = request.sampling
    return s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0


def ask_of(sequences: Sequence[Sequence_], size: int, seed: int) -> SlotParams:
    """The requests' wishes as arrays [size]; the rest is padding."""
    requests = [s.request for s in sequences]
    sampling = [r.sampling for r in requests]
    ids = np.zeros((size, 3), np.int32)
    stops = np.full((size, MAX_STOP_TOKENS), -1, np.int32)
    if requests:
        ids[: len(requests), :2] = np.array([r.key for r in requests], np.int32)
        ids[: len(requests), 2] = [r.branch for r in requests]
        stops[: len(requests)] = [pad_stop_ids(r.stop_token_ids) for r in requests]
    return SlotParams(
        Controls(
            padded([s.temperature for s in sampling], size, 1.0, np.float32),
            padded([s.top_k for s in sampling], size, 0),
            padded([s.top_p for s in sampling], size, 1.0, np.float32),
            padded([s.min_p for s in sampling], size, 0.0, np.float32),
        ),
        np.asarray(request_keys(seed, ids)),
        stops,
        padded([s.max_new for s in sequences], size, 1),
        padded([r.forced_length is not None for r in requests], size, False, np.bool_),
    )


def padded(values: Any, size: int, fill: Any, dtype: Any = np.int32) -> Any:
    """Values in an array of `size`, the rest `fill`."""
    whole = np.full(size, fill, dtype)
    whole[: len(values)] = values
    return whole
