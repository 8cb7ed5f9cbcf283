"""A running request as data: saved, carried to another slot, sampler or process, and resumed.

Because random numbers are keyed by identity (seed, key, branch, position), nothing else is needed
to go on with the same tokens; the KV is a short cut that is taken only where the weights are the
ones that made it.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.types import KeptTokens, Partial, Request, SamplingParams


def save_partial(partial: Partial, path: str | Path) -> None:
    """Write one .npz file."""
    wish = asdict(replace(partial.request, token_ids=np.zeros(0, np.int32)))
    del wish["token_ids"]
    meta = {"request": wish, "seed": partial.seed, "kv_version": partial.kv_version}
    arrays: dict[str, Any] = {} if partial.kv is None else {"kv": partial.kv}
    if partial.full_logprobs is not None and partial.kept is not None:
        arrays |= {"full_logprobs": partial.full_logprobs}
        arrays |= {"kept_ids": partial.kept.ids, "kept_starts": partial.kept.starts}
    with Path(path).open("wb") as file:
        np.savez(
            file,
            meta=np.array(json.dumps(meta)),
            prompt=partial.request.token_ids,
            token_ids=partial.token_ids,
            logprobs=partial.logprobs,
            versions=partial.versions,
            **arrays,
        )


def load_partial(path: str | Path) -> Partial:
    """Read what save_partial wrote. Raises RolloutError where it is something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            wish = meta["request"]
            wish["sampling"] = SamplingParams(**wish["sampling"])
            for name in ("stop_token_ids", "key"):
                wish[name] = tuple(wish[name])
            return Partial(
                request=Request(token_ids=file["prompt"], **wish),
                token_ids=file["token_ids"],
                logprobs=file["logprobs"],
                versions=file["versions"],
                seed=int(meta["seed"]),
                full_logprobs=file.get("full_logprobs"),
                kept=KeptTokens(ids=file["kept_ids"], starts=file["kept_starts"])
                if "kept_ids" in file
                else None,
                kv=file.get("kv"),
                kv_version=meta["kv_version"],
            )
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RolloutError(
            f"{path} is not a saved request ({error}). Give a file that save_partial wrote."
        ) from None


def branches(partial: Partial, count: int) -> list[Partial]:
    """`count` continuations of one prefix that draw different tokens from here on.

    They share what was drawn before; each is a request of its own, with the ids `.../b1`, ...
    """
    first = partial.request.branch * count + 1
    return [
        replace(
            partial,
            request=replace(
                partial.request,
                request_id=f"{partial.request.request_id}/b{i + 1}",
                branch=first + i,
            ),
        )
        for i in range(count)
    ]
