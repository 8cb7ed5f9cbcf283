"""The trainer's update against what the card can do, and the experts' products alone."""

import time

import numpy as np
from proof.shared import Compiled, Work, fastest_s, memory_of, params_of, spec_of

from jaxrl_async.config import schema


def train(work: Work) -> None:
    """Make updates of 32,768 tokens, eight sequences in each packed row of 4,096; the argument is
    model.attention."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.mesh import make_slices
    from jaxrl_async.trainer.flops import train_flops
    from jaxrl_async.trainer.learning_settings import LearningSettings
    from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
    from jaxrl_async.trainer.pack import TrainSequence, pack

    compiled, device, spec = Compiled(), jax.devices()[0], spec_of(work)
    row, length, count = (64, 32, 8) if work.tiny else (4096, 512, 64)
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 4
    sequences = [
        TrainSequence(
            token_ids=rng.integers(0, spec.vocab, length, dtype=np.int32),
            mask=mask,
            behavior_logprobs=np.where(mask, -np.log(spec.vocab), 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.where(mask, rng.standard_normal(), 0.0).astype(np.float32),
        )
        for _ in range(count)
    ]
    batch = pack(sequences, row)
    settings = LearningSettings(
        mesh=make_slices(schema.MeshSection(colocated=True)).trainer,
        trainer=schema.TrainerSection(micro_batch_tokens=2 * row),
        row_length=row,
        dtype=jnp.dtype("bfloat16"),
        remat="layer",
        attention=work.argument,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=1000)
    state = step.init(params_of(spec, jnp.float32))
    report: dict[str, float] = {}

    def update() -> None:
        nonlocal state, report
        state, report = step.update(state, PolicyData(batch))
        jax.block_until_ready(state)

    began = time.perf_counter()
    update()
    first = {"seconds": round(time.perf_counter() - began, 1), **compiled.facts}
    work.report("first update", {**first, **memory_of(device)})
    taken = fastest_s(update, 3)
    flops = train_flops(spec, batch, reference=False)
    tokens = int(np.count_nonzero(batch.segment_ids))
    work.report(
        "update",
        {
            "attention": work.argument,
            "tokens": tokens,
            "seconds": round(taken, 4),
            "tokens_per_s": round(tokens / taken),
            "mfu_of_measured": round(flops / taken / work.ceiling("flops"), 4),
            "model_tflops": round(flops / taken / 1e12, 2),
            "grad_norm": float(report.get("train/grad_norm", np.nan)),
            "ok": all(np.isfinite(float(v)) for v in report.values()),
            **memory_of(device),
        },
    )


def experts(work: Work) -> None:
    """Multiply sorted rows with their experts' matrices, forward and with gradients."""
    import jax
    import jax.numpy as jnp

    from jaxrl_async.model.grouped import grouped_product

    n, count, inner, outer = (256, 4, 64, 128) if work.tiny else (16_384, 64, 2048, 768)
    rows = jax.random.normal(jax.random.key(0), (n, inner), jnp.bfloat16)
    matrices = jax.random.normal(jax.random.key(1), (count, inner, outer), jnp.bfloat16)
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(n, [1 / count] * count), jnp.int32)
    forward = jax.jit(lambda x, w: grouped_product(x, w, sizes, jnp.bfloat16))
    both = jax.jit(
        jax.grad(
            lambda x, w: jnp.sum(
                grouped_product(x, w, sizes, jnp.bfloat16).astype(jnp.float32) ** 2
            ),
            (0, 1),
        )
    )
    peak = work.ceiling("flops")
    for name, function, products in (("forward", forward, 1), ("with gradients", both, 3)):

        def several(function: object = function) -> None:
            jax.block_until_ready([function(rows, matrices) for _ in range(4)])  # type: ignore[operator]

        several()
        rate = 4 * products * 2.0 * n * inner * outer / fastest_s(several, 3)
        facts = {"experts": count, "rows": n, "tflops": rate / 1e12, "of_measured": rate / peak}
        work.report(name, {**facts, **memory_of(jax.devices()[0])})
