"""The judge of a run, and its process rewards."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import load_function
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.judge.judge import (
    JudgeScorer,
    JudgeService,
    Transcripts,
)
from jaxrl_async.judge.judge_prompt import Rubric, rubric_of
from jaxrl_async.judge.process_rewards import FunctionSteps, JudgedSteps, ProcessScorer, StepRewards
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.types import Episode, Prompt, Score


async def no_outcome(episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
    """Return scores of 0: a ports.Scorer."""
    return (Score(reward=0.0),) * len(episodes)


class RunJudges:
    """The judge of a run and its process rewards: run.optional_parts.JudgeScorers."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        faults: FaultCounts,
        outages: Outages | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ConfigError.

        Args:
            config: reward.judge and reward.process.
            tokenizer: decodes the tokens that are judged.
            faults: counts recovered faults.
            outages: Outages of the endpoint; None: a new object.
        """
        self._reward, self._tokenizer, self._count = config.reward, tokenizer, faults.add
        self._judge = judge = config.reward.judge
        self._service: JudgeService | None = None
        self._rubric: Rubric | None = None
        if judge is not None:
            self._service = JudgeService(judge, faults.add, outages)
            self._rubric = rubric_of(judge) if judge.judges_answers else None
        self._transcripts = Transcripts(decode=tokenizer.decode, decode_all=tokenizer.decode_all)
        self._process: ProcessScorer | None = None  # of training

    # ---- scorers

    def of_answers(
        self, others: Scorer | None, on_failure: Literal["fail", "neutral"] | None = None
    ) -> Scorer:
        """Return a scorer of whole answers that adds to `others`; on_failure: None: as
        configured."""
        assert self._judge is not None and self._rubric is not None, "the judge judges answers"
        assert self._service is not None
        return JudgeScorer(
            self._service,
            self._judge,
            self._rubric,
            self._transcripts,
            others=others,
            on_failure=on_failure,
            count=self._count,
        )

    def with_process_rewards(self, outcome: Scorer) -> Scorer:
        """Return a scorer that adds the configured process rewards to an outcome's scores."""
        self._process = self._process_scorer(outcome, waits=False)
        return self._process or outcome

    def process_trial(self) -> Scorer | None:
        """Return a scorer that tests process rewards before a run, without a time limit for the
        group; None: none are configured."""
        return self._process_scorer(no_outcome, waits=True)

    def _process_scorer(self, outcome: Scorer, *, waits: bool) -> ProcessScorer | None:
        section, reward = self._reward.process, self._reward
        if section is None:
            return None
        decode = self._tokenizer.decode
        if section.function == "judge":
            assert self._service is not None and self._judge is not None, (
                "a config rule requires it"
            )
            rewards: StepRewards = JudgedSteps(
                self._service, self._judge, section.rubric, self._transcripts
            )
        else:
            rewards = FunctionSteps(
                load_function(section.function, "reward.process.function"),
                section.function,
                decode=decode,
                timeout_s=section.timeout_s,
                threads=reward.threads,
            )
        if waits:
            section = section.model_copy(
                update={"max_age": None, "max_age_s": None, "on_failure": "fail"}
            )
        return ProcessScorer(outcome, rewards, section, decode=decode, count=self._count)

    # ---- a run

    def cost(self) -> Mapping[str, float]:
        """Return the cost of the judge so far; empty: no judge."""
        return {} if self._service is None else self._service.meter.read()

    def tally(self) -> Mapping[str, float]:
        """Return the totals of process rewards so far; empty: none are configured."""
        return {} if self._process is None else self._process.tally.read()

    def begin(self, folder: Path, process: int, version: Callable[[], int]) -> None:
        """See run.optional_parts.JudgeScorers."""
        if self._service is not None:
            own = f".{process}" if process else ""
            self._service.cache.open(folder / f"judge_cache{own}.jsonl")
        if self._process is not None:
            self._process.version = version

    def close(self) -> None:
        """See run.optional_parts.JudgeScorers."""
        if self._service is not None:
            self._service.close()
