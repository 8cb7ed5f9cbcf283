"""A teacher's log-probs of the generated tokens of episodes. Needs no JAX.

    contexts of an episode ──> in the teacher's tokens ──> log-probs ──> of the policy's tokens

teacher_service asks a server for the log-probs, in_process_teacher a model in this process.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import BadEndpoint, RetriesExhausted
from jaxrl_async.teachers.prompt_logprobs import ContextLogprobs
from jaxrl_async.teachers.retokenizer import Retokenizer
from jaxrl_async.teachers.text_spans import Spans
from jaxrl_async.types import (
    BoolArray,
    Episode,
    FloatArray,
    IntArray,
    Prompt,
    TeacherLogprobs,
)

NO_LOGPROB = -1e4
"""Log-prob of a likely token where none is known: its probability is 0."""
NO_TOKENS = np.zeros(0, np.int32)
COUNTS = ("calls", "retries", "failures", "dropped_groups", "call_s", "unknown_tokens")
"""Counters of every teacher."""


class EpisodeTeacher:
    """One teacher that is asked while groups wait. Counters are read from any thread."""

    def __init__(
        self,
        name: str,
        description: str,
        *,
        top_k: int,
        named_tokens: int,
        retokenizer: Retokenizer | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            name: of the teacher.
            description: of the teacher, for messages.
            top_k: likeliest tokens of each position; 0: none.
            named_tokens: number of the policy's tokens that the teacher can be asked about; the
                others only pad the policy's vocabulary.
            retokenizer: the policy's tokenizer and the teacher's; None: they are the same.
        """
        self.setting, self.name, self._description = f"teachers.{name}", name, description
        self._top_k, self._named_tokens, self._retokenizer = top_k, named_tokens, retokenizer
        self._counts = dict.fromkeys(COUNTS, 0.0)
        if retokenizer is not None:
            self._counts["unaligned_tokens"] = 0.0

    @property
    def retokenizes(self) -> bool:
        """Whether the teacher has another tokenizer than the policy."""
        return self._retokenizer is not None

    def counts(self) -> Mapping[str, float]:
        """Return the counters since the start, by the last part of their metrics' names."""
        return dict(self._counts)

    def note_dropped(self, waited_s: float, prompt_id: int) -> RetriesExhausted:
        """Count a group that waited for too long; return the error that drops it."""
        self._counts["dropped_groups"] += 1
        return RetriesExhausted(
            f"prompt {prompt_id}: the group waited {waited_s:.0f} s for {self._description} "
            f"({self.setting}.max_wait_s) and is dropped. Raise that, or concurrency, or use a "
            "faster teacher."
        )

    def close(self) -> None:
        """Close connections and threads. Idempotent; they are made again when they are needed."""

    async def of_tokens(self, token_ids: IntArray, about: object) -> ContextLogprobs:
        """Return the log-probs of a context's tokens, [n] int32. about: the prompt, for messages.
        Raises as `of_episode`."""
        raise NotImplementedError

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

        Raises RolloutError and BadEndpoint.
        """
        ends = (*episode.starts[1:], len(episode.token_ids))
        head = head_of(episode, prompt, of_episode=self._retokenizer is not None)
        parts: list[_TokenLogprobs] = []
        for start, end in zip(episode.starts, ends, strict=True):
            beyond = np.flatnonzero(episode.token_ids[start:end] >= self._named_tokens)
            token_ids = episode.token_ids[start : start + beyond[0] if len(beyond) else end]
            sampled = episode.drawn[start:end]
            count = np.count_nonzero(sampled)
            sampled = sampled[: len(token_ids)]
            self._counts["unknown_tokens"] += count - np.count_nonzero(sampled)
            if not sampled.any():
                continue
            begins = np.array_equal(token_ids[: len(head)], head)
            if opening is not None and not begins and start == 0:
                raise foreign_beginning(self.setting, prompt)
            shown = (len(head), opening) if opening is not None and begins else (0, NO_TOKENS)
            scores = await self._of_context(token_ids, sampled, *shown, prompt.prompt_id)
            if scores is not None:
                parts.append(scores.moved(start, parts[-1].num_spans if parts else 0))
        if not parts:
            return unknown(self.name, weight, self._top_k)
        joined = _TokenLogprobs(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        return TeacherLogprobs(
            teacher=self.name,
            weight=weight,
            places=joined.indices.astype(np.int32),
            logprobs=joined.logprobs,
            top_ids=joined.top_ids,
            top_logprobs=joined.top_logprobs,
            spans=None if self._retokenizer is None else joined.spans.astype(np.int32),
        )

    async def _of_context(
        self,
        token_ids: IntArray,
        sampled: BoolArray,
        replaced: int,
        opening: IntArray,
        about: object,
    ) -> "_TokenLogprobs | None":
        """Return the log-probs of a context's generated tokens; None: the teacher knows none.

        Args:
            token_ids: [length] int32, with at least one that the policy generated.
            sampled: [length], which ones these are.
            replaced: number of its first tokens that the teacher does not read.
            opening: what it reads in their place.
            about: as in `of_tokens`.
        """
        rest, of_rest = token_ids[replaced:], sampled[replaced:]
        if self._retokenizer is None:
            indices = np.flatnonzero(of_rest)
            read = np.concatenate([opening, rest]).astype(np.int32)
            scores = (await self.of_tokens(read, about)).at(indices + len(opening))
            return _TokenLogprobs(indices + replaced, *scores, spans=np.arange(len(indices)))
        written = await asyncio.to_thread(self._retokenizer.retokenize, rest, of_rest)
        spans = written.spans.moved(replaced, len(opening))
        spans = spans.at(spans.teacher[:, 0] > 0)  # a first token has no log-prob
        covered = int((spans.policy[:, 1] - spans.policy[:, 0]).sum())
        self._counts["unaligned_tokens"] += np.count_nonzero(sampled) - covered
        if not covered:
            return None
        read = np.concatenate([opening, written.token_ids]).astype(np.int32)
        scores = await self.of_tokens(read[: spans.teacher[-1, 1]], about)
        return _of_spans(spans, scores, self._retokenizer.own_ids if self._top_k else NO_TOKENS)


class _TokenLogprobs(NamedTuple):
    """A teacher's log-probs of n tokens; as in TeacherLogprobs."""

    indices: NDArray[np.integer[Any]]
    logprobs: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray
    spans: NDArray[np.integer[Any]]

    @property
    def num_spans(self) -> int:
        """One more than the number of its last span."""
        return int(self.spans[-1]) + 1

    def moved(self, tokens: int, spans: int) -> "_TokenLogprobs":
        """Return the same of tokens behind so many other tokens and spans."""
        return self._replace(indices=self.indices + tokens, spans=self.spans + spans)


