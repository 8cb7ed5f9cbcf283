"""Answers and records of single letters: a token is a character's code."""

import numpy as np

from jaxrl_async.types import Episode, Prompt, StopReason

EOS = 0


def spell(ids):
    return "".join(chr(i) for i in ids if i != EOS)


def answer(text, stop=StopReason.EOS, **more):
    """The policy's one turn, behind a token of the prompt."""
    return episode(b"q", text + (chr(EOS) if stop is StopReason.EOS else ""), stop=stop, **more)


def episode(*parts, stop=StopReason.EOS, **more):
    """Strings are drawn, bytes are not."""
    ids = [ord(c) if isinstance(c, str) else c for part in parts for c in part]
    drawn = np.array([isinstance(part, str) for part in parts for _ in part])
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
