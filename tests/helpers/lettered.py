"""Answers and records of single letters: a token is a character's code."""

import numpy as np

from jaxrl_async.types import Episode, Prompt, StopReason

EOS = 0


def spell(ids):
    return "".join(chr(i) for i in ids if i != EOS)


def answer(text, stop=StopReason.EOS, **more):
    ids = [ord("q"), *map(ord, text), *([EOS] if stop is StopReason.EOS else [])]
    drawn = np.arange(len(ids)) > 0
    return Episode(
        token_ids=np.array(ids, np.int32),
        drawn=drawn,
        logprobs=np.where(drawn, -0.5, 0).astype(np.float32),
        versions=np.where(drawn, 4, -1).astype(np.int32),
        stop=stop,
        **more,
    )


def record(text="How many?", messages=(), right="", **columns):
    ids = np.array([ord("q")], np.int32)
    return Prompt(
        prompt_id=7,
        position=3,
        token_ids=ids,
        text=text,
        reference=right,
        columns=columns,
        messages=messages,
    )
