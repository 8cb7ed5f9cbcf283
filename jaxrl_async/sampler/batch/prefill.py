"""The choice of the tokens to prefill next, and the arguments of the programs that do it.

A *leader* has followers: requests with the same tokens that share its prefill and its full pages.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_async.data.images import NO_IMAGE, ImageStore
from jaxrl_async.model.cache import NewKV
from jaxrl_async.model.kernels import sequences_in_a_call
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.adapter_slots import WeightsInUse
from jaxrl_async.sampler.batch.kv_cache import KvCache
from jaxrl_async.sampler.batch.sequence import Admitted, LiveRequest, Prefilling
from jaxrl_async.sampler.batch.shapes import pad_to
from jaxrl_async.sampler.device.engine import pad_stop_ids, request_keys
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import (
    Cells,
    InsertArgs,
    PrefillArgs,
    Prefix,
    ScoreArgs,
    SlotParams,
    TokenScores,
)
from jaxrl_async.sampler.device.sampling import Controls, named_size
from jaxrl_async.types import MAX_STOP_TOKENS, IntArray

FEW_SLOTS = 4
"""Slots of a small insert, used where the largest insert moves many logits."""
MANY_LOGITS = 2**21
"""Number of logits above which a second, small insert program is worth compiling."""


class Sizes(NamedTuple):
    """The sizes that a prefill is compiled for."""

    rows: int  # sequences
    length: int  # columns that a sequence is padded to; 1: packed, with the first token's index
    tokens: int  # of all sequences
    width: int  # pages of the longest table


Part = tuple[Prefilling, int]
"""A request, and the number of its next tokens to prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of some requests, prefilled by one program."""

    parts: Sequence[Part]
    args: PrefillArgs
    cells: Cells

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, without padding."""
        return sum(count for _, count in self.parts)

    @property
    def unwritten(self) -> Cells:
        """The cells that the prefill has not written itself: all of them or none."""
        kept = None if self.args.cells is None else 0
        return Cells(self.cells.pages[:, :kept], self.cells.offsets[:kept])

    def advance(self) -> list[tuple[int, Prefilling]]:
        """Mark the chunk as prefilled; return the requests that are now done, each with its row."""
        for prefilling, count in self.parts:
            prefilling.prefilled += count
        return [
            (row, p) for row, (p, _) in enumerate(self.parts) if p.prefilled == len(p.token_ids)
        ]


def leaders(stages: Iterable[Admitted]) -> list[Prefilling]:
    """Return the requests to prefill, in the given order, without followers."""
    prefilling = [p for p in stages if isinstance(p, Prefilling)]
    following = {id(f) for p in prefilling for f in p.followers}
    return [p for p in prefilling if id(p) not in following]


def plan_parts(
    waiting: Sequence[Prefilling], budget: int, images: ImageStore | None = None
) -> list[Part]:
    """Return the parts to prefill in one round: up to `budget` tokens of the first requests.

    An image that would be cut is prefilled whole: its first tokens see its last ones.
    images: that token ids name; None: no images.
    """
    sizes = [(p.prefilled, len(p.token_ids)) for p in waiting]
    parts = []
    for piece in shapes.plan_prefill(sizes, budget):
        prefilling, end = waiting[piece.index], piece.start + piece.count
        end = end if images is None else images.whole(prefilling.token_ids, end)
        parts.append((prefilling, end - piece.start))
    return parts


def chunks_of(
    planned: Sequence[Part], budget: int, spec: EngineSpec, images: ImageStore | None = None
) -> Iterator[Chunk]:
    """Yield the chunks of a round (plan_parts with the same budget). Each is made when it is
    needed, after the earlier ones have released pages."""
    if images is None and (few := prefill_sizes(spec, budget)):
        for parts, sizes in _divided(planned, few, spec):
            yield make_chunk(parts, sizes, spec)
        return
    for length, parts in _by_bucket(planned):
        rows = shapes.rows_bucket(len(parts))
        size = shapes.tokens_bucket(sum(count for _, count in parts), rows * length)
        width = shapes.steps_of_half(spec.num_pages(max(p.prefilled for p, _ in parts)))
        yield make_chunk(parts, Sizes(rows, length, size, width), spec, images)


