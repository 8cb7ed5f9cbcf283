"""A client's conversations, so that what the policy drew is never tokenised again.

    call    [system, user]                          -> prompt A, answer x as message m
    call    [system, user, m, tool result]          -> prompt A x + continuation
    call    [system, user, m changed, ...]          -> a new context: `opening`

Messages come in whole with every call. If those up to the last answer are those of an earlier call
with its answer, as it was returned, then the prompt begins with the very tokens of that call.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from jaxrl_async.endpoint.call_messages import digests, following, same_reasoning
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import IntArray, Message

MAX_REMEMBERED = 2**19
"""Most tokens of one client's answers, and of what was said between them, that are remembered; the
oldest are forgotten first."""
MAX_RESPONSES = 512
"""Most responses of one client that are remembered by their ids."""
MAX_RESPONSE_CHARS = 2**26
"""Most characters of them, each response with all before it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """An answer, with all that came before it. Shares what it has in common with others."""

    before: "_Said | None"
    tokens: IntArray  # after those of `before`: what others said, and the answer
    length: int  # of all its tokens
    message: Message  # the answer

    def all_tokens(self) -> IntArray:
        """Return the tokens of the conversation up to here."""
        parts: list[IntArray] = []
        said: _Said | None = self
        while said is not None:
            parts.append(said.tokens)
            said = said.before
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A call's messages as tokens."""

    token_ids: IntArray  # [prompt] int32
    continued: bool  # they begin with those of an earlier call
    digest: bytes  # of the messages
    before: Any = None  # the answer that they continue


class TurnLog:
    """The messages of a client's conversations by the id of the response that they end with, for
    calls that name it in place of them. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        # the messages up to each, and their characters
        self._turns: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()
        self._chars = 0

    def find(self, response_id: str) -> tuple[Message, ...] | None:
        """Return the messages up to a response, and it; None: it is not known (any more)."""
        with self._lock:
            messages, _ = self._turns.get(response_id, (None, 0))
            return messages

    def keep(self, response_id: str, messages: Sequence[Message]) -> None:
        """Remember a response; the oldest are forgotten first."""
        size = sum(len(str(message)) for message in messages)
        with self._lock:
            self._turns[response_id] = tuple(messages), size
            self._chars += size
            while len(self._turns) > MAX_RESPONSES or self._chars > MAX_RESPONSE_CHARS:
                self._chars -= self._turns.popitem(last=False)[1][1]


class Conversations:
    """What one client has been told. Thread safe."""

    def __init__(self) -> None:
        self.responses = TurnLog()
        self._lock = Lock()
        # by the digest of the messages, answer included
        self._said: OrderedDict[bytes, list[_Said]] = OrderedDict()
        self._count = 0

    def prompt(
        self, chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> PromptTokens:
        """Return the tokens of a conversation up to where the policy's turn begins. Raises
        DataError for messages that the format cannot hold."""
        found = digests(messages, tools)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        with self._lock:
            known = tuple(self._said.get(found[last + 1], ())) if last >= 0 else ()
        for said in reversed(known):
            if not same_reasoning(said.message, messages[last]):
                continue
            before = said.all_tokens()
            more = chat.continuation(before, messages[last + 1 :], tools)
            if more is None:
                break  # the format rewrites what was said: a new context
            return PromptTokens(
                token_ids=np.concatenate([before, more]).astype(np.int32),
                continued=True,
                digest=found[-1],
                before=said,
            )
        opening = chat.opening(messages, tools)
        return PromptTokens(token_ids=opening, continued=False, digest=found[-1])

    def remember(self, prompt: PromptTokens, drawn: IntArray, message: Message) -> None:
        """Take note of an answer.

        Args:
            prompt: what was asked.
            drawn: [drawn] int32.
            message: the answer, as it is returned to the client.
        """
        before: _Said | None = prompt.before
        known = 0 if before is None else before.length
        tokens = np.concatenate([prompt.token_ids[known:], drawn]).astype(np.int32)
        length = len(prompt.token_ids) + len(drawn)
        said = _Said(before, tokens, length, message)
        digest = following(prompt.digest, message)
        with self._lock:
            self._said.setdefault(digest, []).append(said)
            self._count += len(tokens)
            while self._count > MAX_REMEMBERED:
                _, oldest = self._said.popitem(last=False)
                self._count -= sum(len(said.tokens) for said in oldest)
