"""What scores the episodes: guarded scorers for training and for the evaluation."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxrl_async.algorithms.advantages import advantage, check_weights
from jaxrl_async.config.judge_section import JudgeSection
from jaxrl_async.config.schema import (
    AlgorithmSection,
    Config,
    FaultsSection,
    RewardSection,
    name_of,
)
from jaxrl_async.config.userfile import load_function
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.judge.judge import (
    OTHERS,
    JudgeDesk,
    JudgeScorer,
    Transcripts,
    judge_cache_file,
    make_desk,
)
from jaxrl_async.judge.judge_prompt import Rubric, rubric_of
from jaxrl_async.judge.process_rewards import (
    FunctionSteps,
    JudgedSteps,
    ProcessScorer,
    StepRewards,
)
from jaxrl_async.mesh import Slices, local_part
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.hf import load_spec
from jaxrl_async.outages import Outages
from jaxrl_async.ports import Scorer
from jaxrl_async.run.builders.devices import Lock
from jaxrl_async.run.builders.initial_policy import check_lengths
from jaxrl_async.scorers.answers import thinking_marks
from jaxrl_async.scorers.environment_scorer import EnvironmentScorer
from jaxrl_async.scorers.guard import GuardedScorer, try_once
from jaxrl_async.scorers.reward_model import (
    FUNCTION,
    MODEL,
    RewardModelScorer,
    load_reward_model,
)
from jaxrl_async.scorers.rewards import REWARDS, RewardFunction, RewardScorer, make_scorer
from jaxrl_async.tasks.task import QUESTIONS, Task
from jaxrl_async.types import Episode, Prompt, Score

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """What scores the training, and the evaluation: there the functions alone, if there are any."""

    training: GuardedScorer
    evaluation: GuardedScorer
    desk: JudgeDesk | None = None  # of the judge; None: there is none
    process: ProcessScorer | None = None  # within `training`; None: no process rewards
    functions: RewardScorer | None = None  # within both; None: there are none
    trials: tuple[tuple[str, GuardedScorer], ...] = ()  # settings and what tries them before a run

    def oldest_s(self) -> float:
        """Return how long the longest call under way has taken, seconds; 0: none."""
        return max(self.training.oldest_s(), self.evaluation.oldest_s())

    def judge_cost(self) -> Mapping[str, float]:
        """Return what the judge has cost so far; empty: there is none."""
        return {} if self.desk is None else self.desk.meter.read()

    def process_tally(self) -> Mapping[str, float]:
        """Return what became of process rewards so far; empty: there are none."""
        return {} if self.process is None else self.process.tally.read()

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """Begin a run.

        Args:
            folder: the run's; the judge's scores are kept there.
            process: index of this process.
            version: reads the newest version of the weights.
        """
        if self.desk is not None:
            self.desk.cache.open(judge_cache_file(folder, process))
        if self.process is not None:
            self.process.version = version
        if self.functions is not None:
            self.functions.version = version

    def close(self) -> None:
        """Close the judge's connections and its cache file, and end the functions' processes.
        Idempotent; what is needed again is made again."""
        if self.desk is not None:
            self.desk.close()
        if self.functions is not None:
            self.functions.close()


def make_scorers(
    config: Config,
    tokenizer: Tokenizer,
    held_out: Sequence[Prompt],
    slices: Slices,
    lock: Lock,
    faults: FaultCounts,
    task: Task,
    outages: Outages | None = None,
) -> Scorers:
    """Make the configured scorers, each with a timeout, retries and a check of its scores.

    Args:
        config: reward, its model and judge, and what bounds the sequences.
        tokenizer: decodes what functions and judge see.
        held_out: records whose columns the functions may ask for.
        slices: the reward model runs on the trainer's, on this process's part of it.
        lock: shared with others on these devices.
        faults: counts what is survived.
        task: its environment and its functions judge, too.
        outages: of what they ask; None: of each one's own.
    """
    section = config.reward
    guarded = functools.partial(_guarded, config.faults, faults=faults, outages=outages)
    functions: RewardScorer | None = None
    if has_functions(section, task):
        others_judge = task.judges or section.model is not None or section.judge.judges_answers
        functions = make_scorer(
            section,
            tokenizer.decode,
            held_out,
            task.rewards,
            alone=not others_judge,
            asks=_asks(config, task),
            max_steps=config.run.steps,
            marks=thinking_marks(tokenizer.special_tokens),
        )
    function: Scorer | None = functions
    if task.judges:
        function = EnvironmentScorer(functions)
    others = function
    if section.model is not None:
        others = _with_model(config, function, tokenizer, slices, lock)
    judging = _Judging.of(config, tokenizer, faults, outages)
    training, evaluation = others, function or others
    trials: list[tuple[str, GuardedScorer]] = []
    if judging is not None and section.judge.judges_answers:
        training = judging.scorer(others)
        evaluation = function or judging.scorer(others, on_failure="fail")
        trial = judging.scorer(None, on_failure="fail")
        trials.append(("reward.judge", guarded(trial, retries=0)))
    if training is None or evaluation is None:
        raise ConfigError(
            "reward.function=none, and the task gives no reward: there is none at all. Set "
            "reward.function, reward.model or reward.judge, or give the task a reward."
        )
    process = _process_scorer(config, training, judging, tokenizer, faults)
    if process is not None:
        steps = _process_scorer(config, NO_OUTCOME, judging, tokenizer, faults, waits=True)
        assert steps is not None, "it is configured"
        trials.append(("reward.process", guarded(steps, retries=0)))
    return Scorers(
        training=guarded(process or training),
        evaluation=guarded(evaluation),
        desk=None if judging is None else judging.desk,
        process=process,
        functions=functions,
        trials=tuple(trials),
    )


def _asks(config: Config, task: Task) -> tuple[str, ...]:
    """Return the columns that may hold a record's question, in the order of those who read them."""
    if task.records is not None:
        return ("messages", *QUESTIONS)
    section = config.data.jsonl
    names = (section.prompt_field, section.messages_field, "prompt")
    return tuple(name for name in names if name is not None)


