"""A running request as data, to save, to move to another slot, sampler or process, and to resume.

Random numbers are keyed by identity (seed, key, branch, position), so nothing else is needed to
continue with the same tokens. The KV is a shortcut, used only with the weights that made it.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.request_checks import INT32_END
from jaxrl_async.types import Partial


def save_partial(partial: Partial, path: str | Path) -> None:
    """Write a saved request to one file."""
    Path(path).write_bytes(dumps(partial).tobytes())


def load_partial(path: str | Path) -> Partial:
    """Read a file that save_partial wrote. Raises RolloutError for any other file."""
    try:
        partial = loads(np.fromfile(path, np.uint8))
    except (OSError, ValueError) as error:
        partial = error
    if not isinstance(partial, Partial):
        raise RolloutError(
            f"{path} is not a saved request ({partial}). Give a file that save_partial wrote."
        )
    return partial


def branches(partial: Partial, count: int) -> list[Partial]:
    """Return `count` continuations of one prefix, which sample different tokens from here on.

    They share the tokens so far. Each is a separate request, with the ids `.../b1`, `.../b2`, ...
    """
    first = _first_branch(partial)
    return [
        replace(
            partial,
            request=replace(
                partial.request,
                request_id=f"{partial.request.request_id}/b{i + 1}",
                branch=1 + (first + i) % (INT32_END - 1),
            ),
        )
        for i in range(count)
    ]


def _first_branch(partial: Partial) -> int:
    """Return the number of a fork's first branch: a hash of the forked branch and its length. Forks
    of forks therefore get different numbers (among n forks, two are equal with probability
    n^2 / 2^32)."""
    fork_point = f"{partial.request.branch}/{len(partial.token_ids)}".encode()
    return int.from_bytes(hashlib.blake2b(fork_point, digest_size=4).digest())
