"""Time one GRPO update whose contexts share prefixes, with trainer.share_prefixes and without.

    prompt   two groups of 8 answers of 64 tokens to a prompt of 512
    tree     two episodes of 12 contexts: each goes on from an earlier one after one of its turns,
             of a tool's reply of 16 tokens and an answer of 32

Both kinds run in turns. `tokens` are those that are computed.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
from common import MODELS, Row, columns, make_params, options, parser, report, spread

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.types import BoolArray, IntArray, PackedBatch

ROW = 1152
"""Tokens of a packed row: two answers, each with its prompt."""
Contexts = list[tuple[IntArray, BoolArray]]
"""Tokens of each context of an episode, and which of them are trained."""


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    rows = [
        row
        for model in args.models
        for workload in WORKLOADS
        for row in rows_of(model, workload, args)
    ]
    report("shared_prefixes", rows, args)


def rows_of(model: str, workload: str, args: argparse.Namespace) -> list[Row]:
    """Time updates of one workload, apart and shared in turns."""
    spec = MODELS[model]
    sequences = WORKLOADS[workload](np.random.default_rng(0), spec.vocab, args.parts)
    batches = {s: pack(sequences, ROW, share_prefixes=s) for s in (False, True)}
    updates = {s: _update(spec, batches[s], shares=s) for s in (False, True)}
    taken: dict[bool, list[float]] = {False: [], True: []}
    for update in updates.values():
        update()
    for _ in range(args.repeats):
        for shares, update in updates.items():
            start = time.perf_counter()
            update()
            taken[shares].append(time.perf_counter() - start)
    return [
        {
            "model": model,
            "workload": workload,
            "share_prefixes": str(shares).lower(),
            "tokens": int(np.count_nonzero(batches[shares].segment_ids)),
            "rows": len(batches[shares].mask),
            **columns(spread(taken[shares])),
        }
        for shares in (False, True)
    ]


def _update(spec: ModelSpec, batch: PackedBatch, *, shares: bool) -> Callable[[], None]:
    """Return an update from this batch; the state changes each time."""
    settings = LearningSettings(
        mesh=make_slices(schema.MeshSection(colocated=True)).trainer,
        trainer=schema.TrainerSection(micro_batch_tokens=ROW, share_prefixes=shares),
        row_length=ROW,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=1000)
    state = step.init(make_params(spec))

    def update() -> None:
        nonlocal state
        state, _ = step.update(state, PolicyData(batch))
        jax.block_until_ready(state)

    return update


def answers_to_prompts(rng: np.random.Generator, vocab: int, groups: int) -> list[TrainSequence]:
    """Make groups of 8 answers of 64 random tokens to a prompt of 512."""
    sequences = []
    for group in range(groups):
        prompt = _tokens(rng, vocab, 512)
        for _ in range(8):
            tokens = np.concatenate([prompt, _tokens(rng, vocab, 64)])
            trained = np.arange(len(tokens)) >= len(prompt)
            sequences.append(_sequence(rng, [(tokens, trained)], group))
    return sequences


def trees_of_contexts(rng: np.random.Generator, vocab: int, episodes: int) -> list[TrainSequence]:
    """Make episodes of 12 contexts of up to 12 turns behind a prompt of 256 tokens."""
    sequences = []
    for number in range(episodes):
        turns, contexts = [0], []  # of each context that can be gone on from
        tokens = [_tokens(rng, vocab, 256)]
        for _ in range(12):
            left = int(rng.integers(len(tokens)))
            seen = tokens[left][: 256 + 48 * int(rng.integers(turns[left] // 2, turns[left] + 1))]
            seen = np.concatenate([seen, _tokens(rng, vocab, 16)])
            whole = np.concatenate([seen, _tokens(rng, vocab, 32)])
            contexts.append((whole, np.arange(len(whole)) >= len(seen)))
            tokens.append(whole)
            turns.append((len(whole) - 256) // 48)
        sequences.append(_sequence(rng, contexts, number))
    return sequences


WORKLOADS = {"prompt": answers_to_prompts, "tree": trees_of_contexts}


def _tokens(rng: np.random.Generator, vocab: int, count: int) -> IntArray:
    return rng.integers(0, vocab, count, dtype=np.int32)


def _sequence(rng: np.random.Generator, contexts: Contexts, group: int) -> TrainSequence:
    """Make an episode that was drawn evenly, with a random advantage."""
    trained = np.concatenate([mask for _, mask in contexts])
    lengths = [len(tokens) for tokens, _ in contexts]
    return TrainSequence(
        token_ids=np.concatenate([tokens for tokens, _ in contexts]),
        mask=trained,
        behavior_logprobs=np.where(trained, -6.0, 0.0).astype(np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
        advantages=np.where(trained, rng.standard_normal(), 0.0).astype(np.float32),
        group=group,
        starts=tuple(np.cumsum([0, *lengths[:-1]]).tolist()),
    )


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--parts", type=int, default=2, help="groups, or episodes of a tree")
    args = options(words)
    if args.quick:
        args.parts = 1
    return args


if __name__ == "__main__":
    main()
