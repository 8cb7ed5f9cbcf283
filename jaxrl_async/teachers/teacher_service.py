"""Asks the server of one teacher for the log-probs of episodes. Needs no JAX.

Calls run on the loop for user code, never on the trainer's thread; at most `concurrency` at a time.
"""

import asyncio
import json
import time
from typing import Any

from jaxrl_async.config.schema import NamedTeacher
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import (
    BadEndpoint,
    OutageTooLong,
    RolloutError,
    TextTooLong,
)
from jaxrl_async.judge.judge_client import JsonClient, JudgeRefusal, key_in
from jaxrl_async.outages import Outages
from jaxrl_async.tasks.usercode import run_async
from jaxrl_async.teachers.episode_teacher import EpisodeTeacher
from jaxrl_async.teachers.prompt_logprobs import (
    ContextLogprobs,
    UnreadableLogprobs,
    address_of,
    read_scores,
    scoring_body,
)
from jaxrl_async.teachers.retokenizer import Retokenizer
from jaxrl_async.types import IntArray

MAX_ANSWER_BYTES = 2**29
"""Maximum size of one answer, bytes: 32 likely tokens of 100,000 positions take about 250 MB."""
PROBES = ("Hello, World!", "12 + 34 = 46.\n", "\tif x != y:", "naïve 数学 🙂")
"""Short texts that the teacher's server must convert to the policy's tokens."""
ANY_TOKEN = 2**31 - 1
"""Number of tokens of a teacher with another tokenizer: its model may have more than that."""
ADVICE = (
    "If the text is too long for it, lower sampler.max_length; one token must be left for an "
    "answer. If it refuses prompt_logprobs, raise its limit (vLLM's --max-logprobs), lower "
    "teacher.top_k, or set protocol."
)


class TeacherService(EpisodeTeacher):
    """One teacher's server."""

    def __init__(
        self,
        name: str,
        section: NamedTeacher,
        *,
        top_k: int,
        vocab: int,
        named_tokens: int,
        outages: Outages,
        retokenizer: Retokenizer | None = None,
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
            retokenizer: the policy's tokenizer and the teacher's; None: they are the same.
        """
        assert section.url is not None, "teachers with an address are asked"
        super().__init__(
            name,
            f"the teacher {name} at {section.url}",
            top_k=top_k,
            named_tokens=named_tokens,
            retokenizer=retokenizer,
        )
        self._section, self._outages = section, outages
        self._vocab = vocab if retokenizer is None else ANY_TOKEN
        self._address = address_of(section.url, section.protocol)
        self._client = JsonClient(
            key=key_in(f"{self.setting}.key_variable", section.key_variable),
            max_calls=section.concurrency,
            timeout_s=section.timeout_s,
            setting=self.setting,
            max_bytes=MAX_ANSWER_BYTES,
        )
        self._slots = asyncio.Semaphore(section.concurrency)

    async def of_tokens(self, token_ids: IntArray, about: object) -> ContextLogprobs:
        """Return the log-probs of a context's tokens, [n] int32; as `of_episode`."""
        tries = 0

        async def attempt() -> ContextLogprobs:
            nonlocal tries
            self._counts["retries"] += tries > 0
            tries += 1
            outcome = await run_async(lambda: self._request(token_ids), None)
            scores: ContextLogprobs = outcome.get()
            return scores

        try:
            return await self._outages.until_answered(self._description, attempt, about=about)
        except (RolloutError, OSError):
            self._counts["failures"] += 1
            raise

    async def check_tokens(self, tokenizer: Tokenizer, text: str) -> str | None:
        """Compare the server's tokens of some texts with the tokens of the teacher's tokenizer, the
        policy's unless another one is set. Return why they cannot be compared; None: they are
        equal. Waits during an outage. Raises BadEndpoint if they differ."""
        named = "the policy"
        advice = (
            "A teacher reads the policy's token ids: choose a model of the same family, or name "
            f"its tokenizer ({self.setting}.tokenizer)."
        )
        if self._retokenizer is not None:
            tokenizer, named = self._retokenizer.other, f"{self.setting}.tokenizer"
            advice = "Name the tokenizer of the model that is served there."

        for shown in (*PROBES, text):

            async def attempt(shown: str = shown) -> list[int]:
                tokens: list[int] = (await run_async(lambda: self._tokens_of(shown), None)).get()
                return tokens

            try:
                expected = tokenizer.encode(shown).tolist()
                served = await self._outages.until_answered(self._description, attempt)
            except TextTooLong:  # for this run: other texts are compared
                continue
            except OutageTooLong:
                raise
            except (BadEndpoint, JudgeRefusal) as error:  # it has no such route
                return str(error)
            if served != expected:
                raise BadEndpoint(
                    f"{self.setting} has other tokens than {named}: {shown[:60]!r} is "
                    f"{served[:12]} there and {expected[:12]} here. {advice}"
                )
        return None

    def close(self) -> None:
        """Close the connections. Idempotent; they are made again when they are needed."""
        self._client.close_from_outside()

    # ---- on the loop for user code

    async def _request(self, token_ids: IntArray) -> ContextLogprobs:
        section = self._section
        body = scoring_body(section.protocol, section.model, token_ids, self._top_k)
        async with self._slots:
            began_s = time.monotonic()
            try:
                content = await self._client.post(self._address, body, ADVICE)
            finally:
                self._counts["calls"] += 1
                self._counts["call_s"] += time.monotonic() - began_s
        try:
            return await asyncio.to_thread(
                read_scores, section.protocol, content, token_ids, self._top_k, self._vocab
            )
        except UnreadableLogprobs as error:
            raise BadEndpoint(
                f"{self._address} does not answer as {self.setting}.protocol={section.protocol} "
                f"asks: {error}. Correct {self.setting}."
            ) from None

    async def _tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a text by vLLM's /tokenize."""
        assert self._section.url is not None
        url = self._section.url.rstrip("/").removesuffix("/v1") + "/tokenize"
        body = {"model": self._section.model, "prompt": text, "add_special_tokens": False}
        content = await self._client.post(url, body, "")
        return _tokens_in(content, url)


def _tokens_in(content: bytes, url: str) -> list[int]:
    try:
        given: Any = json.loads(content)["tokens"]
        return [int(token) for token in given]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise JudgeRefusal(f"{url} answers without tokens: {content[:200]!r}") from None
