"""All inputs of a run, checked before its folder is claimed: errors are reported before anything is
made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_async.algorithms.preflight import check_algorithm
from jaxrl_async.config.schema import Config, FaultsSection, SamplerSection
from jaxrl_async.config.seats_section import has_opponents
from jaxrl_async.config.task_section import section_of_task
from jaxrl_async.data.curriculum import Curriculum, make_stream
from jaxrl_async.data.prompts import FittingPairs, PromptStream, eval_prompts
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, naming
from jaxrl_async.later import Later
from jaxrl_async.mesh import Slices, make_slices
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.outages import Outages
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.run import features
from jaxrl_async.run.builders.constraints import check_constraint
from jaxrl_async.run.builders.device_memory import check_devices_hold
from jaxrl_async.run.builders.devices import Locks, claim_devices, make_locks
from jaxrl_async.run.builders.frozen_weights import check_advisers, check_frozen
from jaxrl_async.run.builders.initial_policy import check_model, make_tokenizer
from jaxrl_async.run.builders.learning import check_critic, check_routing, keeps_masks
from jaxrl_async.run.builders.playing import (
    Play,
    make_play,
    run_chat_format,
    tasks_of,
    tokenizer_source,
)
from jaxrl_async.run.builders.scoring import (
    Scorers,
    built_in_graders,
    check_reward_parts,
    make_scorers,
    note_process_rewards,
)
from jaxrl_async.run.builders.vision import check_images, image_store
from jaxrl_async.run.checkpoint.inputs_digest import inputs_digest
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import (
    NO_NAMED_EVALUATIONS,
    NamedEvaluations,
    QueriedTeachers,
    SeatFillers,
    Serving,
)
from jaxrl_async.run.replay.recording import RecordedSchedule, read_schedule
from jaxrl_async.run.warm_start import warm_pairs
from jaxrl_async.scorers.graders import check_answers, try_references
from jaxrl_async.scorers.rewards import RewardFunction
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import BoolArray, Prompt

if TYPE_CHECKING:
    from jaxrl_async.algorithms import answer_pairs
    from jaxrl_async.data.mixed_prompts import MixedPrompts
    from jaxrl_async.run.builders import mixed_inputs, sampler_teachers
    from jaxrl_async.run.builders.sampler_teachers import SamplerModel
else:
    answer_pairs = Later("jaxrl_async.algorithms.answer_pairs")
    sampler_teachers = Later("jaxrl_async.run.builders.sampler_teachers")
    mixed_inputs = Later("jaxrl_async.run.builders.mixed_inputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """Checked inputs of one task."""

    config: Config  # as the task has it
    play: Play
    held_out: Sequence[Prompt]
    scorers: Scorers
    prompts: "PromptStream | Curriculum | MixedPrompts"
    keep_mask: bool  # whether its sampling masks go with the tokens
    references: Sequence[str]  # answers of its records that built-in rewards must read


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Checked inputs of a run."""

    recorded: RecordedSchedule | None  # the schedule to replay; None: no replay
    tokenizer: Tokenizer
    slices: Slices
    spec: ModelSpec  # of the policy
    locks: Locks
    faults: FaultCounts
    outages: Outages
    held_out: Sequence[Prompt]
    scorers: Scorers
    play: Play  # the task, or several as one
    serving: Serving  # not open yet
    opponents: SeatFillers  # other players of a game; not started yet
    envs: GuardedEnvs  # its environments
    keep_mask: bool  # whether sampling masks go with the tokens
    prompts: "PromptStream | Curriculum | MixedPrompts"
    digests: Mapping[str, str]  # of the graders and the held-out records
    tasks: Mapping[str, TaskInputs] = field(default_factory=dict)  # by name; "": the only one
    evals: NamedEvaluations = NO_NAMED_EVALUATIONS
    unmatched: BoolArray | None = None  # [vocab] tokens that a teacher has not; None: not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What all tasks of a run have in common."""

    tokenizer: Tokenizer
    slices: Slices  # a reward model runs on the trainer's
    spec: ModelSpec  # of the policy
    locks: Locks
    queried: QueriedTeachers | None  # teachers by name, of all tasks; None: no teacher is queried
    lockstep: Lockstep  # the processes, which draw shares of the prompts
    faults: FaultCounts
    outages: Outages
    serving: Serving
    opponents: SeatFillers