def _divided(
    planned: Sequence[Part], sizes: Sequence[Sizes], spec: EngineSpec
) -> Iterator[tuple[Sequence[Part], Sizes]]:
    """Divide the parts of a round among programs of these sizes (prefill_sizes). Models with a
    window do not divide a prompt: its pages hold what its last token in the round sees, not what
    earlier tokens see."""
    by_tokens, rows = {s.tokens: s for s in sizes}, sizes[0].rows
    counts, most = [count for _, count in planned], sizes[-1].tokens
    if not spec.cpu_attention:
        runs = shapes.whole_runs if any(spec.windows) else shapes.filled
        for run, tokens in runs(counts, rows, list(by_tokens)):
            yield [(planned[i][0], count) for i, count in run], by_tokens[tokens]
        return
    for neighbours in shapes.divided(counts, rows, most):
        tokens = shapes.coarse_bucket(sum(counts[neighbours]), most)
        yield planned[neighbours], by_tokens[tokens]


def prefill_sizes(spec: EngineSpec, budget: int) -> list[Sizes]:
    """Return the few sizes for which prefills of prompts without images are compiled, in ascending
    order of tokens; empty: sizes depend on each prompt's padding. budget: as in plan_parts."""
    if not spec.has_few_prefills:
        return []
    rows, width = min(shapes.MAX_SEQUENCES, spec.total_slots), spec.num_pages(spec.max_length)
    budget = min(budget, spec.total_slots * spec.max_length)
    if spec.cpu_attention:
        return [Sizes(rows, 1, tokens, width) for tokens in shapes.coarse_buckets(budget)]
    if not spec.gpu_pages:
        rows = min(rows, sequences_in_a_call(width + spec.model.sinks))
    factor = 2 if any(spec.windows) else 4  # prompts that are not divided fill less
    return [Sizes(rows, 1, tokens, width) for tokens in shapes.filled_buckets(budget, factor)]


def _by_bucket(parts: Sequence[Part]) -> list[tuple[int, list[Part]]]:
    """Group parts of similar length; each group has the length that its program is compiled for."""
    buckets: dict[int, list[Part]] = {}
    for part in parts:
        buckets.setdefault(shapes.length_bucket(part[1]), []).append(part)
    return sorted(buckets.items(), key=lambda bucket: bucket[0])


