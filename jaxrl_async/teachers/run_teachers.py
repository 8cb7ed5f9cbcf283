"""The teachers of a run: run.optional_parts.QueriedTeachers, TeacherScorers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from jaxrl_async.config.schema import Config, NamedTeacher
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_async.errors import BadEndpoint, ConfigError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import ChatFormat, Scorer
from jaxrl_async.tasks.task import Task
from jaxrl_async.teachers.episode_teacher import EpisodeTeacher
from jaxrl_async.teachers.in_process_teacher import Compute, InProcessTeacher
from jaxrl_async.teachers.retokenizer import Retokenizer
from jaxrl_async.teachers.teacher_choices import TeacherChoices
from jaxrl_async.teachers.teacher_contexts import TeacherContexts
from jaxrl_async.teachers.teacher_scorer import TeacherScorer
from jaxrl_async.teachers.teacher_service import TeacherService
from jaxrl_async.types import BoolArray, Episode, Prompt, Score

log = logging.getLogger(__name__)


class TeacherModel(Protocol):
    """A model of this process that computes log-probs, not loaded yet."""

    @property
    def load(self) -> Callable[[], Compute]:
        """Loads it; it then computes the log-probs of sequences."""
        ...

    @property
    def vocab(self) -> int:
        """Number of its tokens."""
        ...


class RunTeachers:
    """The teachers of a run by name. All its tasks ask the same ones, so that
    teachers.NAME.concurrency limits the calls of the whole run."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        vocab: int,
        faults: FaultCounts,
        outages: Outages | None,
        chat: Callable[[], ChatFormat | None],
        models: Mapping[str, TeacherModel] = MappingProxyType({}),
    ) -> None:
        """Connect to nothing and load nothing yet. Raises ConfigError.

        Args:
            config: teacher, teachers and reference.
            tokenizer: of the policy.
            vocab: the policy's number of tokens.
            faults: counts handled faults.
            outages: outages of the run's services; None: a new object.
            chat: returns the policy's chat format; None: it has none.
            models: of the teachers on the sampler's chips, by name.
        """
        section, reference = config.teacher, config.reference_settings.teacher
        outages = outages or Outages(count=faults.add)
        top_k = section.top_k if section is not None and section.form == "loss" else 0
        self.tokenizer = tokenizer
        self.own = _ChatTokenizer(tokenizer, chat, None)
        self.of_others = {
            name: _ChatTokenizer.of(one.tokenizer, tokenizer, chat)
            for name, one in config.named_teachers.items()
            if one.tokenizer is not None
        }
        self.services: dict[str, EpisodeTeacher] = {}
        for name, one in config.named_teachers.items():
            retokenizer = self.of_others[name].retokenizer if name in self.of_others else None
            k = 0 if name == reference else top_k
            if one.url is not None:
                self.services[name] = TeacherService(
                    name,
                    one,
                    top_k=k,
                    vocab=vocab,
                    named_tokens=tokenizer.vocab_size,
                    outages=outages,
                    retokenizer=retokenizer,
                )
            elif name in models:
                model = models[name]
                self.services[name] = InProcessTeacher(
                    name,
                    model.load,
                    max_tokens=config.trainer.micro_batch_tokens,
                    top_k=k,
                    named_tokens=model.vocab if retokenizer is None else tokenizer.vocab_size,
                    retokenizer=retokenizer,
                )

    def unmatched(self, vocab: int) -> BoolArray:
        """Return which of the policy's tokens the other tokenizer has not, [vocab]; teachers have
        one such tokenizer, as a config rule requires."""
        (ids, *_) = (r.own_ids for one in self.of_others.values() if (r := one.retokenizer))
        alone = np.ones(vocab, np.bool_)
        alone[ids[ids >= 0]] = False
        return alone

    def of_task(self, config: Config, task: Task) -> "TaskTeachers":
        """Return the teachers as a task asks them.

        Args:
            config: as the task has it.
            task: may name the teachers of its records.
        """
        return TaskTeachers(self, config, task)


