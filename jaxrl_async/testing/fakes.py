"""Doubles that replay a script: the seams of ports.py without a model, a device or a thread."""

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
    """A prompt whose position in the stream is its id."""
    ids = np.array(token_ids, np.int32)
    return Prompt(prompt_id=prompt_id, position=prompt_id, token_ids=ids, text=text, reference="")


def make_episode(versions: Sequence[int], *, prompt_tokens: int = 2) -> Episode:
    """One turn that drew len(versions) tokens, each by the weights of its version."""
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
    """A finished group, one episode for each sequence of versions; one token of the ticket's where
    none is given. Rewards are 0, 1, 2, ..."""
    episodes = tuple(make_episode(v) for v in versions or ([ticket.version],))
    scores = tuple(Score(reward=float(i)) for i in range(len(episodes)))
    prompt = make_prompt(ticket.group)
    return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=ticket)


class ScriptedGenerate:
    """A ports.Generate that answers each request with the tokens written for its id.

    The answer comes on the loop's next turn, or when finish() says so with hold=True. An exception
    in place of tokens is raised from the future. `version` is that of all tokens, and may be set
    between two requests. `requests` keeps what was asked, one tuple for each call.
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
        """See ports.Generate: a script is not drawn bit by bit."""
        return ()

    def submit_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """See ports.Generate. Raises RolloutError for an id that is not in the script."""
        asked = [r.request if isinstance(r, Partial) else r for r in requests]
        unknown = [r.request_id for r in asked if r.request_id not in self._script]
        if unknown:
            raise RolloutError(
                f"the script has no answer to request {unknown[0]!r} (it has "
                f"{', '.join(self._script)}). Add one."
            )
        self.requests.append(tuple(asked))
        loop = asyncio.get_running_loop()
        futures: list[Future[Completion]] = [loop.create_future() for _ in asked]
        for request, future in zip(asked, futures, strict=True):
            self._held[request.request_id] = (request, future)
            if not self._hold:
                loop.call_soon(self.finish, request.request_id)
        return futures

    def finish(self, request_id: str) -> None:
        """Answer one request now."""
        request, future = self._held.pop(request_id)
        answer = self._script[request_id]
        if future.done():  # cancelled meanwhile
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(make_completion(request, answer, version=self.version))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests that have no answer yet, in the order of asking."""
        return tuple(self._held)


def make_completion(request: Request, token_ids: Sequence[int], *, version: int = 0) -> Completion:
    """These tokens as the answer, cut at max_new_tokens; EOS where the last is a stop token."""
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
    """A ports.Scorer that gives the rewards written for a prompt's id, 0 where there are none.

    An exception in place of rewards is raised. `scored` keeps prompt ids in the order of asking.
    """

    def __init__(self, script: Mapping[int, Sequence[float] | BaseException]) -> None:
        self._script = script
        self.scored: list[int] = []

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """See ports.Scorer."""
        self.scored.append(prompt.prompt_id)
        rewards = self._script.get(prompt.prompt_id, [0.0] * len(episodes))
        if isinstance(rewards, BaseException):
            raise rewards
        assert len(rewards) == len(episodes), f"prompt {prompt.prompt_id}: one reward per episode"
        return tuple(Score(reward=float(r)) for r in rewards)


class ScriptedWeights:
    """A ports.WeightSource that hands out one update of the script per `step()`.

    `lived` keeps the versions that the sampler has said to draw from.
    """

    def __init__(self, updates: Sequence[VersionedParams]) -> None:
        self._updates = list(updates)
        self._staged: VersionedParams | None = None
        self._wake: threading.Event | None = None
        self.lived: list[int] = []

    def step(self) -> None:
        """Stage the next update of the script."""
        self._staged = self._updates.pop(0)
        if self._wake is not None:
            self._wake.set()

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every step()."""
        self._wake = wake

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """See ports.WeightSource."""
        staged, self._staged = self._staged, None
        return staged

    def live(self, version: int) -> None:
        """See ports.WeightSource."""
        self.lived.append(version)

    def leave(self) -> None:
        """See ports.WeightSource: nobody waits here."""

    def rejoin(self) -> "ScriptedWeights":
        """See ports.WeightSource: the next sampler goes on in the script."""
        return self
