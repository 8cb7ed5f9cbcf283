"""Scripted implementations of the interfaces in ports, without a model, a device or a thread."""

import asyncio
import threading
from asyncio import Future
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.types import (
    NOT_DRAWN,
    Completion,
    Episode,
    EpisodeGroup,
    Partial,
    Prompt,
    Request,
    Score,
    StopReason,
    Ticket,
    VersionedParams,
)

LOGPROB = -1.0
"""Log-prob of every scripted token, nats."""


def make_prompt(prompt_id: int = 0, *, token_ids: Sequence[int] = (1, 2), text: str = "") -> Prompt:
    """Return a prompt whose position in the stream is its id."""
    ids = np.array(token_ids, np.int32)
    return Prompt(prompt_id=prompt_id, position=prompt_id, token_ids=ids, text=text, reference="")


def make_episode(versions: Sequence[int], *, prompt_tokens: int = 2) -> Episode:
    """Return an episode of one turn with one generated token per given version."""
    length = prompt_tokens + len(versions)
    drawn = np.arange(length) >= prompt_tokens
    return Episode(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        drawn=drawn,
        logprobs=np.where(drawn, LOGPROB, 0.0).astype(np.float32),
        versions=np.array([NOT_DRAWN] * prompt_tokens + list(versions), np.int32),
        stop=StopReason.EOS,
    )


def make_group(ticket: Ticket, *versions: Sequence[int]) -> EpisodeGroup:
    """Return a finished group with one episode per sequence of versions, and rewards 0, 1, 2, ...

    Without versions, it has one episode of one token of the ticket's version.
    """
    episodes = tuple(make_episode(v) for v in versions or ([ticket.version],))
    scores = tuple(Score(reward=float(i)) for i in range(len(episodes)))
    prompt = make_prompt(ticket.group)
    return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=ticket)


class ScriptedGenerate:
    """A ports.Generate that answers each request with the tokens scripted for its id.

    The answer is set on the next iteration of the event loop, or with hold=True when finish() is
    called. A scripted exception is raised from the future. `version` is the version of all tokens
    and may be set between requests. `requests` records the requests, one tuple per call.
    """

    seed: int | None = None  # it continues no Partial

    def __init__(
        self,
        script: Mapping[str, Sequence[int] | BaseException],
        *,
        version: int = 0,
        hold: bool = False,
    ) -> None:
        self._script, self._hold, self.version = script, hold, version
        self.requests: list[tuple[Request, ...]] = []
        self._held: dict[str, tuple[Request, Future[Completion]]] = {}

    def progress(self) -> tuple[Partial, ...]:
        """Implement ports.Generate: scripted answers have no partial progress."""
        return ()

    def submit_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Implement ports.Generate. Raises RolloutError for an id that is not in the script."""
        plain = [r.request if isinstance(r, Partial) else r for r in requests]
        unknown = [r.request_id for r in plain if r.request_id not in self._script]
        if unknown:
            raise RolloutError(
                f"the script has no answer to request {unknown[0]!r} (it has "
                f"{', '.join(self._script)}). Add one."
            )
        self.requests.append(tuple(plain))
        loop = asyncio.get_running_loop()
        futures: list[Future[Completion]] = [loop.create_future() for _ in plain]
        for request, future in zip(plain, futures, strict=True):
            self._held[request.request_id] = (request, future)
            if not self._hold:
                loop.call_soon(self.finish, request.request_id)
        return futures

    def finish(self, request_id: str) -> None:
        """Answer one request now."""
        request, future = self._held.pop(request_id)
        answer = self._script[request_id]
        if future.done():  # cancelled in the meantime
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(make_completion(request, answer, version=self.version))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of unanswered requests, in order of arrival."""
        return tuple(self._held)


def make_completion(request: Request, token_ids: Sequence[int], *, version: int = 0) -> Completion:
    """Return a completion of these tokens, cut at max_new_tokens; EOS if it ends in a stop
    token."""
    ids = np.array(token_ids[: request.max_new_tokens], np.int32)
    stopped = len(ids) > 0 and int(ids[-1]) in request.stop_token_ids
    return Completion(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=np.full(len(ids), LOGPROB, np.float32),
        versions=np.full(len(ids), version, np.int32),
        stop=StopReason.EOS if stopped else StopReason.LENGTH,
    )


class ScriptedScorer:
    """A ports.Scorer that returns the rewards scripted for a prompt's id, or 0 without a script.

    A scripted exception is raised. `scored` records prompt ids in call order.
    """

    def __init__(self, script: Mapping[int, Sequence[float] | BaseException]) -> None:
        self._script = script
        self.scored: list[int] = []

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Implement ports.Scorer."""
        self.scored.append(prompt.prompt_id)
        rewards = self._script.get(prompt.prompt_id, [0.0] * len(episodes))
        if isinstance(rewards, BaseException):
            raise rewards
        assert len(rewards) == len(episodes), f"prompt {prompt.prompt_id}: one reward per episode"
        return tuple(Score(reward=float(r)) for r in rewards)


class ScriptedWeights:
    """A ports.WeightSource that provides one update of the script per `step()`.

    `live_versions` records the versions that the sampler reported as live.
    """

    def __init__(self, updates: Sequence[VersionedParams]) -> None:
        self._updates = list(updates)
        self._staged: VersionedParams | None = None
        self._wake: threading.Event | None = None
        self.live_versions: list[int] = []

    def step(self) -> None:
        """Stage the next update of the script."""
        self._staged = self._updates.pop(0)
        if self._wake is not None:
            self._wake.set()

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every step()."""
        self._wake = wake

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Implement ports.WeightSource."""
        staged, self._staged = self._staged, None
        return staged

    def live(self, version: int) -> None:
        """Implement ports.WeightSource."""
        self.live_versions.append(version)

    def leave(self) -> None:
        """Implement ports.WeightSource: no caller waits here."""

    def rejoin(self) -> "ScriptedWeights":
        """Implement ports.WeightSource: the next sampler continues the script."""
        return self
