"""The inputs of an evaluation by name: prompts, environments and scorer, checked before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxrl_async.config.schema import (
    AdditionSection,
    Config,
    DataSection,
    JsonlSection,
    NamedEvalSection,
    name_of,
)
from jaxrl_async.data.prompts import EVAL_POSITION, eval_prompts, prompt_of
from jaxrl_async.data.records import read_records
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import DeviceGuard, Slices
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.run.builders.constraints import OfPrompt, check_constraint, prompt_constraint
from jaxrl_async.run.builders.inputs import Inputs, TaskInputs, check_references, guarded_envs
from jaxrl_async.run.builders.playing import Play, find_task, make_play
from jaxrl_async.run.builders.scoring import (
    Scorers,
    built_in_graders,
    has_functions,
    make_scorers,
)
from jaxrl_async.run.optional_parts import NoOpponents, NoServing
from jaxrl_async.scorers.guard import GuardedScorer, try_once
from jaxrl_async.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The inputs of a run that its evaluations share."""

    tokenizer: Tokenizer
    slices: Slices
    lock: DeviceGuard  # of the trainer's devices
    faults: FaultCounts
    outages: Outages
    vocab: int
    play: Play
    envs: GuardedEnvs
    scorers: Scorers
    held_out: Sequence[Prompt]
    tasks: Mapping[str, TaskInputs] = field(default_factory=dict)  # of the run, if it has several

    def of_task(self, name: str, where: str) -> "RunInputs":
        """Return the inputs of one of the run's tasks. Raises ConfigError for a task that an
        evaluation by name cannot play; where: that evaluation."""
        part = self.tasks[name]
        task = part.play.task
        if task.program is not None or task.game is not None:
            raise ConfigError(
                f"{where}.task = {name!r} has a program or a game, which evaluations by name do "
                "not play. `eval` answers its held-out prompts: leave this one out."
            )
        return replace(
            self,
            play=part.play,
            envs=guarded_envs(
                part.config.faults, part.config.sampler, part.play, self.tokenizer, self.faults
            ),
            scorers=part.scorers,
            held_out=[p for p in self.held_out if p.task == name],
        )

    @staticmethod
    def of(inputs: Inputs) -> "RunInputs":
        """Return the parts of a run's inputs that an evaluation needs."""
        return RunInputs(
            tokenizer=inputs.tokenizer,
            slices=inputs.slices,
            lock=inputs.locks.trainer,
            faults=inputs.faults,
            outages=inputs.outages,
            vocab=inputs.spec.vocab,
            play=inputs.play,
            envs=inputs.envs,
            scorers=inputs.scorers,
            held_out=inputs.held_out,
            tasks={name: part for name, part in inputs.tasks.items() if name},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInputs:
    """The checked inputs of one evaluation."""

    section: NamedEvalSection
    prompts: Sequence[Prompt]
    scorer: GuardedScorer
    scorers: Scorers  # holds the scorer; the run's or its own
    envs: GuardedEnvs
    stop_token_ids: tuple[int, ...]
    constraint: OfPrompt | None


def sampling_of(section: NamedEvalSection) -> SamplingParams:
    """Return the distribution that an evaluation samples from."""
    return SamplingParams(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p)


def make_eval_inputs(
    name: str, section: NamedEvalSection, config: Config, run: RunInputs, processes: int
) -> EvalInputs:
    """Make the inputs of an evaluation. Raises JaxrlErrors that name it.

    Args:
        name: of the evaluation.
        section: its settings.
        config: of the run.
        run: inputs that it shares.
        processes: that answer a share each.
    """
    where = f"evals.{name}"
    own = next(iter(run.tasks), None) if section.task is None else section.task
    if isinstance(own, str) and own in run.tasks:  # one of the run's several tasks
        run, config = run.of_task(own, where), run.tasks[own].config
        most = section.max_new_tokens or config.sampler.max_new_tokens
        section = section.model_copy(update={"task": None, "max_new_tokens": most})
    config = config.model_copy(update=_of_evaluation(section, config))
    play, envs = run.play, run.envs
    if section.task is not None:
        play = _play_of(where, section, config, run)
        envs = guarded_envs(config.faults, config.sampler, play, run.tokenizer, run.faults)
    graders = built_in_graders(config.reward, play.task)
    prompts = _prompts_of(where, section, config, run, play)
    if len(prompts) < processes:
        raise ConfigError(
            f"{where}: {len(prompts)} prompts are too few for {processes} processes, which answer "
            f"a share each. Raise {where}.prompts, or give more records."
        )
    if section.own_prompts:
        references = [prompt.reference for prompt in prompts]
        check_references(graders, references, config.data.record_fields.max_bad_share)
    check_constraint(config.algorithm, config.sampler, play.task, prompts, run.tokenizer, run.vocab)
    scorers, functions = run.scorers, has_functions(config.reward, play.task)
    if section.own_prompts or section.reward is not None:
        if functions or play.task.judges:
            scorers = _scorers_of(config, prompts, play, run)
        elif section.reward is not None:
            raise ConfigError(f"{where}.reward names no function. Name one, or leave it out.")
        if functions:
            try_once(scorers.evaluation, prompts[0], run.tokenizer.encode, where)
    return EvalInputs(
        section=section,
        prompts=prompts,
        scorer=scorers.evaluation,
        scorers=scorers,
        envs=envs,
        stop_token_ids=play.stop_token_ids,
        constraint=prompt_constraint(play.task),
    )


def _prompts_of(
    where: str, section: NamedEvalSection, config: Config, run: RunInputs, play: Play
) -> Sequence[Prompt]:
    """Return the prompts of an evaluation. Raises ConfigError and DataError."""
    if section.data is None:
        if section.task is None or play.own is None:
            return run.held_out[: section.prompts]
        return eval_prompts(config.limited_data, run.tokenizer, play.own)[: section.prompts]
    graded = bool(built_in_graders(config.reward, play.task))
    records = read_records(section.data, config.limited_data, run.tokenizer, graded=graded)
    positions = range(len(records))[: section.prompts]
    return [prompt_of(records[i], i, EVAL_POSITION + i) for i in positions]


def _of_evaluation(section: NamedEvalSection, config: Config) -> dict[str, object]:
    """Return the sections of a run's configuration as an evaluation has them."""
    updates: dict[str, object] = {}
    if section.task is not None:
        updates |= {"task": section.task, "seats": None}
        bare: dict[str, object] = {"addition": AdditionSection(), "jsonl": None}
        updates["data"] = config.data.model_copy(update=bare | {"max_prompt_tokens": None})
    if section.data is not None:
        updates["data"] = _data_of(section, config.data)
    if section.task is not None or section.reward is not None:
        updates["reward"] = config.reward.model_copy(update={"function": section.reward})
    return updates


def _data_of(section: NamedEvalSection, data: DataSection) -> DataSection:
    """Return the settings that read an evaluation's file."""
    fields = {"path": section.data, "eval_path": None}
    columns = {"prompt_field", "answer_field", "answer_mark"}
    own = {name: value for name in columns if (value := getattr(section, name)) is not None}
    jsonl: JsonlSection = data.record_fields.model_copy(update={**fields, **own})
    return data.model_copy(update={"jsonl": jsonl, "addition": None})


def _play_of(where: str, section: NamedEvalSection, config: Config, run: RunInputs) -> Play:
    """Return the task of an evaluation with its environments. Raises ConfigError."""
    assert section.task is not None
    if section.data is None:
        task = find_task(config)
    else:  # its records are judged when they are read
        task = find_task(config.model_copy(update={"data": DataSection()}))
    if task.program is not None or task.game is not None:
        raise ConfigError(
            f"{where}.task = {name_of(section.task)!r} has a program or a game, which only the "
            "run's own task may have. Choose a task with an environment, tools or a reward."
        )
    if task.records is not None and section.data is not None:
        raise ConfigError(
            f"{where}: its task has its own records, and data ({section.data}) gives others. Leave "
            "one of them out."
        )
    return make_play(
        config, task, run.tokenizer, run.faults.add, NoServing(), NoOpponents(), run.outages
    )


def _scorers_of(config: Config, prompts: Sequence[Prompt], play: Play, run: RunInputs) -> Scorers:
    """Return the scorers of an evaluation that has functions, or a task that gives rewards."""
    reward = config.reward.model_copy(update={"model": None, "judge": None, "process": None})
    return make_scorers(
        config.model_copy(update={"reward": reward}),
        run.tokenizer,
        prompts,
        run.slices,
        run.lock,
        run.faults,
        play.task,
        run.outages,
    )
