"""A teacher in this process, on the sampler's chips (teachers.NAME.chips=sampler). Needs no JAX.

contexts of several groups ──> queue ──> one thread: all that wait, up to MAX_TOKENS at a time
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxrl_async.teachers.episode_teacher import EpisodeTeacher
from jaxrl_async.teachers.prompt_logprobs import ContextLogprobs
from jaxrl_async.teachers.retokenizer import Retokenizer
from jaxrl_async.types import FloatArray, IntArray

Compute = Callable[[Sequence[IntArray]], Sequence[tuple[FloatArray, IntArray, FloatArray]]]
"""Returns the log-probs of each sequence, as a ContextLogprobs."""


class InProcessTeacher(EpisodeTeacher):
    """One teacher whose model computes in this process."""

    def __init__(
        self,
        name: str,
        load: Callable[[], Compute],
        *,
        max_tokens: int,
        top_k: int,
        named_tokens: int,
        retokenizer: Retokenizer | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            name: of the teacher.
            load: loads the model at the first question; it computes the log-probs of sequences.
            max_tokens: of the sequences that are computed at a time, with their padding; one
                sequence may have more.
            top_k: likeliest tokens of each position; 0: none.
            named_tokens: number of the policy's tokens that the teacher can be asked about.
            retokenizer: the policy's tokenizer and the teacher's; None: they are the same.
        """
        super().__init__(
            name,
            f"the teacher {name} on the sampler's chips",
            top_k=top_k,
            named_tokens=named_tokens,
            retokenizer=retokenizer,
        )
        self._load, self._max_tokens = load, max_tokens
        self._compute: Compute | None = None
        self._waiting: deque[tuple[IntArray, Future[ContextLogprobs]]] = deque()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def of_tokens(self, token_ids: IntArray, about: object) -> ContextLogprobs:
        """Return the log-probs of a context's tokens, [n] int32. Raises the errors of loading."""
        future: Future[ContextLogprobs] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"teacher-{self.name}")
            self._waiting.append((token_ids, future))
            self._thread.submit(self._answer_some)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread once it has answered what waits. Idempotent."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    # ---- on its thread

    def _answer_some(self) -> None:
        """Answer what waits; every question calls this once, and most of them find nothing."""
        waiting = self._next_requests()
        requests = [
            (ids, future) for ids, future in waiting if future.set_running_or_notify_cancel()
        ]
        if not requests:
            return
        began_s = time.monotonic()
        try:
            if self._compute is None:
                self._compute = self._load()
            results = self._compute([ids for ids, _ in requests])
        except BaseException as error:
            self._counts["failures"] += len(requests)
            for _, future in requests:
                future.set_exception(error)
            return
        finally:
            self._counts["calls"] += 1
            self._counts["call_s"] += time.monotonic() - began_s
        for (_, future), result in zip(requests, results, strict=True):
            future.set_result(ContextLogprobs(*result))

    def _next_requests(self) -> list[tuple[IntArray, Future[ContextLogprobs]]]:
        """Take the first questions that wait, up to the maximum of tokens."""
        taken: list[tuple[IntArray, Future[ContextLogprobs]]] = []
        longest = 0
        with self._lock:
            while self._waiting:
                longest = max(longest, len(self._waiting[0][0]))
                if taken and (len(taken) + 1) * longest > self._max_tokens:
                    break
                taken.append(self._waiting.popleft())
        return taken