def _of_spans(spans: Spans, scores: ContextLogprobs, own_ids: IntArray) -> _TokenLogprobs:
    """Return a teacher's log-probs of a context's spans, at least one.

    Args:
        spans: of the context; `teacher` are indices into `scores`.
        scores: the log-probs of the teacher's tokens.
        own_ids: the policy's token for each of the teacher's (Retokenizer.own_ids).
    """
    widths = spans.policy[:, 1] - spans.policy[:, 0]
    ends = np.cumsum(widths) - 1  # index of each span's last token among all spans' tokens
    numbers = np.repeat(np.arange(len(widths)), widths)
    inside = np.arange(len(numbers)) - (ends + 1 - widths)[numbers]
    logprobs = np.zeros(len(numbers), np.float32)
    logprobs[ends] = [scores.logprobs[a:b].sum(dtype=np.float64) for a, b in spans.teacher]
    top_ids = np.full((len(numbers), scores.top_ids.shape[1]), -1, np.int32)
    top_logprobs = np.full(top_ids.shape, NO_LOGPROB, np.float32)
    single = spans.one_to_one
    likely_ids = scores.top_ids[spans.teacher[single, 0]]
    named = likely_ids < len(own_ids)
    ids = np.where(named, own_ids[np.where(named, likely_ids, 0)] if len(own_ids) else -1, -1)
    top_ids[ends[single]] = ids
    likely = scores.top_logprobs[spans.teacher[single, 0]]
    top_logprobs[ends[single]] = likely
    return _TokenLogprobs(
        spans.policy[numbers, 0] + inside, logprobs, top_ids, top_logprobs, numbers
    )


def head_of(episode: Episode, prompt: Prompt, *, of_episode: bool) -> IntArray:
    """Return the tokens of an episode's prompt: the record's tokens, if it has any; of_episode:
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


def computed_later(
    name: str, weight: float, episode: Episode, prompt: Prompt, opening: IntArray | None
) -> TeacherLogprobs:
    """Return what is known of an episode's teacher that the trainer computes. Raises BadEndpoint
    as EpisodeTeacher.of_episode.

    opening: what the teacher reads in place of the prompt's tokens; None: these.
    """
    if opening is None:
        return unknown(name, weight)
    head = head_of(episode, prompt, of_episode=False)
    if not np.array_equal(episode.token_ids[: len(head)], head):
        raise foreign_beginning(f"teachers.{name}", prompt)
    return replace(unknown(name, weight), opening=opening, replaced=len(head))


def foreign_beginning(setting: str, prompt: Prompt) -> BadEndpoint:
    """Return the error for an answer that does not begin with its record's prompt."""
    return BadEndpoint(
        f"{setting}.context replaces a record's prompt, and an answer to prompt "
        f"{prompt.prompt_id} does not begin with it: the task's environment writes its own "
        "beginning. Leave context out."
    )
