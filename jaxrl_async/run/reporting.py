"""Where a run's results go: metrics, samples and screen; and its readings for evaluation, rates and
watchdog."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from jaxrl_async import __version__
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import combined_measures
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import EndpointMisset, RolloutError
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.metrics.prometheus import PrometheusWriter
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.metrics.symptoms import Symptoms
from jaxrl_async.metrics.tracker_kinds import make_trackers
from jaxrl_async.metrics.trackers import (
    TrackedRun,
    TrackedWriter,
    Tracker,
    TrackerThread,
    remembered,
)
from jaxrl_async.ports import Generate, Scorer
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.rollout.episode import EpisodeLimits
from jaxrl_async.rollout.evaluate import ONE_TRY, EvalEffort, EvalResult, EvalSample, evaluate
from jaxrl_async.run import features
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import Opponents
from jaxrl_async.run.rates import Observer
from jaxrl_async.run.replay.player import OrderedPrompts
from jaxrl_async.run.shown_contexts import contexts_of
from jaxrl_async.run.signals import LOOK_S
from jaxrl_async.tasks.usercode import run_loop
from jaxrl_async.trainer.outlets import Finish
from jaxrl_async.trainer.token_view import SHOWN_EPISODES, SHOWN_GROUPS, TokenSight
from jaxrl_async.types import CORRECT, Episode, EpisodeGroup, FloatArray, IntArray, Prompt

log = logging.getLogger(__name__)

GIVE_UP_S = 6.0
"""Longest wait for what plays an evaluation that was given up, seconds."""
MAX_SAMPLE_TOKENS = 1024
"""Tokens of a sample of which log-prob and version are recorded."""


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
    config: Config, paths: Paths, lockstep: Lockstep, resume_step: int | None
) -> MetricsWriter:
    """Open what a run's numbers are written to. resume_step: the step that it continues from."""
    if not lockstep.writes:
        return NoRecorder()
    section, trackers = config.metrics, make_trackers(config.metrics)
    writer: MetricsWriter = Recorder(
        paths.root, tensorboard=section.tensorboard, resume_step=resume_step
    )
    if section.prometheus is not None:
        writer = PrometheusWriter(writer, section.prometheus, run=paths.root.name)
    if trackers:
        begun = _begun(trackers, config, paths, resumes=resume_step is not None)
        writer = TrackedWriter(writer, begun)
    return features.counting_copies(writer, config.run, paths.root)


