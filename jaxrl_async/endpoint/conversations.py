"""A client's conversations. They ensure that generated tokens are never tokenised again.

    call    [system, user]                          -> prompt A, answer x as message m
    call    [system, user, m, tool result]          -> prompt A x + continuation
    call    [system, user, m changed, ...]          -> a new context: `opening`

Every call contains all messages. If those up to the last answer equal an earlier call with the
answer that was returned, the prompt begins with exactly the tokens of that call.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from jaxrl_async.endpoint.call_messages import digests, next_digest, same_reasoning
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import IntArray, Message

MAX_REMEMBERED = 2**19
"""Maximum number of stored tokens of one client's answers and the messages between them; the oldest
are dropped first."""
MAX_RESPONSES = 512
"""Maximum number of responses of one client that are stored by id."""
MAX_RESPONSE_CHARS = 2**26
"""Maximum number of characters in them; each response counts with everything before it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """An answer and everything before it. Shares common prefixes with other answers."""

    before: "_Answer | None"
    tokens: IntArray  # added after `before`: messages of others, and the answer
    length: int  # total number of tokens
    message: Message  # the answer

    def all_tokens(self) -> IntArray:
        """Return the tokens of the conversation up to here."""
        parts: list[IntArray] = []
        answer: _Answer | None = self
        while answer is not None:
            parts.append(answer.tokens)
            answer = answer.before
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A call's messages as tokens."""

    token_ids: IntArray  # [prompt] int32
    continued: bool  # they start with the tokens of an earlier call
    digest: bytes  # of the messages
    chat: ChatFormat  # that wrote them
    before: Any = None  # the answer that they continue
    prefix: int = 0  # number of tokens at their end that begin the answer


class TurnLog:
    """The messages of a client's conversations, by the id of their last response, for calls that
    send this id instead of the messages. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        # messages up to each response, and their number of characters
        self._turns: OrderedDict[str, tuple[tuple[Message, ...], int]] = OrderedDict()
        self._chars = 0

    def find(self, response_id: str) -> tuple[Message, ...] | None:
        """Return the messages up to and including a response; None: unknown or dropped."""
        with self._lock:
            return self._turns.get(response_id, (None, 0))[0]

    def keep(self, response_id: str, messages: Sequence[Message]) -> None:
        """Store a response; the oldest are dropped first."""
        size = sum(len(str(message)) for message in messages)
        with self._lock:
            self._turns[response_id] = tuple(messages), size
            self._chars += size
            while len(self._turns) > MAX_RESPONSES or self._chars > MAX_RESPONSE_CHARS:
                self._chars -= self._turns.popitem(last=False)[1][1]


class Conversations:
    """The conversations of one client. Thread safe."""

    def __init__(self) -> None:
        self.responses = TurnLog()
        self._lock = Lock()
        # by the digest of the messages, including the answer
        self._answers: OrderedDict[bytes, list[_Answer]] = OrderedDict()
        self._count = 0

    def prompt(
        self,
        chat: ChatFormat,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]],
        arguments: Mapping[str, object] | None = None,
    ) -> PromptTokens:
        """Return the tokens of a conversation up to the policy's next turn. Raises DataError for
        messages that the format does not support.

        Args:
            chat: the chat format.
            messages: the conversation.
            tools: the tools that may be called.
            arguments: variables of the format that the call has set, as `chat` has them.
        """
        prefixes = digests(messages, [*tools, arguments] if arguments else tools)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        with self._lock:
            known = tuple(self._answers.get(prefixes[last + 1], ())) if last >= 0 else ()
        for answer in reversed(known):
            if not same_reasoning(answer.message, messages[last]):
                continue
            before = answer.all_tokens()
            continuation = chat.continuation(before, messages[last + 1 :], tools)
            if continuation is None:
                break  # the format rewrites history: a new context
            return PromptTokens(
                token_ids=np.concatenate([before, continuation]).astype(np.int32),
                continued=True,
                digest=prefixes[-1],
                chat=chat,
                before=answer,
            )
        opening = chat.opening(messages, tools)
        return PromptTokens(token_ids=opening, continued=False, digest=prefixes[-1], chat=chat)

    def remember(self, prompt: PromptTokens, token_ids: IntArray, message: Message) -> None:
        """Store an answer.

        Args:
            prompt: the prompt of the call.
            token_ids: of the answer, [tokens] int32.
            message: the answer, as returned to the client.
        """
        before: _Answer | None = prompt.before
        known = 0 if before is None else before.length
        tokens = np.concatenate([prompt.token_ids[known:], token_ids]).astype(np.int32)
        length = len(prompt.token_ids) + len(token_ids)
        answer = _Answer(before, tokens, length, message)
        digest = next_digest(prompt.digest, message)
        with self._lock:
            self._answers.setdefault(digest, []).append(answer)
            self._count += len(tokens)
            while self._count > MAX_REMEMBERED:
                _, oldest = self._answers.popitem(last=False)
                self._count -= sum(len(answer.tokens) for answer in oldest)
