"""Outlets of a run's results (metrics, samples and screen), and the evaluation."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_async import __version__
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import combined_measures
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import BadEndpoint, RolloutError
from jaxrl_async.later import Later
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.metrics.recorder import MetricsWriter, Recorder
from jaxrl_async.metrics.symptoms import Symptoms
from jaxrl_async.metrics.trackers import (
    TrackedRun,
    TrackedWriter,
    Tracker,
    TrackerThread,
    make_trackers,
    remembered,
)
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.rollout.evaluate import (
    ONE_TRY,
    EvalEffort,
    EvalResult,
    EvalSample,
    clustered_stderr,
    evaluate,
)
from jaxrl_async.run import features
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import SeatFillers
from jaxrl_async.run.rates import Observer
from jaxrl_async.run.signals import LOOK_S
from jaxrl_async.tasks.usercode import run_loop
from jaxrl_async.trainer.evaluation import Finish
from jaxrl_async.trainer.step_data import SHOWN_EPISODES, SHOWN_GROUPS, TokenView
from jaxrl_async.types import (
    CORRECT,
    Episode,
    EpisodeGroup,
    EpisodeLimits,
    FloatArray,
    IntArray,
    Prompt,
)

if TYPE_CHECKING:
    from jaxrl_async.metrics import prometheus
    from jaxrl_async.run import shown_contexts
    from jaxrl_async.run.replay.recording import OrderedPrompts
else:
    prometheus = Later("jaxrl_async.metrics.prometheus")
    shown_contexts = Later("jaxrl_async.run.shown_contexts")

log = logging.getLogger(__name__)

GIVE_UP_S = 6.0
"""Maximum wait for the episodes of an abandoned evaluation, seconds."""
MAX_SAMPLE_TOKENS = 1024
"""Maximum tokens of a sample whose log-probs and versions are recorded."""


class NoRecorder:
    """The MetricsWriter of a process that does not write: another one does."""

    writes = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def samples(self, step: int, records: Iterable[Mapping[str, object]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_recorder(
    config: Config, paths: Paths, lockstep: Lockstep, resume_step: int | None
) -> MetricsWriter:
    """Open the writer of a run's metrics. resume_step: the step from which it is resumed."""
    if not lockstep.writes:
        return NoRecorder()
    section, trackers = config.metrics, make_trackers(config.metrics)
    writer: MetricsWriter = Recorder(
        paths.root, tensorboard=section.tensorboard, resume_step=resume_step
    )
    if section.prometheus is not None:
        writer = prometheus.PrometheusWriter(writer, section.prometheus, run=paths.root.name)
    if trackers:
        begun = _start_trackers(trackers, config, paths, resumes=resume_step is not None)
        writer = TrackedWriter(writer, begun)
    return features.counting_copies(writer, config.run, paths.root)


def _start_trackers(
    trackers: Sequence[Tracker], config: Config, paths: Paths, *, resumes: bool
) -> list[TrackerThread]:
    """Begin a run in each tracker; a warm start, which has its own folder, begins separate runs."""
    name, folder = config.run.name, paths.root
    known = remembered(folder) if resumes else {}
    run = TrackedRun(
        name=name if folder.name == name else f"{name}-{folder.name}",
        folder=folder,
        config=config.model_dump(),
        version=__version__,
        continues=None,
    )
    return [
        TrackerThread(one, replace(run, continues=known.get(one.name, {}).get("id")))
        for one in trackers
    ]


