"""A conversation with a policy: each turn continues the tokens of the earlier ones unchanged.

    opening(question) + answer + continuation(question) + answer ...

The sampled tokens are never tokenized again, so the sampler finds their KV in its prefix cache.
Where the chat format rewrites earlier turns (it drops a model's reasoning), the next question
begins a new context. Without a chat format each question is a separate text.
"""

import itertools
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np

from jaxrl_async.api.scored_text import ScoredText, scored_text
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.sampling_request import stop_ids
from jaxrl_async.errors import DataError, RolloutError
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import (
    Completion,
    IntArray,
    LogprobRequest,
    Message,
    Request,
    SamplingParams,
    StopReason,
)

POLL_S = 0.02
"""Interval at which a stream polls for new tokens, seconds."""
ENDING_S = 1.0
"""Maximum wait for an answer that was stopped, seconds; one that has not begun is taken back."""
NUMBERS = itertools.count(1)
"""Numbers of requests: several conversations may share a sampler."""
NO_TOKENS: IntArray = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A conversation so far, as messages and as tokens."""

    messages: tuple[Message, ...] = ()
    token_ids: IntArray = field(default_factory=lambda: NO_TOKENS)  # [length] int32; [0]: none yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationAnswer:
    """A policy's answer in a conversation."""

    text: str
    stop: StopReason  # CANCELLED: the caller stopped it
    prompt_tokens: int  # of the whole conversation before the answer
    token_ids: IntArray  # [sampled] int32, the stop token included
    latency_s: float


def with_question(
    turns: Transcript, question: str, chat: ChatFormat | None, tokenizer: Tokenizer
) -> Transcript:
    """Return the turns with a question, up to where the policy's answer begins. Raises DataError.

    Args:
        turns: the turns before it.
        question: the user's text.
        chat: the chat format; None: the question alone, as a text to continue.
        tokenizer: of the policy.
    """
    if chat is None:
        return Transcript(token_ids=tokenizer.encode_prompt(question))
    message: Message = {"role": "user", "content": question}
    messages = (*turns.messages, message)
    if len(turns.token_ids):
        tail = chat.continuation(turns.token_ids, [message], ())
        if tail is not None:
            tokens = np.concatenate([turns.token_ids, tail]).astype(np.int32)
            return Transcript(messages=messages, token_ids=tokens)
    return Transcript(messages=messages, token_ids=chat.opening(messages, ()))


def with_answer(turns: Transcript, token_ids: IntArray, chat: ChatFormat | None) -> Transcript:
    """Return the turns with the policy's answer, [sampled] int32, whose tokens are kept as they
    are."""
    tokens = np.concatenate([turns.token_ids, token_ids]).astype(np.int32)
    messages = () if chat is None else (*turns.messages, chat.message(token_ids, ()))
    return Transcript(messages=messages, token_ids=tokens)


