"""Callers of the endpoint: guests, and sessions of a run, which become episodes."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_async.endpoint.conversations import Conversations
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.sampling_request import (
    CallerLimits,
    RequestDraft,
    SamplingOptions,
    sampling_of,
)
from jaxrl_async.endpoint.sessions import PolicySession, first_of
from jaxrl_async.ports.generate import Generate
from jaxrl_async.types import (
    Completion,
    IntArray,
    Message,
    Request,
)

Cut = Callable[[IntArray], int | None]
"""Given sampled tokens, returns how many of them count; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """One answer to sample."""

    token_ids: IntArray  # [prompt] int32
    draft: RequestDraft
    options: SamplingOptions  # of its call
    index: int  # of the answer in its call
    cut: Cut
    early: "asyncio.Future[Completion]"  # set when a stop string ends the answer before its end
    began: Callable[[str], None]  # called with the request's id before it is queued


class Guest:
    """A caller whose answers do not become an episode."""

    _numbers = itertools.count()
    _server = secrets.token_hex(6)  # so that ids of other servers, and after a restart, differ

    def __init__(
        self,
        generate: Generate,
        terms: CallerLimits,
        conversations: Conversations,
        *,
        adapter: str = "",
    ) -> None:
        """Make a caller.

        Args:
            generate: the sampler.
            terms: the terms of its answers.
            conversations: its earlier conversations.
            adapter: the sampler's adapter for its answers; empty: none.
        """
        self.terms, self.conversations, self._generate = terms, conversations, generate
        self.adapter = adapter

    async def sample(self, spec: AnswerSpec) -> Completion:
        """Sample one answer. Cancelling frees its slot. Raises RolloutError and Closed.

        With a seed, the same tokens are sampled each time. Each answer of a call has separate
        random numbers: the request's key is (seed, index).
        """
        request = Request(
            request_id=f"guest-{self._server}-{next(self._numbers)}/a{spec.index}",
            token_ids=spec.token_ids,
            max_new_tokens=spec.draft.max_new_tokens,
            sampling=spec.draft.sampling,
            stop_token_ids=spec.draft.stop_token_ids,
            key=None if spec.options.seed is None else (spec.options.seed, spec.index),
            priority=self.terms.priority,
            extras=spec.draft.extras,
            adapter=self.adapter,
            for_training=False,
            shaping=spec.draft.shaping,
            logprobs=spec.options.logprobs,
        )
        spec.began(request.request_id)
        return await first_of(self._generate.submit_many([request])[0], spec.early)

    def exhaust(self, limit: str, token_ids: IntArray) -> None:
        """Do nothing: a guest has no episode."""

    def add_messages(self, messages: Sequence[Message], answer: Message) -> None:
        """Do nothing: no reward function reads it."""


class Member:
    """A session: its calls become an episode of a run."""

    adapter = ""

    def __init__(
        self, session: PolicySession, conversations: Conversations, player: str = ""
    ) -> None:
        """Make the caller of a session. player: its player; empty: there is only one."""
        self.session, self.conversations, self._player = session, conversations, player

    @property
    def terms(self) -> CallerLimits:
        """The terms of its answers."""
        limits = self.session.limits
        return CallerLimits(
            sampling=limits.sampling,
            stop_token_ids=limits.stop_token_ids,
            max_new_tokens=limits.max_new_tokens,
            max_length=limits.max_length,
            fixed_sampling=not self.session.bounds.own_sampling,
            extras=limits.keep_mask,
            takes_constraints=self.session.takes_constraints,
        )

    async def sample(self, spec: AnswerSpec) -> Completion:
        """Sample one answer, as for a guest. The random numbers are the session's."""
        limits, draft = self.session.limits, spec.draft
        if not set(limits.stop_token_ids) <= set(draft.stop_token_ids):
            raise CallRefused(
                "a session's answers end at the model's stop tokens", field="ignore_eos"
            )
        named = sampling_of(spec.options, limits.sampling)
        return await self.session.sample(
            spec.token_ids,
            max_new_tokens=draft.max_new_tokens,
            stop_token_ids=draft.stop_token_ids,
            sampling=None if named == limits.sampling else named,
            seed=spec.options.seed,
            shaping=spec.options.shaping,
            logprobs=spec.options.logprobs,
            cut=spec.cut,
            early=spec.early,
            began=spec.began,
            player=self._player,
        )

    def exhaust(self, limit: str, token_ids: IntArray) -> None:
        """Record that a call with these tokens, [prompt] int32, was rejected for this limit: the
        episode ends as cut off."""
        self.session.exhaust(limit, token_ids)

    def add_messages(self, messages: Sequence[Message], answer: Message) -> None:
        """Record a call's messages and its answer: the session's reward functions may read them."""
        self.session.add_messages(messages, answer, self._player)


Caller = Guest | Member
"""The caller that a key belongs to."""
