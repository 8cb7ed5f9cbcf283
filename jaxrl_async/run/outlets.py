"""Where a run's results go: metrics, samples and screen; and its readings for evaluation, rates and
watchdog."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_async.config.schema import MetricsSection
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import RolloutError
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.ports import Scorer
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.rollout.episode import EpisodeLimits
from jaxrl_async.rollout.evaluate import EvalResult, evaluate
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.rates import Observer
from jaxrl_async.run.replay.player import OrderedPrompts
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.types import EpisodeGroup, Prompt

log = logging.getLogger(__name__)


class MetricsWriter(Protocol):
    """What a run's numbers and samples are written to."""

    writes: bool  # False: nothing that it is given is kept

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write what a step measured."""
        ...

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write sample episodes."""
        ...

    def close(self) -> None:
        """Write no more."""
        ...


class NoRecorder:
    """The MetricsWriter of a process that leaves writing to another one."""

    writes = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_recorder(
    section: MetricsSection, paths: Paths, lockstep: Lockstep, resume_step: int | None
) -> MetricsWriter:
    """Open what a run's numbers are written to. resume_step: the step that it continues from."""
    if not lockstep.writes:
        return NoRecorder()
    return Recorder(paths.root, tensorboard=section.tensorboard, resume_step=resume_step)


# ---- one step's report


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReporter:
    """Reports each step: a line in metrics.jsonl, the screen, and sometimes sample episodes."""

    observer: Observer
    recorder: MetricsWriter
    console: Console
    tokenizer: Tokenizer
    prompts: PromptStream | OrderedPrompts
    samples_every: int  # updates; 0: none

    def report(
        self, version: int, values: Mapping[str, float], groups: Sequence[EpisodeGroup]
    ) -> None:
        """Report the step that made this version. groups: trained on in it."""
        values = self.observer.complete(values)
        if not self.recorder.writes:
            return
        if groups:
            values |= self.prompts.measures(1 + max(g.ticket.group for g in groups))
        self.recorder.log(version, values)
        if groups and self.samples_every and version % self.samples_every == 0:
            self.recorder.samples(version, sample_records(groups[:2], self.tokenizer))
        self.console.phase("training")
        self.console.step(version, values)


def sample_records(groups: Sequence[EpisodeGroup], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the first two episodes of some groups, for people."""
    return [
        {
            "prompt": group.prompt.text,
            "completion": tokenizer.decode(episode.token_ids[episode.drawn]),
            "reference": group.prompt.reference,
            "reward": score.reward,
            "parts": dict(score.parts),
            "length": episode.num_drawn,
            "stop": episode.stop.value,
            "group": group.ticket.group,
        }
        for group in groups
        for episode, score in list(zip(group.episodes, group.scores, strict=True))[:2]
    ]


# ---- the evaluation


NOT_ASKED = EvalResult(
    num_prompts=0,
    mean_reward=0.0,
    accuracy=None,
    mean_length_tokens=0.0,
    truncated_share=0.0,
    samples=(),
)
"""The part of a process without rollouts in an evaluation: it counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out prompts, and all that answers and judges them; each process answers its part."""

    sampler: Router
    prompts: Sequence[Prompt]
    scorer: Scorer
    make_env: MakeEnv
    limits: EpisodeLimits
    lockstep: Lockstep
    faults: FaultCounts

    def run(self) -> Mapping[str, float]:
        """Measure reward, and accuracy if the reward says what is right, with the live weights.

        If the scorer or an environment fails for good, nothing but the time is reported: with
        holes the numbers could not be compared.
        """
        start = time.perf_counter()
        result: EvalResult | None = NOT_ASKED
        try:
            if self.lockstep.plays:
                result = asyncio.run(self._answered())
        except RolloutError as error:
            result = None
            self.faults.add("failed_evaluations")
            log.warning("an evaluation is left out: %s", error)
        if not all(self.lockstep.gather_json(result is not None)) or result is None:
            return {"time/eval_s": time.perf_counter() - start}
        graded = any(self.lockstep.gather_json(result.accuracy is not None))
        metrics = {
            **({"eval/accuracy": result.accuracy or 0.0} if graded else {}),
            "eval/reward": result.mean_reward,
            "eval/length_mean": result.mean_length_tokens,
            "eval/truncated_share": result.truncated_share,
        }
        return {
            **self.lockstep.mean(metrics, result.num_prompts),
            "time/eval_s": time.perf_counter() - start,
        }

    async def _answered(self) -> EvalResult:
        return await evaluate(
            self.sampler,
            self.prompts,
            self.scorer,
            sampling=self.limits.sampling,
            stop_token_ids=self.limits.stop_token_ids,
            max_new_tokens=self.limits.max_new_tokens,
            max_length=self.limits.max_length,
            make_env=self.make_env,
        )
