"""A scorer tried on one prompt before the run starts. Needs no JAX."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.ports import Scorer
from jaxrl_async.types import CORRECT, Episode, IntArray, Prompt, Score, StopReason

log = logging.getLogger(__name__)


def try_once(
    scorer: Scorer, prompt: Prompt, encode: Callable[[str], IntArray], setting: str
) -> Score:
    """Score the prompt's reference, as if the policy had drawn it, once; that score.

    Warns where a score's part `correct` says that the reference, where there is one, is not right.
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

    async def score() -> tuple[Score, ...]:
        return await scorer((episode,), prompt)

    try:
        with ThreadPoolExecutor(1) as thread:  # in a notebook this one has a loop of its own
            (found,) = thread.submit(asyncio.run, score()).result()
    except RolloutError as error:
        raise ConfigError(f"{setting}, tried on the first held-out prompt: {error}") from error
    if prompt.reference.strip() and found.parts.get(CORRECT, 1.0) < 1.0:
        log.warning(
            "%s says that the first held-out prompt's own right answer, %.80r, is right to %g. "
            "Unless it asks for more than the answer, another grader fits these records.",
            setting,
            prompt.reference,
            found.parts[CORRECT],
        )
    return found
