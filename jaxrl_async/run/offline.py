"""Supervised fine-tuning, preferences, reward models: one thread from records to weights.

    ExampleStream ──take──> pack ──> update ──> metrics.jsonl, console, TensorBoard
          │                             │
          └──state──> checkpoint <── TrainState ──every eval.every──> measure(held-out examples)

A job is an update with examples that it can pack; all jobs share the loop. There is no sampler.
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

from jaxrl_async.algorithms.preference_losses import (
    needs_baseline,
    needs_reference,
    preference_loss,
)
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.examples import (
    ExampleSplit,
    ExampleStream,
    demonstrations,
    own_demonstrations,
    preferences,
)
from jaxrl_async.data.preferences import PreferencePair, mismatched
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.host import only_new_garbage
from jaxrl_async.mesh import Slices, make_slices
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import MetricsWriter
from jaxrl_async.metrics.spans import span
from jaxrl_async.metrics.symptoms import Symptoms
from jaxrl_async.model.frozen_base import merged_by_layer
from jaxrl_async.model.heads import HEAD, save_head, warn_of_readers, with_head
from jaxrl_async.model.lora import merged
from jaxrl_async.model.policy import Policy, with_special_tokens
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import Params
from jaxrl_async.profiling import StepTraces
from jaxrl_async.run.assemble import RunContext, with_copies
from jaxrl_async.run.builders.devices import claim_devices
from jaxrl_async.run.builders.frozen_weights import check_frozen, reference_params
from jaxrl_async.run.builders.initial_policy import (
    check_model,
    make_policy,
    make_tokenizer,
    with_adapter_of,
)
from jaxrl_async.run.builders.learning import base_of, learning, warm_started
from jaxrl_async.run.builders.playing import find_task, taught_records
from jaxrl_async.run.builders.trainer_parts import step_traces
from jaxrl_async.run.builders.vision import check_images, image_store
from jaxrl_async.run.checkpoint.rollout_state import resuming_if_possible
from jaxrl_async.run.checkpoint.store import (
    Checkpoints,
    check_resumed,
    check_scale,
    open_checkpoints,
)
from jaxrl_async.run.folder import Paths, log_merged, write_policy
from jaxrl_async.run.lockstep import StopRequests
from jaxrl_async.run.rates import Utilisation, measured_peak_flops
from jaxrl_async.run.reporting import make_recorder, warn_of
from jaxrl_async.run.signals import preempted
from jaxrl_async.run.update_loop import Ahead, make_updates
from jaxrl_async.run.warm_start import forget_warm_start, warm_pairs
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.kl_baseline import BaselinePass
from jaxrl_async.trainer.objectives.preference_objective import PreferenceData, preference_update
from jaxrl_async.trainer.objectives.reward_objective import reward_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.pack import pack_pairs
from jaxrl_async.trainer.pack_pairs import pack_preference
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, TrainState

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
"""Keys of a step's `measure`, and the keys under which held-out examples are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineJob:
    """The differences between the jobs."""

    step: Update[Any]
    pack: Callable[[Sequence[Any]], Any]  # examples to the data of the step
    complete: Callable[[Params, Frozen, Any], Any] = lambda params, frozen, data: data
    """Adds values that need weights to the data."""
    params: Params  # the trained weights, at the start
    base: Params | None = None  # weights that an adapter changes; None: all weights are trained
    split: ExampleSplit[Any]
    batch_size: int
    reference: Callable[[], Params] | None = None  # makes the frozen weights; None: not needed
    write: Callable[[Params], Path]  # the final weights as a Hugging Face directory


@dataclass(slots=True, kw_only=True)
class OfflineProgress:
    """The state from which a resumed run continues."""

    state: TrainState
    reference: Params | None
    examples: ExampleStream[Any]
    version: int = 0


