"""A scorer tried on one prompt before the run starts. Needs no JAX."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.ports import Scorer
from jaxrl_async.types import Episode, IntArray, Prompt, StopReason


def try_once(
    scorer: Scorer, prompt: Prompt, encode: Callable[[str], IntArray], setting: str
) -> None:
    """Score the prompt's reference, as if the policy had drawn it, once.

    Raises ConfigError, which begins with `setting`, where the scorer raises, takes too long or
    gives something else than a reward: no step has been made then.
    """
    answer = encode(prompt.reference)
    is_prompt = np.zeros(len(prompt.token_ids), bool)
    drawn = np.concatenate([is_prompt, np.ones(len(answer), bool)])
    episode = Episode(
        token_ids=np.concatenate([prompt.token_ids, answer]),
        drawn=drawn,
        logprobs=np.zeros(len(drawn), np.float32),
        versions=np.where(drawn, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )

    async def score() -> None:
        await scorer((episode,), prompt)

    try:
        with ThreadPoolExecutor(1) as thread:  # in a notebook this one has a loop of its own
            thread.submit(asyncio.run, score()).result()
    except RolloutError as error:
        raise ConfigError(f"{setting}, tried on the first held-out prompt: {error}") from error
