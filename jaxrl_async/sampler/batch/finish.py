"""Take requests out of a batch: ended, saved as data, or cancelled. Used only by the sampler's
thread, between two blocks."""

from dataclasses import replace

import numpy as np

from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.decoding import kv_of_pages
from jaxrl_async.sampler.batch.sequence import Running, Stage, live_of
from jaxrl_async.types import Partial, TokenRecord


def ended(batch: Batch, running: Running) -> TokenRecord:
    """Take a request out and return its tokens; keep its KV for later turns if the current version
    of the weights computed all of it."""
    output = batch.output(running)
    slot, used = running.slot_index, batch.weights.of(running.request)
    if running.kv_version is not None and running.kv_version == used.version:
        whole = np.concatenate([running.request.token_ids, output.token_ids])
        batch.cache.prefixes.put(whole, batch.slots.tables[slot], used.salt)
    batch.leave(running)
    return output


def request_as_data(batch: Batch, stage: Stage, *, with_kv: bool) -> Partial:
    """Return a request as data. with_kv: include its KV, if one version of the weights computed all
    of it."""
    saved = live_of(stage).as_partial(batch.output(stage), batch.seed)
    if not (with_kv and isinstance(stage, Running) and stage.kv_version is not None):
        return saved
    if batch.spec.model.delta:
        return saved  # KV is of no use without the states of gated delta nets
    slot = stage.slot_index
    tokens = int(batch.slots.lengths[slot])
    kv = kv_of_pages(batch.state.kv, batch.slots.tables[slot], tokens, batch.spec)
    incomplete = batch.cache.form.first_pages(tokens).any()
    return replace(
        saved,
        kv=kv,
        kv_version=stage.kv_version,
        kv_page_tokens=batch.spec.page_tokens if incomplete else 0,
    )


def give_up(batch: Batch, stage: Stage) -> None:
    """Drop a request that its caller cancelled; count its sampled tokens."""
    count = len(batch.output(stage).token_ids)
    batch.stats = batch.stats.plus(cancelled_tokens=count)
    batch.cancel(stage)
