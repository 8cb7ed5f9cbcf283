"""Score answers with a language model behind an OpenAI-compatible endpoint. Needs no JAX.

group ──> Questions ──> JudgeService: cached? ─no──> a slot ───> JudgeClient ──reply──> parsed?
              (one for each answer,   │                ^                             │ no, or failed
               or one for all)        └─> Scores       └────── after a wait ─────────┘

JudgeService works on the loop for user code: neither trainer nor sampler waits for it. Training and
evaluation share its connections, its concurrency limit and its cache.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.errors import RetriesExhausted, RolloutError, Unavailable
from jaxrl_async.judge.judge_cache import JudgeCache, Scores, question_key
from jaxrl_async.judge.judge_client import (
    BadJudgeEndpoint,
    JudgeBusy,
    JudgeClient,
    chat_call,
    key_in,
)
from jaxrl_async.judge.judge_prompt import (
    JudgedTask,
    JudgeQuestion,
    Rubric,
    UnreadableReply,
    about_answers,
    follow_up,
)
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.scorers.results import FUNCTIONS, added, distinct_parts
from jaxrl_async.tasks.usercode import TooLate, run_async, side_by_side
from jaxrl_async.types import Episode, IntArray, Prompt, Score

log = logging.getLogger(__name__)

Decode = Callable[[IntArray], str]
JUDGE = "judge"
"""Score part for a judge's number without parts; all other scorers use FUNCTIONS."""
MIDDLE = 0.5
"""Neutral score if no answer of the group was judged."""
MARGIN_S = 10.0
"""Time in addition to patience_s for JudgeService's own work, seconds."""


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A question without scores, and the reason."""

    reason: RolloutError


class JudgeService:
    """Sends all questions of a run to one endpoint. `answers` may be called from any thread."""

    def __init__(
        self,
        section: JudgeSection,
        count: Callable[[str], None] = lambda name: None,
        outages: Outages | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ConfigError if the API key is not in the environment.

        Args:
            section: endpoint, limits and retries.
            count: called with the name of each fault (metrics/fault_counts.py).
            outages: Outages of the run; None: a new object.
        """
        self.outages = outages or Outages(count=count)
        self.name = f"the judge at {section.base_url}"
        self._section, self._count = section, count
        self._client = JudgeClient(
            section.base_url,
            key=key_in("reward.judge.key_variable", section.key_variable),
            max_calls=section.concurrency,
            timeout_s=section.timeout_s,
        )
        self.cache, self.meter = JudgeCache(), self._client.meter

    async def answers(self, questions: Sequence[JudgeQuestion]) -> list[Scores | Unjudged]:
        """Return the scores of each question, or why it has none. Takes patience_s at most.

        Raises BadJudgeEndpoint if the endpoint cannot serve any question.
        """

        async def all_of_them() -> list[Scores | Unjudged]:
            deadline = asyncio.get_running_loop().time() + self._section.patience_s
            return await side_by_side(self._in_time(q, deadline) for q in questions)

        try:
            outcome = await run_async(all_of_them, self._section.patience_s + MARGIN_S)
        except TooLate:
            raise RolloutError(
                f"the judge's event loop did not answer within {MARGIN_S:g} s after "
                "reward.judge.patience_s: one of your async functions blocks it. Make it await."
            ) from None
        result: list[Scores | Unjudged] = outcome.get()
        return result

    def close(self) -> None:
        """Close the connections and the cache. Idempotent."""
        self.cache.close()
        self._client.close_from_outside()

    # ---- on the loop for user code

    async def _in_time(self, question: JudgeQuestion, deadline: float) -> Scores | Unjudged:
        key = question_key(chat_call(self._section, question.messages))
        known = self.cache.get(key) if self._section.cache else None
        if known is not None and _fits(known, question):
            self.meter.add(cached=1)
            return known
        trouble: list[RolloutError] = []
        try:
            async with asyncio.timeout_at(deadline):
                scores = await self._ask(question, trouble)
        except BadJudgeEndpoint:
            raise
        except TimeoutError:
            last = f"; the last attempt: {trouble[-1]}" if trouble else ""
            unavailable = trouble and isinstance(trouble[-1], Unavailable)
            return Unjudged(
                (Unavailable if unavailable else RolloutError)(
                    f"the judge gave no scores within {self._section.patience_s:g} s{last}. Raise "
                    "reward.judge.patience_s or concurrency, or use a faster judge."
                )
            )
        except RolloutError as error:
            return Unjudged(error)
        if self._section.cache:
            self.cache.put(key, scores)
        return scores

    async def _ask(self, question: JudgeQuestion, trouble: list[RolloutError]) -> Scores:
        """Ask until the reply has scores. Raises RolloutError after the last attempt.

        trouble: receives the error of each attempt.
        """
        messages, section = question.messages, self._section
        for number in range(section.retries + 1):
            wait_s = backoff_s(section.backoff_s, number)
            try:
                reply = await self._client.ask(chat_call(section, messages))
                if reply.cut:
                    raise UnreadableReply("it was cut off at the token limit")
                return question.read(reply.text)
            except UnreadableReply as error:
                self._count("judge_refused_replies")
                messages = follow_up(question, reply.text, str(error))
                trouble.append(
                    RolloutError(
                        f"the judge's reply is unreadable: {error}: {reply.text[-200:]!r}. Raise "
                        "reward.judge.max_tokens, or use a model that follows the format."
                    )
                )
                wait_s = 0.0
            except JudgeBusy as error:
                self._count("judge_busy")
                trouble.append(error)
                wait_s = self._client.pause_s(error, wait_s, section.patience_s)
            if number < section.retries:
                log.info("asking the judge again: %s", trouble[-1])
                await asyncio.sleep(wait_s)
        raise trouble[-1]


