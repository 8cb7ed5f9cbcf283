"""A running request as data: saved, carried to another slot, sampler or process, and resumed.

Because random numbers are keyed by identity (seed, key, branch, position), nothing else is needed
to go on with the same tokens; the KV is a short cut that is taken only where the weights are the
ones that made it.
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
    """Write one file."""
    Path(path).write_bytes(dumps(partial).tobytes())


def load_partial(path: str | Path) -> Partial:
    """Read what save_partial wrote. Raises RolloutError where it is something else."""
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
    """`count` continuations of one prefix that draw different tokens from here on.

    They share what was drawn before; each is a request of its own, with the ids `.../b1`, ...
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
    """Where the numbers of a fork's branches begin: a hash of which branch forks, and where, so
    that forks of forks do not meet (two of n forks: with a chance of n^2 / 2^32)."""
    place = f"{partial.request.branch}/{len(partial.token_ids)}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=4).digest())