def check_inputs(
    config: Config, lockstep: Lockstep, locks: Locks | None = None, task: Task | None = None
) -> tuple[Inputs, FittingPairs | None]:
    """Read and check all inputs of a run of rl; no weight of the policy is read.

    The pairs are the warm start's, which are not needed after it; None: no warm start. Raises
    JaxrlErrors that name the setting.

    Args:
        config: the whole configuration.
        lockstep: the processes of this run.
        locks: of the devices, if several runs share them.
        task: see playing.find_task.
    """
    features.check_listening(config, lockstep)
    claim_devices(config)
    file = config.run.replay_schedule
    recorded = None if file is None else read_schedule(Path(file), config)
    check_algorithm(config.algorithm, config.teacher)
    if config.pairs is not None:
        answer_pairs.pairs_loss(config.pairs.loss)
    tasks = tasks_of(config, task)
    shared = _shared(config, tasks, lockstep, locks)
    tokenizer, faults, outages = shared.tokenizer, shared.faults, shared.outages
    parts = _inputs_by_task(config, tasks, shared)
    if config.named_tasks:
        joined = mixed_inputs.join_inputs(config, parts, lockstep, tokenizer, faults, outages)
    else:
        joined = parts[""]
    check_shares(joined.held_out, lockstep)
    pairs = warm_pairs(config, tokenizer, joined.play.own) if config.warm_start.steps else None
    _check_references_of(parts)
    tokenizer.images = check_images(config, tokenizer.images)
    teacher, queried = config.teacher, shared.queried
    unmatched = None
    if teacher is not None and teacher.unmatched_weight and queried is not None:
        unmatched = queried.unmatched(shared.spec.vocab)
    inputs = Inputs(
        recorded=recorded,
        tokenizer=tokenizer,
        slices=shared.slices,
        spec=shared.spec,
        locks=shared.locks,
        faults=faults,
        outages=outages,
        held_out=joined.held_out,
        scorers=joined.scorers,
        play=joined.play,
        serving=shared.serving,
        opponents=shared.opponents,
        envs=guarded_envs(config.faults, config.sampler, joined.play, tokenizer, faults),
        keep_mask=joined.keep_mask,
        prompts=joined.prompts,
        digests=_digests_of(parts),
        tasks=parts,
        unmatched=unmatched,
    )
    evals = features.named_evaluations(config, inputs, lockstep)
    return replace(inputs, evals=evals), pairs


def _shared(
    config: Config, tasks: Mapping[str, Task], lockstep: Lockstep, locks: Locks | None
) -> _Shared:
    """Make and check what all tasks have in common. Raises JaxrlErrors."""
    faults = FaultCounts()
    outages = make_outages(config.faults, faults, resumed=config.run.resume)
    first = next(iter(tasks.values()))
    data, with_words = tokenizer_source(config, tasks)
    tokenizer = make_tokenizer(data, config.model, with_words)
    tokenizer.max_tokens = config.longest_text
    slices = make_slices(config.mesh)
    spec = check_model(config, tokenizer, slices)
    tokenizer.images = image_store(config, spec, tokenizer)
    check_frozen(config)
    features.check_engines(config, spec)
    locks = locks or _locks(config, slices, lockstep)
    with_program = (one for one in tasks.values() if one.program is not None)
    serving = features.serving(config, next(with_program, first), faults.add)
    opponents = features.opponents(
        config,
        lockstep,
        lambda: run_chat_format(config.data, config.model, tokenizer),
        spec,
        faults,
        outages,
    )
    models: Mapping[str, SamplerModel] = {}
    if any(one.chips == "sampler" for one in config.named_teachers.values()):
        models = sampler_teachers.sampler_models(config, spec, slices, locks.sampler)
    _check_models(config, spec, tokenizer, slices)
    return _Shared(
        tokenizer=tokenizer,
        slices=slices,
        locks=locks,
        spec=spec,
        queried=features.teachers(
            config,
            tokenizer,
            spec.vocab,
            faults,
            outages,
            lambda: run_chat_format(config.data, config.model, tokenizer),
            models,
        ),
        lockstep=lockstep,
        faults=faults,
        outages=outages,
        serving=serving,
        opponents=opponents,
    )


def _locks(config: Config, slices: Slices, lockstep: Lockstep) -> Locks:
    """Return locks of the devices, some for two users."""
    rewards = [own.reward for own in config.by_task.values()]
    reward = next((one for one in rewards if one.model is not None), rewards[0])
    teaches = any(one.chips == "sampler" for one in config.named_teachers.values())
    shares = teaches or has_opponents(config.players)
    return make_locks(reward, slices, lockstep, shares_sampler=shares)


