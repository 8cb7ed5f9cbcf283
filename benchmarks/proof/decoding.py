"""Tokens per second of the sampler against the floor by bytes, its memory, and its programs."""

import time
from typing import Any

import numpy as np
from proof.shared import (
    DECODERS,
    WORSE,
    Compiled,
    Work,
    fastest_s,
    gib,
    memory_of,
    params_of,
    small_spec,
    spec_of,
)

from jaxrl_async.config import schema

LEAST_NATS = 1e-3
"""Difference of log-probs that is always accepted, nats, in the mean."""


def sizes(work: Work, slots: int) -> tuple[int, int, int]:
    """Return slots, tokens of a prompt and of an answer."""
    return (min(slots, 8), 8, 16) if work.tiny else (slots, 128, 256)


def decode(work: Work) -> None:
    """Sample as many answers at the same time as the argument says."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.sampler.sampler import Sampler
    from jaxrl_async.sampler.setup import SamplerSettings

    compiled, device = Compiled(), jax.devices()[0]
    slots, prompt, answer = sizes(work, int(work.argument))
    spec = spec_of(work)
    params = params_of(spec, jnp.bfloat16)
    section = schema.SamplerSection(
        slots=slots,
        reserve=0.0,
        max_length=prompt + answer,
        max_new_tokens=answer,
        block=min(32, answer),
        prefix_cache=False,
        prefill_chunk=8192,
    )
    began = time.perf_counter()
    sampler = Sampler((spec, params), section=section, settings=SamplerSettings(dtype=jnp.bfloat16))
    sent = requests(spec.vocab, [prompt] * slots, [answer] * slots)
    answers = sampler.generate(sent)
    first_s = time.perf_counter() - began
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    plan = sampler.setup.plan
    planned = {
        name: gib(getattr(plan, name))
        for name in dir(plan)
        if name.endswith("_bytes") and name != "page_bytes"
    }
    work.report(
        "first run",
        {
            "seconds": round(first_s, 1),
            "sampler_programs": sampler.stats().compiled_programs,
            **compiled.facts,
            "weights_gib": gib(weights),
            "planned_gib": planned,
            **memory_of(device),
        },
    )
    taken = fastest_s(lambda: sampler.generate(sent), 2)
    # of each step: all weights (an embedding that is the head is read whole), and the keys and
    # values of all contexts, whose mean length is the prompt's and half of the answer's
    context = slots * (prompt + answer / 2)
    floor_s = (weights + context * kv_bytes(spec)) / work.ceiling("bytes_per_s")
    work.report(
        "tokens",
        {
            "slots": slots,
            "tokens_per_s": round(slots * answer / taken),
            "ms_a_step": round(1e3 * taken / answer, 3),
            "floor_ms": round(1e3 * floor_s, 3),
            "share_of_floor": round(floor_s * answer / taken, 3),
            **compiled.facts,
            **memory_of(device),
        },
    )
    sampler.close()
    work.report("mismatch of sampled and trained", mismatch(spec, params, sent[:8], answers[:8]))


def paged(work: Work) -> None:
    """Compare a sampler's log-probs with the trainer's, for small decoders of several families
    whose contexts are several pages long."""
    import jax.numpy as jnp

    from jaxrl_async.sampler.sampler import Sampler
    from jaxrl_async.sampler.setup import SamplerSettings

    compiled = Compiled()
    longest, answer = (96, 16) if work.tiny else (512, 64)
    for name, changes in DECODERS.items():
        spec = small_spec(work, changes)
        params = params_of(spec, jnp.bfloat16)
        section = schema.SamplerSection(slots=8, max_length=longest, max_new_tokens=answer)
        settings = SamplerSettings(dtype=jnp.bfloat16)
        sampler = Sampler((spec, params), section=section, settings=settings)
        prompts = np.linspace(2, longest - answer, 8).astype(int).tolist()
        sent = requests(spec.vocab, prompts, [answer] * 8)
        answers = sampler.generate(sent)
        sampler.close()
        work.report(name, mismatch(spec, params, sent, answers))
    work.report("compiled", compiled.facts)


def kv_bytes(spec: Any) -> int:
    """Return the bytes of a token's keys and values in all layers, in bfloat16."""
    sides, heads, width = spec.cached_shape
    return 2 * int(spec.layers) * sides * heads * width


