"""A policy behind an OpenAI-compatible endpoint as a sampler of an evaluation: texts in place of
tokens, one code point each. Needs no JAX."""

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from jaxrl_async.data.tokenizer import Tokenizer, chat_tokenizer, fill_template
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.judge.judge_client import JudgeBusy, JudgeClient, JudgeRefusal, JudgeReply
from jaxrl_async.types import (
    Completion,
    IntArray,
    Message,
    Partial,
    Prompt,
    Request,
    StopReason,
)

SEEDS = 2**31
"""Upper bound of the seeds sent to an endpoint."""
MODELS_S = 30.0
"""Timeout of the question for its models, seconds."""
TRIES = 6
"""Number of times that a call is made while the endpoint is busy or cannot be reached."""
FIRST_WAIT_S = 1.0
"""Wait before the second try, seconds; doubles with each further one."""


def code_points(text: str) -> IntArray:
    """Return a text as code points, [length] int32."""
    return np.array([ord(character) for character in text], np.int32)


class CodePoints(Tokenizer):
    """Texts as code points, for scorers of answers that came as text."""

    def __init__(self) -> None:
        """Encode prompts with a small chat tokenizer: their tokens are not sent."""
        super().__init__(chat_tokenizer().hf)

    def encode(self, text: str) -> IntArray:
        """Return the code points, [length] int32."""
        return code_points(text)

    def decode(self, token_ids: IntArray | Sequence[int]) -> str:
        """Return the text of code points."""
        return "".join(map(chr, token_ids))

    @property
    def special_tokens(self) -> dict[int, str]:
        """None: texts have no tokens."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """An endpoint of a policy."""

    url: str  # up to /v1
    model: str | None  # its name there; None: the only one
    key_variable: str  # environment variable with the key; unset: none is sent
    concurrency: int  # calls at a time
    timeout_s: float  # of one call

    @property
    def key(self) -> str | None:
        """The key, if the environment has one."""
        return os.environ.get(self.key_variable, "").strip() or None


def model_at(endpoint: EndpointSettings) -> str:
    """Return the name of the endpoint's only model. Raises ConfigError."""
    if endpoint.model is not None:
        return endpoint.model
    url = endpoint.url.rstrip("/") + "/models"
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else None
    try:
        reply = httpx2.get(url, headers=headers, timeout=MODELS_S)
        names = [str(entry["id"]) for entry in reply.json()["data"]] if reply.is_success else None
        text = reply.text[:200]
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, LookupError, TypeError) as e:
        names, text = None, f"{type(e).__name__}: {e}"
    if names is None:
        raise ConfigError(
            f"{url} does not list its models ({text}). Check the address, which ends in /v1, and "
            f"the key in {endpoint.key_variable}; or name the model."
        )
    if len(names) != 1:
        raise ConfigError(
            f"{url} lists {len(names)} models ({', '.join(names[:8])}). Name one of them."
        )
    return names[0]


class TextEndpoint:
    """ports.Generate over an endpoint: each request is a chat completion. Used on one loop."""

    seed = None  # it continues no Partial

    def __init__(
        self,
        endpoint: EndpointSettings,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        system_prompt: str | None = None,
        template: str | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ConfigError.

        Args:
            endpoint: its address, model and limits.
            prompts: of the requests, which are found by their position.
            seed: of the calls' seeds.
            system_prompt: put before conversations without one.
            template: of prompts that are no conversations; None: as they are.
        """
        self._model = model_at(endpoint)
        self._prompts = {prompt.position: prompt for prompt in prompts}
        self._system, self._template, self._seed = system_prompt, template, seed
        self._client = JudgeClient(
            endpoint.url,
            key=endpoint.key,
            max_calls=endpoint.concurrency,
            timeout_s=endpoint.timeout_s,
            setting="the endpoint",
        )
        self.lengths: dict[tuple[int, int], int] = {}
        """Tokens that the endpoint reported, by position of the prompt and sample."""

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> list["asyncio.Future[Completion]"]:
        """See ports.Generate."""
        plain = [r.request if isinstance(r, Partial) else r for r in requests]
        return [asyncio.ensure_future(self._complete(r)) for r in plain]

    def progress(self) -> tuple[Partial, ...]:
        """Return nothing: texts arrive whole."""
        return ()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def messages_of(self, prompt: Prompt) -> list[Message]:
        """Return the conversation that a prompt asks to continue."""
        messages: list[Message] = [dict(message) for message in prompt.messages]
        if not messages:
            text = prompt.text
            if self._template is not None:
                text = fill_template(self._template, text)
            messages = [{"role": "user", "content": text}]
        if self._system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return messages

    async def _complete(self, request: Request) -> Completion:
        assert request.key is not None, "episode.make_request gives one"
        position, sample = request.key
        reply = await self._call(self._body(request, position, sample))
        if reply.completion_tokens:
            self.lengths[request.key] = reply.completion_tokens
        ids = code_points(reply.text)
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            stop=StopReason.LENGTH if reply.cut else StopReason.EOS,
        )

    def _body(self, request: Request, position: int, sample: int) -> Mapping[str, Any]:
        sampling = request.sampling
        mixed = np.random.SeedSequence([self._seed, position, sample]).generate_state(1)[0]
        return {
            "model": self._model,
            "messages": self.messages_of(self._prompts[position]),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            "max_tokens": request.max_new_tokens,
            "seed": int(mixed) % SEEDS,
        }

    async def _call(self, body: Mapping[str, object]) -> JudgeReply:
        """Make a call, again while the endpoint is busy. Raises RolloutError."""
        try:
            return await self._client.ask_again(
                body, retries=TRIES - 1, first_s=FIRST_WAIT_S, longest_s=math.inf
            )
        except JudgeRefusal as error:
            text, _, _ = str(error).partition(" If it refuses a field")
            raise RolloutError(f"the endpoint refuses a question: {text}") from error
        except JudgeBusy as error:
            raise RolloutError(f"after {TRIES} calls: {error}") from error
