"""New weights in a batch, of the base or of one adapter, and their effect on running requests.

Sampled tokens stay (continue, recompute) or are discarded (restart); the KV stays or is recomputed.
Used only by the sampler's thread, between two blocks.
"""

from jaxrl_async.sampler.batch.adapter_places import PlacedAdapter
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.prompt_scores import scores_for
from jaxrl_async.sampler.batch.sequence import Placed, Prefilling, Running


def new_version(batch: Batch, version: int) -> None:
    """Use this version of the base from now on; KV of earlier versions is no longer shared."""
    batch.cache.prefixes.clear()
    batch.weights.base = PlacedAdapter(version=version)
    _renew(batch, "", version)


def new_adapter(batch: Batch, new: PlacedAdapter) -> None:
    """Use this version of an adapter from now on; KV of its earlier one is no longer shared."""
    before = batch.weights.adapters.loaded.get(new.name)
    if before is not None:
        batch.cache.prefixes.forget(before.salt)
    batch.weights.adapters.put(new)
    _renew(batch, new.name, new.version)


def drop_adapter(batch: Batch, name: str) -> None:
    """Free the place of an adapter that no request uses."""
    batch.cache.prefixes.forget(batch.weights.adapters.loaded[name].salt)
    batch.weights.adapters.take_out(name)


def _renew(batch: Batch, adapter: str, version: int) -> None:
    for placed in placed_of(batch, adapter):
        if batch.placed.get(placed.slot_index) is not placed:
            continue  # a follower of one that starts again
        if isinstance(placed, Prefilling) and placed.scores is not None:
            batch.leave(placed)  # its log-probs are all by the same weights
            batch.queue.put_back([placed.live])
            continue
        begun = isinstance(placed, Running) or placed.prefilled
        placed.kv_version = None if begun else version


def under_way(batch: Batch, adapter: str = "") -> bool:
    """Whether a request of an adapter has a slot, or was preempted with tokens of its current
    weights."""
    version = batch.weights.version_of(adapter)
    return bool(placed_of(batch, adapter) or batch.admission.begun(adapter, version))


def placed_of(batch: Batch, adapter: str) -> list[Placed]:
    """Return the requests with a slot that use this adapter, oldest first."""
    return [p for p in batch.placed.values() if p.request.adapter == adapter]


def recompute(batch: Batch, adapter: str = "") -> None:
    """Recompute all KV of an adapter's requests with its current weights; sampled tokens stay."""
    for placed in placed_of(batch, adapter):
        used = batch.weights.of(placed.request)
        if isinstance(placed, Running):
            slot, live = placed.slot_index, placed.live
            lost = int(batch.slots.lengths[slot])
            live.partial = live.as_partial(batch.output(placed), batch.seed)
            batch.placed[slot] = Prefilling(
                live=live,
                slot_index=slot,
                order=placed.order,
                token_ids=live.known_tokens,
                table=batch.slots.free(slot),
                kv_version=used.version,
                place=used.place,
            )
        else:
            lost = placed.prefilled
            placed.prefilled, placed.kv_version = 0, used.version
            placed.scores = scores_for(placed.request, placed.live.partial, used.version)
        batch.stats = batch.stats.plus(recomputed_tokens=lost)


def restart(batch: Batch, adapter: str = "") -> None:
    """Restart an adapter's unfinished requests from their prompts, oldest first."""
    begun = placed_of(batch, adapter)
    for placed in begun:
        drawn = len(batch.output(placed).token_ids)
        batch.stats = batch.stats.plus(restarted=1, discarded_tokens=drawn)
        if isinstance(placed, Prefilling):
            placed.followers = []
    for placed in begun:
        batch.leave(placed)
        placed.live.partial = None
    batch.queue.put_back([p.live for p in sorted(begun, key=lambda p: p.order)])