def _inputs_by_task(
    config: Config, tasks: Mapping[str, Task], shared: _Shared
) -> dict[str, TaskInputs]:
    """Read and check the records and the rewards of each task. Raises JaxrlErrors."""
    parts: dict[str, TaskInputs] = {}
    for name, own in config.by_task.items():
        with naming(section_of_task(name)):
            play = make_play(
                own,
                tasks[name],
                shared.tokenizer,
                shared.faults.add,
                shared.serving,
                shared.opponents,
                shared.outages,
            )
            parts[name] = _task_inputs(own, play, shared)
    return parts


def _task_inputs(config: Config, play: Play, shared: _Shared) -> TaskInputs:
    """Read and check the records and the rewards of one task. Raises JaxrlErrors.

    config: as the task has it.
    play: the task with its environments.
    """
    task, tokenizer, lockstep = play.task, shared.tokenizer, shared.lockstep
    graders = built_in_graders(config.reward, task)
    data, graded = config.limited_data, bool(graders)
    held_out = eval_prompts(data, tokenizer, play.own, graded=graded)
    scorers = make_scorers(
        config, tokenizer, held_out, shared.slices, shared.locks.trainer, shared.faults, task,
        shared.outages, queried=shared.queried,
    )  # fmt: skip
    keep_mask = keeps_masks(config, task)
    check_constraint(config.algorithm, config.sampler, task, held_out, tokenizer, shared.spec.vocab)
    note_process_rewards(config.algorithm, config.reward, pairs=config.pairs is not None)
    check_reward_parts(config.reward, config.algorithm, scorers, held_out[0], tokenizer, task)
    prompts = make_stream(
        data, tokenizer, config.run.seed, lockstep.player, lockstep.players, play.own, graded,
        check=scorers.teachers.check,
    )  # fmt: skip
    return TaskInputs(
        config=config,
        play=play,
        held_out=held_out,
        scorers=scorers,
        prompts=prompts,
        keep_mask=keep_mask,
        references=[*prompts.references, *(p.reference for p in held_out)],
    )


def _digests_of(parts: Mapping[str, TaskInputs]) -> dict[str, str]:
    """Return the digests of all tasks' graders and held-out records, by a name for people."""
    merged: dict[str, str] = {}
    for name, part in parts.items():
        digests = inputs_digest(part.config, part.play.task, tuple(part.held_out))
        merged |= {f"{key} of the task {name}" if name else key: d for key, d in digests.items()}
    return merged


def _check_models(config: Config, spec: ModelSpec, tokenizer: Tokenizer, slices: Slices) -> None:
    """Raise ConfigError if policy, critic and teacher do not fit together or into memory."""
    check_routing(config.algorithm, config.model, spec)
    check_critic(config.critic_settings, config.algorithm.advantage, config.run.steps)
    check_advisers(config, spec, tokenizer)
    check_devices_hold(config, spec, slices)


def _check_references_of(parts: Mapping[str, TaskInputs]) -> None:
    """Raise an error if built-in rewards cannot read the answers of a task's records."""
    for name, part in parts.items():
        with naming(section_of_task(name)):
            graders = built_in_graders(part.config.reward, part.play.task)
            bad = part.config.data.record_fields.max_bad_share
            check_references(graders, part.references, bad)


def check_references(
    graders: Mapping[str, RewardFunction], references: Sequence[str], max_bad_share: float
) -> None:
    """Raise an error if built-in rewards cannot read the records' answers."""
    if graders:
        check_answers(references, max_bad_share)
        try_references(graders, references)


def make_outages(section: FaultsSection, faults: FaultCounts, *, resumed: bool) -> Outages:
    """Return the tracker of outages of the run's services."""
    return Outages(
        longest_s=section.outage_s,
        backoff_first_s=section.backoff_s,
        known=resumed,
        count=faults.add,
    )


def guarded_envs(
    section: FaultsSection,
    sampler: SamplerSection,
    play: Play,
    tokenizer: Tokenizer,
    faults: FaultCounts,
) -> GuardedEnvs:
    """Return a task's environments with their limits."""
    return GuardedEnvs(
        play.make_env,
        timeout_s=section.env_timeout_s,
        vocab_size=tokenizer.vocab_size,
        max_length=sampler.max_length,
        count=faults.add,
    )


def check_shares(held_out: Sequence[Prompt], lockstep: Lockstep) -> None:
    """Raise ConfigError if a process would have no held-out problem to answer."""
    if len(held_out) < lockstep.players:
        raise ConfigError(
            f"{len(held_out)} held-out problems are too few for {lockstep.players} processes, "
            "which answer a share each. Raise data.addition.eval_size or data.jsonl.eval_size."
        )