class TaskTeachers:
    """The teachers of a run, as one of its tasks asks them."""

    def __init__(self, run: RunTeachers, config: Config, task: Task) -> None:
        """See RunTeachers.of_task."""
        section = config.teacher
        distils = section is not None and section.source == "teachers"
        self._tokenizer, self._services = run.tokenizer, run.services
        self._reference = config.reference_settings.teacher if config.refers else None
        self._openings = {
            name: run.of_others.get(name, run.own).contexts(
                f"teachers.{name}", one, config.data.record_fields.template
            )
            for name, one in config.named_teachers.items()
            if one.context is not None or name in run.of_others
        }
        self._max_wait_s = {name: one.max_wait_s for name, one in config.named_teachers.items()}
        self._choices = TeacherChoices(
            weights={name: one.weight for name, one in config.distilling.items() if distils},
            column="teacher" if section is None else section.column,
            of_task=task.teacher if distils else None,
        )

    def with_teachers(self, outcome: Scorer) -> Scorer:
        """Return a scorer that adds the teachers' log-probs to an outcome's scores."""
        return TeacherScorer(
            outcome,
            self._choices,
            self._services,
            self._max_wait_s,
            self._openings,
            reference=self._reference,
        )

    def trials(self) -> list[tuple[str, Scorer]]:
        """Return the settings of the teachers with an address, each with a trial before a run."""
        return [
            (service.setting, _Trial(service, self._tokenizer, self._openings.get(name)))
            for name, service in self._services.items()
            if isinstance(service, TeacherService)
        ]

    def counts(self) -> Mapping[str, float]:
        """Return the counters of all tasks since the start, as NAME/COUNTER."""
        return {
            f"{name}/{counter}": number
            for name, service in self._services.items()
            for counter, number in service.counts().items()
        }

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if a record names its teachers wrongly. A function of the task is not
        called."""
        try:
            self._choices.check(prompt)
        except BadEndpoint as error:
            raise ConfigError(str(error)) from None

    def close(self) -> None:
        """Close the connections of all tasks. Idempotent; they are made again if they are needed
        again."""
        for service in self._services.values():
            service.close()


@dataclass(frozen=True, slots=True)
class _ChatTokenizer:
    """A tokenizer with its chat format, and how it writes what the policy's has written."""

    tokenizer: Tokenizer
    chat: Callable[[], ChatFormat | None]
    retokenizer: Retokenizer | None  # None: it is the policy's

    @classmethod
    def of(
        cls, folder: str, own: Tokenizer, own_chat: Callable[[], ChatFormat | None]
    ) -> "_ChatTokenizer":
        """Load the tokenizer of a teacher, next to the policy's. Raises DataError."""
        other = load_tokenizer(folder)
        chat = chat_format(other, Path(folder)) if other.has_chat_template else None
        ends = () if (own_format := own_chat()) is None else own_format.stop_token_ids
        others_ends = other.eos_ids if chat is None else (*chat.stop_token_ids, *other.eos_ids)
        retokenizer = Retokenizer(
            own,
            other,
            own_ends=tuple(dict.fromkeys((*ends, *own.eos_ids))),
            other_end=next(iter(others_ends), None),
        )
        return cls(other, lambda: chat, retokenizer)

    def contexts(self, setting: str, one: NamedTeacher, template: str | None) -> TeacherContexts:
        """Return what converts the context of a teacher, or the prompt if it has no context."""
        named = f"tokenizer={one.tokenizer}" if one.context is None else f"context={one.context}"
        return TeacherContexts(
            f"{setting}.{named}",
            one.context,
            template=template,
            tokenizer=self.tokenizer,
            chat=self.chat,
        )


class _Trial:
    """A ports.Scorer that asks one teacher about an episode, after a comparison of the tokens."""

    def __init__(
        self, service: TeacherService, tokenizer: Tokenizer, opening: TeacherContexts | None
    ) -> None:
        self._service, self._tokenizer, self._opening = service, tokenizer, opening

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        if (why := await self._service.check_tokens(self._tokenizer, prompt.text)) is not None:
            log.warning(
                "%s: its tokens are assumed to be the policy's, and could not be compared: %s",
                self._service.setting,
                why,
            )
        opening = None
        if self._opening is not None and self._service.retokenizes:
            opening = self._opening(prompt)
        for episode in episodes:
            scores = await self._service.of_episode(episode, 1.0, prompt, opening)
            if not len(scores.places) and self._service.retokenizes:
                log.warning(
                    "%s: no token of an answer such as %r can be aligned with the teacher's. See "
                    "teacher/<name>/unaligned_tokens",
                    self._service.setting,
                    self._tokenizer.decode(episode.token_ids)[:60],
                )
        return (Score(reward=0.0),) * len(episodes)