def _fits(scores: Scores, question: JudgeQuestion) -> bool:
    """Return whether cached scores have the shape that the question asks for."""
    rows, columns = max(1, len(question.ids)), max(1, len(question.names))
    return len(scores) == rows and all(len(row) == columns for row in scores)


class JudgeScorer:
    """ports.Scorer: the judge's score of each answer, added to another scorer's."""

    def __init__(
        self,
        service: JudgeService,
        section: JudgeSection,
        rubric: Rubric,
        transcripts: "Transcripts",
        *,
        others: Scorer | None = None,
        on_failure: Literal["fail", "neutral"] | None = None,
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Judge by a rubric.

        Args:
            service: asks the endpoint.
            section: mode, scale, weight.
            rubric: criteria of the judge.
            transcripts: renders tasks and answers as text.
            others: another scorer that runs in parallel; None: the judge alone.
            on_failure: None: as in the section.
            count: called with the name of each fault.
        """
        self._service, self._section, self._rubric = service, section, rubric
        self._transcripts, self._others, self._count = transcripts, others, count
        self._on_failure = on_failure or section.on_failure

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode. Raises RolloutError if one cannot be judged and on_failure=fail.
        Errors of the other scorer are passed on."""
        if self._others is None:
            own = await self._own(episodes, prompt)
            return tuple(added([(self._section.weight, score)]) for score in own)
        own, others = await side_by_side(
            (self._own(episodes, prompt), self._others(episodes, prompt))
        )
        both = distinct_parts({FUNCTIONS: list(others), JUDGE: list(own)})
        weights = (1.0, self._section.weight)
        return tuple(
            added(list(zip(weights, pair, strict=True))) for pair in zip(*both, strict=True)
        )

    async def _own(self, episodes: Sequence[Episode], prompt: Prompt) -> tuple[Score, ...]:
        """Return the judge's scores, before weighting. Identical answers to one task are judged
        once. Answers are ranked among the answers to their task, which may differ by member."""
        shown = [
            _View(
                self._transcripts.task(one, prompt, reference=self._section.show_reference),
                self._transcripts.answer(one),
            )
            for one in episodes
        ]
        rows: dict[_View, Sequence[float]] = {}
        failures: list[Unjudged] = []

        async def ask_all() -> None:
            rows.clear()
            batches = _questions_of(shown, ranked=self._section.mode == "rank")
            results = await self._service.answers([self._question(batch) for batch in batches])
            for batch, result in zip(batches, results, strict=True):
                if not isinstance(result, Unjudged):
                    rows.update(zip(batch, result, strict=True))
            failures[:] = [result for result in results if isinstance(result, Unjudged)]
            outages = [
                result.reason for result in failures if isinstance(result.reason, Unavailable)
            ]
            if outages and (self._on_failure == "fail" or not rows):
                raise outages[0]

        with suppress(RetriesExhausted):  # it was waited for long enough
            await self._service.outages.until_answered(
                self._service.name, ask_all, about=prompt.prompt_id
            )
        if failures:
            self._note_failures(sum(one not in rows for one in shown), failures[0], prompt)
        neutral = self._neutral([rows[one] for one in shown if one in rows])
        return tuple(self._score(rows.get(one, neutral)) for one in shown)

    def _question(self, shown: Sequence["_View"]) -> JudgeQuestion:
        return about_answers(
            self._rubric,
            shown[0].task,
            [one.answer for one in shown],
            self._section.scale,
            ranked=self._section.mode == "rank",
        )

    def _note_failures(self, answers: int, failure: Unjudged, prompt: Prompt) -> None:
        """Count answers without scores. Raises RolloutError if on_failure=fail."""
        for _ in range(answers):
            self._count("judge_failures")
        if self._on_failure == "fail":
            kind = RetriesExhausted if isinstance(failure.reason, Unavailable) else RolloutError
            raise kind(
                f"prompt {prompt.prompt_id}: {answers} answers could not be judged: "
                f"{failure.reason}"
            )
        log.warning(
            "prompt %d: %d answers could not be judged and count as neutral: %s",
            prompt.prompt_id,
            answers,
            failure.reason,
        )

    def _neutral(self, known: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return the mean of the group's other answers, for each criterion."""
        if not known:
            return (MIDDLE,) * len(self._rubric.names)
        return tuple(sum(column) / len(known) for column in zip(*known, strict=True))

    def _score(self, numbers: Sequence[float]) -> Score:
        parts = dict(zip(self._rubric.names, numbers, strict=True))
        return Score(reward=self._rubric.reward(numbers), parts=parts)


class _View(NamedTuple):
    """What the judge sees of one episode."""

    task: JudgedTask
    answer: str


def _questions_of(shown: Sequence[_View], *, ranked: bool) -> list[list[_View]]:
    """Return the answers of each question, without duplicates: one answer, or all answers to one
    task if they are ranked."""
    different = sorted(  # in an order that is arbitrary but reproducible
        dict.fromkeys(shown),
        key=lambda one: hashlib.sha256(one.answer.encode("utf-8", "replace")).digest(),
    )
    if not ranked:
        return [[one] for one in different]
    tasks = dict.fromkeys(one.task for one in shown)
    return [[one for one in different if one.task == task] for task in tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts:
    """Tasks and answers as texts, for a judge."""

    decode: Decode  # leaves out special tokens
    decode_all: Decode  # keeps them

    def task(self, episode: Episode, prompt: Prompt, *, reference: bool) -> JudgedTask:
        """Return the task of the answer. That is the prompt's text if the only other message is a
        system prompt, else everything before the first sampled token."""
        start = int(episode.drawn.argmax()) if episode.num_drawn else len(episode.token_ids)
        messages = [m for m in prompt.messages if m["role"] not in ("system", "developer")]
        text = prompt.text if len(messages) < 2 else ""
        text = text or self.decode_all(episode.token_ids[:start])
        return JudgedTask(text=text, reference=prompt.reference.strip() if reference else "")

    def answer(self, episode: Episode) -> str:
        """Return the answer. With several turns or contexts, it is everything after the task,
        including replies and special tokens."""
        if episode.num_turns == 1 and len(episode.starts) == 1:
            return self.decode(episode.token_ids[episode.drawn])
        ends = (*episode.starts[1:], len(episode.token_ids))
        start = int(episode.drawn.argmax()) if episode.num_drawn else ends[0]
        begins = (min(start, ends[0]), *episode.starts[1:])
        parts = [episode.token_ids[a:b] for a, b in zip(begins, ends, strict=True)]
        return "\n\n".join(map(self.decode_all, parts))
