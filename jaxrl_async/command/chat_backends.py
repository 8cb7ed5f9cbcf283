"""What answers in a chat in the terminal: a policy loaded here, or one behind an endpoint."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx2

from jaxrl_async.command.chat_options import ChatOptions, ShownToken
from jaxrl_async.errors import DataError, RolloutError
from jaxrl_async.evals.text_endpoint import EndpointSettings, model_at
from jaxrl_async.types import Message, SamplingParams, StopReason

if TYPE_CHECKING:  # it imports JAX, which an endpoint does not need
    from jaxrl_async.api.asker import Asker

POLL_S = 0.05
"""Interval at which a call of an endpoint polls whether it shall stop, seconds."""
CONNECT_S = 10.0
"""Timeout of a connection to an endpoint, seconds."""

OnText = Callable[[str], object]
"""Called with each new piece of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """An answer in a chat, whose text was passed to on_text."""

    num_tokens: int | None  # None: the endpoint does not report it
    latency_s: float
    cut: bool = False  # at max_new_tokens, or at the end of the room
    stopped: bool = False  # by the user
    tokens: tuple[ShownToken, ...] = ()  # (): log-probs were not asked for


class ChatBackend(Protocol):
    """Answers the messages of one conversation at a time."""

    @property
    def about(self) -> str:
        """A line about the policy."""
        ...

    def begin(self, system: str | None) -> None:
        """Begin a new conversation. Raises JaxrlError for a system message that cannot be used."""
        ...

    def ask(
        self, question: str, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Answer a message; blocks until `stopped` is set or the answer is complete. Raises
        JaxrlErrors, after which the conversation is as before."""
        ...

    def regenerate(
        self, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Replace the last answer; as `ask`."""
        ...


class PolicyBackend:
    """A policy that is loaded in this process."""

    def __init__(self, asker: "Asker", about: str) -> None:
        """Take an open Asker, which the caller closes. about: the policy, in a line."""
        self._asker, self.about = asker, about
        self._conversation = asker.conversation()

    def begin(self, system: str | None) -> None:
        """Begin a new conversation; see ChatBackend."""
        self._conversation = self._asker.conversation(system=system)

    def ask(
        self, question: str, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Answer a message; see ChatBackend."""
        answer = self._conversation.ask(question, **_sampled_by(options, on_text, stopped))
        return self._answered(answer, options)

    def regenerate(
        self, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Replace the last answer; see ChatBackend."""
        answer = self._conversation.regenerate(**_sampled_by(options, on_text, stopped))
        return self._answered(answer, options)

    def _answered(self, answer: Any, options: ChatOptions) -> ChatReply:
        tokens: tuple[ShownToken, ...] = ()
        if options.logprobs is not None and len(answer.token_ids):
            tokens = self._tokens(answer.prompt_tokens, options.logprobs)
        return ChatReply(
            num_tokens=len(answer.token_ids),
            latency_s=answer.latency_s,
            cut=answer.stop is StopReason.LENGTH,
            stopped=answer.stop is StopReason.CANCELLED,
            tokens=tokens,
        )

    def _tokens(self, first: int, top: int) -> tuple[ShownToken, ...]:
        """Return the last answer's tokens with their log-probs at temperature 1."""
        scored, written = self._conversation.logprobs(top), self._asker.token_text
        return tuple(
            ShownToken(
                text=written(int(scored.token_ids[i])),
                logprob=float(scored.logprobs[i]),
                others=tuple(
                    (written(int(token)), float(logprob))
                    for token, logprob in zip(
                        scored.top_ids[i], scored.top_logprobs[i], strict=True
                    )
                ),
            )
            for i in range(first, len(scored.token_ids))
        )


def _sampled_by(options: ChatOptions, on_text: OnText, stopped: threading.Event) -> dict[str, Any]:
    sampling = SamplingParams(
        temperature=options.temperature, top_p=options.top_p, top_k=options.top_k
    )
    return {
        "sampling": sampling,
        "max_new_tokens": options.max_new_tokens,
        "on_text": on_text,
        "stopped": stopped,
    }


class EndpointBackend:
    """A policy behind an OpenAI-compatible endpoint, asked in streamed chat completions."""

    def __init__(self, endpoint: EndpointSettings) -> None:
        """Ask the endpoint for its model if none is named. Raises ConfigError."""
        self._endpoint, self._model = endpoint, model_at(endpoint)
        self._messages: list[Message] = []
        self.about = f"{self._model} at {endpoint.url}"

    def begin(self, system: str | None) -> None:
        """Begin a new conversation; see ChatBackend."""
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(
        self, question: str, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Answer a message; see ChatBackend."""
        messages = [*self._messages, {"role": "user", "content": question}]
        return self._answered(messages, options, on_text, stopped)

    def regenerate(
        self, options: ChatOptions, on_text: OnText, stopped: threading.Event
    ) -> ChatReply:
        """Replace the last answer; see ChatBackend."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise DataError("there is no answer yet that could be replaced. Ask something first.")
        return self._answered(self._messages[:-1], options, on_text, stopped)

    def _answered(
        self,
        messages: list[Message],
        options: ChatOptions,
        on_text: OnText,
        stopped: threading.Event,
    ) -> ChatReply:
        begun, parts = time.perf_counter(), list[str]()
        reply = _StreamedReply()

        def add(text: str) -> None:
            parts.append(text)
            on_text(text)

        body = chat_body(self._model, messages, options)
        is_stopped = asyncio.run(self._streamed(body, reply, add, stopped))
        if parts:
            self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
        return ChatReply(
            num_tokens=reply.num_tokens,
            latency_s=time.perf_counter() - begun,
            cut=reply.cut,
            stopped=is_stopped,
            tokens=tuple(reply.tokens),
        )

    async def _streamed(
        self,
        body: Mapping[str, object],
        reply: "_StreamedReply",
        on_text: OnText,
        stopped: threading.Event,
    ) -> bool:
        """Read an answer until it ends or `stopped` is set; return whether it was stopped. Raises
        RolloutError."""
        reading = asyncio.ensure_future(self._read(body, reply, on_text))
        while not reading.done():
            await asyncio.wait({reading}, timeout=POLL_S)
            if stopped.is_set() and not reading.done():
                reading.cancel()
                await asyncio.wait({reading})
                break
        if reading.cancelled():
            return True
        reading.result()
        return False

    async def _read(
        self, body: Mapping[str, object], reply: "_StreamedReply", on_text: OnText
    ) -> None:
        key, url = self._endpoint.key, self._endpoint.url.rstrip("/") + "/chat/completions"
        headers = {"Authorization": f"Bearer {key}"} if key else None
        timeout = httpx2.Timeout(self._endpoint.timeout_s, connect=CONNECT_S)
        try:
            async with (
                httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
                client.stream("POST", url, json=body) as response,
            ):
                if response.status_code != httpx2.codes.OK:
                    text = (await response.aread())[:300].decode(errors="replace")
                    raise RolloutError(
                        f"{url} answers {response.status_code}: {text}. Correct the address, the "
                        f"model (--model) or the key in {self._endpoint.key_variable}."
                    )
                async for event in events_of(response.aiter_lines()):
                    reply.add(event, on_text)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise RolloutError(
                f"no answer from {url} ({type(error).__name__}: {error}). Check that it can be "
                "reached from this machine."
            ) from error


def chat_body(model: str, messages: list[Message], options: ChatOptions) -> dict[str, Any]:
    """Return the body of a streamed chat completion. What equals the API's default is left out,
    since some models refuse these fields."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": options.max_new_tokens,
    }
    usual = ChatOptions()
    for name in ("temperature", "top_p", "top_k"):
        if getattr(options, name) != getattr(usual, name):
            body[name] = getattr(options, name)
    if options.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": options.logprobs}
    return body


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, until [DONE]. Raises
    RolloutError."""
    async for line in lines:
        field, _, data = line.partition(":")
        if field != "data":
            continue
        if data.strip() == "[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise RolloutError(f"the endpoint sent an event that is no JSON object: {data:.200}")
        if "error" in event:
            raise RolloutError(f"the endpoint reports an error: {json.dumps(event['error']):.300}")
        yield event


class _StreamedReply:
    """The answer in the events of a streamed chat completion."""

    def __init__(self) -> None:
        self.num_tokens: int | None = None
        self.cut = False
        self.tokens: list[ShownToken] = []

    def add(self, event: Mapping[str, Any], on_text: OnText) -> None:
        """Take in an event, and pass on its text. Raises RolloutError."""
        try:
            usage = event.get("usage") or {}
            if isinstance(usage.get("completion_tokens"), int):
                self.num_tokens = usage["completion_tokens"]
            for choice in event.get("choices") or ():
                text = (choice.get("delta") or {}).get("content")
                if text:
                    on_text(str(text))
                self.cut |= choice.get("finish_reason") == "length"
                for row in (choice.get("logprobs") or {}).get("content") or ():
                    self.tokens.append(_shown_token(row))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise RolloutError(
                f"the endpoint sent an event that is no part of a chat completion "
                f"({type(error).__name__}: {error}): {json.dumps(event):.200}"
            ) from error


def _shown_token(row: Mapping[str, Any]) -> ShownToken:
    others = tuple((str(o["token"]), float(o["logprob"])) for o in row.get("top_logprobs") or ())
    return ShownToken(text=str(row["token"]), logprob=float(row["logprob"]), others=others)
