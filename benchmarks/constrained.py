"""Measure requests with a JSON schema and requests without one in the same batch.

Answers of 128 tokens without a constraint, and as many as fit of an endless list of JSON objects.
waited: most steps of a block while constrained rows wait (MOST_WAITED). plain_per_s,
constrained_per_s: tokens per second of each kind while the plain ones run, median, least and most;
alone: the plain ones without the others.
"""

import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import (
    MODELS,
    PROMPT_TOKENS,
    Row,
    make_params,
    options,
    parser,
    random_prompts,
    report,
)

from jaxrl_async.config import schema
from jaxrl_async.data.tokenizer import chat_tokenizer
from jaxrl_async.sampler.batch import shaping_args
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Constraint, IntArray, LogitShaping, Request

LENGTH, LONGEST = 128, 1024
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "price": {"type": "integer"}},
    "required": ["name", "price"],
    "additionalProperties": False,
}
ENDLESS = Constraint(
    kind="json_schema", text=json.dumps({"type": "array", "items": ITEM, "minItems": 400})
)


def main() -> None:
    """Measure every row and print them."""
    words = parser(__doc__ or "")
    words.add_argument("--slots", nargs="+", type=int, default=[8, 64])
    words.add_argument("--waited", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    args = options(words)
    if args.quick:
        args.slots, args.waited = [8], [4]
    rows = []
    for model in args.models:
        for slots in args.slots:
            rows += measured(model, slots, args.waited, args.repeats)
    report("constrained", rows, args)


def measured(model: str, slots: int, waited: list[int], repeats: int) -> list[Row]:
    """Measure one batch with one constrained request in eight, and with half of them."""
    spec, tokenizer = MODELS[model], chat_tokenizer()
    section = schema.SamplerSection(
        slots=slots, max_length=PROMPT_TOKENS + LONGEST, max_new_tokens=LONGEST
    )
    settings = SamplerSettings(tokenizer=tokenizer)
    rows, usual = [], shaping_args.MOST_WAITED
    with Sampler((spec, make_params(spec)), section=section, settings=settings) as sampler:
        for share in (8, 2):
            held = slots // share
            cases = [(n, held) for n in waited]
            runs: dict[tuple[int, int], list[tuple[float, float]]] = {}
            for number in range(repeats + 1):  # in turns; the first compiles
                for case in [(usual, 0), *cases]:
                    shaping_args.MOST_WAITED = case[0]
                    outcome = one_run(sampler, spec.vocab, tokenizer, slots - held, case[1])
                    if number:
                        runs.setdefault(case, []).append(outcome)
            shaping_args.MOST_WAITED = usual
            alone = statistics.median(plain for plain, _ in runs[usual, 0])
            for case in cases:
                plain = [run[0] for run in runs[case]]
                held_back = [run[1] for run in runs[case]]
                rows.append(
                    {
                        "model": model,
                        "slots": slots,
                        "constrained": held,
                        "waited": case[0],
                        **spread("plain_per_s", plain),
                        **spread("constrained_per_s", held_back),
                        "plain_of_alone": statistics.median(plain) / alone,
                    }
                )
    return rows


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return the median, the least and the most of some values."""
    most = {f"least_{name}": min(values), f"most_{name}": max(values)}
    return {f"median_{name}": statistics.median(values), **most}


def one_run(
    sampler: Sampler, vocab: int, tokenizer: Any, plain: int, held: int
) -> tuple[float, float]:
    """Return the tokens per second of both kinds, until the last plain answer ends."""
    prompts = random_prompts(vocab, plain + held)
    stops = tokenizer.eos_ids
    endless = [
        Request(
            request_id=f"c{i}",
            token_ids=prompts[plain + i],
            max_new_tokens=LONGEST,
            stop_token_ids=stops,
            key=(i, 1),
            shaping=LogitShaping(constraint=ENDLESS),
        )
        for i in range(held)
    ]
    few = [replace(one, request_id=f"w{i}", max_new_tokens=8) for i, one in enumerate(endless)]
    sampler.generate(few)  # their programs are compiled, which may take longer than PROGRESS_S
    sampler.generate([*few, *plain_requests(prompts[:plain], 8)])
    others = sampler.start_many(endless)
    while held and len(sampler.progress()) < held:
        time.sleep(0.01)
    before = generated_tokens(sampler)
    ended = threading.Semaphore(0)
    begin = time.perf_counter()
    requests = sampler.start_many(plain_requests(prompts[:plain], LENGTH))
    for future in requests:
        future.add_done_callback(lambda _: ended.release())
    for _ in requests:
        ended.acquire()
    took = time.perf_counter() - begin
    more = generated_tokens(sampler) - before
    for future in others:
        future.cancel()
    while held and sampler.stats().in_flight:
        time.sleep(0.01)
    return plain * LENGTH / took, more / took


def plain_requests(prompts: Sequence[IntArray], length: int) -> list[Request]:
    """Return a request without a constraint for each prompt."""
    return [
        Request(
            request_id=f"p{i}",
            token_ids=token_ids,
            max_new_tokens=length,
            key=(i, 0),
            forced_length=length,
        )
        for i, token_ids in enumerate(prompts)
    ]


def generated_tokens(sampler: Sampler) -> int:
    """Return the number of tokens of the constrained requests so far."""
    running = sampler.progress()
    return sum(len(p.token_ids) for p in running if p.request.request_id.startswith("c"))


if __name__ == "__main__":
    main()
