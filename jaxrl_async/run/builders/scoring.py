"""The scorers of episodes, with timeouts and retries, for training and for the evaluation."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_async.algorithms.advantages import advantage, check_weights
from jaxrl_async.config.schema import (
    AlgorithmSection,
    Config,
    FaultsSection,
    JsonlSection,
    RewardSection,
    name_of,
)
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.mesh import DeviceGuard, Slices, local_part
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.hf import load_spec
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.run import features
from jaxrl_async.run.builders.initial_policy import check_lengths
from jaxrl_async.run.optional_parts import (
    Judges,
    NoJudges,
    NoTeachers,
    QueriedTeachers,
    Teachers,
)
from jaxrl_async.scorers.answers import thinking_marks
from jaxrl_async.scorers.guard import GuardedScorer, try_once
from jaxrl_async.scorers.results import FUNCTION, FUNCTIONS, MODEL
from jaxrl_async.scorers.rewards import REWARDS, RewardFunction, RewardScorer, make_scorer
from jaxrl_async.tasks.task import QUESTIONS, Task
from jaxrl_async.types import Episode, Prompt

if TYPE_CHECKING:
    from jaxrl_async.scorers import environment_scorer, reward_model
else:
    environment_scorer = Later("jaxrl_async.scorers.environment_scorer")
    reward_model = Later("jaxrl_async.scorers.reward_model")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Scorers of training and of the evaluation, which uses the functions alone if any exist."""

    training: GuardedScorer
    evaluation: GuardedScorer
    judges: Judges = field(default_factory=NoJudges)  # within `training`
    teachers: Teachers = field(default_factory=NoTeachers)  # within `training`
    functions: RewardScorer | None = None  # within both; None: no functions
    trials: tuple[tuple[str, GuardedScorer], ...] = ()  # settings and their trials before a run
    parts: tuple[tuple[Path, "Scorers"], ...] = ()  # of several tasks, with subfolders of the run's

    def final_answer(self, episode: Episode) -> str | None:
        """Return the final answer that the functions read in an episode; None: none."""
        return None if self.functions is None else self.functions.final_answer(episode)

    def oldest_s(self) -> float:
        """Return the age of the oldest running call, seconds; 0: no call."""
        return max(self.training.oldest_s(), self.evaluation.oldest_s())

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Begin a run.

        Args:
            folder: the run's; the judge's scores are kept there.
            process: index of this process.
            version: reads the newest version of the weights.
        """
        for name, part in self.parts:
            (folder / name).mkdir(parents=True, exist_ok=True)
            part.begin(folder / name, process, version)
        self.judges.begin(folder, process, version)
        if self.functions is not None:
            self.functions.version = version

    def close(self) -> None:
        """Close the connections of judge and teachers and the judge's cache file, and end the
        functions' processes. Idempotent; they are made again if they are needed again."""
        for _, part in self.parts:
            part.close()
        self.judges.close()
        self.teachers.close()
        if self.functions is not None:
            self.functions.close()


def make_scorers(
    config: Config,
    tokenizer: Tokenizer,
    held_out: Sequence[Prompt],
    slices: Slices,
    lock: DeviceGuard,
    faults: FaultCounts,
    task: Task,
    outages: Outages | None = None,
    *,
    queried: QueriedTeachers | None = None,
) -> Scorers:
    """Make the configured scorers, each with a timeout, retries and a check of its scores.

    Args:
        config: reward, its model and judge, and the limits of the sequences.
        tokenizer: decodes answers for functions and judge.
        held_out: records with the columns for the functions.
        slices: the reward model runs on this process's part of the trainer's slice.
        lock: shared with other users of these devices.
        faults: counts handled faults.
        task: its environment and its functions give rewards, too.
        outages: shared tracker of outages; None: one for each scorer.
        queried: the run's teachers by name; None: no teacher is queried.
    """
    section = config.reward
    guarded = functools.partial(guarded_scorer, config.faults, faults=faults, outages=outages)
    functions = _functions(config, tokenizer, held_out, task)
    function: Scorer | None = functions
    if task.judges:
        function = environment_scorer.EnvironmentScorer(functions)
    others = function
    if section.model is not None:
        others = _with_model(config, function, tokenizer, slices, lock)
    training, evaluation = others, function or others
    trials: list[tuple[str, GuardedScorer]] = []
    judges = features.judges(config, tokenizer, faults, outages)
    if judges is not None and section.judged:
        training = judges.of_answers(others)
        evaluation = function or judges.of_answers(others, on_failure="fail")
        trial = judges.of_answers(None, on_failure="fail")
        trials.append(("reward.judge", guarded(trial, retries=0)))
    if training is None or evaluation is None:
        raise ConfigError(
            "reward.function=none, and the task gives no reward: the run has no reward. Set "
            "reward.function, reward.model or reward.judge, or give the task a reward."
        )
    if judges is not None and (steps := judges.process_trial()) is not None:
        training = judges.with_process_rewards(training)
        trials.append(("reward.process", guarded(steps, retries=0)))
    teachers = None if queried is None else queried.of_task(config, task)
    if teachers is not None:
        training = teachers.with_teachers(training)
        trials += [(name, guarded(trial, retries=0)) for name, trial in teachers.trials()]
    if task.teacher is not None and not config.distilling:
        log.warning("Task.teacher has no effect without teachers (teacher.source=teachers)")
    return Scorers(
        training=guarded(training),
        evaluation=guarded(evaluation),
        judges=NoJudges() if judges is None else judges,
        teachers=NoTeachers() if teachers is None else teachers,
        functions=functions,
        trials=tuple(trials),
    )


