"""Arguments and results of the sampler's programs.

Shapes: S slots (decoding and reserve), R rows that decode, Q reserve slots, B sequences of a
prefill, T the longest of them, n tokens, P pages, G tokens a page, C context columns, V vocabulary,
N KV heads, K head width, E stop tokens that a request can have, W pages of the longest table, L
groups of layers, each with its own table (model/kv_layout.py). P in a table is no page.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.delta_layer import DeltaState
from jaxrl_async.model.spec import Params
from jaxrl_async.sampler.device.logit_shaping import Shaping
from jaxrl_async.sampler.device.sampling import AnyArray, Controls, Named, TokenExtras


class EngineWeights(NamedTuple):
    """A policy's parameters in the programs' form: one tree a layer. Made once per swap."""

    params: Params  # all but the layers
    layers: list[Params]
    stack: Sequence[Params] = ()  # all adapters, one tree a layer, see model/adapter_stack.py


class Cells(NamedTuple):
    """The positions of a chunk's tokens in the pages."""

    pages: AnyArray  # [L, n] int32; P: not kept, or padding
    offsets: AnyArray  # [n] int32, index in that page


class PrefillArgs(NamedTuple):
    """New tokens of B sequences, packed."""

    token_ids: AnyArray  # [n] int32
    positions: AnyArray  # [n] int32, position in the sequence
    token_indices: AnyArray  # [B, T] int32, index into n; any index where there is no token
    cell_indices: AnyArray  # [n] int32, each token's index into B * T
    starts: AnyArray  # [B] int32, tokens that the pages hold already
    lengths: AnyArray  # [B] int32, new tokens, >= 1
    tables: AnyArray  # [B, L, C / G] int32, pages of earlier tokens
    adapter_slots: AnyArray | None = None  # [n] int32, of each token; 0: no adapter
    # first token of each token's image [n], and its embedding [n, D], as in decoder.TokenRows
    images: tuple[AnyArray, AnyArray] | None = None  # None: no images
    slots: AnyArray | None = None  # [B] int32, slot of each sequence's states; None: no states
    cells: Cells | None = None  # where prefill_in_pages writes the tokens; None: insert does


class ScoreArgs(NamedTuple):
    """The tokens of a chunk that are scored: the log-prob of the token after each is requested."""

    indices: AnyArray  # [n] int32, index in the chunk; the rest is padding
    count: AnyArray  # [] int32, number of scored tokens
    targets: AnyArray  # [n] int32, the token after each
    rows: AnyArray  # [n] int32, sequence of each in the chunk
    ids: AnyArray  # [B, I] int32, token ids that each sequence names


class TokenScores(NamedTuple):
    """Log-probs after the scored tokens, in their order, under the untempered distribution."""

    logprobs: AnyArray  # [n] float32, of the targets
    named: Named  # [n, ...]


class Prefix(NamedTuple):
    """A prefilled chunk, ready to be inserted; opaque to callers."""

    kv: NewKV | None  # layers of [n, N, K]; None: in the pages already
    logits: AnyArray  # [B, V] float32, after each sequence's last token
    routes: AnyArray | None = None  # [n, layers, k] experts of each token, with keeps_routes
    states: tuple[DeltaState, ...] = ()  # [B] after their new tokens, of gated delta nets


class SlotParams(NamedTuple):
    """Sampling and end conditions of requests; arrays over slots or inserted requests."""

    controls: Controls
    keys: AnyArray  # [S, 2] uint32
    stop_ids: AnyArray  # [S, E] int32; -1 matches nothing
    max_new: AnyArray  # [S] int32
    ignores_stop: AnyArray  # [S] bool


class InsertArgs(NamedTuple):
    """The targets of an insert."""

    pages: AnyArray  # [L, n] int32, pages of each token of the chunk; P: not kept, or padding
    offsets: AnyArray  # [n] int32, index in that page
    sources: AnyArray  # [m] int32, pages that are copied after the chunk is written
    targets: AnyArray  # [m] int32, pages that they are copied to; P is padding
    rows: AnyArray  # [k] int32, the sequence of the chunk whose logits a slot takes
    slots: AnyArray  # [k] int32; S is padding
    slot_params: SlotParams  # [k]
    state_slots: AnyArray | None = None  # [B] int32, slots of the chunk's states; S is padding


class DecodeArgs(NamedTuple):
    """The slots that decode in a block."""

    rows: AnyArray  # [R] int32, slot of each row; S is an empty row
    reserve: AnyArray  # [Q] int32, slots that take over ended rows, in this order
    num_reserve: AnyArray  # [] int32
    lengths: AnyArray  # [S] int32, tokens in each slot's pages
    num_sampled: AnyArray  # [S] int32, tokens sampled so far
    tables: AnyArray  # [S, L, W] int32, each slot's pages, including those that the block will fill
    steps: AnyArray  # [] int32, at most the engine's block
    adapter_slots: AnyArray | None = None  # [S] int32, of each slot; 0: no adapter
    shaping: Shaping | None = None  # of each slot; None: no request has any
    ids: AnyArray | None = None  # [S, I] int32, token ids that each slot names; None: Mix.ids is 0


class DecodeState(NamedTuple):
    """All state on the device between two blocks. Donated to insert and generate; opaque."""

    kv: PagedKV
    logits: AnyArray  # [S, V] float32: the next token's
    slot_params: SlotParams
    states: tuple[DeltaState, ...] = ()  # [S], of gated delta nets


class Block(NamedTuple):
    """The tokens that a decode block sampled: 13 bytes a token, plus the requested extras."""

    tokens: AnyArray  # [R, block] int32
    logprobs: AnyArray  # [R, block] float32
    owners: AnyArray  # [R, block] int32, slot of the token; S: no token
    ends: AnyArray  # [R, block] bool, a stop token or its request's last possible token
    steps: AnyArray  # [] int32, decode steps made
    extras: TokenExtras | None = None  # [R, block, ...]
    routes: AnyArray | None = None  # [R, block, layers, k] the token's experts, with keeps_routes