# ---- one step's report


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReporter:
    """Reports each step: a line in metrics.jsonl, the screen, and sometimes sample episodes."""

    observer: Observer
    recorder: MetricsWriter
    console: Console
    tokenizer: Tokenizer
    prompts: "PromptStream | OrderedPrompts"
    samples_every: int  # updates; 0: no samples
    lockstep: Lockstep
    opponents: SeatFillers
    views: Callable[[], Sequence[TokenView]] = tuple  # of the reported step
    symptoms: Symptoms = field(default_factory=Symptoms)

    def report(
        self, version: int, values: Mapping[str, float], groups: Sequence[EpisodeGroup]
    ) -> Finish:
        """Report the step that made this version; return what shows it, with further values.

        groups: trained on in the step.
        """
        values = self.observer.complete(values)
        values |= self._of_prompts(groups)
        values |= unknown_tokens(groups, self.tokenizer) if groups else {}
        values |= self.opponents.measures() if groups else {}
        if not self.recorder.writes:
            return lambda more: None
        self.recorder.log(version, values)
        warn_of(self.symptoms, values)
        if groups and self.samples_every and version % self.samples_every == 0:
            self.recorder.samples(version, self._samples(groups[:SHOWN_GROUPS]))
        return partial(self._finish, version, values)

    def _finish(self, version: int, values: Mapping[str, float], more: Mapping[str, float]) -> None:
        if more:
            self.recorder.log(version, more)
        self.console.phase("training")
        self.console.step(version, {**values, **more})

    def _samples(self, groups: Sequence[EpisodeGroup]) -> list[dict[str, Any]]:
        """Return sample episodes; samples of games name the opponents."""
        return [
            {**record, **({"opponents": seated} if (seated := self.opponents.names(group)) else {})}
            for group in groups
            for record in sample_records([group], self.tokenizer, self.views())
        ]

    def _of_prompts(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Return metrics of the prompts of all processes with rollouts, which exchange them."""
        lockstep = self.lockstep
        numbers = [g.ticket.group for g in groups]
        own = [n // lockstep.players for n in numbers if n % lockstep.players == lockstep.player]
        if not own or not lockstep.plays:
            return {}
        measures = self.prompts.measures(1 + max(own))
        if lockstep.players == 1 or not measures:
            return measures
        return combined_measures(lockstep.gather_json(measures))


def warn_of(symptoms: Symptoms, values: Mapping[str, float]) -> None:
    """Log warnings if an update's metrics show that the run trains nothing."""
    for warning in symptoms.warnings(values):
        log.warning("%s", warning)


def unknown_tokens(groups: Sequence[EpisodeGroup], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the metric of sampled ids that are no tokens of the tokenizer."""
    sampled = [e.token_ids[e.drawn] for group in groups for e in group.episodes]
    return {"rollout/unknown_tokens": float(tokenizer.count_unknown(np.concatenate(sampled)))}


def sample_records(
    groups: Sequence[EpisodeGroup], tokenizer: Tokenizer, views: Sequence[TokenView] = ()
) -> list[dict[str, Any]]:
    """Return the first episodes of some groups, for people, with the trainer's values.

    An episode of several turns, and one whose environment wrote its opening, is shown whole with
    its special tokens, including tokens that were not sampled. One of several turns has its
    `contexts`.
    """
    return [
        {
            **_shown_texts(group.prompt, episode, tokenizer),
            **({"task": group.prompt.task} if group.prompt.task else {}),
            "reference": group.prompt.reference,
            "reward": score.total,
            "parts": dict(score.parts),
            "length": episode.num_drawn,
            "turns": episode.num_turns,
            "stop": episode.stop.value,
            "group": group.ticket.group,
            **({"seat": episode.seat} if episode.seat else {}),
            "tokens": token_facts(episode, tokenizer, views),
            **(
                {"contexts": shown_contexts.contexts_of(episode, tokenizer)}
                if episode.num_turns > 1
                else {}
            ),
        }
        for group in groups
        for episode, score in list(zip(group.episodes, group.scores, strict=True))[:SHOWN_EPISODES]
    ]


def token_facts(
    episode: Episode, tokenizer: Tokenizer, views: Sequence[TokenView] = ()
) -> dict[str, Any]:
    """Return text, log-prob and version of an episode's tokens from the first sampled one on, at
    most MAX_SAMPLE_TOKENS; None for a token that was not sampled. left_out: number of tokens after
    the last one.

    With a TokenView of the episode also each token's advantage, and `difference`: the trainer's
    log-prob minus the sampler's, nats.
    """
    begin = int(episode.drawn.argmax()) if episode.num_drawn else len(episode.token_ids)
    span = slice(begin, begin + MAX_SAMPLE_TOKENS)
    sampled = episode.drawn[span].tolist()

    def of_sampled(values: Iterable[object]) -> list[Any]:
        return [v if d else None for v, d in zip(values, sampled, strict=True)]

    facts = {
        "text": [tokenizer.token_text(int(t)) for t in episode.token_ids[span]],
        "logprob": of_sampled(_short(episode.logprobs[span], 3)),
        "version": of_sampled(episode.versions[span].tolist()),
        "left_out": max(len(episode.token_ids) - span.stop, 0),
    }
    for view in views:
        if view.episode is episode:
            facts["advantage"] = of_sampled(_short(view.advantages[span], 3))
            difference = view.logprobs[span] - episode.logprobs[span]
            facts["difference"] = of_sampled(_short(difference, 6))
    return facts


def _short(values: FloatArray, digits: int) -> list[float | None]:
    """Return rounded values for JSON; None for one that is not finite."""
    return [round(float(x), digits) + 0.0 if math.isfinite(x) else None for x in values]


def _shown_texts(prompt: Prompt, episode: Episode, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prompt and the completion of a sample; contexts are separated by blank
    lines."""
    if episode.num_turns == 1 and len(prompt.token_ids):
        sampled = episode.token_ids[episode.drawn]
        return {"prompt": prompt.text, "completion": tokenizer.decode(sampled)}
    ends = (*episode.starts[1:], len(episode.token_ids))
    contexts = [
        episode.token_ids[begin:end] for begin, end in zip(episode.starts, ends, strict=True)
    ]
    start = int(episode.drawn.argmax()) if episode.num_drawn else len(contexts[0])
    parts = [contexts[0][start:], *contexts[1:]]
    return {
        "prompt": tokenizer.decode_all(contexts[0][:start]),
        "completion": "\n\n".join(map(tokenizer.decode_all, parts)),
    }


# ---- the evaluation


class TaskPrompt(NamedTuple):
    """The results of one held-out prompt."""

    task: str  # empty: the run has one
    rewards: Sequence[float]  # of its answers
    correct: Sequence[float]  # their parts CORRECT, of those that count
    graded: bool  # whether one of its answers has that part

    @property
    def graded_task(self) -> str:
        """Name under which Evaluation.known has its task, once an answer had the part CORRECT."""
        return f"{CORRECT} of {self.task}" if self.task else CORRECT


def estimate_of(key: str, values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean of all prompts' values as this metric, with its standard error; {}: there are
    no values."""
    flat = [value for of_prompt in values for value in of_prompt]
    if not flat:
        return {}
    error = clustered_stderr(values)
    stderr = {} if error is None else {f"{key}_stderr": error}
    return {key: math.fsum(flat) / len(flat), **stderr}


NO_SHARE = EvalResult(
    num_prompts=0,
    mean_reward=0.0,
    accuracy=None,
    mean_length_tokens=0.0,
    truncated_share=0.0,
    samples=(),
)
"""The result of a process without rollouts in an evaluation: its weight is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation: held-out prompts with sampler and scorer; each process answers a share."""

    generate: Generate
    prompts: Sequence[Prompt]
    scorer: Scorer
    make_env: MakeEnv
    limits: EpisodeLimits
    lockstep: Lockstep
    faults: FaultCounts
    gives_up: Callable[[], bool]  # called while waiting for answers; True abandons it
    effort: EvalEffort = ONE_TRY
    decode: Callable[[IntArray], str] | None = None
    write: Callable[[Sequence[EvalSample]], None] = lambda samples: None  # the first answers
    # holds the part CORRECT once an answer had it; later answers without it count as wrong
    known: set[str] = field(default_factory=set)
    samples: int = 1  # answers to each prompt
    label: str = "eval"  # of its requests: eval, or eval/NAME

    @property
    def shown_name(self) -> str:
        """Its name in messages."""
        name = self.label.removeprefix("eval").removeprefix("/")
        return f"the evaluation {name}" if name else "an evaluation"

    def run(self) -> Mapping[str, float]:
        """Measure reward with the live weights, and accuracy if the reward has the part CORRECT.

        If the scorer or an environment fails after all retries, or if the evaluation is abandoned,
        only the time is reported: incomplete numbers could not be compared.
        """
        start = time.perf_counter()
        result = self.own_result()
        measured = {} if result is None else self._metrics_of(result)
        return {**measured, "time/eval_s": time.perf_counter() - start}

    def own_result(self) -> EvalResult | None:
        """Return the result of this process's share; None: the evaluation failed in a process."""
        result: EvalResult | None = NO_SHARE
        try:
            if self.lockstep.plays:
                result = run_loop(self._evaluate_unless_stopped())
        except BadEndpoint:
            raise
        except RolloutError as error:
            result = None
            self.faults.add("failed_evaluations")
            log.warning("%s is skipped: %s", self.shown_name, error)
        return result if all(self.lockstep.gather_json(result is not None)) else None

    def _metrics_of(self, result: EvalResult) -> dict[str, float]:
        """Return the metrics of all processes' results."""
        if self.lockstep.writes:
            self.write(result.samples)
        if any(self.lockstep.gather_json(result.accuracy is not None)):
            self.known.add(CORRECT)
        metrics = {
            **({"eval/accuracy": result.accuracy or 0.0} if CORRECT in self.known else {}),
            "eval/reward": result.mean_reward,
            "eval/length_mean": result.mean_length_tokens,
            "eval/truncated_share": result.truncated_share,
            **{f"eval/seat_{seat}": reward for seat, reward in result.seats.items()},
        }
        means = self.lockstep.mean(metrics, result.num_prompts)
        shares = self.lockstep.gather_json(
            [
                [p.prompt.task, p.rewards, p.correct, any(CORRECT in s.parts for s in p.scores)]
                for p in result.played
            ]
        )
        prompts = [TaskPrompt(*prompt) for share in shares for prompt in share]
        self.known.update(p.graded_task for p in prompts if p.graded)
        counted = [p for p in prompts if p.graded_task in self.known]
        errors = {"eval/reward": clustered_stderr(p.rewards for p in prompts)}
        if CORRECT in self.known:
            errors["eval/accuracy"] = clustered_stderr(p.correct for p in counted)
        known = {f"{k}_stderr": x for k, x in errors.items() if x is not None}
        return means | known | self._of_tasks(prompts, counted)

    def _of_tasks(
        self, prompts: Sequence["TaskPrompt"], counted: Sequence["TaskPrompt"]
    ) -> dict[str, float]:
        """Return the metrics of each of several tasks' prompts, and the accuracy over those whose
        rewards have the part CORRECT.

        counted: the prompts with that part.
        """
        tasks = dict.fromkeys(p.task for p in prompts if p.task)
        metrics = estimate_of("eval/accuracy", [p.correct for p in counted]) if tasks else {}
        for task in tasks:
            rewards = [p.rewards for p in prompts if p.task == task]
            correct = [p.correct for p in counted if p.task == task]
            metrics |= estimate_of(f"eval/{task}/reward", rewards)
            metrics |= estimate_of(f"eval/{task}/accuracy", correct)
        return metrics

    async def _evaluate_unless_stopped(self) -> EvalResult | None:
        """Return the result; None: the evaluation was abandoned."""
        answered = asyncio.ensure_future(self._evaluate())
        while not (answered.done() or self.gives_up()):
            await asyncio.wait((answered,), timeout=LOOK_S)
        if answered.done():
            return await answered
        answered.cancel()
        await asyncio.wait((answered,), timeout=GIVE_UP_S)
        log.warning("%s is skipped: a stop was requested before all answers", self.shown_name)
        return None

    async def _evaluate(self) -> EvalResult:
        return await evaluate(
            self.generate,
            self.prompts,
            self.scorer,
            sampling=self.limits.sampling,
            stop_token_ids=self.limits.stop_token_ids,
            max_new_tokens=self.limits.max_new_tokens,
            max_length=self.limits.max_length,
            make_env=self.make_env,
            decode=self.decode,
            level=self.limits.priority.first,
            effort=self.effort,
            constraint=self.limits.constraint,
            by_task=self.limits.by_task,
            samples=self.samples,
            label=self.label,
        )