def requests(vocab: int, prompts: list[int], answers: list[int]) -> list[Any]:
    """Return requests of random tokens whose answers have these lengths."""
    from jaxrl_async.types import Request

    rng = np.random.default_rng(0)
    return [
        Request(
            request_id=f"r{i}",
            token_ids=rng.integers(0, vocab, length).astype(np.int32),
            max_new_tokens=answer,
            key=(i, 0),
            forced_length=answer,
        )
        for i, (length, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def mismatch(spec: Any, params: Any, sent: list[Any], answers: list[Any]) -> dict[str, Any]:
    """Return how far the sampler's log-probs of its tokens are from the trainer's in packed rows,
    both in bfloat16, and how far each is from the reference in float32, nats.

    A sampler is wrong if it is much farther from the reference than the trainer in bfloat16.
    """
    import jax
    import jax.numpy as jnp

    from jaxrl_async.mesh import make_slices
    from jaxrl_async.trainer.learning_settings import LearningSettings
    from jaxrl_async.trainer.logprob_pass import LogprobPass
    from jaxrl_async.trainer.pack import TrainSequence, pack

    sequences = []
    for request, answer in zip(sent, answers, strict=True):
        begin = len(request.token_ids)
        sampled = np.arange(begin + len(answer.token_ids)) >= begin
        logprobs = np.zeros(len(sampled), np.float32)
        logprobs[sampled] = answer.logprobs
        sequences.append(
            TrainSequence(
                token_ids=np.concatenate([request.token_ids, answer.token_ids]).astype(np.int32),
                mask=sampled,
                behavior_logprobs=logprobs,
                versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.zeros(len(sampled), np.float32),
            )
        )
    row = 2 * max(len(s.token_ids) for s in sequences)
    batch = pack(sequences, row)
    where = np.asarray(batch.mask, bool)

    def computed(dtype: Any, attention: str, weights: Any) -> Any:
        settings = LearningSettings(
            mesh=make_slices(schema.MeshSection(colocated=True)).trainer,
            trainer=schema.TrainerSection(micro_batch_tokens=2 * row),
            row_length=row,
            dtype=jnp.dtype(dtype),
            attention=attention,
        )
        return LogprobPass(spec, settings).logprobs(weights, batch)[where]

    sampled = batch.behavior_logprobs[where]
    trained = computed("bfloat16", "auto", params)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        true = computed("float32", "reference", wide)
    gap = np.abs(sampled - trained)
    from_true = {"sampled": np.abs(sampled - true), "trained": np.abs(trained - true)}
    means = {f"{name}_from_true": float(x.mean()) for name, x in from_true.items()}
    return {
        "tokens": len(gap),
        "mean_nats": float(gap.mean()),
        "p99_nats": float(np.quantile(gap, 0.99)),
        "most_nats": float(gap.max()),
        **means,
        "ok": means["sampled_from_true"] <= WORSE * means["trained_from_true"] + LEAST_NATS,
    }


def churn(work: Work) -> None:
    """Sample answers of mixed lengths with default settings, twice: what is compiled as contexts
    grow, and for how long the sampler pauses for it."""
    import jax.numpy as jnp

    from jaxrl_async.sampler.sampler import Sampler
    from jaxrl_async.sampler.setup import SamplerSettings

    compiled = Compiled()
    spec = spec_of(work, layers=min(4, work.shape["layers"]))
    longest, slots = (64, 8) if work.tiny else (1024, 64)
    section = schema.SamplerSection(slots=slots, max_length=longest, max_new_tokens=longest // 2)
    params = params_of(spec, jnp.bfloat16)
    sampler = Sampler((spec, params), section=section, settings=SamplerSettings(dtype=jnp.bfloat16))
    rng = np.random.default_rng(0)
    prompts, answers = rng.integers(4, longest // 2, (2, 2 * slots if work.tiny else 3 * slots))
    sent = requests(spec.vocab, prompts.tolist(), answers.tolist())
    taken = [fastest_s(lambda: sampler.generate(sent), 1) for _ in range(2)]
    work.report(
        "programs",
        {
            "layers": spec.layers,
            "sampler_programs": sampler.stats().compiled_programs,
            **compiled.facts,
            "first_s": round(taken[0], 1),
            "second_s": round(taken[1], 1),
            "tokens_per_s": round(int(answers.sum()) / taken[1]),
        },
    )
    sampler.close()
