"""Measure scored tokens per second of the sampler, against prefills of the same prompts.

8 prompts of 256, 512 or 2,048 random tokens. prefill: one token is sampled after each prompt;
scored: the same with the log-probs of the prompt's tokens; only scored: no token is sampled. top
20: with the 20 likeliest tokens of each position. ratio: time over the time of the prefill.
"""

from functools import partial

import numpy as np
from common import MODELS, Row, columns, make_params, measure, options, parser, report

from jaxrl_async.config import schema
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import LogprobRequest, Request

PROMPTS = 8
"""Prompts of a row."""
KINDS = {
    "prefill": (1, None),
    "scored": (1, LogprobRequest(prompt=True)),
    "only scored": (0, LogprobRequest(prompt=True)),
    "only scored, top 20": (0, LogprobRequest(prompt=True, top=20)),
}
"""New tokens and log-probs of each row."""


def main() -> None:
    """Measure every row and print them."""
    words = parser(__doc__ or "")
    words.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 2048])
    args = options(words)
    rows: list[Row] = []
    for model in args.models:
        params = make_params(MODELS[model])
        for length in [32] if args.quick else args.lengths:
            section = schema.SamplerSection(
                slots=PROMPTS, max_length=length + 1, max_new_tokens=1, prefix_cache=False
            )
            with Sampler((MODELS[model], params), section=section) as sampler:
                rows += rows_of(sampler, model, length, args.repeats)
    report("score", rows, args)


def rows_of(sampler: Sampler, model: str, length: int, repeats: int) -> list[Row]:
    """Measure each kind of request, after the prefills with which it is compared."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, MODELS[model].vocab, (PROMPTS, length), dtype=np.int32)
    rows: list[Row] = []
    for name, (new, logprobs) in KINDS.items():
        requests = [
            Request(request_id=f"r{i}", token_ids=prompt, max_new_tokens=new, logprobs=logprobs)
            for i, prompt in enumerate(prompts)
        ]
        taken = measure(partial(sampler.generate, requests), repeats)
        base = rows[0]["median_s"] if rows else taken.median
        rows.append(
            {
                "model": model,
                "prompt": length,
                "requests": name,
                "tokens_per_s": PROMPTS * length / taken.median,
                "ratio": taken.median / base,
                **columns(taken),
            }
        )
    return rows


if __name__ == "__main__":
    main()
