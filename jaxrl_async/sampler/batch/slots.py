"""The host's side of the decode state: the content of each slot, in NumPy. Pure host code.

S slots, decoding and reserve. The device treats both alike: a block's arguments name the slots that
decode.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.sampler.batch.kv_cache import KvCache, Table
from jaxrl_async.sampler.grammar import MaskSets
from jaxrl_async.types import (
    FloatArray,
    IntArray,
    LogprobRequest,
    Partial,
    PositionLogprobs,
    TokenRecord,
)

NamedArrays = tuple[IntArray, FloatArray, FloatArray]
"""Of some tokens: ids and log-probs of the likeliest [n, k], and log-probs of named ids [n, i]."""


class Span(NamedTuple):
    """The tokens that one slot sampled in a block."""

    slot: int
    start: int  # tokens sampled before
    end: int


class Slots:
    """Lengths, page tables and sampled tokens. Changed only by the sampler's thread."""

    def __init__(self, total_slots: int, *, max_new: int, cache: KvCache, vocab: int = 0) -> None:
        """Make empty slots. vocab: number of token ids, for sampling masks; 0: unknown."""
        self.cache, self._vocab = cache, vocab
        self.tables: IntArray = np.stack([cache.form.empty()] * total_slots)  # [S, groups, width]
        self._ends = np.zeros(total_slots, np.int32)  # end of the pages that a slot has
        self._last_pages = np.zeros(
            total_slots, np.int32
        )  # page of the last token, at the last release_hidden
        self.lengths = np.zeros(total_slots, np.int32)
        self.num_sampled = np.zeros(total_slots, np.int32)
        self.logits_versions = np.zeros(total_slots, np.int32)
        self.adapter_slots = np.zeros(total_slots, np.int32)
        self.tokens = np.zeros((total_slots, max_new), np.int32)
        self.logprobs = np.zeros((total_slots, max_new), np.float32)
        self.versions = np.zeros((total_slots, max_new), np.int32)
        self.full_logprobs = np.zeros((total_slots, max_new), np.float32)
        self.masks = [MaskSets(vocab) for _ in range(total_slots)]
        self.named: list[list[NamedArrays]] = [[] for _ in range(total_slots)]  # in order

    def occupy(
        self, slot: int, length: int, table: Table, version: int, adapter_slot: int = 0
    ) -> None:
        """Fill a slot with a sequence of `length` tokens, prefilled by weights of `version` and the
        adapter in `adapter_slot`."""
        self.tables[slot] = table
        self._ends[slot], self._last_pages[slot] = self.cache.form.end(table), 0
        self.lengths[slot], self.num_sampled[slot] = length, 0
        self.logits_versions[slot], self.adapter_slots[slot] = version, adapter_slot
        self.masks[slot], self.named[slot] = MaskSets(self._vocab), []

    def recall(self, slot: int, partial: Partial) -> None:
        """Write the tokens that a sequence sampled before it came to this slot."""
        n = len(partial.token_ids)
        self.tokens[slot, :n], self.logprobs[slot, :n] = partial.token_ids, partial.logprobs
        self.versions[slot, :n], self.num_sampled[slot] = partial.versions, n
        if partial.full_logprobs is not None:
            self.full_logprobs[slot, :n] = partial.full_logprobs
        if partial.kept is not None:
            self.masks[slot].recall(partial.kept)
        if partial.top_logprobs is not None:
            top = partial.top_logprobs
            self.named[slot] = [(top.top_ids, top.top_logprobs, top.id_logprobs)]

    def free(self, slot: int) -> Table:
        """Empty a slot; return its table, whose pages stay held."""
        table = self.tables[slot].copy()
        self.tables[slot] = self.cache.form.no_page
        self.lengths[slot] = self.num_sampled[slot] = self.adapter_slots[slot] = 0
        self.masks[slot], self.named[slot] = MaskSets(self._vocab), []
        return table

    def release_hidden(self, slot: int) -> None:
        """Release the pages that windows hide from all later tokens."""
        form, length = self.cache.form, int(self.lengths[slot])
        last = (length - 1) // form.page_tokens
        if last != self._last_pages[slot]:
            self._last_pages[slot], table = last, self.tables[slot]
            self.cache.release(table, form.hidden(table, length))

    def grow(self, slot: int, steps: int, limit: int) -> bool:
        """Give a slot pages for `steps` more tokens, at most `limit`; return False if the cache has
        too few."""
        begin = int(self._ends[slot])
        end = self.cache.form.num_pages(int(self.lengths[slot]) + min(steps, limit))
        if end <= begin:
            return True
        if not self.cache.grow(self.tables[slot], begin, end):
            return False
        self._ends[slot] = end
        return True

    def output(
        self,
        slot: int,
        *,
        extras: bool,
        masks: bool = False,
        logprobs: LogprobRequest | None = None,
    ) -> TokenRecord:
        """Return a copy of the tokens that a slot's sequence has sampled so far.

        extras: with full log-probs and masks. masks: with masks. logprobs: further log-probs.
        """
        n = int(self.num_sampled[slot])
        named = logprobs is not None and logprobs.names_tokens
        return TokenRecord(
            token_ids=self.tokens[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            full_logprobs=self.full_logprobs[slot, :n].copy() if extras else None,
            kept=self.masks[slot].record() if extras or masks else None,
            top_logprobs=self._named(slot, logprobs) if logprobs is not None and named else None,
        )

    def _named(self, slot: int, request: LogprobRequest) -> PositionLogprobs:
        """Return the log-probs that a request wants of its sampled tokens."""
        top, ids, parts = request.top, len(request.ids), self.named[slot]
        empty = np.zeros((0, top), np.int32), np.zeros((0, top), np.float32)
        return PositionLogprobs(
            logprobs=self.logprobs[slot, : int(self.num_sampled[slot])].copy(),
            top_ids=np.concatenate([empty[0], *(part[0][:, :top] for part in parts)]),
            top_logprobs=np.concatenate([empty[1], *(part[1][:, :top] for part in parts)]),
            id_logprobs=np.concatenate(
                [np.zeros((0, ids), np.float32), *(part[2][:, :ids] for part in parts)]
            ),
        )

    def take(
        self,
        tokens: IntArray,
        logprobs: FloatArray,
        owners: IntArray,
        version: int | IntArray,
        extras: Any = None,
        masked: Collection[int] = (),
        named: Collection[int] = (),
    ) -> list[Span]:
        """Add a block's tokens [R, block] to their slots; return the new tokens of each slot.

        Args:
            tokens: sampled ids.
            logprobs: of these tokens.
            owners: slot of each token.
            version: of the weights that computed the block, of all slots or [S] of each. A slot's
                first token was sampled from earlier logits and has their version.
            extras: sampling.TokenExtras [R, block, ...]; None: no request wants them.
            masked: slots whose requests want masks. Only these store them.
            named: slots whose requests want log-probs of named tokens.
        """
        versions = np.broadcast_to(np.asarray(version, np.int32), len(self.tables))
        flat = owners.reshape(-1)
        order = np.argsort(flat, kind="stable")
        slots, starts, counts = np.unique(flat[order], return_index=True, return_counts=True)
        spans = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if slot >= len(self.tables):
                continue
            indices = order[start : start + count]
            begin = int(self.num_sampled[slot])
            end = begin + int(count)
            self.tokens[slot, begin:end] = tokens.reshape(-1)[indices]
            self.logprobs[slot, begin:end] = logprobs.reshape(-1)[indices]
            self.versions[slot, begin:end] = versions[slot]
            self.versions[slot, begin] = self.logits_versions[slot]
            if extras is not None and slot in masked:
                self.full_logprobs[slot, begin:end] = extras.full_logprobs.reshape(-1)[indices]
                words = extras.kept.reshape(-1, extras.kept.shape[-1])[indices]
                for row in words:
                    self.masks[slot].add(row)
            if extras is not None and extras.named is not None and slot in named:
                values = (x.reshape(owners.size, x.shape[-1])[indices] for x in extras.named)
                self.named[slot].append(tuple(values))
            self.logits_versions[slot] = versions[slot]
            self.num_sampled[slot] = end
            self.lengths[slot] += int(count)
            spans.append(Span(int(slot), begin, end))
        return spans