def _begun(
    trackers: Sequence[Tracker], config: Config, paths: Paths, *, resumes: bool
) -> list[TrackerThread]:
    """Begin a run in each tracker; that of a warm start, in a folder of its own, is one of its
    own."""
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
    prompts: PromptStream | OrderedPrompts
    samples_every: int  # updates; 0: none
    lockstep: Lockstep
    opponents: Opponents
    sights: Callable[[], Sequence[TokenSight]] = tuple  # of the step that is reported
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
        """Return sample episodes; those of games say who sat where."""
        return [
            {**record, **({"opponents": seated} if (seated := self.opponents.names(group)) else {})}
            for group in groups
            for record in sample_records([group], self.tokenizer, self.sights())
        ]

    def _of_prompts(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Return metrics of the prompts of all processes with rollouts; these exchange them."""
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
    """Log what an update's metrics say of a run that learns nothing."""
    for warning in symptoms.warnings(values):
        log.warning("%s", warning)


def unknown_tokens(groups: Sequence[EpisodeGroup], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the metric of sampled ids that have no token."""
    sampled = [e.token_ids[e.drawn] for group in groups for e in group.episodes]
    return {"rollout/unknown_tokens": float(tokenizer.count_unknown(np.concatenate(sampled)))}


def sample_records(
    groups: Sequence[EpisodeGroup], tokenizer: Tokenizer, sights: Sequence[TokenSight] = ()
) -> list[dict[str, Any]]:
    """Return the first episodes of some groups, for people, with what the trainer made of them.

    An episode of several turns, and one whose environment wrote its opening, is shown whole with
    its special tokens: what is not drawn is there, too. One of several turns has its `contexts`.
    """
    return [
        {
            **_shown_texts(group.prompt, episode, tokenizer),
            "reference": group.prompt.reference,
            "reward": score.total,
            "parts": dict(score.parts),
            "length": episode.num_drawn,
            "turns": episode.num_turns,
            "stop": episode.stop.value,
            "group": group.ticket.group,
            **({"seat": episode.seat} if episode.seat else {}),
            "tokens": token_facts(episode, tokenizer, sights),
            **({"contexts": contexts_of(episode, tokenizer)} if episode.num_turns > 1 else {}),
        }
        for group in groups
        for episode, score in list(zip(group.episodes, group.scores, strict=True))[:SHOWN_EPISODES]
    ]


def token_facts(
    episode: Episode, tokenizer: Tokenizer, sights: Sequence[TokenSight] = ()
) -> dict[str, Any]:
    """Return text, log-prob and version of an episode's tokens from the first drawn one on, at most
    MAX_SAMPLE_TOKENS; None where a token was not drawn. left_out: how many follow.

    With a sight of the episode also each token's advantage, and `difference`: the trainer's
    log-prob less the sampler's, nats.
    """
    begin = int(episode.drawn.argmax()) if episode.num_drawn else len(episode.token_ids)
    kept = slice(begin, begin + MAX_SAMPLE_TOKENS)
    drawn = episode.drawn[kept].tolist()

    def of_drawn(values: Iterable[Any]) -> list[Any]:
        return [v if d else None for v, d in zip(values, drawn, strict=True)]

    facts = {
        "text": [tokenizer.token_text(int(t)) for t in episode.token_ids[kept]],
        "logprob": of_drawn(_short(episode.logprobs[kept], 3)),
        "version": of_drawn(episode.versions[kept].tolist()),
        "left_out": max(len(episode.token_ids) - kept.stop, 0),
    }
    for sight in sights:
        if sight.episode is episode:
            facts["advantage"] = of_drawn(_short(sight.advantages[kept], 3))
            difference = sight.logprobs[kept] - episode.logprobs[kept]
            facts["difference"] = of_drawn(_short(difference, 6))
    return facts


def _short(values: FloatArray, digits: int) -> list[float | None]:
    """Return values as short as JSON may have them; None where one is not finite."""
    return [round(float(x), digits) + 0.0 if math.isfinite(x) else None for x in values]


def _shown_texts(prompt: Prompt, episode: Episode, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prompt and the completion of a sample; contexts are lines apart."""
    if episode.num_turns == 1 and len(prompt.token_ids):
        drawn = episode.token_ids[episode.drawn]
        return {"prompt": prompt.text, "completion": tokenizer.decode(drawn)}
    ends = (*episode.starts[1:], len(episode.token_ids))
    contexts = [
        episode.token_ids[begin:end] for begin, end in zip(episode.starts, ends, strict=True)
    ]
    begun = int(episode.drawn.argmax()) if episode.num_drawn else len(contexts[0])
    parts = [contexts[0][begun:], *contexts[1:]]
    return {
        "prompt": tokenizer.decode_all(contexts[0][:begun]),
        "completion": "\n\n".join(map(tokenizer.decode_all, parts)),
    }


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

    generate: Generate
    prompts: Sequence[Prompt]
    scorer: Scorer
    make_env: MakeEnv
    limits: EpisodeLimits
    lockstep: Lockstep
    faults: FaultCounts
    gives_up: Callable[[], bool]  # asked while answers are waited for; True leaves it out
    effort: EvalEffort = ONE_TRY
    decode: Callable[[IntArray], str] | None = None
    write: Callable[[Sequence[EvalSample]], None] = lambda samples: None  # the first answers
    # the part CORRECT, once an answer had it: without it all are wrong from then on
    known: set[str] = field(default_factory=set)

    def run(self) -> Mapping[str, float]:
        """Measure reward, and accuracy if the reward says what is right, with the live weights.

        If the scorer or an environment fails for good, or if it is given up, nothing but the time
        is reported: with holes the numbers could not be compared.
        """
        start = time.perf_counter()
        result: EvalResult | None = NOT_ASKED
        try:
            if self.lockstep.plays:
                result = run_loop(self._answered_unless_given_up())
        except EndpointMisset:
            raise
        except RolloutError as error:
            result = None
            self.faults.add("failed_evaluations")
            log.warning("an evaluation is left out: %s", error)
        if not all(self.lockstep.gather_json(result is not None)) or result is None:
            return {"time/eval_s": time.perf_counter() - start}
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
        return {
            **self.lockstep.mean(metrics, result.num_prompts),
            "time/eval_s": time.perf_counter() - start,
        }

    async def _answered_unless_given_up(self) -> EvalResult | None:
        """Return what is measured; None: it was given up."""
        answered = asyncio.ensure_future(self._answered())
        while not (answered.done() or self.gives_up()):
            await asyncio.wait((answered,), timeout=LOOK_S)
        if answered.done():
            return await answered
        answered.cancel()
        await asyncio.wait((answered,), timeout=GIVE_UP_S)
        log.warning("an evaluation is left out: a stop was asked for before all was answered")
        return None

    async def _answered(self) -> EvalResult:
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
        )
