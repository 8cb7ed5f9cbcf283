"""The arrays of a decode block, and KV read back from the pages."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.model import cache
from jaxrl_async.model.kernels import MAX_RAGGED_PAGES
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.kv_cache import Table, TableForm
from jaxrl_async.sampler.batch.sequence import Running
from jaxrl_async.sampler.batch.shapes import pad_to
from jaxrl_async.sampler.batch.shaping_args import empty_shaping, steps_of
from jaxrl_async.sampler.batch.slots import Slots
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.logit_shaping import Shaping
from jaxrl_async.sampler.device.program_arguments import DecodeArgs
from jaxrl_async.sampler.device.sampling import AnyArray, Mix
from jaxrl_async.types import IntArray


def form_of(spec: EngineSpec) -> TableForm:
    """Return the form of an engine's tables, as wide as the widest table of a block."""
    longest = shapes.steps_of_half(spec.num_pages(spec.max_length))
    return TableForm(
        layout=spec.kv_layout,
        page_tokens=spec.page_tokens,
        width=longest + spec.num_pages(spec.block) + 1,
        no_page=spec.pages,
    )


def decode_args(
    rows: Sequence[Running],
    reserve: Sequence[Running],
    slots: Slots,
    spec: EngineSpec,
    shaping: Shaping | None = None,
) -> tuple[DecodeArgs, int]:
    """Return the arguments of a block, and the number of pages that hold the longest row's tokens.

    rows: requests that decode. reserve: requests that take over ended rows, in this order.
    shaping: of all of them (shaping_of).
    """
    longest = max(int(slots.lengths[r.slot_index]) for r in (*rows, *reserve))
    context_pages = context_pages_of(spec, longest)
    num_rows = padded_rows(spec, len(rows))
    args = DecodeArgs(
        rows=pad_to(num_rows, [r.slot_index for r in rows], spec.total_slots),
        reserve=pad_to(spec.reserve, [r.slot_index for r in reserve], 0),
        num_reserve=np.int32(len(reserve)),
        lengths=slots.lengths.copy(),
        num_sampled=slots.num_sampled.copy(),
        tables=slots.tables[:, :, : context_pages + spec.num_pages(spec.block) + 1].copy(),
        steps=np.int32(steps_of(rows, spec)),
        adapter_slots=None if spec.room is None else slots.adapter_slots.copy(),
        shaping=shaping,
    )
    return args, context_pages


def named_ids(running: Mapping[int, Running], total_slots: int, size: int) -> IntArray:
    """Return the token ids that the requests in slots name, [total_slots, size]; the rest is 0."""
    ids = np.zeros((total_slots, size), np.int32)
    for slot, one in running.items():
        if one.request.logprobs is not None:
            ids[slot, : len(one.request.logprobs.ids)] = one.request.logprobs.ids
    return ids


def empty_decode_args(
    spec: EngineSpec,
    rows: int,
    context_pages: int,
    mix: Mix = Mix(),  # noqa: B008 (frozen)
) -> DecodeArgs:
    """Return the arguments of a block of `rows` rows that do not decode, to compile it."""
    S, groups = spec.total_slots, len(spec.kv_layout.groups)
    width = context_pages + spec.num_pages(spec.block) + 1
    nothing = np.zeros(S, np.int32)
    return DecodeArgs(
        rows=np.full(rows, S, np.int32),
        reserve=np.zeros(spec.reserve, np.int32),
        num_reserve=np.int32(0),
        lengths=nothing,
        num_sampled=nothing,
        tables=np.full((S, groups, width), spec.pages, np.int32),
        steps=np.int32(spec.block),
        adapter_slots=None if spec.room is None else nothing,
        shaping=empty_shaping(spec, mix),
    )


def padded_rows(spec: EngineSpec, running: int) -> int:
    """Return the number of rows that a block of `running` requests is compiled for."""
    rows_of = shapes.coarse_rows if spec.in_pages else shapes.decode_rows
    return rows_of(running, spec.slots)


def context_pages_of(spec: EngineSpec, longest: int) -> int:
    """Return the pages of context that a block is compiled for, given the longest row's tokens: one
    of few numbers where a row costs only its own tokens."""
    needed = spec.num_pages(longest)
    if not spec.in_pages:
        return shapes.steps_of_half(needed)
    return next(pages for pages in context_widths(spec) if pages >= needed)


def context_widths(spec: EngineSpec) -> tuple[int, ...]:
    """Return the numbers of context pages that blocks which read the pages are compiled for,
    ascending: the maximum; on a TPU also half of the pages that its kernel reads in one step, to
    avoid reading the rest in vain."""
    most, few = spec.num_pages(spec.max_length), MAX_RAGGED_PAGES // 2
    return (few, most) if spec.pads_pages and most > few else (most,)


def kv_of_pages(kv: cache.PagedKV, table: Table, tokens: int, spec: EngineSpec) -> AnyArray:
    """Return the KV of one sequence's tokens on the host, [layers, 2, tokens, N, K]; for latent
    attention [layers, 1, tokens, 1, K]. Tokens that a window hides are 0."""
    width = shapes.steps_of_half(spec.num_pages(tokens))
    keys, values = jax.device_get(_read_kv(spec, kv, table[None, :, :width]))
    sides = [keys, values] if values.shape[-1] else [keys]
    both = np.stack(sides, axis=1)[:, :, :tokens]
    for group in spec.kv_layout.groups:
        begin = group.first_page(tokens, spec.page_tokens) * spec.page_tokens
        both[list(group.layers), :, :begin] = 0
    return both


@partial(jax.jit, static_argnums=0)
def _read_kv(spec: EngineSpec, kv: cache.PagedKV, tables: AnyArray) -> tuple[AnyArray, AnyArray]:
    group_tables = [tables[:, g] for g in range(tables.shape[1])]
    context = cache.gather(kv, spec.kv_layout, group_tables, spec.model.cached_shape[2])
    keys = jnp.stack([jnp.moveaxis(k[0], 2, 0) for k in context.k])
    values = jnp.stack([jnp.swapaxes(v[0], 0, 1) for v in context.v])
    return keys, values