def run(config: Config, context: RunContext) -> Path:
    """Run the training job of run.job to its end; return the folder of the weights. Raises
    JaxrlErrors.

    Several processes take the same examples, and each computes its rows of them.
    """
    stop, console, lockstep = context.stop, context.console, context.lockstep
    whole = config
    config = config.model_copy(update={"mesh": config.mesh.without_samplers})
    claim_devices(config)
    task, slices = find_task(config, context.task), make_slices(config.mesh)
    tokenizer = make_tokenizer(config.data, config.model, task)
    tokenizer.max_tokens = config.longest_text
    spec = check_model(config, tokenizer, slices)
    tokenizer.images = image_store(config, spec, tokenizer)
    split = _split(config, tokenizer, task)
    tokenizer.images = check_images(config, tokenizer.images)
    check_frozen(config)
    warms = config.warm_start.steps > 0 and config.run.job != "sft"
    pairs = warm_pairs(config, tokenizer) if warms else None

    whole, paths = context.claim(whole)
    config = config.model_copy(update={"run": whole.run})
    with ExitStack() as closing:
        on_saved = with_copies(config, paths, tokenizer, stop, context.on_saved)
        checkpoints = closing.enter_context(
            open_checkpoints(config.checkpoint, paths, lambda: stop.preempted, on_saved)
        )
        resume_asked, warmed = config.run.resume, dict[str, float]()
        config = resuming_if_possible(config, checkpoints)
        policy = make_policy(config.model, config.run, spec, tokenizer, slices, paths.base)
        if not config.run.resume and pairs is not None:
            policy, warmed = warm_started(
                config, policy, slices, pairs, paths, resume_asked, console, stop, lockstep
            )
        policy = with_adapter_of(config.model, config.run, policy, slices, paths.base)
        stop.answer = "stopping after this step and saving"
        job = JOBS[config.run.job](config, paths, slices, policy, split)
        progress = begin(config, job, checkpoints)
        resume_step = progress.version if resume_asked else None
        recorder = make_recorder(config, paths, lockstep, resume_step)
        closing.callback(recorder.close)
        if warmed:
            recorder.log(0, warmed)
        agreed = lockstep.agreed_stop(stop)
        outlet = functools.partial(_report, recorder, console, Symptoms())
        work = OfflineRun(config, job, progress, checkpoints, outlet, agreed)
        closing.callback(work.close)
        with only_new_garbage():
            learn_job(config, work, agreed, step_traces(config.run.profile, paths.root, lockstep))
    if lockstep.writes:
        forget_warm_start(paths)
    if stop.preempted:
        raise preempted(stop, f"version {progress.version}")
    console.phase("writing the weights and the report")
    return job.write(progress.state.params)


# ---- the jobs


