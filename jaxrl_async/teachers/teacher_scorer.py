"""Scores with the log-probs of teachers. Needs no JAX.

        ┌─> all other scorers ────────────────────> Scores ─┐
group ──┤                                                   ├──> Scores with teachers
        └─> each episode ──> its teachers' servers ─────────┘
                                 └─ after max_wait_s: the group is dropped
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.tasks.usercode import side_by_side
from jaxrl_async.teachers.episode_teacher import EpisodeTeacher, computed_later
from jaxrl_async.teachers.teacher_choices import TeacherChoices
from jaxrl_async.types import Episode, IntArray, Message, Prompt, Score, TeacherLogprobs

Opening = Callable[[Prompt, Sequence[Message]], IntArray]
"""Returns what a teacher reads in place of an episode's prompt, from that and what an environment
wrote before the policy's first turn; [length] int32."""


class TeacherScorer:
    """ports.Scorer: another scorer's scores, with the log-probs of the episodes' teachers."""

    def __init__(
        self,
        outcome: Scorer,
        choices: TeacherChoices,
        services: Mapping[str, EpisodeTeacher],
        max_wait_s: Mapping[str, float | None],
        openings: Mapping[str, Opening],
        *,
        reference: str | None = None,
    ) -> None:
        """Ask the teachers in parallel to `outcome`.

        Args:
            outcome: scores answers.
            choices: names the teachers that a prompt has.
            services: the teachers that are asked here; the trainer computes the others.
            max_wait_s: how long a group waits for each of these, seconds; None: any time.
            openings: of the teachers that read something else than the prompt's tokens.
            reference: the teacher that is the reference of all answers; None: no teacher is.
        """
        self._openings, self._reference = openings, reference
        self._outcome, self._choices = outcome, choices
        self._services, self._max_wait_s = services, max_wait_s

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode. Errors of the other scorer and of the teachers are passed on."""
        of_prompt = self._choices.of(prompt)
        if self._reference is not None:
            of_prompt[self._reference] = 0.0  # nothing is learned from it
        calls = side_by_side(
            self._of_teacher(name, weight, episodes, prompt) for name, weight in of_prompt.items()
        )
        work: tuple[Coroutine[None, None, Any], ...] = (self._outcome(episodes, prompt), calls)
        scores, by_teacher = await side_by_side(work)
        return tuple(
            replace(score, teachers=tuple(of_one[number] for of_one in by_teacher))
            for number, score in enumerate(scores)
        )

    async def _of_teacher(
        self, name: str, weight: float, episodes: tuple[Episode, ...], prompt: Prompt
    ) -> list[TeacherLogprobs]:
        """Return a teacher's log-probs of episodes. Raises RetriesExhausted after max_wait_s."""
        service = self._services.get(name)
        begin = self._openings.get(name)
        openings = [None if begin is None else begin(prompt, e.opened) for e in episodes]
        if service is None:
            return [
                computed_later(name, weight, episode, prompt, opening)
                for episode, opening in zip(episodes, openings, strict=True)
            ]
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._max_wait_s[name]) as limit:
                return await side_by_side(
                    service.of_episode(episode, weight, prompt, opening)
                    for episode, opening in zip(episodes, openings, strict=True)
                )
        except TimeoutError:
            if not limit.expired():
                raise
            waited_s = time.monotonic() - began_s
            raise service.note_dropped(waited_s, prompt.prompt_id) from None
