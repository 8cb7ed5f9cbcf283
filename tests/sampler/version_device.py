"""An engine of NumPy for the sampler: a KV cell says which weights made it and for which token.

Weights are their version, a whole number. The next token is a hash of the tokens whose cells the
page table names, of the version that made the logits, and of the request's key: whoever gets cells
of other tokens, or logits of other weights, draws other tokens. With a window there is a second
layer: what it sees of its own pages must be what the first one sees there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.families.parts import LayerKind
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.program_arguments import Block, DecodeState, Prefix, SlotParams
from jaxrl_async.sampler.device.sampling import Controls
from jaxrl_async.types import MAX_STOP_TOKENS

VOCAB = 11
FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class TwoLayers:
    """What a sampler asks of a model: a layer that sees everything, and maybe one with a window."""

    kinds: tuple[LayerKind, ...]
    vocab: int = VOCAB
    head_dim: int = 2
    delta: None = None
    latent: None = None
    cached_shape: tuple[int, int, int] = (2, 1, 2)


def mixed(*parts: int) -> int:
    """A hash of whole numbers."""
    found = np.uint64(1469598103934665603)
    with np.errstate(over="ignore"):
        for part in parts:
            found = (found ^ np.uint64(part & 0xFFFFFFFF)) * FACTOR
            found ^= found >> np.uint64(29)
    return int(found >> np.uint64(1))


def logits_of(tokens: Any, version: int) -> int:
    """What stands for the logits after these tokens."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(tokens), FACTOR))
        total = np.sum((np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers)
    return mixed(int(total >> np.uint64(33)), int(total) & 0xFFFFFFFF, len(tokens), version)


def token_of(logits: int, key: Any, position: int) -> int:
    """The token drawn from them."""
    return mixed(logits, logits >> 32, *map(int, key), position) % VOCAB


class VersionDevice:
    """In the place of sampler.engine.Engine. `watch(slot, versions of its cells, version)` is told
    of all that a slot's first token of a block sees."""

    def __init__(self, *, slots: int, reserve: int, max_length: int, pages: int, page_tokens: int,
                 block: int, window: int = 0) -> None:  # fmt: skip
        near = (LayerKind(window=window),) if window else ()
        model: Any = TwoLayers((LayerKind(), *near))
        self.spec = EngineSpec(
            model=model, slots=slots, reserve=reserve, max_length=max_length, pages=pages,
            page_tokens=page_tokens, block=block,
        )  # fmt: skip
        self.num_compiled = 0
        self.watch = lambda slot, versions, version: None

    def prepare(self, params: int) -> int:
        return params

    def init_decode_state(self) -> DecodeState:
        P, G, S = self.spec.pages, self.spec.page_tokens, self.spec.total_slots
        kv = PagedKV(
            (np.full((P, 1, 2, G), -1, np.float32),), (np.full((P, 1, G, 2), -1, np.float32),)
        )
        slot = SlotParams(
            Controls(*(np.zeros(S) for _ in range(4))),
            np.zeros((S, 2), np.uint32),
            np.full((S, MAX_STOP_TOKENS), -1),
            np.ones(S, int),
            np.zeros(S, bool),
        )
        return DecodeState(kv, np.zeros(S, np.int64), slot)

    def cells(self, state: DecodeState, table: Any, count: int) -> tuple[Any, Any]:
        """Versions, and tokens, of the first `count` cells behind a page table [groups, W]: of the
        layer with a window those that what follows sees."""
        versions, tokens = [], []
        for row, window in zip(np.asarray(table), self.spec.windows, strict=True):
            where = np.arange(max(0, count - window + 1) if window else 0, count)
            pages, offsets = row[where // self.spec.page_tokens], where % self.spec.page_tokens
            assert (pages < self.spec.pages).all(), "a page that is seen is not there"
            versions.append(state.kv.k[0][pages, 0, 0, offsets].astype(int))
            tokens.append(state.kv.v[0][pages, 0, offsets, 0].astype(int))
            assert tokens[-1].tolist() == tokens[0][where].tolist(), "cells of other tokens"
        return np.concatenate(versions), tokens[0]

    def prefill(self, weights: int, state: DecodeState, chunk: Any) -> Prefix:
        logits = []
        for indices, start, length, table in zip(
            chunk.token_indices, chunk.starts, chunk.lengths, chunk.tables, strict=True
        ):
            _, before = self.cells(state, table, int(start))
            new = chunk.token_ids[indices[:length]]
            logits.append(logits_of(np.concatenate([before, new]), weights))
        made = np.zeros((len(chunk.token_ids), 1, 2), np.float32)
        made[:, 0, 0] = weights
        tokens = np.zeros_like(made)
        tokens[:, 0, 0] = chunk.token_ids
        layers = len(self.spec.model.kinds)
        return Prefix(NewKV((made,) * layers, (tokens,) * layers), np.array(logits))

    def insert(self, prefix: Prefix, state: DecodeState, into: Any) -> DecodeState:
        keys, values = state.kv.k[0], state.kv.v[0]
        for g, pages in enumerate(into.pages):
            real = pages < self.spec.pages
            keys[pages[real], :, :, into.offsets[real]] = np.asarray(prefix.kv.k[g])[real]
            values[pages[real], :, into.offsets[real]] = np.asarray(prefix.kv.v[g])[real]
        for source, target in zip(into.sources, into.targets, strict=True):
            if target < self.spec.pages:
                keys[target], values[target] = keys[source], values[source]
        for i, slot in enumerate(into.slots):
            if slot < self.spec.total_slots:
                state.logits[slot] = prefix.logits[into.rows[i]]
                state.slot_params.keys[slot] = into.slot_params.keys[i]
                state.slot_params.max_new[slot] = into.slot_params.max_new[i]
                state.slot_params.stop_ids[slot] = into.slot_params.stop_ids[i]
        return state

    def generate(
        self, weights: int, state: DecodeState, run: Any, *, context_pages: int, mix: Any
    ) -> tuple[DecodeState, Block]:
        S, G, params = self.spec.total_slots, self.spec.page_tokens, state.slot_params
        rows, waiting = list(run.rows), list(run.reserve[: run.num_reserve])
        shape = (len(rows), self.spec.block)
        tokens, owners = np.zeros(shape, np.int32), np.full(shape, S, np.int32)
        ends, lengths, sampled = np.zeros(shape, bool), run.lengths.copy(), run.num_sampled.copy()
        for slot in [r for r in rows if r < S] + waiting:
            seen, _ = self.cells(state, run.tables[slot], int(lengths[slot]))
            self.watch(int(slot), seen, weights)
        steps = 0
        for step in range(int(run.steps)):
            for row, slot in enumerate(rows):
                if slot == S and waiting:
                    rows[row] = slot = waiting.pop(0)
                if slot == S:
                    continue
                steps = step + 1
                at = int(lengths[slot])
                token = token_of(int(state.logits[slot]), params.keys[slot], at)
                tokens[row, step], owners[row, step] = token, slot
                pages, offset = run.tables[slot, :, at // G], at % G
                state.kv.k[0][pages, 0, 0, offset] = weights
                state.kv.v[0][pages, 0, offset, 0] = token
                lengths[slot], sampled[slot] = at + 1, sampled[slot] + 1
                _, context = self.cells(state, run.tables[slot], at + 1)
                state.logits[slot] = logits_of(context, weights)
                if sampled[slot] >= params.max_new[slot] or token in params.stop_ids[slot]:
                    ends[row, step], rows[row] = True, S
        logprobs = np.zeros(shape, np.float32)
        return state, Block(
            tokens=tokens, logprobs=logprobs, owners=owners, ends=ends, steps=np.int32(steps)
        )
