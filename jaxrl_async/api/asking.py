"""Ask a policy: texts or conversations in, texts out, whole or as they are drawn."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.config.schema import SamplerSection
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.wish import stop_ids
from jaxrl_async.errors import DataError
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports import ChatFormat
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import IntArray, Message, Request, SamplingParams

LOOK_S = 0.02
"""How often `stream` looks for new tokens, seconds."""
USUAL_TOKENS = 256
"""Longest answer where none is given, tokens."""

Asked = str | Sequence[Message]
"""A text (a question to a chat model, else what it goes on from), or a conversation to answer."""


class Asker:
    """A policy that answers, its sampler open until it is closed: many calls, one compilation.

    A context manager. Use `generate` for a single call.
    """

    def __init__(
        self, policy: Policy, *, section: SamplerSection | None = None, seed: int = 0
    ) -> None:
        """Open a sampler on the default device. Raises ConfigError.

        Args:
            policy: with its tokenizer.
            section: the settings of `sampler`; None: as Sampler's.
            seed: of the random numbers.
        """
        if policy.tokenizer is None:
            raise DataError(
                "the policy has no tokenizer. Load it from a directory that has one, or give "
                "Policy(..., tokenizer=...)."
            )
        self._tokenizer: Tokenizer = policy.tokenizer
        self._chat: ChatFormat | None = None
        self._sampler = Sampler(policy, section=section, seed=seed)
        self._count = 0

    def close(self) -> None:
        """End the sampler. Idempotent."""
        self._sampler.close()

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Asked | Sequence[Asked],
        *,
        max_new_tokens: int = USUAL_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> list[str]:
        """Return an answer to each prompt, or to the only one, in this order; blocks.

        Args:
            prompts: a text (a question to a chat model, else what it goes on from), a conversation
                (messages) to answer, or several.
            max_new_tokens: longest answer.
            temperature: 0: the most likely tokens.
            top_p: least probability of the tokens to choose among, the likeliest first.
            top_k: number of tokens to choose among; 0: all.

        Raises DataError for what cannot be written as tokens, RolloutError for a prompt that is too
        long.
        """
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
        requests = [self._request(p, max_new_tokens, sampling) for p in listed_prompts(prompts)]
        return [self._text(c.token_ids) for c in self._sampler.generate(requests)]

    def stream(
        self,
        prompt: Asked,
        *,
        max_new_tokens: int = USUAL_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Iterator[str]:
        """Yield the answer to a prompt in pieces, as it is drawn. Arguments and errors as of
        `generate`. Leaving early ends the drawing."""
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
        request = self._request(prompt, max_new_tokens, sampling)
        (answer,) = self._sampler.start_many([request])
        told = ""
        try:
            while not answer.done():
                for partial in self._sampler.progress():
                    if partial.request.request_id == request.request_id:
                        # a character's bytes may be spread over tokens: the last one may change
                        whole = self._text(partial.token_ids).rstrip("\N{REPLACEMENT CHARACTER}")
                        if whole.startswith(told) and len(whole) > len(told):
                            yield whole[len(told) :]
                            told = whole
                time.sleep(LOOK_S)
            whole = self._text(answer.result().token_ids)
            yield from [whole[len(told) :]] if len(whole) > len(told) else []
        finally:
            answer.cancel()

    def _request(self, prompt: Asked, most: int, sampling: SamplingParams) -> Request:
        self._count += 1
        chat = None if isinstance(prompt, str) else self._format()
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode_prompt(prompt)
        else:
            assert chat is not None, "conversations have a format"
            tokens = chat.opening(list(prompt), ())
        return Request(
            request_id=f"ask-{self._count}",
            token_ids=tokens,
            max_new_tokens=min(most, self._sampler.section.max_new_tokens),
            sampling=sampling,
            stop_token_ids=stop_ids(self._tokenizer, chat),
        )

    def _format(self) -> ChatFormat:
        if self._chat is None:
            self._chat = chat_format(self._tokenizer, None)
        return self._chat

    def _text(self, token_ids: IntArray) -> str:
        return self._tokenizer.decode(np.asarray(token_ids))


def listed_prompts(prompts: Asked | Sequence[Asked]) -> list[Asked]:
    """Return one prompt or several as a list. Raises DataError for what is neither text nor
    messages."""
    if isinstance(prompts, str):
        return [prompts]
    each: list[Any] = list(prompts)
    if each and all(isinstance(message, Mapping) for message in each):
        return [each]  # a conversation
    for index, prompt in enumerate(each):
        messages = isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt)
        if not (isinstance(prompt, str) or (messages and len(prompt))):
            raise DataError(
                f"prompts[{index}] is {prompt!r:.80}. Give a text, or messages such as "
                '[{"role": "user", "content": "..."}].'
            )
    return each


def generate(
    policy: Policy,
    prompts: Asked | Sequence[Asked],
    *,
    max_new_tokens: int = USUAL_TOKENS,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[str]:
    """Return a policy's answer to each prompt, or to the only one; see Asker.generate, which is
    quicker for several calls."""
    with Asker(policy, seed=seed) as asker:
        return asker.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        )
