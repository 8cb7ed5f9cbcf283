"""Arrays of what shapes the logits of a block's requests (logit_shaping.py). Pure host code."""

from collections.abc import Iterable, Mapping

import numpy as np

from jaxrl_async.sampler.batch.sequence import Running
from jaxrl_async.sampler.batch.slots import Slots, Span
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.logit_shaping import Penalties, Shaping
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.types import MAX_BIASED

MOST_WAITED = 4
"""Maximum steps of a block for the sake of requests without a constraint, while others wait: a
larger number saves little (the host's time between two blocks is divided by it), and slows the
others in proportion."""
ALL_STEPS = 2**30
"""Shaping.steps of a slot that takes part in all steps of a block."""


def empty_shaping(spec: EngineSpec, mix: Mix) -> Shaping | None:
    """Return arrays that change no slot's logits; None if the mix is not shaped."""
    if not (mix.shaped or mix.penalized):
        return None
    S, V = spec.total_slots, spec.model.vocab
    zeros = np.zeros(S, np.float32)
    penalties = Penalties(
        frequency=zeros,
        presence=zeros.copy(),
        repetition=np.ones(S, np.float32),
        token_ids=np.full((S, spec.max_length), V, np.int32),
        prompts=np.zeros(S, np.int32),
    )
    return Shaping(
        allowed=np.full((S, -(-V // 32)), 2**32 - 1, np.uint32),
        forced=np.full((S, spec.block), -1, np.int32),
        steps=np.full(S, ALL_STEPS, np.int32),
        bias_ids=np.full((S, MAX_BIASED), V, np.int32),
        bias=np.zeros((S, MAX_BIASED), np.float32),
        min_tokens=np.zeros(S, np.int32),
        penalties=penalties if mix.penalized else None,
    )


def shaping_of(
    running: Mapping[int, Running], slots: Slots, spec: EngineSpec, mix: Mix
) -> Shaping | None:
    """Return what shapes a block's requests, by slot index; None if the mix is not shaped."""
    args = empty_shaping(spec, mix)
    if args is None:
        return None
    for slot, one in running.items():
        if one.request.shaping is not None:
            _write(args, slot, one, slots, spec)
    return args


def _write(args: Shaping, slot: int, one: Running, slots: Slots, spec: EngineSpec) -> None:
    shaping, matching = one.request.shaping, one.matching
    assert shaping is not None
    for column, (token, value) in enumerate(shaping.bias):
        args.bias_ids[slot, column], args.bias[slot, column] = token, value
    if matching is None:
        args.min_tokens[slot] = shaping.min_tokens
    else:  # whose mask allows or forbids stop tokens
        args.allowed[slot] = matching.mask()
        forced = matching.forced[: spec.block]
        args.forced[slot, : len(forced)] = forced
        args.steps[slot] = len(matching.forced) + 1
    if args.penalties is not None:
        penalties, prompt = args.penalties, one.request.token_ids
        penalties.frequency[slot] = shaping.frequency_penalty
        penalties.presence[slot] = shaping.presence_penalty
        penalties.repetition[slot] = shaping.repetition_penalty
        answer = slots.tokens[slot, : slots.num_sampled[slot]]
        whole = np.concatenate([prompt, answer])
        penalties.token_ids[slot, : len(whole)] = whole
        penalties.prompts[slot] = len(prompt)


def take_masks(span: Span, slots: Slots, one: Running) -> None:
    """Take the tokens of a block into the request's constraint; keep the masks that the device has
    not returned. Raises RolloutError."""
    assert one.matching is not None
    if not one.request.needs_extras:
        for words in one.matching.masks_of(span.end - span.start):
            slots.masks[span.slot].add(words)
    one.matching.take(slots.tokens[span.slot, span.start : span.end].tolist())


def steps_of(rows: Iterable[Running], spec: EngineSpec) -> int:
    """Return the steps of a block. A constrained row makes its certain steps and one more, then
    waits for its next mask: the others make at most MOST_WAITED steps meanwhile, and fewer, the
    more rows would wait."""
    matchings = [r.matching for r in rows]
    steps = [len(m.forced) + 1 for m in matchings if m is not None]
    if not steps:
        return spec.block
    others = len(matchings) - len(steps)
    return min(spec.block, max(*steps, min(MOST_WAITED, -(-others // len(steps)))))
