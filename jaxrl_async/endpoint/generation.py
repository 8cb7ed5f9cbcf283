"""The answers of one call while they are generated: their growth, their end at stop strings, and
the finished answers.

    Caller.sample ──> Generate ──progress, every few blocks──> GrowingAnswer ──> Answer
                       └────────── Completion ─────────────────┘

Used on one event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxrl_async.endpoint.callers import AnswerSpec, Caller
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.progress_watch import ProgressWatch
from jaxrl_async.endpoint.sampling_request import RequestDraft, SamplingOptions
from jaxrl_async.endpoint.text_flow import Decode, TextFlow
from jaxrl_async.rollout.call_log import cut_completion
from jaxrl_async.types import (
    Completion,
    FloatArray,
    IntArray,
    Partial,
    PositionLogprobs,
    StopReason,
    TokenRecord,
)

RESTARTED = (
    "this answer was restarted by new weights or another sampler, and the part already sent is "
    "invalid; call again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedAnswer:
    """One finished answer."""

    completion: Completion  # up to the token that completes a stop string
    text: str  # without the stop string and special tokens
    stop: str | None  # the stop string that ended it

    @property
    def finish(self) -> str:
        """The stop reason, in OpenAI's terms."""
        ended = self.stop is not None or self.completion.stop is StopReason.EOS
        return "stop" if ended else "length"


class GrowingAnswer:
    """One answer while it is generated."""

    def __init__(self, flow: TextFlow) -> None:
        """flow: converts its tokens to text."""
        self.flow = flow
        self.request_id: str | None = None  # None: not requested yet
        self._seen: IntArray = np.zeros(0, np.int32)  # passed to `flow`
        self.token_ids: IntArray = np.zeros(0, np.int32)  # that count, so far
        self.logprobs: FloatArray = np.zeros(0, np.float32)
        self.top_logprobs: PositionLogprobs | None = None
        self.prompt_logprobs: PositionLogprobs | None = None
        self.answer: GeneratedAnswer | None = None
        self.early: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def cut(self, token_ids: IntArray) -> int | None:
        """Return the number of sampled tokens that count, up to a stop string; None: all. Raises
        CallRefused if earlier tokens have changed."""
        known = min(len(self._seen), len(token_ids))
        if not np.array_equal(self._seen[:known], token_ids[:known]):
            raise CallRefused(RESTARTED, status=503, code="redrawn", retry_after_s=1.0)
        if len(token_ids) > known:
            self.flow.feed(token_ids[known:].tolist())
            self._seen = token_ids
        return self.flow.count

    def grow(self, grown: Partial) -> None:
        """Process the tokens so far. Raises as `cut`."""
        count = self.cut(grown.token_ids)
        self._take(grown, count)
        if count is not None and not self.early.done():
            name = grown.request.request_id
            so_far = Completion(request_id=name, stop=StopReason.EOS, **grown.columns)
            self.early.set_result(cut_completion(so_far, count, len(grown.request.token_ids)))

    def end(self, completion: Completion) -> None:
        """Process the complete answer. Raises as `cut`."""
        count = self.cut(completion.token_ids)
        if count is not None and count < len(completion.token_ids):
            prompt = 0 if completion.expert_ids is None else len(completion.expert_ids)
            prompt -= max(0, len(completion.token_ids) - 1)
            completion = cut_completion(completion, count, prompt)
        self._take(completion, len(completion.token_ids))
        self.answer = GeneratedAnswer(
            completion=completion, text=self.flow.whole(), stop=self.flow.stop
        )

    def _take(self, record: TokenRecord, count: int | None) -> None:
        self.token_ids, self.logprobs = record.token_ids[:count], record.logprobs[:count]
        self.top_logprobs, self.prompt_logprobs = record.top_logprobs, record.prompt_logprobs


class CallGeneration:
    """The answers of one call. `close` ends unfinished ones: their slots become free at the next
    block."""

    def __init__(
        self,
        caller: Caller,
        prompts: Sequence[IntArray],
        drafts: Sequence[RequestDraft],
        options: SamplingOptions,
        *,
        decode: Decode,
        watch: ProgressWatch | None = None,
    ) -> None:
        """Start sampling all answers.

        Args:
            caller: the caller.
            prompts: [prompt] int32 each.
            drafts: the options under the caller's terms, for each prompt.
            options: the call's sampling parameters.
            decode: tokens to text.
            watch: reports the tokens so far; None: only complete answers are needed.
        """
        self.choices = [
            GrowingAnswer(TextFlow(decode, options.stops))
            for _ in range(options.count * len(prompts))
        ]
        self._event, self._watch = asyncio.Event(), watch
        specs = [
            AnswerSpec(
                token_ids=prompts[index // options.count],
                draft=drafts[index // options.count],
                options=options,
                index=index % options.count,
                cut=choice.cut,
                early=choice.early,
                began=partial(self._began, choice),
            )
            for index, choice in enumerate(self.choices)
        ]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(caller.sample(spec)) for spec in specs]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._event.set())

    def _began(self, choice: GrowingAnswer, request_id: str) -> None:
        """Watch a request from when it is queued."""
        choice.request_id = request_id
        if self._watch is not None:
            self._watch.add([request_id], self._event)

    async def steps(self) -> AsyncIterator[None]:
        """Yield whenever more tokens arrive, until every choice has its answer. Errors of the
        sampler are passed on."""
        while any(choice.answer is None for choice in self.choices):
            await self._event.wait()
            self._event.clear()
            for choice, task in zip(self.choices, self._tasks, strict=True):
                if choice.answer is None:
                    self._look(choice, task)
            yield

    def _look(self, choice: GrowingAnswer, task: "asyncio.Task[Completion]") -> None:
        """Process new tokens of one answer."""
        if task.cancelled():
            raise CallRefused("the sampler gave up this answer; call again", status=503)
        if task.done():
            choice.end(task.result())
        elif self._watch is not None and choice.request_id is not None:
            so_far = self._watch.latest(choice.request_id)
            if so_far is not None and len(so_far.token_ids) > len(choice.token_ids):
                choice.grow(so_far)

    async def answers(self) -> list[GeneratedAnswer]:
        """Wait for all answers. Errors of the sampler are passed on."""
        async for _ in self.steps():
            pass
        return self.finished

    @property
    def finished(self) -> list[GeneratedAnswer]:
        """The finished answers, in order."""
        return [choice.answer for choice in self.choices if choice.answer is not None]

    async def close(self) -> None:
        """Cancel unfinished answers. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._watch is not None:
            self._watch.remove([s.request_id for s in self.choices if s.request_id is not None])
        await asyncio.gather(*self._tasks, return_exceptions=True)