def sft(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> OfflineJob:
    """Make the job that trains on the records' answers by maximum likelihood."""
    return OfflineJob(
        step=supervised_update(
            policy.spec,
            learning(config, slices, policy.lora),
            learning_rate=config.algorithm.learning_rate,
            total_steps=config.run.steps,
        ),
        pack=functools.partial(
            pack_pairs, row_length=config.row_length, images=policy.tokenizer.images
        ),
        params=policy.trained,
        base=base_of(policy),
        split=split,
        batch_size=config.sft.batch_size,
        write=functools.partial(_write_policy, policy, paths, config.model.path),
    )


def _split(config: Config, tokenizer: Tokenizer, task: Task) -> ExampleSplit[Any]:
    """Return the job's examples: from the task's conversations, or from the data."""
    if config.task is None:
        return SPLITS[config.run.job](config, tokenizer)
    own = taught_records(config, task, tokenizer)  # a rule allows task only with sft
    return own_demonstrations(own, tokenizer, config.longest_example)


def _demonstrations(config: Config, tokenizer: Tokenizer) -> ExampleSplit[Any]:
    return demonstrations(config.limited_data, tokenizer, config.run.seed, config.longest_example)


def preference(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> OfflineJob:
    """Make the job that trains a policy on better and worse answers: dpo and similar losses."""
    section, settings = config.preference, learning(config, slices, policy.lora)
    loss = preference_loss.resolve(section.loss)
    step = preference_update(
        policy.spec,
        settings,
        section.loss,
        learning_rate=config.algorithm.learning_rate,
        total_steps=config.run.steps,
    )
    reference = functools.partial(
        reference_params, config.model, "preference.reference", section.reference, policy, slices
    )
    pack = functools.partial(pack_preference, row_length=config.row_length, rows=step.micro_rows)

    def packed(pairs: Sequence[PreferencePair]) -> PreferenceData:
        others = pack(mismatched(pairs)) if needs_baseline(loss) else None
        return PreferenceData(pack(pairs), others)

    return OfflineJob(
        step=step,
        pack=packed,
        complete=BaselinePass(step),
        params=policy.trained,
        base=base_of(policy),
        split=split,
        batch_size=section.batch_size,
        reference=reference if needs_reference(loss) else None,
        write=functools.partial(_write_policy, policy, paths, config.model.path),
    )


def _answers_compared(config: Config, tokenizer: Tokenizer) -> ExampleSplit[Any]:
    loss = preference_loss.resolve(config.preference.loss)
    return _pairs(config, tokenizer, halves=needs_baseline(loss))


def reward_model(
    config: Config, paths: Paths, slices: Slices, policy: Policy, split: ExampleSplit[Any]
) -> OfflineJob:
    """Make the job that trains a scalar head to score better answers higher."""
    warn_of_readers(policy.spec, "reward")  # also before the training
    step = reward_update(
        policy.spec,
        learning(config, slices, policy.lora),
        learning_rate=config.algorithm.learning_rate,
        total_steps=config.run.steps,
        margin=config.reward_model.margin,
    )

    whole = with_head(policy.spec, policy.params, "reward", jax.random.key(config.run.seed))

    def write(params: Params) -> Path:
        assert policy.tokenizer is not None
        if policy.lora is not None:
            merge = merged_by_layer if is_quantized(whole) else merged
            params = merge(policy.spec, policy.lora, whole, params)
            log_merged(paths.reward_model, config.model.path or str(paths.base), policy)
        save_head(paths.reward_model, with_special_tokens(policy.spec, policy.tokenizer), params)
        policy.tokenizer.save_pretrained(paths.reward_model)
        return paths.reward_model

    return OfflineJob(
        step=step,
        pack=functools.partial(pack_preference, row_length=config.row_length, rows=step.micro_rows),
        params=whole if policy.lora is None else {**policy.adapter, HEAD: whole[HEAD]},
        base=base_of(policy),
        split=split,
        batch_size=config.reward_model.batch_size,
        write=write,
    )


SPLITS: dict[str, Callable[[Config, Tokenizer], ExampleSplit[Any]]] = {
    "sft": _demonstrations,
    "preference": _answers_compared,
    "reward_model": lambda config, tokenizer: _pairs(config, tokenizer, halves=False),
}
"""Examples of each job."""

JOBS: dict[str, Callable[[Config, Paths, Slices, Policy, ExampleSplit[Any]], OfflineJob]] = {
    "sft": sft,
    "preference": preference,
    "reward_model": reward_model,
}


def _pairs(config: Config, tokenizer: Tokenizer, *, halves: bool) -> ExampleSplit[Any]:
    longest = config.longest_example
    return preferences(config.limited_data, tokenizer, config.run.seed, longest, halves=halves)


def _write_policy(policy: Policy, paths: Paths, base: str | None, params: Params) -> Path:
    return write_policy(policy.with_trained(params), paths, base)


# ---- the loop


def begin(config: Config, job: OfflineJob, checkpoints: Checkpoints) -> OfflineProgress:
    """Start a job, or, with run.resume, continue from the newest readable checkpoint."""
    examples = ExampleStream(job.split.train, config.run.seed)
    state = job.step.init(job.params)
    if not config.run.resume:
        reference = job.reference() if job.reference else None
        return OfflineProgress(state=state, reference=reference, examples=examples)
    like = {"train": state, **({"reference": state.params} if job.reference else {})}
    saved = checkpoints.restore(None, like)
    check_resumed(saved, config, checkpoints.directory)
    check_scale(saved, config, checkpoints.directory)
    examples.restore(saved.loop["examples"])
    return OfflineProgress(
        state=saved.state["train"],
        reference=saved.state.get("reference"),
        examples=examples,
        version=int(saved.loop["version"]),
    )


class OfflineRun:
    """A job's updates with their reports and checkpoints; update_loop.Work."""

    def __init__(
        self,
        config: Config,
        job: OfflineJob,
        progress: OfflineProgress,
        checkpoints: Checkpoints,
        outlet: Callable[[int, Mapping[str, float]], None],
        stop: StopRequests,
    ) -> None:
        """outlet: takes each version's report."""
        self._config, self._job, self._progress = config, job, progress
        self._checkpoints, self._outlet, self._stop = checkpoints, outlet, stop
        self._frozen = Frozen(reference=progress.reference, base=job.base)
        self._rates = _rates(config)
        self._held_out = job.pack(job.split.held_out)
        examples = progress.examples
        self._batches = Ahead(lambda: job.pack(examples.take(job.batch_size)), examples.state)

    @property
    def made(self) -> int:
        """Updates made so far: the version."""
        return self._progress.version

    def begin(self) -> None:
        """Report the held-out examples before the first update."""
        if self.made == 0 or self._is_due():
            self._outlet(self.made, self._measure())

    def step(self) -> Mapping[str, float]:
        """Make one update; report it, with the held-out examples if they are due."""
        start = time.perf_counter()
        report = self._update()
        train_s = time.perf_counter() - start
        last = self.made == self._config.run.steps or self._stop.is_set()
        if (last or self._is_due()) and not self._stop.preempted:
            with span("evaluate"):
                report |= self._measure()
        report = self._rates(report, train_s, time.perf_counter() - start)
        self._outlet(self.made, report)
        return report

    def _update(self) -> dict[str, float]:
        job, progress = self._job, self._progress
        data = job.complete(progress.state.params, self._frozen, self._batches.take())
        progress.state, report = job.step.update(
            progress.state, data, self._frozen, at=progress.version
        )
        progress.version += 1
        return report

    def _is_due(self) -> bool:
        """Return whether a run that is never stopped would evaluate this version."""
        every = self._config.eval.every
        return every > 0 and self.made % every == 0

    def _measure(self) -> dict[str, float]:
        """Measure the held-out examples, under keys that begin with eval/."""
        start, params = time.perf_counter(), self._progress.state.params
        data = self._job.complete(params, self._frozen, self._held_out)
        measured = self._job.step.measure(params, data, self._frozen)
        report = {HELD_OUT[key]: value for key, value in measured.items() if key in HELD_OUT}
        return report | {"time/eval_s": time.perf_counter() - start}

    def close(self) -> None:
        """End the thread that makes batches ahead."""
        self._batches.close()

    def save(self) -> None:
        """Write the train state and the position in the stream."""
        config, progress = self._config, self._progress
        tree: dict[str, Any] = {"train": progress.state}
        if progress.reference is not None:
            tree["reference"] = progress.reference
        loop = {
            "job": config.run.job,
            "version": progress.version,
            "config": dump(config),
            "examples": self._batches.state,
        }
        self._checkpoints.save(progress.version, state=tree, loop=loop)


def learn_job(config: Config, work: OfflineRun, stop: StopRequests, traces: StepTraces) -> None:
    """Make one version after another, until run.steps are made or a stop is requested."""
    work.begin()
    saved = work.made if config.run.resume else None
    make_updates(work, config.run.steps, config, stop, saved=saved, keeps_last=True, traces=traces)


def _rates(config: Config) -> Callable[[dict[str, float], float, float], dict[str, float]]:
    """Return a function that adds times and rates to a report, from the seconds of its update and
    of its whole step."""
    device, began = jax.local_devices()[0], time.perf_counter()
    peak = config.metrics.peak_flops or measured_peak_flops(device)
    utilisation = Utilisation(
        peak * config.mesh.trainer.num_devices, measured=config.metrics.peak_flops is None
    )

    def rates(values: dict[str, float], train_s: float, step_s: float) -> dict[str, float]:
        flops = values.pop("train/flops", None)
        mfu = {} if flops is None else {"throughput/mfu": utilisation.of(flops, train_s)}
        return {
            **values,
            **mfu,
            "throughput/trained_tokens_per_s": values["train/tokens"] / step_s,
            "time/train_s": train_s,
            "time/step_s": step_s,
            "time/elapsed_s": time.perf_counter() - began,
        }

    return rates


def _report(
    recorder: MetricsWriter,
    console: Console,
    symptoms: Symptoms,
    version: int,
    values: Mapping[str, float],
) -> None:
    recorder.log(version, values)
    if recorder.writes:
        warn_of(symptoms, values)
    console.phase("training")
    console.step(version, values)