class NoOutcome:
    """ports.Scorer that rewards nothing."""

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Return scores of 0."""
        return (Score(reward=0.0),) * len(episodes)


NO_OUTCOME = NoOutcome()


def _with_model(
    config: Config, function: Scorer | None, tokenizer: Tokenizer, slices: Slices, lock: Lock
) -> Scorer:
    """Load the reward model, whose score is added to the functions'."""
    section = config.reward
    model = load_reward_model(section, config.model, tokenizer, local_part(slices.trainer), lock)
    check_lengths(config, load_spec(Path(section.model or "")), f"reward.model={section.model}")
    return RewardModelScorer(
        model,
        function=function,
        function_weight=section.function_weight,
        model_weight=section.model_weight,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judging:
    """A judge, with what shows it the answers."""

    section: JudgeSection
    desk: JudgeDesk
    transcripts: Transcripts
    rubric: Rubric | None  # None: it judges steps alone
    count: Callable[[str], None]

    @classmethod
    def of(
        cls, config: Config, tokenizer: Tokenizer, faults: FaultCounts, outages: Outages | None
    ) -> "_Judging | None":
        """Return the configured judge; None: there is none. Raises ConfigError."""
        section = config.reward.judge
        if section.model is None:
            return None
        return cls(
            section=section,
            desk=make_desk(section, faults.add, outages),
            transcripts=Transcripts(decode=tokenizer.decode, decode_all=tokenizer.decode_all),
            rubric=rubric_of(section) if section.judges_answers else None,
            count=faults.add,
        )

    def scorer(
        self, others: Scorer | None, on_failure: Literal["fail", "neutral"] | None = None
    ) -> JudgeScorer:
        """Return a scorer of whole answers; on_failure: None: as configured."""
        assert self.rubric is not None, "asked for only where answers are judged"
        return JudgeScorer(
            self.desk,
            self.section,
            self.rubric,
            self.transcripts,
            others=others,
            on_failure=on_failure,
            count=self.count,
        )


def _process_scorer(
    config: Config,
    outcome: Scorer,
    judging: "_Judging | None",
    tokenizer: Tokenizer,
    faults: FaultCounts,
    *,
    waits: bool = False,
) -> ProcessScorer | None:
    """Return what adds process rewards to `outcome`; None: none are configured. waits: for ever."""
    section, reward = config.reward.process, config.reward
    if section.function is None:
        return None
    if section.function == "judge":
        assert judging is not None, "a rule asks for it"
        rewards: StepRewards = JudgedSteps(
            judging.desk, reward.judge, section.rubric, judging.transcripts
        )
    else:
        rewards = FunctionSteps(
            load_function(section.function, "reward.process.function"),
            section.function,
            decode=tokenizer.decode,
            timeout_s=section.timeout_s,
            threads=reward.threads,
        )
    if waits:
        section = section.model_copy(
            update={"max_age": None, "max_age_s": None, "on_failure": "fail"}
        )
    return ProcessScorer(outcome, rewards, section, decode=tokenizer.decode, count=faults.add)


def has_functions(section: RewardSection, task: Task) -> bool:
    """Return whether reward functions judge: the task's, or the setting's. Where an environment
    judges, only a setting that is written down does."""
    of_setting = bool(section.weights) and not (task.judges and section.function is None)
    return bool(task.rewards) or of_setting


def built_in_graders(section: RewardSection, task: Task) -> dict[str, RewardFunction]:
    """Return the graders of the package that judge, by name."""
    of_task = {f.__name__: f for f in task.rewards if f in REWARDS.values()}
    if not has_functions(section, task) or (task.rewards and section.function is None):
        return of_task
    return of_task | {name: REWARDS[name] for name in section.weights if name in REWARDS}


def _guarded(
    section: FaultsSection,
    scorer: Scorer,
    *,
    faults: FaultCounts,
    outages: Outages | None,
    retries: int | None = None,
) -> GuardedScorer:
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
    process rewards. Which parts an environment gives is only known when it does, and so are those
    of a function that does not apply to the example.
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
        tried = try_once(scorers.evaluation, example, tokenizer.encode, where)
        of_function, all_known = tried.parts, not tried.left_out
        beside_judge = reward.judge.judges_answers and reward.model is None
        alone = OTHERS if beside_judge else FUNCTION
        parts |= of_function.keys() or ({alone} if parts else set())
    if task.judges or not all_known:
        return
    if algorithm.signal_part and algorithm.signal_part not in parts:
        raise ConfigError(
            f"algorithm.signal_part = {algorithm.signal_part!r}: the reward has no such "
            f"part (it has: {', '.join(sorted(parts)) or 'none'}). Correct it."
        )
    check_weights(algorithm.advantage, parts)


def note_process_rewards(config: Config) -> None:
    """Say what is made of process rewards where an answer is learnt as a whole."""
    facts = advantage.facts(config.algorithm.advantage)
    if config.reward.process.function is None:
        return
    if config.pairs.loss is not None:
        log.info("reward.process: the steps' rewards are added to the answer's, and pairs compared")
        return
    if facts.level == "token":
        return
    name = name_of(config.algorithm.advantage)
    known = "gives all tokens of an answer one number: the steps' rewards are added to its reward"
    log.warning(
        "reward.process: algorithm.advantage=%s %s. discounted, reinforce_pp and gae credit each "
        "step (docs/algorithms.md).",
        name,
        known if facts.level == "sequence" else "does not say whether it looks at token_rewards",
    )
