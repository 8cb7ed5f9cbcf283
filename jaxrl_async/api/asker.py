"""Ask a policy: texts or conversations in, texts out, complete or streamed, or their log-probs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.api.conversation import Conversation, streamed
from jaxrl_async.api.scored_text import (
    Scored,
    ScoredText,
    listed_texts,
    scored_text,
    tokens_to_score,
)
from jaxrl_async.config.schema import SamplerSection
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.images import ImageStore, holds_images, take_images
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.sampling_request import stop_ids
from jaxrl_async.errors import DataError
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.vision.image_form import images_of
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import (
    Constraint,
    IntArray,
    LogitShaping,
    LogprobRequest,
    Message,
    Request,
    SamplingParams,
)

USUAL_TOKENS = 256
"""Default maximum length of an answer, tokens."""

PromptLike = str | Sequence[Message]
"""A text (a question to a chat model, or the beginning that another model continues), or a
conversation to answer."""


class Asker:
    """A policy that answers, its sampler open until it is closed: many calls, one compilation. A
    context manager."""

    def __init__(
        self,
        policy: Policy | str | Path,
        *,
        section: SamplerSection | None = None,
        seed: int = 0,
        chat_arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Open a sampler on the default device. Raises ConfigError, DataError and CheckpointError.

        Args:
            policy: with its tokenizer; or the directory of one, or its name on the hub.
            section: the settings of `sampler`; None: as Sampler's.
            seed: of the random numbers.
            chat_arguments: what the chat template reads besides the messages, such as
                {"enable_thinking": False}; as data.chat_arguments.
        """
        policy = _loaded(policy)
        self._tokenizer: Tokenizer = policy.tokenizer
        self._images: ImageStore | None = None
        if policy.tower is not None:
            self._images = images_of(policy.tower, policy.spec, policy.tokenizer)
        if self._images is not None:  # a separate tokenizer: it writes this store's images
            self._tokenizer = Tokenizer(policy.tokenizer.hf, eos_ids=policy.tokenizer.eos_ids)
            self._tokenizer.images = self._images
        self._chat: ChatFormat | None = None
        self._chat_arguments = dict(chat_arguments or {})
        settings = SamplerSettings(images=self._images)
        self._sampler = Sampler(policy, section=section, seed=seed, settings=settings)
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
        prompts: PromptLike | Sequence[PromptLike],
        *,
        max_new_tokens: int = USUAL_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        constraint: Constraint | None = None,
    ) -> list[str]:
        """Return an answer to each prompt, in order; blocks.

        Args:
            prompts: a text (a question to a chat model, or a beginning to continue), a conversation
                (messages), or a list of these.
            max_new_tokens: longest answer, tokens.
            temperature: 0: the most likely tokens.
            top_p: total probability of the likeliest tokens to choose among.
            top_k: number of tokens to choose among; 0: all.
            constraint: what each answer must match unless max_new_tokens cuts it off, such as
                Constraint.schema({...}).

        Raises DataError for what cannot be tokenized, RolloutError for a prompt that is too long,
        and for a constraint that cannot be followed.
        """
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
        listed = listed_prompts(prompts)
        requests = [self._request(p, max_new_tokens, sampling, constraint) for p in listed]
        return [self._text(c.token_ids) for c in self._sampler.generate(requests)]

    def score(
        self,
        texts: Scored | Sequence[Scored],
        *,
        top: int = 0,
        ids: Sequence[int] = (),
    ) -> list[ScoredText]:
        """Return the log-probs of each text's tokens, in order; blocks.

        Args:
            texts: a text or its token ids, a tuple (prompt, completion), or a list of these. A
                tuple gives the log-probs of the completion; its prompt may be a conversation. Texts
                are tokenized as they are, after the tokenizer's bos.
            top: number of likeliest tokens whose log-probs are given at each position, at most 128.
            ids: token ids whose log-probs are given at each position, at most 128.

        Raises DataError for what cannot be tokenized, RolloutError for a text that is too long.
        """
        requests = [
            self._scoring(text, index, top, ids) for index, text in enumerate(listed_texts(texts))
        ]
        answers = self._sampler.generate(requests)
        pairs = zip(requests, answers, strict=True)
        return [scored_text(request, done, self._tokenizer) for request, done in pairs]

    def conversation(self, *, system: str | None = None) -> Conversation:
        """Begin a conversation of several turns, whose sampled tokens are kept unchanged.

        system: system message. Without a chat template it raises DataError, and each question is a
        text to continue.
        """
        chat = self._format() if self._tokenizer.has_chat_template else None
        return Conversation(self._sampler, self._tokenizer, chat, system=system)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; a part of a character is U+FFFD."""
        return self._tokenizer.token_text(token_id)

    def _scoring(self, text: Scored, index: int, top: int, ids: Sequence[int]) -> Request:
        self._count += 1
        tokens, first = tokens_to_score(text, index, self._tokenizer, self._conversation)
        return Request(
            request_id=f"score-{self._count}",
            token_ids=tokens,
            max_new_tokens=0,
            logprobs=LogprobRequest(prompt=True, start=first, top=top, ids=tuple(ids)),
            for_training=False,
        )

    def stream(
        self,
        prompt: PromptLike,
        *,
        max_new_tokens: int = USUAL_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        constraint: Constraint | None = None,
    ) -> Iterator[str]:
        """Yield the answer in pieces while it is sampled; otherwise as `generate`. Leaving the
        loop early cancels the answer."""
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
        request = self._request(prompt, max_new_tokens, sampling, constraint)
        yield from streamed(self._sampler, request, self._text)

    def _request(
        self,
        prompt: PromptLike,
        most: int,
        sampling: SamplingParams,
        constraint: Constraint | None = None,
    ) -> Request:
        self._count += 1
        if isinstance(prompt, str) and self._chat_arguments:
            prompt = [{"role": "user", "content": prompt}]
        chat = None if isinstance(prompt, str) else self._format()
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode_prompt(prompt)
        else:
            tokens = self._conversation(list(prompt))
        return Request(
            request_id=f"ask-{self._count}",
            token_ids=tokens,
            max_new_tokens=min(most, self._sampler.section.max_new_tokens),
            sampling=sampling,
            stop_token_ids=stop_ids(self._tokenizer, chat),
            shaping=None if constraint is None else LogitShaping(constraint=constraint),
        )

    def _conversation(self, messages: Sequence[object]) -> IntArray:
        """Return the tokens of messages, images among them. Raises DataError."""
        if self._images is None and holds_images(messages):
            raise DataError(
                "the prompt has an image, and the policy reads text alone. Load a Gemma 3 with its "
                "vision tower (docs/images.md), or leave the image out."
            )
        taken, numbers = take_images(messages, self._images)
        tokens = self._format().opening(taken, ())
        return tokens if self._images is None else self._images.named(tokens, numbers)

    def _format(self) -> ChatFormat:
        if self._chat is None:
            self._chat = chat_format(self._tokenizer, None, arguments=self._chat_arguments)
        return self._chat

    def _text(self, token_ids: IntArray) -> str:
        return self._tokenizer.decode(np.asarray(token_ids))


def _loaded(policy: Policy | str | Path) -> Policy:
    """Return a policy with its tokenizer. Raises DataError."""
    if isinstance(policy, str | Path):
        policy = Policy.from_pretrained(policy)
    if not isinstance(policy, Policy):
        raise DataError(
            f"the policy is a {type(policy).__name__}. Give a Policy, such as run.policy, or the "
            "directory of one."
        )
    if policy.tokenizer is None:
        raise DataError(
            "the policy has no tokenizer. Load it from a directory that has one, or give "
            "Policy(..., tokenizer=...)."
        )
    return policy


def listed_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Return one prompt or several as a list. Raises DataError for what is neither text nor
    messages."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise DataError(f"prompts is a {type(prompts).__name__}. Give a text, messages, or a list.")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(message, Mapping) for message in listed):
        return [listed]  # a conversation
    for index, prompt in enumerate(listed):
        messages = isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt)
        if not (isinstance(prompt, str) or (messages and len(prompt))):
            raise DataError(
                f"prompts[{index}] is {prompt!r:.80}. Give a text, or messages such as "
                '[{"role": "user", "content": "..."}].'
            )
    return listed


def generate(
    policy: Policy | str | Path,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    max_new_tokens: int = USUAL_TOKENS,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    chat_arguments: Mapping[str, Any] | None = None,
    constraint: Constraint | None = None,
) -> list[str]:
    """Return a policy's answer to each prompt, as Asker.generate, which is quicker for several
    calls."""
    with Asker(policy, seed=seed, chat_arguments=chat_arguments) as asker:
        return asker.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            constraint=constraint,
        )


def score(
    policy: Policy | str | Path,
    texts: Scored | Sequence[Scored],
    *,
    top: int = 0,
    ids: Sequence[int] = (),
) -> list[ScoredText]:
    """Return the log-probs of the tokens of texts or completions, as Asker.score, which is
    quicker for several calls."""
    with Asker(policy) as asker:
        return asker.score(texts, top=top, ids=ids)
