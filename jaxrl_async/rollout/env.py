"""Environments: what answers the policy's turns. One is made for each episode and used once."""

from collections.abc import Callable

import numpy as np

from jaxrl_async.ports import Env, Reply
from jaxrl_async.types import Completion, Prompt

MakeEnv = Callable[[Prompt], Env]
"""Makes the environment of one episode."""


class SingleTurn:
    """The policy answers once; nothing answers back."""

    def __init__(self, prompt: Prompt) -> None:
        del prompt  # every environment is made from its prompt; this one needs nothing of it

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """The end, after the first turn."""
        return Reply(token_ids=np.zeros(0, np.int32), done=True)
