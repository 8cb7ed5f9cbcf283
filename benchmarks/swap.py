"""Swap weights at every decode block for a minute while all slots decode: what does it cost?

A second thread publishes the next version as soon as the last one is live. Prints swaps and
blocks, the pause of a swap (median and most), a block's time with swaps and without, programs
compiled after the start, tokens with a wrong version, and resident memory at the start and end.
"""

import resource
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import MODELS, Row, make_params, options, parser, random_prompts, report

from jaxrl_async.config import schema
from jaxrl_async.errors import Closed
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Completion, Request
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.delivery import FunctionLink

SLOTS, LENGTH = 64, 128
"""Sequences at a time, and tokens of each answer."""


def main() -> None:
    """Measure and print."""
    words = parser(__doc__ or "")
    words.add_argument("--seconds", type=float, default=60.0, help="how long weights are published")
    args = options(words)
    seconds = 2.0 if args.quick else args.seconds
    report("swap", [measure(model, seconds) for model in args.models], args)


def measure(model: str, seconds: float) -> Row:
    """Measure one decoder's row."""
    spec, params = MODELS[model], make_params(MODELS[model])
    copied = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1, tree))
    channel = WeightChannel([FunctionLink(copied)])
    pauses: list[float] = []
    answers: list[tuple[int, int]] = []  # tokens of each answer, and how many have a wrong version
    section = schema.SamplerSection(
        slots=SLOTS, max_length=32 + LENGTH, max_new_tokens=LENGTH, block=16
    )
    sampler = Sampler((spec, params), section=section, weights=channel.subscribe())
    try:
        timed_blocks(sampler, spec.vocab, 0.0, answers)  # compile
        quiet = timed_blocks(sampler, spec.vocab, min(3.0, seconds / 2), answers)
        first = threading.Thread(target=publish, args=(channel, params, sampler, pauses))
        first.start()
        timed_blocks(sampler, spec.vocab, min(3.0, seconds / 2), answers)
        before, memory = sampler.stats(), resident_mib()
        pauses.clear()
        answers.clear()
        busy = timed_blocks(sampler, spec.vocab, seconds, answers)
        after, grown = sampler.stats(), resident_mib() - memory
    finally:
        channel.close()
        sampler.close()
    tokens, wrong = (sum(numbers) for numbers in zip(*answers, strict=True))
    return {
        "model": model,
        "seconds": seconds,
        "blocks": after.blocks - before.blocks,
        "swaps": after.swaps - before.swaps,
        "block_ms_quiet": quiet * 1e3,
        "block_ms_swapping": busy * 1e3,
        "pause_ms_median": float(np.median(pauses)) * 1e3,
        "pause_ms_most": max(pauses) * 1e3,
        "compiled": after.compiled_programs - before.compiled_programs,
        "tokens": tokens,
        "wrong_versions": wrong,
        "memory_grown_MiB": grown,
    }


def publish(channel: WeightChannel, params: Any, sampler: Sampler, pauses: list[float]) -> None:
    """Publish the next version as soon as the last is live, until the channel closes."""
    version = 0
    try:
        while True:
            version += 1
            channel.publish(version, params)
            channel.wait_live(version, 600.0)
            pauses.append(sampler.stats().swap_pause_s)
    except Closed:
        return


def timed_blocks(
    sampler: Sampler, vocab: int, seconds: float, answers: list[tuple[int, int]]
) -> float:
    """Keep all slots busy for so many seconds; return the mean time of a block, seconds."""
    prompts, number = random_prompts(vocab, SLOTS), 0
    before, start = sampler.stats(), time.perf_counter()
    while number == 0 or time.perf_counter() - start < seconds:
        requests = [
            Request(
                request_id=f"{number}/{i}",
                token_ids=prompt,
                max_new_tokens=LENGTH,
                key=(number, i),
                forced_length=LENGTH,
            )
            for i, prompt in enumerate(prompts)
        ]
        answers += [(len(c.token_ids), wrong_versions(c)) for c in sampler.generate(requests)]
        number += 1
    after = sampler.stats()
    return (after.busy_s - before.busy_s) / max(1, after.blocks - before.blocks)


def wrong_versions(completion: Completion) -> int:
    """Count tokens whose version falls, or changes elsewhere than at a block's second token."""
    steps = np.diff(completion.versions)
    changes = np.flatnonzero(steps) + 1
    return int((steps < 0).sum() + ((changes - 1) % 16 != 0).sum())


def resident_mib() -> float:
    """Return resident memory now, MiB; without /proc, the most so far."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text(encoding="ascii").split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
