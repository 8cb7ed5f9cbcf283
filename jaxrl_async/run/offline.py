"""Supervised fine-tuning, preferences, reward models: one thread from records to weights.

    ExampleStream ──take──> pack ──> update ──> metrics.jsonl, console, TensorBoard
          │                             │
          └──place──> checkpoint <── TrainState ──every eval.every──> measure(held-out examples)

A job is a step with examples that it can pack; the loop is the same for all. No sampler.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrl_async.algorithms.preferences import needs_baseline, needs_reference, preference_loss
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.examples import ExampleSplit, ExampleStream, demonstrations, preferences
from jaxrl_async.data.preferences import mismatched
from jaxrl_async.data.prompts import warm_start_pairs
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.mesh import TRAINER_RULES, Slices, make_slices
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.model.heads import save_head, with_head
from jaxrl_async.model.policy import Policy, speaking
from jaxrl_async.run.assemble import (
    Claim,
    check_frozen,
    check_model,
    claim_devices,
    learning,
    make_policy,
    make_recorder,
    make_tokenizer,
    open_checkpoints,
    reference_params,
    warm_started,
)
from jaxrl_async.run.checkpoint.rollout_state import resuming_if_possible
from jaxrl_async.run.checkpoint.store import Checkpoints, check_resumed
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep, SharedStop, StopRequests
from jaxrl_async.run.rates import measured_peak_flops
from jaxrl_async.run.signals import Stop, preempted
from jaxrl_async.run.warm_start import forget_warm_start, stop_if_lost
from jaxrl_async.trainer.preference_step import PreferenceStep, RewardStep
from jaxrl_async.trainer.supervised import SupervisedStep
from jaxrl_async.trainer.update import Params, TrainState

log = logging.getLogger(__name__)

HELD_OUT = {
    "train/loss": "eval/loss",
    "sft/accuracy": "eval/accuracy",
    "sft/token_accuracy": "eval/token_accuracy",
    "preference/accuracy": "eval/accuracy",
    "preference/margin": "eval/margin",
    "preference/chosen_reward": "eval/chosen_reward",
    "preference/rejected_reward": "eval/rejected_reward",
}
"""What a step's `measure` says, and the keys under which it is reported of held-out examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the jobs differ in."""

    step: Any  # SupervisedStep, PreferenceStep or RewardStep
    params: Params  # at the start
    split: ExampleSplit[Any]
    batch_size: int
    reference: Callable[[], Params] | None = None  # makes the frozen weights; null: none needed
    baseline: bool = False  # whether answers to other prompts are needed, too
    write: Callable[[Params], Path]  # the final weights as a Hugging Face directory


@dataclass(slots=True, kw_only=True)
class OfflineProgress:
    """All that a resumed run takes up again."""

    state: TrainState
    reference: Params | None
    examples: ExampleStream[Any]
    version: int = 0


def run(config: Config, claim: Claim, stop: Stop, console: Console, lockstep: Lockstep) -> Path:
    """Train as run.job says, to its end; the folder of the weights. Raises JaxrlError kinds.

    Several processes take the same examples, and each computes its rows of them.
    """
    whole = config
    config = config.model_copy(update={"mesh": config.mesh.without_samplers})
    claim_devices(config)
    tokenizer, slices = make_tokenizer(config), make_slices(config.mesh)
    split = SPLITS[config.run.job](config, tokenizer)
    spec = check_model(config, tokenizer, slices)
    check_frozen(config)
    warms = config.warm_start.steps > 0 and config.run.job != "sft"
    pairs = (
        warm_start_pairs(
            config.data,
            config.warm_start,
            tokenizer,
            seed=config.run.seed,
            max_length=config.row_length,
        )
        if warms
        else None
    )

    whole, paths = claim(whole)
    config = config.model_copy(update={"run": whole.run})
    with ExitStack() as closing:
        checkpoints = closing.enter_context(open_checkpoints(config, paths))
        resume_asked, warmed = config.run.resume, dict[str, float]()
        config = resuming_if_possible(config, checkpoints)
        policy = make_policy(config, spec, tokenizer, slices)
        if not config.run.resume and pairs is not None:
            policy, warmed = warm_started(
                config, policy, slices, pairs, paths, resume_asked, console, stop, lockstep
            )
        stop.answer = "stopping after this step and saving"
        job = JOBS[config.run.job](config, paths, slices, policy, split)
        progress = begin(config, job, checkpoints)
        recorder = None
        if lockstep.writes:
            recorder = make_recorder(config, paths, progress.version if resume_asked else None)
            closing.callback(recorder.close)
            if warmed:
                recorder.log(0, warmed)
        learn(
            config,
            job,
            progress,
            checkpoints,
            functools.partial(_tell, recorder, console),
            stop if lockstep.count == 1 else SharedStop(stop, lockstep),
        )
    if lockstep.writes:
        forget_warm_start(paths)
    if stop.preempted:
        raise preempted(stop, f"version {progress.version}")
    console.phase("writing the weights and the report")
    return job.write(progress.state.params)