def make_chunk(
    parts: Sequence[Part],
    sizes: Sizes,
    spec: EngineSpec,
    images: ImageStore | None = None,
) -> Chunk:
    """Pack the next tokens of some requests; images: see plan_parts."""
    rows, length, n, width = sizes
    groups = len(spec.kv_layout.groups)
    tokens, positions, cell_indices, adapter_slots = (np.zeros(n, np.int32) for _ in range(4))
    begins = np.full(n, NO_IMAGE, np.int32)
    cells = Cells(np.full((groups, n), spec.pages, np.int32), np.zeros(n, np.int32))
    token_indices = np.zeros((rows, length), np.int32)
    starts, lengths = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    begin = 0
    for row, (prefilling, count) in enumerate(parts):
        start, end = prefilling.prefilled, begin + count
        indices = np.arange(start, start + count)
        tokens[begin:end] = prefilling.token_ids[start : start + count]
        positions[begin:end] = indices
        cell_indices[begin:end] = row * length + np.arange(count)
        token_indices[row, :count] = np.arange(begin, end)[:length]
        cells.pages[:, begin:end] = prefilling.table[:, indices // spec.page_tokens]
        cells.offsets[begin:end] = indices % spec.page_tokens
        starts[row], lengths[row] = start, count
        adapter_slots[begin:end] = prefilling.adapter_slot
        if images is not None:
            begins[begin:end] = images.begins(prefilling.token_ids)[indices]
        begin = end
    tables = np.full((rows, groups, width), spec.pages, np.int32)
    for row, (prefilling, _) in enumerate(parts):
        tables[row] = prefilling.table[:, :width]
    embedded = None
    if images is not None and images.has_any(tokens):
        embedded = begins, images.embeddings(tokens)
    args = PrefillArgs(
        tokens if images is None else images.plain(tokens),
        positions,
        token_indices,
        cell_indices,
        starts,
        lengths,
        tables,
        None if spec.room is None else adapter_slots,
        embedded,
        state_slots(parts, rows, spec) if spec.model.delta else None,
        cells if images is None and spec.prefills_in_pages else None,
    )
    return Chunk(parts=parts, args=args, cells=cells)


def state_slots(parts: Sequence[Part], rows: int, spec: EngineSpec) -> IntArray:
    """Return the slots of the states of a chunk's sequences, [rows]; padding is in no slot."""
    return pad_to(rows, [p.slot_index for p, _ in parts], spec.total_slots)


class SlotInsert(NamedTuple):
    """A prefilled request, whose logits are inserted into its slot."""

    row: int  # of its leader in the chunk
    leader: Prefilling
    target: Prefilling  # the leader, or one of its followers


def slot_inserts(
    done: Iterable[tuple[int, Prefilling]], spec: EngineSpec
) -> list[list[SlotInsert]]:
    """Return the requests of each insert; inserted_sizes bounds the number of one insert.

    done: leaders whose last token a chunk holds, each with its row. Requests that only score are
    not inserted.
    """
    every = [
        SlotInsert(row, p, target)
        for row, p in done
        for target in (p, *p.followers)
        if not target.live.only_scores
    ]
    most = inserted_sizes(spec)[-1]
    return [every[i : i + most] for i in range(0, max(len(every), 1), most)]


def insert_args(
    cells: Cells,
    inserted: Sequence[SlotInsert],
    spec: EngineSpec,
    seed: int,
    states: IntArray | None = None,
    *,
    size: int = 0,
    num_copies: int = 0,
) -> InsertArgs:
    """Return the targets of a chunk: pages for tokens, last pages for followers, slots for logits.

    inserted: of slot_inserts. states: see state_slots; None: a model without states. size,
    num_copies: minimum sizes of what is inserted into slots, and of the copies of pages.
    """
    copies = [
        (int(a), int(b))
        for _, leader, target in inserted
        if target is not leader and len(leader.token_ids) % spec.page_tokens
        for a, b in zip(*(_last_pages(x, spec) for x in (leader, target)), strict=True)
    ]
    size = max(size, next(s for s in inserted_sizes(spec) if s >= len(inserted)))
    num_copies = max(num_copies, next(n for n in copied_sizes(size, spec) if n >= len(copies)))
    return InsertArgs(
        pages=cells.pages,
        offsets=cells.offsets,
        sources=pad_to(num_copies, [a for a, _ in copies], 0),
        targets=pad_to(num_copies, [b for _, b in copies], spec.pages),
        rows=pad_to(size, [p.row for p in inserted], 0),
        slots=pad_to(size, [p.target.slot_index for p in inserted], spec.total_slots),
        slot_params=slot_params_of([p.target.live for p in inserted], size, seed),
        state_slots=states,
    )


def inserted_sizes(spec: EngineSpec) -> tuple[int, ...]:
    """Return the numbers of slots that inserts are compiled for, ascending. With few programs: the
    maximum, and a small number if the maximum moves many logits."""
    largest = spec.total_slots
    if not spec.has_few_prefills:
        sizes = [1]
        while sizes[-1] < largest:
            sizes.append(4 * sizes[-1])
        return tuple(sizes)
    if spec.prefills_in_pages:
        largest = min(largest, shapes.MAX_SEQUENCES)  # more take several inserts
    small = largest * spec.model.vocab <= MANY_LOGITS
    return (largest,) if small or largest <= FEW_SLOTS else (FEW_SLOTS, largest)


def copied_sizes(size: int, spec: EngineSpec) -> tuple[int, ...]:
    """Return the numbers of page copies that inserts into `size` slots are compiled for: the
    maximum, and 0 where that saves more than a program costs."""
    most = size * len(spec.kv_layout.groups)
    return (most,) if spec.prefills_in_pages else (0, most)


def _last_pages(prefilling: Prefilling, spec: EngineSpec) -> IntArray:
    """Return the page of a request's last token in each group, [groups]."""
    return prefilling.table[:, (len(prefilling.token_ids) - 1) // spec.page_tokens]


def saved_tokens(prefilling: Prefilling, kv: Any) -> int:
    """Return the number of a request's tokens for which saved KV is used."""
    return min(kv.shape[2], len(prefilling.token_ids) - 1)


def saved_chunk(prefilling: Prefilling, kv: Any, spec: EngineSpec) -> tuple[int, Prefix, Cells]:
    """Return saved KV (decoding.kv_of_pages) as a chunk of a request: its number of tokens, the
    prefix, and the target cells. The last token is left out: its logits must be computed."""
    n = saved_tokens(prefilling, kv)
    bucket = shapes.coarse_bucket if spec.cpu_attention else shapes.tokens_bucket
    size = bucket(max(n, 1), spec.max_length)
    indices = np.arange(n)
    pages = np.full((len(prefilling.table), size), spec.pages, np.int32)
    pages[:, :n] = prefilling.table[:, indices // spec.page_tokens]
    cells = Cells(pages, pad_to(size, indices % spec.page_tokens, 0))
    padded = np.zeros((*kv.shape[:2], size, *kv.shape[3:]), kv.dtype)
    padded[:, :, :n] = kv[:, :, :n]
    keys = tuple(jnp.asarray(padded[i, 0]) for i in range(len(padded)))
    second = padded[:, 1] if padded.shape[1] == 2 else padded[:, 0, :, :, :0]
    values = tuple(jnp.asarray(layer) for layer in second)
    logits = jnp.zeros((1, spec.model.vocab), jnp.float32)
    return n, Prefix(NewKV(keys, values), logits), cells


def slot_params_of(requests: Sequence[LiveRequest], size: int, seed: int) -> SlotParams:
    """Return the sampling parameters of requests as arrays [size]; the rest is padding."""
    given = [live.request for live in requests]
    sampling = [r.sampling for r in given]
    ids = np.zeros((size, 3), np.int32)
    stops = np.full((size, MAX_STOP_TOKENS), -1, np.int32)
    if given:
        ids[: len(given), :2] = np.array([r.key for r in given], np.int32)
        ids[: len(given), 2] = [r.branch for r in given]
        stops[: len(given)] = [pad_stop_ids(r.stop_token_ids) for r in given]
    return SlotParams(
        Controls(
            pad_to(size, [s.temperature for s in sampling], 1.0, np.float32),
            pad_to(size, [s.top_k for s in sampling], 0),
            pad_to(size, [s.top_p for s in sampling], 1.0, np.float32),
            pad_to(size, [s.min_p for s in sampling], 0.0, np.float32),
        ),
        np.asarray(request_keys(seed, ids)),
        stops,
        pad_to(size, [live.max_new for live in requests], 1),
        pad_to(size, [r.forced_length is not None for r in given], False, np.bool_),
    )


def inserts_of(
    chunk: Chunk, done: Sequence[tuple[int, Prefilling]], spec: EngineSpec, seed: int
) -> list[InsertArgs]:
    """Return the inserts of a computed chunk: several if many requests begin.

    done: the requests that the chunk completes, each with its sequence in the chunk.
    """
    return [
        insert_args(chunk.unwritten, inserted, spec, seed, chunk.args.slots)
        for inserted in slot_inserts(done, spec)
    ]


def filled(cache: KvCache, part: Part, *, hidden: bool = False) -> bool:
    """Take pages for a request's next tokens; return False if there are too few.

    hidden: include the pages that its own later tokens do not see.
    """
    (prefilling, count), form = part, cache.form
    end = prefilling.prefilled + count
    first = prefilling.prefilled // form.page_tokens if hidden else form.first_pages(end)
    return cache.fill(prefilling.table, first, end)


def keep_pages(cache: KvCache, weights: WeightsInUse, chunk: Chunk) -> None:
    """Store the full pages of a prefilled chunk, and release the pages that windows hide from all
    later tokens."""
    for prefilling, _ in chunk.parts:
        table, used = prefilling.table, weights.of(prefilling.request)
        hidden = cache.form.hidden(table, prefilling.prefilled)
        done = prefilling.prefilled == len(prefilling.token_ids)
        if prefilling.kv_version == used.version and (done or hidden.any()):
            known = prefilling.token_ids[: prefilling.prefilled]
            cache.prefixes.put(known, table, used.salt)
        cache.release(table, hidden)


def has_usable_kv(prefilling: Prefilling, spec: EngineSpec, version: int) -> bool:
    """Return whether the saved KV of a request, whose weights have this version, can be used."""
    saved = prefilling.live.partial
    if saved is None or saved.kv is None or spec.model.delta:
        return False  # states of gated delta nets are not saved: prefilled again
    if prefilling.scores is not None:
        return False  # prefilled again, for its log-probs
    # a window would see pages that were saved only in part
    whole = saved.kv_page_tokens in (0, spec.page_tokens)
    return whole and saved.kv_version == version


# ---- prefills that score prompts
# Token i's result is the log-prob of token i + 1, so the last token of a prompt is not scored.


def divided_parts(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Return the parts without a scored token, and the others."""

    def is_scored(part: Part) -> bool:
        prefilling, count = part
        begin, scores = prefilling.prefilled, prefilling.scores
        return scores is not None and len(scores.scored(begin, begin + count)) > 0

    plain = [part for part in parts if not is_scored(part)]
    return plain, [part for part in parts if is_scored(part)]


def score_args(chunk: Chunk, images: ImageStore | None) -> tuple[ScoreArgs, int]:
    """Return the arguments of a scoring prefill of this chunk, all of whose requests ask for
    log-probs, and the number of likeliest tokens that it returns. Call before Chunk.advance."""
    indices, targets, rows, begin = list[IntArray](), list[IntArray](), list[IntArray](), 0
    logprobs = [p.scores.request for p, _ in chunk.parts if p.scores is not None]
    size = named_size(max(len(one.ids) for one in logprobs))
    ids = np.zeros((len(chunk.args.lengths), size), np.int32)
    for row, (prefilling, _) in enumerate(chunk.parts):
        scored = np.asarray(_scored(chunk, row), np.int32)
        after = prefilling.token_ids[scored + 1]
        indices.append(scored - prefilling.prefilled + begin)
        targets.append(after if images is None else images.plain(after))
        rows.append(np.full(len(scored), row, np.int32))
        ids[row, : len(logprobs[row].ids)] = logprobs[row].ids
        begin += chunk.parts[row][1]
    n = len(chunk.args.token_ids)
    args = ScoreArgs(
        indices=pad_to(n, np.concatenate(indices), 0),
        count=np.int32(sum(map(len, indices))),
        targets=pad_to(n, np.concatenate(targets), 0),
        rows=pad_to(n, np.concatenate(rows), 0),
        ids=ids,
    )
    return args, named_size(max(one.top for one in logprobs))


def expect_scores(chunk: Chunk, scores: TokenScores) -> None:
    """Give each request of a chunk its part of the results. Call before Chunk.advance."""
    begin = 0
    for row, (prefilling, _) in enumerate(chunk.parts):
        scored = _scored(chunk, row)
        assert prefilling.scores is not None
        rows = slice(begin, begin + len(scored))
        prefilling.scores.expect(scored.start + 1, rows, scores)
        begin = rows.stop


def _scored(chunk: Chunk, row: int) -> range:
    """Return the tokens of a part that are scored, as indices of its sequence."""
    prefilling, count = chunk.parts[row]
    assert prefilling.scores is not None, "all requests of the chunk want log-probs"
    return prefilling.scores.scored(prefilling.prefilled, prefilling.prefilled + count)