def _functions(
    config: Config, tokenizer: Tokenizer, held_out: Sequence[Prompt], task: Task
) -> RewardScorer | None:
    """Return the scorer of the reward functions; None: none are used."""
    section = config.reward
    if not has_functions(section, task):
        return None
    others_judge = task.judges or section.model is not None or section.judged
    return make_scorer(
        section,
        tokenizer.decode,
        held_out,
        task.rewards,
        alone=not others_judge,
        questions=_questions(config.data.record_fields, task),
        max_steps=config.run.steps,
        marks=thinking_marks(tokenizer.special_tokens),
    )


def _questions(section: JsonlSection, task: Task) -> tuple[str, ...]:
    """Return the columns that may hold a record's question, in order of preference."""
    if task.records is not None:
        return ("messages", *QUESTIONS)
    names = (section.prompt_field, section.messages_field, "prompt")
    return tuple(name for name in names if name is not None)


def _with_model(
    config: Config, function: Scorer | None, tokenizer: Tokenizer, slices: Slices, lock: DeviceGuard
) -> Scorer:
    """Load the reward model, whose score is added to the functions'."""
    section = config.reward
    model = reward_model.load_reward_model(
        section, config.model, tokenizer, local_part(slices.trainer), lock
    )
    check_lengths(config, load_spec(Path(section.model or "")), f"reward.model={section.model}")
    return reward_model.RewardModelScorer(
        model,
        function=function,
        function_weight=section.function_weight,
        model_weight=section.model_weight,
    )


def has_functions(section: RewardSection, task: Task) -> bool:
    """Return whether reward functions are used: the task's, or the setting's. If an environment
    gives rewards, the setting's are used only if it is set."""
    of_setting = bool(section.weights) and not (task.judges and section.function is None)
    return bool(task.rewards) or of_setting


def built_in_graders(section: RewardSection, task: Task) -> dict[str, RewardFunction]:
    """Return the package's graders that are used, by name."""
    of_task = {f.__name__: f for f in task.rewards if f in REWARDS.values()}
    if not has_functions(section, task) or (task.rewards and section.function is None):
        return of_task
    return of_task | {name: REWARDS[name] for name in section.weights if name in REWARDS}


def guarded_scorer(
    section: FaultsSection,
    scorer: Scorer,
    *,
    faults: FaultCounts,
    outages: Outages | None,
    retries: int | None = None,
) -> GuardedScorer:
    """Return a scorer with the run's timeout and retries; retries None: as configured."""
    return GuardedScorer(
        scorer,
        timeout_s=section.scorer_timeout_s,
        retries=section.scorer_retries if retries is None else retries,
        backoff_s=section.backoff_s,
        count=faults.add,
        outages=outages,
    )


def check_reward_parts(
    reward: RewardSection,
    algorithm: AlgorithmSection,
    scorers: Scorers,
    example: Prompt,
    tokenizer: Tokenizer,
    task: Task,
) -> None:
    """Raise ConfigError if the algorithm asks for a part that the reward does not have.

    The functions are tried once, on a made-up answer to the example, and so are the judge and
    process rewards. The parts of an environment's reward, and of a function that does not apply to
    the example, are unknown before the run.
    """
    parts = {MODEL} if reward.model is not None else set[str]()
    all_known = True
    try:
        for setting, trial in scorers.trials:
            parts |= try_once(trial, example, tokenizer.encode, setting).parts.keys()
    finally:
        scorers.close()  # connections are made again when the run needs them
    if has_functions(reward, task):
        named = "exact" if reward.function is None else reward.function
        where = "the task's reward" if task.rewards else f"reward.function = {named!r}"
        log.info("answers are rewarded by %s", where)
        tried = try_once(scorers.evaluation, example, tokenizer.encode, where)
        of_function, all_known = tried.parts, not tried.left_out
        with_judge = reward.judged and reward.model is None
        alone = FUNCTIONS if with_judge else FUNCTION
        parts |= of_function.keys() or ({alone} if parts else set())
    if task.judges or not all_known:
        return
    if algorithm.signal_part and algorithm.signal_part not in parts:
        raise ConfigError(
            f"algorithm.signal_part = {algorithm.signal_part!r}: the reward has no such "
            f"part (it has: {', '.join(sorted(parts)) or 'none'}). Correct it."
        )
    check_weights(algorithm.advantage, parts)


def note_process_rewards(
    algorithm: AlgorithmSection, reward: RewardSection, *, pairs: bool
) -> None:
    """Log how process rewards are used if all tokens of an answer get one advantage. pairs: whether
    the run trains on pairs of answers."""
    facts = advantage.facts(algorithm.advantage)
    if reward.process is None:
        return
    if pairs:
        log.info("reward.process: the steps' rewards are added to the answer's, and pairs compared")
        return
    if facts.level == "token":
        return
    name = name_of(algorithm.advantage)
    known = "gives all tokens of an answer one number: the steps' rewards are added to its reward"
    log.warning(
        "reward.process: algorithm.advantage=%s %s. discounted, reinforce_pp and gae credit each "
        "step (docs/functions.md).",
        name,
        known if facts.level == "sequence" else "does not say whether it uses token_rewards",
    )