class Conversation:
    """A conversation with a policy, made by Asker.conversation, for one thread at a time."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: Tokenizer,
        chat: ChatFormat | None,
        *,
        system: str | None = None,
    ) -> None:
        """Begin a conversation. Raises DataError for a system message without a chat format.

        Args:
            sampler: of the policy.
            tokenizer: of the policy.
            chat: its chat format; None: each question is a text to continue, alone.
            system: system message; None: none.
        """
        if system is not None and chat is None:
            raise DataError(
                "the policy has no chat template, so it takes no system message. Leave it out."
            )
        self._sampler, self._tokenizer, self._chat = sampler, tokenizer, chat
        messages: tuple[Message, ...] = ()
        if system is not None:
            messages = ({"role": "system", "content": system},)
        self._turns = Transcript(messages=messages)
        self._prompt: Transcript | None = None  # up to where the last answer begins

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far; without a chat format: none."""
        return self._turns.messages

    @property
    def token_ids(self) -> IntArray:
        """The tokens so far, [length] int32, the last answer's at the end."""
        return self._turns.token_ids

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        on_text: Callable[[str], object] | None = None,
        stopped: threading.Event | None = None,
    ) -> ConversationAnswer:
        """Ask the policy; its answer becomes a part of the conversation. Blocks.

        Args:
            question: the user's text.
            max_new_tokens: longest answer, tokens; None: what the sampler's max_length leaves.
            sampling: how tokens are sampled.
            on_text: called with each new piece of the answer's text.
            stopped: ends the answer when it is set, with its tokens so far; without any the
                question is taken back.

        Raises DataError for what cannot be tokenized, RolloutError if there is no room for an
        answer.
        """
        prompt = with_question(self._turns, question, self._chat, self._tokenizer)
        return self._answered(prompt, max_new_tokens, sampling, on_text, stopped)

    def regenerate(
        self,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        on_text: Callable[[str], object] | None = None,
        stopped: threading.Event | None = None,
    ) -> ConversationAnswer:
        """Replace the last answer; as `ask`. Raises DataError if nothing was asked."""
        if self._prompt is None:
            raise DataError("there is no answer yet that could be replaced. Ask something first.")
        return self._answered(self._prompt, max_new_tokens, sampling, on_text, stopped)

    def logprobs(self, top: int = 0) -> ScoredText:
        """Return the log-probs of the last answer's tokens, and of the `top` likeliest at each
        position, at temperature 1; blocks. Raises DataError if there is no answer yet."""
        if self._prompt is None:
            raise DataError("there is no answer yet that has log-probs. Ask something first.")
        scored = LogprobRequest(prompt=True, start=len(self._prompt.token_ids), top=top)
        request = Request(
            request_id=f"chat-{next(NUMBERS)}",
            token_ids=self._turns.token_ids,
            max_new_tokens=0,
            logprobs=scored,
            for_training=False,
        )
        (done,) = self._sampler.generate([request])
        return scored_text(request, done, self._tokenizer)

    def _answered(
        self,
        prompt: Transcript,
        most: int | None,
        sampling: SamplingParams,
        on_text: Callable[[str], object] | None,
        stopped: threading.Event | None,
    ) -> ConversationAnswer:
        """Sample an answer, and make it the conversation's last one unless it is empty."""
        longest, length = self._sampler.section.max_length, len(prompt.token_ids)
        if length >= longest:
            raise RolloutError(
                f"the conversation has {length} tokens, and at most {longest} fit together with an "
                "answer. Begin a new one, or open the policy with a larger max_length."
            )
        room = min(longest - length, self._sampler.section.max_new_tokens)
        request = Request(
            request_id=f"chat-{next(NUMBERS)}",
            token_ids=prompt.token_ids,
            max_new_tokens=room if most is None else min(most, room),
            sampling=sampling,
            stop_token_ids=stop_ids(self._tokenizer, self._chat),
            for_training=False,
        )
        begun = time.perf_counter()
        done = self._sampled(request, on_text, stopped)
        ids = NO_TOKENS if done is None else done.token_ids
        if done is not None and len(ids):
            self._prompt, self._turns = prompt, with_answer(prompt, ids, self._chat)
        return ConversationAnswer(
            text=self._tokenizer.decode(ids),
            stop=StopReason.CANCELLED if done is None else done.stop,
            prompt_tokens=length,
            token_ids=ids,
            latency_s=time.perf_counter() - begun,
        )

    def _sampled(
        self,
        request: Request,
        on_text: Callable[[str], object] | None,
        stopped: threading.Event | None,
    ) -> Completion | None:
        """Return the sampler's answer; None: it was stopped before its first token."""
        pieces = streamed(self._sampler, request, self._tokenizer.decode, stopped)
        with closing(pieces):
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    done: Completion | None = end.value
                    return done
                if on_text is not None:
                    on_text(piece)


def streamed(
    sampler: Sampler,
    request: Request,
    text_of: Callable[[IntArray], str],
    stopped: threading.Event | None = None,
) -> Generator[str, None, Completion | None]:
    """Yield an answer's text in pieces while it is sampled, and return the answer; None: it was
    stopped before its first token. Closing the generator early cancels the answer.

    Args:
        sampler: of the policy.
        request: to be answered.
        text_of: decodes tokens, [sampled] int32.
        stopped: ends the answer when it is set: its tokens so far are then the answer.
    """
    (future,) = sampler.start_many([request])
    yielded = ""
    try:
        while not future.done():
            for partial in sampler.progress():
                if partial.request.request_id == request.request_id:
                    # a character's bytes may be spread over tokens: the last one may change
                    text = text_of(partial.token_ids).rstrip("\N{REPLACEMENT CHARACTER}")
                    if text.startswith(yielded) and len(text) > len(yielded):
                        yield text[len(yielded) :]
                        yielded = text
            if stopped is not None and stopped.is_set():
                with suppress(RolloutError):  # one that has not begun is cancelled below
                    sampler.save(request.request_id, stop=True, with_kv=False)
                wait([future], timeout=ENDING_S)
                if not future.done():
                    return None
            time.sleep(POLL_S)
        done = future.result()
        text = text_of(done.token_ids)
        if len(text) > len(yielded):
            yield text[len(yielded) :]
        return done
    finally:
        future.cancel()
