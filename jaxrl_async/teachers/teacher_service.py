"""Asks the server of one teacher for the log-probs of episodes. Needs no JAX.

Calls run on the loop for user code, never on the trainer's thread; at most `concurrency` at a time.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.config.schema import NamedTeacher
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import (
    EndpointMisset,
    GivenUp,
    OutageTooLong,
    RolloutError,
    TextTooLong,
)
from jaxrl_async.judge.judge_client import JsonClient, JudgeRefusal, key_in
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.usercode import run_async, start_async
from jaxrl_async.teachers.prompt_logprobs import (
    ContextLogprobs,
    UnreadableLogprobs,
    address_of,
    read_scores,
    scoring_body,
)
from jaxrl_async.types import Episode, IntArray, Prompt, TeacherLogprobs

MAX_ANSWER_BYTES = 2**29
"""Maximum size of one answer, bytes: 32 likely tokens of 100,000 positions take about 250 MB."""
CLOSE_S = 5.0
"""Maximum wait for the end of the connections, seconds."""
PROBES = ("Hello, World!", "12 + 34 = 46.\n", "\tif x != y:", "naïve 数学 🙂")
"""Short texts that the teacher's server must convert to the policy's tokens."""
ADVICE = (
    "If the text is too long for it, lower sampler.max_length; one token must be left for an "
    "answer. If it refuses prompt_logprobs, raise its limit (vLLM's --max-logprobs), lower "
    "teacher.top_k, or set protocol."
)


class TeacherService:
    """One teacher's server. Counters are read from any thread."""

    def __init__(
        self,
        name: str,
        section: NamedTeacher,
        *,
        top_k: int,
        vocab: int,
        named_tokens: int,
        outages: Outages,
    ) -> None:
        """Connect to nothing yet. Raises ConfigError if the API key is not in the environment.

        Args:
            name: of the teacher.
            section: its settings; url is set.
            top_k: likeliest tokens of each position; 0: none.
            vocab: the policy's number of tokens.
            named_tokens: number of these that its tokenizer has; a server may refuse the others,
                which only pad the policy's vocabulary.
            outages: of the run.
        """
        assert section.url is not None, "teachers with an address are asked"
        self.setting, self.name = f"teachers.{name}", name
        self._section, self._top_k, self._vocab = section, top_k, vocab
        self._named_tokens = named_tokens
        self._who, self._outages = f"the teacher {name} at {section.url}", outages
        self._route = address_of(section.url, section.protocol)
        self._client: JsonClient | None = None  # made on the loop that uses it
        self._places = asyncio.Semaphore(section.concurrency)
        self._key = key_in(f"{self.setting}.key_variable", section.key_variable)
        self._counts = dict.fromkeys(("calls", "retries", "failures", "dropped_groups"), 0.0)
        self._counts |= {"call_s": 0.0, "unknown_tokens": 0.0}

    def counts(self) -> Mapping[str, float]:
        """Return the counters since the start, by the last part of their metrics' names."""
        return dict(self._counts)

    async def of_episode(
        self, episode: Episode, weight: float, prompt: Prompt, opening: IntArray | None = None
    ) -> TeacherLogprobs:
        """Return the log-probs of an episode's generated tokens. Waits during an outage.

        A context with a token that the tokenizer does not have is asked about up to there.

        Args:
            episode: one answer.
            weight: of this teacher.
            prompt: of the episode.
            opening: what the teacher reads in place of the prompt's tokens; None: these.

        Raises RolloutError and EndpointMisset.
        """
        ends = (*episode.starts[1:], len(episode.token_ids))
        parts: list[ContextLogprobs] = []
        places: list[NDArray[np.int64]] = []
        for start, end in zip(episode.starts, ends, strict=True):
            strange = np.flatnonzero(episode.token_ids[start:end] >= self._named_tokens)
            token_ids = episode.token_ids[start : start + strange[0] if len(strange) else end]
            wanted = np.flatnonzero(episode.drawn[start:end])
            known = wanted[wanted < len(token_ids)]
            self._counts["unknown_tokens"] += len(wanted) - len(known)
            if len(known):
                read = self._with_opening(token_ids, prompt, opening, is_first=start == 0)
                found = await self.of_tokens(read, prompt.prompt_id)
                parts.append(found.at(known + len(read) - len(token_ids)))
                places.append(start + known)
        if not parts:
            return unknown(self.name, weight, self._top_k)
        logprobs, ids, likely = (np.concatenate(c) for c in zip(*parts, strict=True))
        return TeacherLogprobs(
            teacher=self.name,
            weight=weight,
            places=np.concatenate(places).astype(np.int32),
            logprobs=logprobs,
            top_ids=ids,
            top_logprobs=likely,
        )

    def _with_opening(
        self, token_ids: IntArray, prompt: Prompt, opening: IntArray | None, *, is_first: bool
    ) -> IntArray:
        """Return a context's tokens with `opening` in place of the prompt, if it begins with that.
        Raises EndpointMisset if an episode's first context does not."""
        length = len(prompt.token_ids)
        if opening is None:
            return token_ids
        if np.array_equal(token_ids[:length], prompt.token_ids):
            return np.concatenate([opening, token_ids[length:]]).astype(np.int32)
        if is_first:
            raise EndpointMisset(
                f"{self.setting}.context replaces a record's prompt, and an answer to prompt "
                f"{prompt.prompt_id} does not begin with it: the task's environment writes its own "
                "beginning. Leave context out."
            )
        return token_ids

    async def of_tokens(self, token_ids: IntArray, about: object) -> ContextLogprobs:
        """Return the log-probs of a context's tokens, [n] int32; as `of_episode`."""
        tries = 0

        async def attempt() -> ContextLogprobs:
            nonlocal tries
            self._counts["retries"] += tries > 0
            tries += 1
            outcome = await run_async(lambda: self._asked(token_ids), None)
            scores: ContextLogprobs = outcome.get()
            return scores

        try:
            return await self._outages.until_answered(self._who, attempt, about=about)
        except (RolloutError, OSError):
            self._counts["failures"] += 1
            raise

    async def check_tokens(self, tokenizer: Tokenizer, text: str) -> str | None:
        """Compare the server's tokens of some texts with the policy's. Return why they cannot be
        compared; None: they are equal. Waits during an outage. Raises EndpointMisset if they
        differ."""

        for shown in (*PROBES, text):

            async def attempt(shown: str = shown) -> list[int]:
                tokens: list[int] = (await run_async(lambda: self._tokens_of(shown), None)).get()
                return tokens

            try:
                ours = tokenizer.encode(shown).tolist()
                theirs = await self._outages.until_answered(self._who, attempt)
            except TextTooLong:  # for this run: other texts are compared
                continue
            except OutageTooLong:
                raise
            except (EndpointMisset, JudgeRefusal) as error:  # it has no such route
                return str(error)
            if theirs != ours:
                raise EndpointMisset(
                    f"{self.setting} has other tokens than the policy: {shown[:60]!r} is "
                    f"{theirs[:12]} there and {ours[:12]} here. A teacher reads the policy's "
                    "token ids: choose a model of the same family."
                )
        return None

    def close(self) -> None:
        """Close the connections. Idempotent; they are made again when they are needed."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # closing a connection may raise anything
                start_async(client.close).result(CLOSE_S)

    # ---- on the loop for user code

    async def _asked(self, token_ids: IntArray) -> ContextLogprobs:
        section = self._section
        body = scoring_body(section.protocol, section.model, token_ids, self._top_k)
        async with self._places:
            began_s = time.monotonic()
            try:
                content = await self._connected().post(self._route, body, ADVICE)
            finally:
                self._counts["calls"] += 1
                self._counts["call_s"] += time.monotonic() - began_s
        try:
            return await asyncio.to_thread(
                read_scores, section.protocol, content, token_ids, self._top_k, self._vocab
            )
        except UnreadableLogprobs as error:
            raise EndpointMisset(
                f"{self._route} does not answer as {self.setting}.protocol={section.protocol} "
                f"asks: {error}. Correct {self.setting}."
            ) from None

    async def _tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a text by vLLM's /tokenize."""
        assert self._section.url is not None
        url = self._section.url.rstrip("/").removesuffix("/v1") + "/tokenize"
        body = {"model": self._section.model, "prompt": text, "add_special_tokens": False}
        content = await self._connected().post(url, body, "")
        return _tokens_in(content, url)

    def _connected(self) -> JsonClient:
        if self._client is None:
            self._client = JsonClient(
                key=self._key,
                places=self._section.concurrency,
                timeout_s=self._section.timeout_s,
                setting=self.setting,
                max_bytes=MAX_ANSWER_BYTES,
            )
        return self._client

    def note_dropped(self, waited_s: float, prompt_id: int) -> GivenUp:
        """Count a group that waited for too long; return the error that drops it."""
        self._counts["dropped_groups"] += 1
        return GivenUp(
            f"prompt {prompt_id}: the group waited {waited_s:.0f} s for {self._who} "
            f"({self.setting}.max_wait_s) and is dropped. Raise that, or concurrency, or use a "
            "faster teacher."
        )


def unknown(name: str, weight: float, top_k: int = 0) -> TeacherLogprobs:
    """Return a teacher's log-probs of no token. The trainer computes a local teacher later."""
    return TeacherLogprobs(
        teacher=name,
        weight=weight,
        places=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        top_ids=np.zeros((0, top_k), np.int32),
        top_logprobs=np.zeros((0, top_k), np.float32),
    )


def _tokens_in(content: bytes, url: str) -> list[int]:
    try:
        given: Any = json.loads(content)["tokens"]
        return [int(token) for token in given]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise JudgeRefusal(f"{url} answers without tokens: {content[:200]!r}") from None
