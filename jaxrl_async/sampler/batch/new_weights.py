"""New weights in a batch, of the base or of one adapter, and their effect on running requests.

Sampled tokens stay (continue, recompute) or are discarded (restart); the KV stays or is recomputed.
Used only by the sampler's thread, between two blocks.
"""

from jaxrl_async.sampler.batch.adapter_slots import LoadedAdapter
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.prompt_scores import scores_for
from jaxrl_async.sampler.batch.sequence import Admitted, Prefilling, Running


def new_version(batch: Batch, version: int) -> None:
    """Use this version of the base from now on; KV of earlier versions is no longer shared."""
    batch.cache.prefixes.clear()
    batch.weights.base = LoadedAdapter(version=version)
    _renew(batch, "", version)


def new_adapter(batch: Batch, new: LoadedAdapter) -> None:
    """Use this version of an adapter from now on; KV of its earlier one is no longer shared."""
    before = batch.weights.adapters.loaded.get(new.name)
    if before is not None:
        batch.cache.prefixes.forget(before.salt)
    batch.weights.adapters.put(new)
    _renew(batch, new.name, new.version)


def drop_adapter(batch: Batch, name: str) -> None:
    """Free the slot of an adapter that no request uses."""
    batch.cache.prefixes.forget(batch.weights.adapters.loaded[name].salt)
    batch.weights.adapters.take_out(name)


def _renew(batch: Batch, adapter: str, version: int) -> None:
    for stage in admitted_of(batch, adapter):
        if batch.admitted.get(stage.slot_index) is not stage:
            continue  # a follower of one that starts again
        if isinstance(stage, Prefilling) and stage.scores is not None:
            batch.leave(stage)  # its log-probs are all by the same weights
            batch.queue.put_back([stage.live])
            continue
        begun = isinstance(stage, Running) or stage.prefilled
        stage.kv_version = None if begun else version


def under_way(batch: Batch, adapter: str = "") -> bool:
    """Return whether a request of an adapter has a slot, or was preempted with tokens of its
    current weights."""
    version = batch.weights.version_of(adapter)
    return bool(admitted_of(batch, adapter) or batch.admission.begun(adapter, version))


def admitted_of(batch: Batch, adapter: str) -> list[Admitted]:
    """Return the requests with a slot that use this adapter, oldest first."""
    return [p for p in batch.admitted.values() if p.request.adapter == adapter]


def recompute(batch: Batch, adapter: str = "") -> None:
    """Recompute all KV of an adapter's requests with its current weights; sampled tokens stay."""
    for stage in admitted_of(batch, adapter):
        used = batch.weights.of(stage.request)
        if isinstance(stage, Running):
            slot, live = stage.slot_index, stage.live
            lost = int(batch.slots.lengths[slot])
            live.partial = live.as_partial(batch.output(stage), batch.seed)
            batch.admitted[slot] = Prefilling(
                live=live,
                slot_index=slot,
                order=stage.order,
                token_ids=live.known_tokens,
                table=batch.slots.free(slot),
                kv_version=used.version,
                adapter_slot=used.slot,
            )
        else:
            lost = stage.prefilled
            stage.prefilled, stage.kv_version = 0, used.version
            stage.scores = scores_for(stage.request, stage.live.partial, used.version)
        batch.stats = batch.stats.plus(recomputed_tokens=lost)


def restart(batch: Batch, adapter: str = "") -> None:
    """Restart an adapter's unfinished requests from their prompts, oldest first."""
    begun = admitted_of(batch, adapter)
    for stage in begun:
        count = len(batch.output(stage).token_ids)
        batch.stats = batch.stats.plus(restarted=1, discarded_tokens=count)
        if isinstance(stage, Prefilling):
            stage.followers = []
    for stage in begun:
        batch.leave(stage)
        stage.live.partial = None
    batch.queue.put_back([p.live for p in sorted(begun, key=lambda p: p.order)])
