"""Arguments and results of the sampler's programs.

Shapes: S slots (decoding and reserve), R rows that decode, Q reserve slots, B sequences of a
prefill, T the longest of them, n tokens, P pages, G tokens a page, C context columns, V vocabulary,
N KV heads, K head width, E stop tokens that a request can have, W pages of the longest table, L
groups of layers, each with a table of its own (model/kv_layout.py). P in a table is no page.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_async.model.cache import NewKV, PagedKV
from jaxrl_async.model.delta_layer import DeltaState
from jaxrl_async.model.spec import Params
from jaxrl_async.sampler.device.sampling import AnyArray, Controls, TokenExtras


class EngineWeights(NamedTuple):
    """A policy's parameters as the programs take them: one tree a layer. Made once per swap."""

    params: Params  # everything but the layers
    layers: list[Params]
    stack: Sequence[Params] = ()  # all adapters, one tree a layer, see model/adapter_stack.py


class Cells(NamedTuple):
    """Where in the pages the tokens of a chunk go."""

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
    tables: AnyArray  # [B, L, C / G] int32, pages of the tokens before
    places: AnyArray | None = None  # [n] int32, place of each token's adapter; 0: it has none
    # where the image of each token begins [n], and its embedding [n, D], as in decoder.TokenRows
    images: tuple[AnyArray, AnyArray] | None = None  # None: the chunk has none
    slots: AnyArray | None = None  # [B] int32, where each one's states are; None: there are none
    cells: Cells | None = None  # where prefill_in_pages writes the tokens; None: insert does


class Prefix(NamedTuple):
    """A prefilled chunk, ready to be inserted; opaque to callers."""

    kv: NewKV | None  # layers of [n, N, K]; None: it is in the pages already
    logits: AnyArray  # [B, V] float32, after each sequence's last token
    routes: AnyArray | None = None  # [n, layers, k] experts of each token, with keeps_routes
    states: tuple[DeltaState, ...] = ()  # [B] after their new tokens, of gated delta nets


class SlotParams(NamedTuple):
    """How a slot's request is sampled and when it ends; arrays over slots or inserted requests."""

    controls: Controls
    keys: AnyArray  # [S, 2] uint32
    stop_ids: AnyArray  # [S, E] int32; -1 matches nothing
    max_new: AnyArray  # [S] int32
    ignores_stop: AnyArray  # [S] bool


class InsertArgs(NamedTuple):
    """Where an insert writes a chunk."""

    pages: AnyArray  # [L, n] int32, pages of each token of the chunk; P: not kept, or padding
    offsets: AnyArray  # [n] int32, index in that page
    sources: AnyArray  # [m] int32, pages that are copied after the chunk is written
    targets: AnyArray  # [m] int32, pages that they are copied to; P is padding
    rows: AnyArray  # [k] int32, the sequence of the chunk whose logits a slot takes
    slots: AnyArray  # [k] int32; S is padding
    slot_params: SlotParams  # [k]
    state_slots: AnyArray | None = None  # [B] int32 that take the chunk's states; S is padding


class DecodeArgs(NamedTuple):
    """Which slots decode in a block."""

    rows: AnyArray  # [R] int32, slot of each row; S is an empty row
    reserve: AnyArray  # [Q] int32, slots that take over rows that end, in this order
    num_reserve: AnyArray  # [] int32
    lengths: AnyArray  # [S] int32, tokens in each slot's pages
    drawn: AnyArray  # [S] int32, tokens drawn so far
    tables: AnyArray  # [S, L, W] int32, each slot's pages, including those that the block will fill
    steps: AnyArray  # [] int32, at most the engine's block
    places: AnyArray | None = None  # [S] int32, place of each slot's adapter; 0: it has none


class DecodeState(NamedTuple):
    """Everything on the device between two blocks. Donated to insert and generate; opaque."""

    kv: PagedKV
    logits: AnyArray  # [S, V] float32: the next token's
    slot_params: SlotParams
    states: tuple[DeltaState, ...] = ()  # [S], of gated delta nets


class Block(NamedTuple):
    """The tokens that a decode block drew: 13 bytes a token, and the extras that were asked for."""

    tokens: AnyArray  # [R, block] int32
    logprobs: AnyArray  # [R, block] float32
    owners: AnyArray  # [R, block] int32, slot that the token belongs to; S: no token was drawn
    ends: AnyArray  # [R, block] bool, a stop token or the last token that its request may draw
    steps: AnyArray  # [] int32, decode steps made
    extras: TokenExtras | None = None  # [R, block, ...]
    routes: AnyArray | None = None  # [R, block, layers, k] the token's experts, with keeps_routes