# ---- the jobs


def sft(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> Job:
    """Maximum likelihood of the records' answers."""
    return Job(
        step=SupervisedStep(policy.spec, slices.trainer, TRAINER_RULES, **_settings(config)),
        params=policy.params,
        split=split,
        batch_size=config.sft.batch_size,
        write=functools.partial(_write_policy, policy, paths.policy),
    )


def _demonstrations(config: Config, tokenizer: Tokenizer) -> ExampleSplit[Any]:
    return demonstrations(config.data, tokenizer, config.run.seed, config.row_length)


def preference(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> Job:
    """A policy by better and worse answers: dpo and its kin."""
    section = config.preference
    loss = preference_loss.resolve(section.loss)
    step = PreferenceStep(
        policy.spec, slices.trainer, TRAINER_RULES, loss=section.loss, **_settings(config)
    )
    return Job(
        step=step,
        params=policy.params,
        split=split,
        batch_size=section.batch_size,
        reference=functools.partial(
            reference_params, config, "preference.reference", section.reference, policy, slices
        )
        if needs_reference(loss)
        else None,
        baseline=needs_baseline(loss),
        write=functools.partial(_write_policy, policy, paths.policy),
    )


def _answers_compared(config: Config, tokenizer: Tokenizer) -> ExampleSplit[Any]:
    loss = preference_loss.resolve(config.preference.loss)
    return _pairs(config, tokenizer, halves=needs_baseline(loss))


def reward_model(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> Job:
    """A scalar head on the policy that scores better answers higher."""
    step = RewardStep(
        policy.spec,
        slices.trainer,
        TRAINER_RULES,
        margin=config.preference.margin,
        **_settings(config),
    )

    def write(params: Params) -> Path:
        assert policy.tokenizer is not None
        save_head(paths.reward_model, speaking(policy.spec, policy.tokenizer), params)
        policy.tokenizer.save_pretrained(paths.reward_model)
        return paths.reward_model

    return Job(
        step=step,
        params=with_head(policy.spec, policy.params, "reward", jax.random.key(config.run.seed)),
        split=split,
        batch_size=config.preference.batch_size,
        write=write,
    )


SPLITS: dict[str, Callable[[Config, Tokenizer], ExampleSplit[Any]]] = {
    "sft": _demonstrations,
    "preference": _answers_compared,
    "reward_model": lambda config, tokenizer: _pairs(config, tokenizer, halves=False),
}
"""What each job learns from."""

JOBS: dict[str, Callable[[Config, Paths, Slices, Policy, ExampleSplit[Any]], Job]] = {
    "sft": sft,
    "preference": preference,
    "reward_model": reward_model,
}


def _settings(config: Config) -> dict[str, Any]:
    """What every step is made with."""
    return {
        **learning(config),
        "learning_rate": config.algorithm.learning_rate,
        "total_steps": config.run.steps,
    }


def _pairs(config: Config, tokenizer: Tokenizer, *, halves: bool) -> ExampleSplit[Any]:
    return preferences(config.data, tokenizer, config.run.seed, config.row_length, halves=halves)


def _write_policy(policy: Policy, folder: Path, params: Params) -> Path:
    policy.with_params(params).save_pretrained(folder)
    return folder


# ---- the loop


def begin(config: Config, job: Job, checkpoints: Checkpoints) -> OfflineProgress:
    """At the start, or, with run.resume, where the newest readable checkpoint was taken."""
    examples = ExampleStream(job.split.train, config.run.seed)
    state = job.step.init(job.params)
    if not config.run.resume:
        reference = job.reference() if job.reference else None
        return OfflineProgress(state=state, reference=reference, examples=examples)
    like = {"train": state, **({"reference": state.params} if job.reference else {})}
    saved = checkpoints.restore(None, like)
    check_resumed(saved, config, checkpoints.directory)
    examples.restore(saved.loop["examples"])
    return OfflineProgress(
        state=saved.state["train"],
        reference=saved.state.get("reference"),
        examples=examples,
        version=int(saved.loop["version"]),
    )


def learn(
    config: Config,
    job: Job,
    progress: OfflineProgress,
    checkpoints: Checkpoints,
    tell: Callable[[int, Mapping[str, float]], None],
    stop: StopRequests,
) -> None:
    """Make one version after another, until run.steps are made or somebody asks for a stop.

    produces      metrics (to `tell`), checkpoints, the weights in `progress`
    on failure    a non-finite step is skipped and counted; several in a row stop the run, saved
    """
    measure = _held_out(job, progress.reference)
    rates = _rates(config)
    if progress.version == 0 or _is_due(config, progress.version):
        tell(progress.version, measure(progress.state.params))
    saved, skipped = progress.version if config.run.resume else -1, 0
    try:
        while progress.version < config.run.steps and not stop.is_set():
            start = time.perf_counter()
            values = update(job, progress)
            train_s = time.perf_counter() - start
            last = progress.version == config.run.steps or stop.is_set()
            if (last or _is_due(config, progress.version)) and not stop.preempted:
                values |= measure(progress.state.params)
            tell(progress.version, rates(values, train_s, time.perf_counter() - start))
            skipped = skipped + 1 if values["train/skipped"] else 0
            stop_if_lost(skipped, config)
            if config.checkpoint.every and progress.version % config.checkpoint.every == 0:
                save(config, progress, checkpoints)
                saved = progress.version
    finally:
        if saved != progress.version:
            save(config, progress, checkpoints)


def _is_due(config: Config, version: int) -> bool:
    """Whether a run that never stops evaluates this version, beside the first and the last."""
    return config.eval.every > 0 and version % config.eval.every == 0


def update(job: Job, progress: OfflineProgress) -> dict[str, float]:
    """One update from the next examples; what the step reports of it."""
    examples = progress.examples.take(job.batch_size)
    progress.state, values = job.step.update(
        progress.state,
        job.step.pack(examples),
        at=progress.version,
        **_context(job, progress.reference, examples),
    )
    progress.version += 1
    return values


def _context(job: Job, reference: Params | None, examples: Sequence[Any]) -> dict[str, Any]:
    """What a preference loss compares the examples with."""
    context: dict[str, Any] = {} if reference is None else {"reference_params": reference}
    if job.baseline:
        context["mismatched"] = job.step.pack(mismatched(examples))
    return context


def _held_out(job: Job, reference: Params | None) -> Callable[[Params], dict[str, float]]:
    """The evaluation: held-out examples are packed once, their keys are eval/..."""
    batch = job.step.pack(job.split.held_out)
    context = _context(job, reference, job.split.held_out)

    def measure(params: Params) -> dict[str, float]:
        start = time.perf_counter()
        measured = job.step.measure(params, batch, **context)
        told = {HELD_OUT[key]: value for key, value in measured.items() if key in HELD_OUT}
        return told | {"time/eval_s": time.perf_counter() - start}

    return measure


def _rates(config: Config) -> Callable[[dict[str, float], float, float], dict[str, float]]:
    """(values of a step, seconds that it learnt, seconds in all) -> values with times and rates."""
    device, began = jax.local_devices()[0], time.perf_counter()
    peak = config.metrics.peak_flops or measured_peak_flops(device)
    peak *= config.mesh.trainer.num_devices

    def rates(values: dict[str, float], train_s: float, step_s: float) -> dict[str, float]:
        flops = values.pop("train/flops", None)
        utilisation = {} if flops is None else {"throughput/mfu": flops / (peak * train_s)}
        return {
            **values,
            **utilisation,
            "throughput/trained_tokens_per_s": values["train/tokens"] / step_s,
            "time/train_s": train_s,
            "time/step_s": step_s,
            "time/elapsed_s": time.perf_counter() - began,
        }

    return rates


def _tell(
    recorder: Recorder | None, console: Console, version: int, values: Mapping[str, float]
) -> None:
    if recorder is None:
        return
    recorder.log(version, values)
    console.phase("training")
    console.step(version, values)


def save(config: Config, progress: OfflineProgress, checkpoints: Checkpoints) -> None:
    """Write the train state and where the stream is."""
    tree: dict[str, Any] = {"train": progress.state}
    if progress.reference is not None:
        tree["reference"] = progress.reference
    loop = {
        "job": config.run.job,
        "version": progress.version,
        "config": dump(config),
        "examples": progress.examples.state(),
    }
    checkpoints.save(progress.version, state=tree, loop=loop)
