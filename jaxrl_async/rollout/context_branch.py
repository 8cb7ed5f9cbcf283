"""Random numbers of an episode's later contexts."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxrl_async.types import IntArray


def context_branch(root: IntArray, earlier: int) -> int:
    """Return a number of at least 1 for a context after the first, to be added to Request.branch,
    so the same position in two contexts uses different random numbers.

    Args:
        root: [root] int32, the tokens that its first request continues.
        earlier: number of the member's earlier requests with the same tokens.
    """
    told = np.asarray(root, np.int32).tobytes() + b"/%d" % earlier
    return 1 + int.from_bytes(hashlib.blake2b(told, digest_size=4).digest()) % 2**30


def branch_after(calls: Sequence[tuple[IntArray, IntArray]], prompt: IntArray) -> int:
    """Return the branch of a request that follows others sequentially, as rollout.call_log.Trace
    computes it.

    Args:
        calls: [prompt] and [drawn] int32 of the earlier requests, in order.
        prompt: [prompt] int32 of this request.
    """
    contexts: list[tuple[IntArray, int]] = []  # tokens and branch of each context
    for number, (now, drawn) in enumerate([*calls, (prompt, prompt[:0])]):
        earlier = sum(np.array_equal(now, before) for before, _ in calls[:number])
        known = [n for n, (c, _) in enumerate(contexts) if np.array_equal(c, now[: len(c)])]
        place = max(known, key=lambda n: len(contexts[n][0]), default=None)
        new = context_branch(now, earlier) if number else 0
        branch = new if place is None else contexts.pop(place)[1]
        contexts.append((np.concatenate([now, drawn]), branch))
    return branch + earlier
