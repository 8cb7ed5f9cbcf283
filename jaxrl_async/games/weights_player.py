"""Players whose weights are on the sampler's devices: a snapshot of the policy, or a frozen model.

    messages ──ChatFormat.opening──> tokens ──Request──> its sampler ──> ChatFormat.message

Its output is not trained on, so the conversation is tokenised again for each answer.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import RolloutError, TextTooLong
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Message, Prompt, Request, SamplingParams

Lease = Callable[[], AbstractAsyncContextManager[Sampler]]
"""Leases the sampler for one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Sampling settings and limits of a player's answers."""

    sampling: SamplingParams
    max_new_tokens: int
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlayer:
    """A ports.Player that samples from fixed weights."""

    name: str
    seat: str
    lease: Lease
    chat: ChatFormat
    limits: AnswerLimits

    async def answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt: Prompt,
        member: int,
        turn: int,
    ) -> Message:
        """See ports.Player. Raises RolloutError if the conversation leaves no room to answer."""
        limits = self.limits
        try:
            tokens = self.chat.opening(messages, tools)
        except TextTooLong as error:
            tokens = error.token_ids
        if len(tokens) >= limits.max_length:
            raise RolloutError(
                f"the conversation of seat {self.seat} ({self.name}) has {len(tokens)} tokens, "
                f"which leaves no room for an answer in {limits.max_length}. Raise "
                "sampler.max_length, or let the game end earlier."
            )
        request = Request(
            request_id=f"{self.seat}/p{prompt.position}/m{member}/t{turn}",
            token_ids=tokens,
            max_new_tokens=min(limits.max_new_tokens, limits.max_length - len(tokens)),
            sampling=limits.sampling,
            stop_token_ids=self.chat.stop_token_ids,
            key=(prompt.position, member),
            branch=branch_of(self.seat, turn),
            for_training=False,
        )
        async with self.lease() as sampler:
            completion = await sampler.submit(request)
        return self.chat.message(completion.token_ids, tools)


def branch_of(seat: str, turn: int) -> int:
    """Return a branch for a turn of a seat, at least 1: each uses different random numbers."""
    digest = hashlib.blake2b(f"{seat}/{turn}".encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (2**31 - 2)
