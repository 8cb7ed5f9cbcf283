"""Asks the server of one teacher for the log-probs of episodes. Needs no JAX.

Calls run on the loop for user code, never on the trainer's thread; at most `concurrency` at a time.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

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
from jaxrl_async.teachers.other_tokens import OtherTokens
from jaxrl_async.teachers.prompt_logprobs import (
    ContextLogprobs,
    UnreadableLogprobs,
    address_of,
    read_scores,
    scoring_body,
)
from jaxrl_async.teachers.text_spans import Spans
from jaxrl_async.types import (
    BoolArray,
    Episode,
    FloatArray,
    IntArray,
    Prompt,
    TeacherLogprobs,
)

MAX_ANSWER_BYTES = 2**29
"""Maximum size of one answer, bytes: 32 likely tokens of 100,000 positions take about 250 MB."""
CLOSE_S = 5.0
"""Maximum wait for the end of the connections, seconds."""
PROBES = ("Hello, World!", "12 + 34 = 46.\n", "\tif x != y:", "naïve 数学 🙂")
"""Short texts that the teacher's server must convert to the policy's tokens."""
ANY_TOKEN = 2**31 - 1
"""Number of tokens of a teacher with another tokenizer: its model may have more than that."""
NO_LOGPROB = -1e4
"""Log-prob of a likely token that the policy's tokenizer does not have: nothing is compared."""
NO_TOKENS = np.zeros(0, np.int32)
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
        others: OtherTokens | None = None,
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
            others: the policy's tokenizer and the teacher's; None: they are the same.
        """
        assert section.url is not None, "teachers with an address are asked"
        self.setting, self.name = f"teachers.{name}", name
        self._section, self._top_k, self._others = section, top_k, others
        self._vocab = vocab if others is None else ANY_TOKEN
        self._named_tokens = named_tokens
        self._who, self._outages = f"the teacher {name} at {section.url}", outages
        self._route = address_of(section.url, section.protocol)
        self._client: JsonClient | None = None  # made on the loop that uses it
        self._places = asyncio.Semaphore(section.concurrency)
        self._key = key_in(f"{self.setting}.key_variable", section.key_variable)
        self._counts = dict.fromkeys(("calls", "retries", "failures", "dropped_groups"), 0.0)
        self._counts |= {"call_s": 0.0, "unknown_tokens": 0.0}
        if others is not None:
            self._counts["unaligned_tokens"] = 0.0

    @property
    def reads_other_tokens(self) -> bool:
        """Whether the teacher has another tokenizer than the policy."""
        return self._others is not None

    def counts(self) -> Mapping[str, float]:
        """Return the counters since the start, by the last part of their metrics' names."""
        return dict(self._counts)

    async def of_episode(
        self, episode: Episode, weight: float, prompt: Prompt, opening: IntArray | None = None
    ) -> TeacherLogprobs:
        """Return the log-probs of an episode's generated tokens. Waits during an outage.

        A context with a token that the tokenizer does not have is asked about up to there. For a
        teacher with another tokenizer it is written in that one's tokens.

        Args:
            episode: one answer.
            weight: of this teacher.
            prompt: of the episode.
            opening: what the teacher reads in place of the prompt's tokens; None: these.

        Raises RolloutError and EndpointMisset.
        """
        ends = (*episode.starts[1:], len(episode.token_ids))
        head = _head(episode, prompt, of_episode=self._others is not None)
        parts: list[_Said] = []
        for start, end in zip(episode.starts, ends, strict=True):
            strange = np.flatnonzero(episode.token_ids[start:end] >= self._named_tokens)
            token_ids = episode.token_ids[start : start + strange[0] if len(strange) else end]
            drawn = episode.drawn[start:end]
            wanted = np.count_nonzero(drawn)
            drawn = drawn[: len(token_ids)]
            self._counts["unknown_tokens"] += wanted - np.count_nonzero(drawn)
            if not drawn.any():
                continue
            begins = np.array_equal(token_ids[: len(head)], head)
            if opening is not None and not begins and start == 0:
                raise EndpointMisset(
                    f"{self.setting}.context replaces a record's prompt, and an answer to prompt "
                    f"{prompt.prompt_id} does not begin with it: the task's environment writes its "
                    "own beginning. Leave context out."
                )
            shown = (len(head), opening) if opening is not None and begins else (0, NO_TOKENS)
            said = await self._of_context(token_ids, drawn, *shown, prompt.prompt_id)
            if said is not None:
                parts.append(said.moved(start, parts[-1].num_spans if parts else 0))
        if not parts:
            return unknown(self.name, weight, self._top_k)
        joined = _Said(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        return TeacherLogprobs(
            teacher=self.name,
            weight=weight,
            places=joined.places.astype(np.int32),
            logprobs=joined.logprobs,
            top_ids=joined.top_ids,
            top_logprobs=joined.top_logprobs,
            spans=None if self._others is None else joined.spans.astype(np.int32),
        )

    async def _of_context(
        self,
        token_ids: IntArray,
        drawn: BoolArray,
        replaced: int,
        opening: IntArray,
        about: object,
    ) -> "_Said | None":
        """Return the log-probs of a context's generated tokens; None: the teacher knows none.

        Args:
            token_ids: [length] int32, with at least one that the policy generated.
            drawn: [length], which ones these are.
            replaced: number of its first tokens that the teacher does not read.
            opening: what it reads in their place.
            about: as in `of_tokens`.
        """
        rest, of_rest = token_ids[replaced:], drawn[replaced:]
        if self._others is None:
            places = np.flatnonzero(of_rest)
            read = np.concatenate([opening, rest]).astype(np.int32)
            found = (await self.of_tokens(read, about)).at(places + len(opening))
            return _Said(places + replaced, *found, spans=np.arange(len(places)))
        written = await asyncio.to_thread(self._others.written, rest, of_rest)
        spans = written.spans.moved(replaced, len(opening))
        spans = spans.at(spans.theirs[:, 0] > 0)  # a first token has no log-prob
        covered = int((spans.ours[:, 1] - spans.ours[:, 0]).sum())
        self._counts["unaligned_tokens"] += np.count_nonzero(drawn) - covered
        if not covered:
            return None
        read = np.concatenate([opening, written.token_ids]).astype(np.int32)
        found = await self.of_tokens(read[: spans.theirs[-1, 1]], about)
        return _of_spans(spans, found, self._others.own_ids if self._top_k else NO_TOKENS)

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
        """Compare the server's tokens of some texts with those of the teacher's tokenizer, which is
        the policy's unless another one is set. Return why they cannot be compared; None: they are
        equal. Waits during an outage. Raises EndpointMisset if they differ."""
        named = "the policy"
        advice = (
            "A teacher reads the policy's token ids: choose a model of the same family, or name "
            f"its tokenizer ({self.setting}.tokenizer)."
        )
        if self._others is not None:
            tokenizer, named = self._others.other, f"{self.setting}.tokenizer"
            advice = "Name the tokenizer of the model that is served there."

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
                    f"{self.setting} has other tokens than {named}: {shown[:60]!r} is "
                    f"{theirs[:12]} there and {ours[:12]} here. {advice}"
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


class _Said(NamedTuple):
    """What a teacher says about n tokens; as in TeacherLogprobs."""

    places: NDArray[np.integer[Any]]
    logprobs: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray
    spans: NDArray[np.integer[Any]]

    @property
    def num_spans(self) -> int:
        """One more than the number of its last span."""
        return int(self.spans[-1]) + 1

    def moved(self, tokens: int, spans: int) -> "_Said":
        """Return the same of tokens behind so many other tokens and spans."""
        return self._replace(places=self.places + tokens, spans=self.spans + spans)


def _of_spans(spans: Spans, found: ContextLogprobs, own_ids: IntArray) -> _Said:
    """Return what a teacher says about a context's spans, at least one.

    Args:
        spans: of the context; `theirs` are indices into `found`.
        found: the log-probs of the teacher's tokens.
        own_ids: the policy's token for each of the teacher's (OtherTokens.own_ids).
    """
    widths = spans.ours[:, 1] - spans.ours[:, 0]
    ends = np.cumsum(widths) - 1  # index of each span's last token among those of all spans
    numbers = np.repeat(np.arange(len(widths)), widths)
    inside = np.arange(len(numbers)) - (ends + 1 - widths)[numbers]
    logprobs = np.zeros(len(numbers), np.float32)
    logprobs[ends] = [found.logprobs[a:b].sum(dtype=np.float64) for a, b in spans.theirs]
    top_ids = np.full((len(numbers), found.top_ids.shape[1]), -1, np.int32)
    top_logprobs = np.full(top_ids.shape, NO_LOGPROB, np.float32)
    single = spans.one_to_one
    theirs = found.top_ids[spans.theirs[single, 0]]
    named = theirs < len(own_ids)
    ids = np.where(named, own_ids[np.where(named, theirs, 0)] if len(own_ids) else -1, -1)
    top_ids[ends[single]] = ids
    likely = found.top_logprobs[spans.theirs[single, 0]]
    top_logprobs[ends[single]] = np.where(ids >= 0, likely, NO_LOGPROB)
    return _Said(spans.ours[numbers, 0] + inside, logprobs, top_ids, top_logprobs, numbers)


def _head(episode: Episode, prompt: Prompt, *, of_episode: bool) -> IntArray:
    """Return the tokens of an episode's prompt: those of its record, if that has any; of_episode:
    all before the first that the policy generated."""
    if len(prompt.token_ids) and not of_episode:
        return prompt.token_ids
    return episode.token_ids[: int(np.argmax(episode.drawn))]


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
