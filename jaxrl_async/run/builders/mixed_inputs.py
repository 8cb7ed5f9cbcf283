"""The inputs of several tasks as one: a run's other parts see one task, one scorer, one stream.

tasks.NAME ──> TaskInputs ──┐
tasks.NAME ──> TaskInputs ──┴──> TaskInputs, which chooses by Prompt.task
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl_async.config.schema import Config, FaultsSection, NamedTasks
from jaxrl_async.config.userfile import load_function
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.mixed_prompts import MixedPrompts, TaskMix, catch_up
from jaxrl_async.data.prompts import EVAL_POSITION, PromptStream
from jaxrl_async.data.records import Record, RecordSource, Split, make_source
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import Env, Scorer
from jaxrl_async.run.builders.inputs import TaskInputs
from jaxrl_async.run.builders.playing import Play
from jaxrl_async.run.builders.scoring import Scorers, guarded_scorer
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import Judges, NoJudges
from jaxrl_async.tasks.task import NO_TASK
from jaxrl_async.types import MAX_STOP_TOKENS, Episode, Prompt, Score


def join_inputs(
    config: Config,
    parts: Mapping[str, TaskInputs],
    lockstep: Lockstep,
    tokenizer: Tokenizer,
    faults: FaultCounts,
    outages: Outages,
) -> TaskInputs:
    """Return the inputs of all tasks as one task whose prompts name their tasks. Raises
    ConfigError for a user's `mixing` that cannot be loaded."""
    named = [replace(p, task=name) for name, part in parts.items() for p in part.held_out]
    if len(parts) > 1:  # each has positions of its own
        named = [replace(p, position=EVAL_POSITION + i) for i, p in enumerate(named)]
    return TaskInputs(
        config=config,
        play=_join_plays(config.named_tasks, parts, tokenizer),
        held_out=tuple(named),
        scorers=_join_scorers(
            config.faults, {n: p.scorers for n, p in parts.items()}, faults, outages
        ),
        prompts=_mix(config, parts, lockstep),
        keep_mask=any(part.keep_mask for part in parts.values()),
        references=(),
    )


def _mix(config: Config, parts: Mapping[str, TaskInputs], lockstep: Lockstep) -> MixedPrompts:
    tasks, own = config.named_tasks, config.mixing
    prompts = {name: part.prompts for name, part in parts.items()}
    most = catch_up(
        {name: task.weight for name, task in tasks.items()}, config.algorithm.groups_per_step
    )
    return MixedPrompts(
        {n: one for n, one in prompts.items() if isinstance(one, PromptStream | Curriculum)},
        {
            name: TaskMix(weight=task.weight, most=most[name], max_in_flight=task.max_in_flight)
            for name, task in tasks.items()
        },
        choose=None if own is None else load_function(own, "mixing"),
        process_index=lockstep.player,
        process_count=lockstep.players,
    )


# ---- environments


def _join_plays(tasks: NamedTasks, parts: Mapping[str, TaskInputs], tokenizer: Tokenizer) -> Play:
    """Return the tasks as one, with the environments of each prompt's task."""
    plays = {name: part.play for name, part in parts.items()}

    def make_env(prompt: Prompt) -> Env:
        return plays[prompt.task].make_env(prompt)

    only = next(iter(plays.values()))
    stops = dict.fromkeys(token for play in plays.values() for token in play.stop_token_ids)
    taught = {n: p for n, p in parts.items() if tasks[n].warm_start}
    return Play(
        task=only.task if len(plays) == 1 else NO_TASK,
        make_env=make_env,
        stop_token_ids=tuple(stops)[:MAX_STOP_TOKENS],  # each prompt uses its task's
        own=MixedRecords(taught, tokenizer),
        oldest_s=lambda: max(play.oldest_s() for play in plays.values()),
    )


@dataclass(frozen=True, slots=True)
class MixedRecords:
    """The demonstrations of several tasks; data.records.OwnRecords."""

    parts: Mapping[str, TaskInputs]
    tokenizer: Tokenizer

    def source(self, split: Split, *, taught: bool = False) -> RecordSource:
        """Return the records of all tasks, alternating. Raises ConfigError, DataError."""
        if not self.parts:
            raise ConfigError(
                "no task has warm_start=true, and warm_start.steps or supervised_coefficient asks "
                "for demonstrations. Set it for one, or give warm_start.path."
            )
        return AlternatingRecords(
            [self._of(part, split, taught=taught) for part in self.parts.values()]
        )

    def _of(self, part: TaskInputs, split: Split, *, taught: bool) -> RecordSource:
        if part.play.own is not None:
            return part.play.own.source(split, taught=taught)
        config = part.config
        data, seed = config.limited_data, config.run.seed
        return make_source(data, self.tokenizer, seed, split, taught=taught)


@dataclass(frozen=True, slots=True)
class AlternatingRecords:
    """Records of several sources, alternating: each has the same share, and shorter ones repeat."""

    sources: Sequence[RecordSource]

    def __len__(self) -> int:
        return len(self.sources) * max(map(len, self.sources))

    @property
    def in_memory(self) -> bool:
        """Whether reading all records is cheap."""
        return all(
            getattr(source, "in_memory", isinstance(source, list | tuple))
            for source in self.sources
        )

    def __getitem__(self, index: int) -> Record:
        """Return a record of the source whose turn it is."""
        turn, which = divmod(index, len(self.sources))
        source = self.sources[which]
        return source[turn % len(source)]


# ---- scorers


def _join_scorers(
    section: FaultsSection, parts: Mapping[str, Scorers], faults: FaultCounts, outages: Outages
) -> Scorers:
    """Return the scorers that choose by the prompt's task."""
    guarded = functools.partial(guarded_scorer, section, faults=faults, outages=outages)
    training = {name: part.training.scorer for name, part in parts.items()}
    evaluation = {name: part.evaluation.scorer for name, part in parts.items()}
    return Scorers(
        training=guarded(ByTask(training)),
        evaluation=guarded(ByTask(evaluation)),
        judges=JoinedJudges([part.judges for part in parts.values()]),
        teachers=next(part.teachers for part in parts.values()),  # all tasks ask the same ones
        parts=tuple(
            (Path() if isinstance(part.judges, NoJudges) else Path("tasks") / name, part)
            for name, part in parts.items()
        ),
    )


@dataclass(frozen=True, slots=True)
class ByTask:
    """A scorer that asks the scorer of the prompt's task."""

    scorers: Mapping[str, Scorer]

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """See ports.rollout.Scorer."""
        return await self.scorers[prompt.task](episodes, prompt)


@dataclass(frozen=True, slots=True)
class JoinedJudges:
    """The counters of the tasks' judges; Scorers.parts begins and closes them."""

    judges: Sequence[Judges]

    def cost(self) -> Mapping[str, float]:
        """See optional_parts.Judges."""
        return sum_counters(judge.cost() for judge in self.judges)

    def tally(self) -> Mapping[str, float]:
        """See optional_parts.Judges."""
        return sum_counters(judge.tally() for judge in self.judges)

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def sum_counters(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of counters, by name."""
    total: dict[str, float] = {}
    for counter in counters:
        for name, value in counter.items():
            total[name] = total.get(name, 0.0) + value
    return total
