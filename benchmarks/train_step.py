"""Time one GRPO update: 64 sequences of 96 tokens (32 of prompt), packed, AdamW included.

    --cpu-kernels on off    with trainer.cpu_kernels and without, in turns
    --length 1024           longer sequences
    --tunix                 beside Tunix's own train step on the same sequences, in turns
                            (peers/environments.py installs it); it starts with huge pages as we do

Columns with `cpu` are of the process's CPU seconds, which other work on the machine disturbs less.
A share of the peak counts the model's FLOPs (train_flops) against a square matrix product on the
same device, in wall and in CPU seconds.
"""

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # as the commands do

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    cpu_s,
    make_params,
    options,
    parser,
    report,
    spread,
)
from peers.environments import ENVIRONMENTS, python_of

from jaxrl_async.config import schema
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.flops import train_flops
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.types import PackedBatch

PEAK_SIZE = 2048
"""Rows and columns of the product that says what the device can do."""

Taken = tuple[float, float]
"""Wall and CPU seconds."""
Work = Callable[[], Taken]


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    rows = [row for model in args.models for row in rows_of(model, args)]
    report("train_step", rows, args)


def rows_of(model: str, args: argparse.Namespace) -> list[Row]:
    """Make updates of one model in every way, in turns."""
    spec = MODELS[model]
    batch = random_batch(spec.vocab, args.sequences, args.length)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ways: dict[str, Work] = {"product": product_of(PEAK_SIZE)}
        ways |= {
            f"ours, remat {remat}, kernels {kernels}": our_update(
                spec, batch, remat, kernels == "on", args
            )
            for remat in args.remat
            for kernels in args.cpu_kernels
        }
        if args.tunix:
            ways["tunix"] = tunix_update(spec, batch, Path(folder), args, stack)
        taken = in_turns(ways, args.repeats)
    products = taken.pop("product")
    peaks = tuple(
        2 * PEAK_SIZE**3 / statistics.median(column) for column in zip(*products, strict=True)
    )
    flops = train_flops(spec, batch, reference=False)
    return [{"model": model, "way": way} | _row(t, batch, flops, peaks) for way, t in taken.items()]


def _row(taken: list[Taken], batch: PackedBatch, flops: float, peaks: tuple[float, ...]) -> Row:
    wall, cpu = (spread(column) for column in zip(*taken, strict=True))
    tokens = int(np.count_nonzero(batch.segment_ids))
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / wall.median,
        "of_peak": flops / wall.median / peaks[0],
        "of_peak_cpu": flops / cpu.median / peaks[1],
        **columns(wall),
        **columns(cpu, "cpu_s"),
    }


def in_turns(ways: Mapping[str, Work], repeats: int) -> dict[str, list[Taken]]:
    """Do each work twice to compile and warm up, then all of them `repeats` times in turns."""
    for work in ways.values():
        work(), work()
    taken: dict[str, list[Taken]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            taken[name].append(work())
    return taken


def timed(work: Callable[[], object]) -> Work:
    """Return the work with its wall and CPU seconds; it must wait for its results."""

    def once() -> Taken:
        start, used = time.perf_counter(), cpu_s()
        work()
        return time.perf_counter() - start, cpu_s() - used

    return once


def product_of(size: int) -> Work:
    """Return a square product, by XLA."""
    x = jnp.full((size, size), 0.5)
    product = jax.jit(lambda x: x @ x)
    return timed(lambda: jax.block_until_ready(product(x)))


def our_update(
    spec: ModelSpec, batch: PackedBatch, remat: str, kernels: bool, args: argparse.Namespace
) -> Work:
    """Return an update from the batch; the state changes each time."""
    settings = LearningSettings(
        mesh=make_slices(schema.MeshSection(colocated=True)).trainer,
        trainer=schema.TrainerSection(
            micro_batch_tokens=args.micro_batch_tokens, cpu_kernels=kernels
        ),
        row_length=args.length,
        remat=remat,
    )
    step = policy_update(spec, settings, schema.AlgorithmSection(), total_steps=1000)
    state = step.init(make_params(spec))

    def update() -> None:
        nonlocal state
        state, _ = step.update(state, PolicyData(batch))
        jax.block_until_ready(state)

    return timed(update)


def tunix_update(
    spec: ModelSpec,
    batch: PackedBatch,
    folder: Path,
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> Work:
    """Start Tunix's trainer in a process of its own, which ends with the stack, and return its
    update from the same batch."""
    Policy(spec, make_params(spec)).save_pretrained(folder)
    data = folder / "batch.npz"
    np.savez(
        data,
        token_ids=batch.token_ids,
        prompt=PROMPT_TOKENS,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages[:, -1],
    )
    rows = max(1, args.micro_batch_tokens // args.length)
    script = Path(__file__).parent / "peers" / "worker_tunix_step.py"
    words = [python_of(ENVIRONMENTS["tunix"]), script, folder, data, min(rows, len(batch.mask))]
    process = subprocess.Popen(
        [str(w) for w in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    requests, answers = process.stdin, process.stdout
    stack.callback(process.wait)
    stack.callback(requests.close)  # called first

    def update() -> Taken:
        requests.write("\n")
        requests.flush()
        taken = json.loads(answers.readline())
        return taken["s"], taken["cpu_s"]

    return update


def random_batch(vocab: int, count: int, length: int, seed: int = 0) -> PackedBatch:
    """Make `count` sequences of random tokens, all sampled by the policy except the prompt."""
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= PROMPT_TOKENS
    return pack(
        [
            TrainSequence(
                token_ids=rng.integers(0, vocab, length, dtype=np.int32),
                mask=mask,
                behavior_logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, rng.standard_normal(), 0.0).astype(np.float32),
            )
            for _ in range(count)
        ],
        length,
    )


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--sequences", type=int, default=64)
    words.add_argument("--length", type=int, default=96, help="tokens of a sequence, and of a row")
    words.add_argument("--micro-batch-tokens", type=int, default=64 * 96)
    words.add_argument("--remat", nargs="+", choices=["none", "layer", "dots"], default=["none"])
    words.add_argument("--cpu-kernels", nargs="+", choices=["on", "off"], default=["on"])
    words.add_argument("--tunix", action="store_true", help="beside Tunix's train step")
    args = options(words)
    if args.quick:
        args.sequences, args.micro_batch_tokens = 4, 4 * args.length
    return args


if __name__ == "__main__":
    main()
