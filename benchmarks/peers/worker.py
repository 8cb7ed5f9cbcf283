"""Share what every worker needs: JSON lines on stdin and stdout, one request at a time.

A worker is a script that runs with the Python of its peer's own environment and imports only this
file of ours. It writes {"ready": true, ...} once the model is loaded, then answers each line
{"prompts": [[ids]], "lengths": [n], "concurrency": c} with its measurements.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], list[int], int], int]
"""(prompts, new tokens of each, sequences at once) -> tokens computed, when all are done."""


def serve(load: Callable[[str], tuple[Generate, str]]) -> None:
    """Load the model of argv[1], then answer requests until stdin ends.

    Output of libraries goes to stderr, so that stdout has nothing but JSON.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start = time.perf_counter()
    generate, version = load(sys.argv[1])
    reply(answers, ready=True, startup_s=time.perf_counter() - start, version=version)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        try:
            computed = generate(request["prompts"], request["lengths"], request["concurrency"])
        except Exception as error:
            reply(answers, error=f"{type(error).__name__}: {error}")
            continue
        reply(
            answers,
            seconds=time.perf_counter() - start,
            computed_tokens=computed,
            useful_tokens=sum(request["lengths"]),
            peak_rss_bytes=peak_rss_bytes(),
        )


def peak_rss_bytes() -> int:
    """Return the peak memory of this process and its children, bytes."""
    own, children = (
        resource.getrusage(process).ru_maxrss * 1024
        for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return max(own, children)


def reply(answers: Any, **what: Any) -> None:
    """Write one line of JSON."""
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def static_batches(
    prompts: list[list[int]], lengths: list[int], concurrency: int
) -> list[tuple[list[list[int]], int]]:
    """Generate in fixed batches, each as long as its longest answer."""
    starts = range(0, len(prompts), concurrency)
    return [(prompts[i : i + concurrency], max(lengths[i : i + concurrency])) for i in starts]
