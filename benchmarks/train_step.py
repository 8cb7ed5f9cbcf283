"""Seconds of one GRPO update: 64 sequences of 96 tokens (32 of prompt), packed, AdamW included.

The share of the peak counts the model's FLOPs (train_flops) against a square matrix product
measured on the same device.
"""

import argparse

import jax
import numpy as np
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    make_params,
    measure,
    options,
    parser,
    report,
)

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.rates import measured_peak_flops
from jaxrl_async.trainer.flops import train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.types import PackedBatch

LENGTH = 96
"""Tokens of a sequence, and of a packed row."""


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    peak = measured_peak_flops(jax.devices()[0])
    rows = [
        {"model": model, "remat": remat} | one_row(MODELS[model], remat, peak, args)
        for model in args.models
        for remat in args.remat
    ]
    report("train_step", rows, args)


def one_row(spec: ModelSpec, remat: str, peak: float, args: argparse.Namespace) -> Row:
    """Update again and again from the same batch; the state moves on."""
    batch = random_batch(spec.vocab, args.sequences)
    settings = LearningSettings(
        mesh=make_slices(schema.MeshSection(colocated=True)).trainer,
        trainer=schema.TrainerSection(micro_batch_tokens=args.micro_batch_tokens),
        row_length=LENGTH,
        remat=remat,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=1000)
    state = step.init(make_params(spec))

    def update() -> None:
        nonlocal state
        state, _ = step.update(state, PolicyData(batch))
        jax.block_until_ready(state)

    taken = measure(update, args.repeats)
    flops = train_flops(spec, batch, reference=False)
    return {
        "micro_batches": -(-len(batch.mask) // step.micro_rows),
        "tokens": int(np.count_nonzero(batch.segment_ids)),
        "tokens_per_s": np.count_nonzero(batch.segment_ids) / taken.median,
        "gflop_per_s": flops / taken.median / 1e9,
        "share_of_peak": flops / taken.median / peak,
        **columns(taken),
    }


def random_batch(vocab: int, count: int, seed: int = 0) -> PackedBatch:
    """`count` sequences of LENGTH random tokens, of which the policy drew all but the prompt."""
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) >= PROMPT_TOKENS
    return pack(
        [
            TrainSequence(
                token_ids=rng.integers(0, vocab, LENGTH, dtype=np.int32),
                mask=mask,
                behavior_logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, rng.standard_normal(), 0.0).astype(np.float32),
            )
            for _ in range(count)
        ],
        LENGTH,
    )


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--sequences", type=int, default=64)
    words.add_argument("--micro-batch-tokens", type=int, default=64 * LENGTH)
    words.add_argument("--remat", nargs="+", choices=["none", "layer", "dots"], default=["none"])
    args = options(words)
    if args.quick:
        args.sequences, args.micro_batch_tokens = 4, 4 * LENGTH
    return args


if __name__ == "__main__":
    main()
