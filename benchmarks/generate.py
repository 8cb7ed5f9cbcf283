"""Measure generated tokens per second of the sampler, alone on its devices.

Prompts of 32 tokens; 8, 64 and 256 slots; answers all of 64 or all of 128 tokens (as many requests
as slots), or a long tail (four times as many, so that freed slots are refilled). Lengths are
forced, because the weights are random.

--peers: the same workloads on vLLM's CPU build, Tunix's sampler, and transformers (static and
continuous batching), each in an environment of its own that is made first, in turns with ours.
useful: wanted tokens over computed tokens. first_tokens_ms: one token of every sequence at once.
start_s: loading the model; first_run_s: the first run of the workload, compilation included.
"""

import argparse
import os

import peers.run
from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    columns,
    long_tail,
    make_params,
    measure,
    options,
    parser,
    random_prompts,
    report,
)

from jaxrl_async.config import schema
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams

LONGEST = 128
"""Longest answer of any row, tokens."""


def main() -> None:
    """Measure every row and print them."""
    args = _options()
    if args.peers is not None:
        names = args.peers or ["vllm", "tunix", "transformers", "transformers-continuous"]
        if args.starts:
            starts = [
                row for model in args.models for row in peers.run.measure_starts(model, names)
            ]
            report("generate --peers --starts", starts, args)
            return
        replicas = dict.fromkeys(args.models, args.samplers or os.cpu_count() or 1)
        rows = peers.run.measure_peers(
            args.models,
            args.slots,
            args.repeats,
            names,
            replicas=replicas,
            answers=args.answers,
            numbers=args.numbers,
            quick=args.quick,
        )
        report("generate --peers", rows, args)
        return
    rows = []
    for model in args.models:
        params = make_params(MODELS[model])
        for slots in args.slots:
            sampler = Sampler(
                (MODELS[model], params),
                section=schema.SamplerSection(
                    slots=slots,
                    max_length=PROMPT_TOKENS + LONGEST,
                    max_new_tokens=LONGEST,
                    block=args.block,
                ),
            )
            try:
                for name, lengths in workloads(slots, quick=args.quick).items():
                    rows.append({"model": model, "slots": slots, "answers": name})
                    rows[-1] |= one_row(sampler, MODELS[model].vocab, lengths, args.repeats)
            finally:
                sampler.close()
    report("generate", rows, args)


def workloads(slots: int, *, quick: bool) -> dict[str, list[int]]:
    """Return each request's answer length, tokens."""
    if quick:
        return {"8 each": [8] * slots, "long tail": long_tail(2 * slots, median=4, most=16)}
    return {
        "64 each": [64] * slots,
        "128 each": [128] * slots,
        "long tail": long_tail(4 * slots, most=LONGEST),
    }


def one_row(sampler: Sampler, vocab: int, lengths: list[int], repeats: int) -> Row:
    """Generate all answers, again and again."""
    requests = [
        Request(
            request_id=f"r{i}",
            token_ids=tokens,
            max_new_tokens=length,
            sampling=SamplingParams(temperature=1.0),
            key=(i, 0),
            forced_length=length,
        )
        for i, (tokens, length) in enumerate(
            zip(random_prompts(vocab, len(lengths)), lengths, strict=True)
        )
    ]
    before = sampler.stats()
    taken = measure(lambda: sampler.generate(requests), repeats)
    after = sampler.stats()
    steps = after.slot_steps - before.slot_steps
    return {
        "requests": len(requests),
        "tokens": sum(lengths),
        "tokens_per_s": sum(lengths) / taken.median,
        "occupancy": (after.used_slot_steps - before.used_slot_steps) / steps,
        **columns(taken),
    }


def _options() -> argparse.Namespace:
    words = parser(__doc__ or "")
    words.add_argument("--slots", nargs="+", type=int, default=[8, 64, 256])
    words.add_argument("--peers", nargs="*", metavar="NAME", help="compare with these, or all")
    words.add_argument(
        "--answers",
        nargs="+",
        default=[],
        metavar="NAME",
        help='with --peers: of "64 each", "128 each", "long tail", "stragglers"; default: all',
    )
    words.add_argument(
        "--numbers",
        default="float32",
        choices=sorted(peers.run.NUMBERS),
        help="with --peers vllm: what products are made of; int8: ours, beside vLLM's bfloat16",
    )
    words.add_argument("--starts", action="store_true", help="with --peers: time to first token")
    words.add_argument("--samplers", type=int, help="ours in --peers; default: one per core")
    words.add_argument("--block", type=int, default=32, help="decode steps in one dispatch")
    args = options(words)
    if args.quick:
        args.slots = [8]
    if args.numbers != "float32" and args.peers != ["vllm"]:
        words.error("--numbers is for --peers vllm alone")
    if args.answers:
        names = list(peers.run.workloads(1, quick=args.quick))
        if args.peers is None or not set(args.answers) <= set(names):
            words.error(f"--answers is for --peers, and one or more of {names}")
    return args


if __name__ == "__main__":
    main()
