"""Build a run's parts from its configuration: the builders in order.

    check_inputs ──> claim the folder ──> policy ──> learner <── checkpoint
                                            │           │
          records ──> buffer ──> samplers ──┴> rollouts └──> trainer        nothing runs yet

Each builder in run/builders/ takes what it needs and returns a record of parts. Parts whose state
is in a checkpoint restore themselves from it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_async.algorithms.preflight import with_correction
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.later import Later
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard
from jaxrl_async.metrics.console import Console
from jaxrl_async.model.policy import Policy
from jaxrl_async.rollout.env import GuardedEnvs
from jaxrl_async.rollout.rollout_loop import RolloutLoop
from jaxrl_async.run.builders.initial_policy import make_policy, with_adapter_of
from jaxrl_async.run.builders.inputs import Inputs, check_inputs
from jaxrl_async.run.builders.learning import (
    base_of,
    make_learner,
    warm_started,
    with_shared_prefixes,
)
from jaxrl_async.run.builders.observers import make_observer, make_watchdog
from jaxrl_async.run.builders.playing import run_chat_format
from jaxrl_async.run.builders.rehearsal import Rehearsal
from jaxrl_async.run.builders.rollouts import (
    Records,
    RolloutSide,
    SharedSampling,
    make_rollout_side,
    open_records,
)
from jaxrl_async.run.builders.samplers import Sampling
from jaxrl_async.run.builders.scoring import Scorers
from jaxrl_async.run.builders.trainer_parts import make_outlets, make_trainer
from jaxrl_async.run.checkpoint.rollout_state import (
    StartingPoint,
    resumed,
    resuming_if_possible,
)
from jaxrl_async.run.checkpoint.store import Checkpoints, OnSaved, open_checkpoints
from jaxrl_async.run.folder import Paths, write_policy
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import Serving
from jaxrl_async.run.signals import Stop
from jaxrl_async.run.watchdog import Notices, Watchdog
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.trainer import Trainer
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.channel import WeightChannel

if TYPE_CHECKING:
    from jaxrl_async.run import policy_copies
    from jaxrl_async.run.replay.player import RunSchedule
else:
    policy_copies = Later("jaxrl_async.run.policy_copies")

Claim = Callable[[Config], tuple[Config, Paths]]
"""Creates or finds the run's folder and locks it; returns the configuration with run.resume set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Context of a job in addition to its configuration."""

    claim: Claim  # called after all checks that need no folder
    stop: Stop  # ends the warm start and, later, the run
    console: Console  # shows progress
    lockstep: Lockstep  # the processes of this run
    task: Task | None = None  # an object of the Python program that trains; None: config.task
    on_saved: OnSaved | None = None  # called with each complete checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Start of a run: checked inputs, the folder, and the policy as it is at the start."""

    config: Config
    inputs: Inputs
    paths: Paths
    checkpoints: Checkpoints
    continued: bool  # whether run.resume was asked for, even if there is no checkpoint yet
    policy: Policy
    warm_metrics: Mapping[str, float]
    base_path: str | None  # directory of the weights that an adapter changes; None: in `paths`
    label: str = ""  # name of one of several runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """Parts that one of several runs shares with the others."""

    sampling: SharedSampling  # adds the run to the samplers
    turn: DeviceGuard  # on the trainer's slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All parts of a run, connected to each other."""

    paths: Paths
    policy: Policy
    trainer: Trainer
    sampling: Sampling
    rollouts: RolloutLoop
    scorers: Scorers
    envs: GuardedEnvs
    buffer: ReplayBuffer
    schedule: "RunSchedule"
    watchdog: Watchdog
    notices: Notices
    serving: Serving
    plays: bool  # whether this process has rollouts
    base_path: str | None  # the directory of the policy at the start; None: random weights
    label: str = ""  # name of one of several runs

    @property
    def sampler(self) -> Router:
        """All samplers as one."""
        return self.sampling.router

    @property
    def channel(self) -> WeightChannel:
        """Channel of the weights to the samplers."""
        return self.sampling.channel

    def save_policy(self) -> Path:
        """Write the newest weights as a Hugging Face directory; return its path."""
        policy = self.policy.with_trained(self.trainer.learner.params)
        return write_policy(policy, self.paths, self.base_path)


def with_copies(
    config: Config,
    paths: Paths,
    tokenizer: Tokenizer,
    stop: Stop,
    on_saved: OnSaved | None,
    count: Callable[[str], None] = lambda name: None,
) -> OnSaved | None:
    """Return what is called with each complete checkpoint, with the folders of
    checkpoint.hugging_face, if that is set. Raises ConfigError.

    Args:
        config: the run's.
        paths: the run's.
        tokenizer: the policy's.
        stop: says whether the process must end soon.
        on_saved: called after them.
        count: called with the name of a fault.
    """
    if not config.checkpoint.hugging_face:
        return on_saved
    return policy_copies.PolicyCopies(
        config,
        paths,
        tokenizer,
        is_hurried=lambda: stop.preempted,
        failed=lambda: count("failed_policy_copies"),
        on_saved=on_saved,
    )


def assemble(config: Config, context: RunContext, closing: ExitStack) -> Parts:
    """Build every part, and warm-start the policy or restore the run; nothing runs yet.

    Args:
        config: the whole configuration.
        context: folder, stop, console and processes of the job.
        closing: closes all that was opened, in any case.
    """
    stop, lockstep = context.stop, context.lockstep
    config = with_correction(config)
    inputs, pairs = check_inputs(config, lockstep, task=context.task)
    config, paths = context.claim(config)
    on_saved = with_copies(
        config, paths, inputs.tokenizer, stop, context.on_saved, inputs.faults.add
    )
    checkpoints = closing.enter_context(
        open_checkpoints(config.checkpoint, paths, lambda: stop.preempted, on_saved)
    )
    continued, warm_metrics = config.run.resume, dict[str, float]()
    config = resuming_if_possible(config, checkpoints)
    slices, tokenizer = inputs.slices, inputs.tokenizer
    policy = make_policy(config.model, config.run, inputs.spec, tokenizer, slices, paths.base)
    if not config.run.resume and pairs is not None:
        with Rehearsal(config, inputs) as rehearsal:
            policy, warm_metrics = warm_started(
                config,
                policy,
                slices,
                pairs,
                paths,
                continued,
                context.console,
                stop,
                lockstep,
                rehearsal.start,
            )
    policy = with_adapter_of(config.model, config.run, policy, slices, paths.base)
    run = RunStart(
        config=config,
        inputs=inputs,
        paths=paths,
        checkpoints=checkpoints,
        continued=continued,
        policy=policy,
        warm_metrics=warm_metrics,
        base_path=config.model.path,
    )
    return connect(run, context, closing)


def connect(
    run: RunStart, context: RunContext, closing: ExitStack, shared: SharedParts | None = None
) -> Parts:
    """Build the parts that train, sample and report, and restore them; arguments as `assemble`'s.

    shared: parts that several runs share; None: this is the only run.
    """
    stop, console, lockstep = context.stop, context.console, context.lockstep
    inputs, paths, policy = run.inputs, run.paths, run.policy
    trainers, images = inputs.slices.trainer, inputs.tokenizer.images is not None
    config = with_shared_prefixes(run.config, policy, trainers, images=images)
    checkpoints, slices, tokenizer = run.checkpoints, inputs.slices, inputs.tokenizer
    sampling, turn = (None, NO_DEVICE_LOCK) if shared is None else (shared.sampling, shared.turn)
    stop.answer = "stopping after this step and saving"
    learner = make_learner(
        config, policy, slices, tokenizer, inputs.keep_mask, inputs.play.own, inputs.unmatched
    )
    start = resumed(
        config, checkpoints, learner, inputs.prompts, lockstep, tokenizer.images, inputs.digests
    )
    records = _open_records(run, start, lockstep, closing, scheduled=shared is None)
    weights = VersionedParams(version=start.version, params=learner.params)
    side = make_rollout_side(
        config,
        inputs,
        records,
        weights,
        lockstep,
        stop,
        paths.root,
        closing,
        base_of(policy),
        sampling,
    )
    trained = policy.with_trained(learner.params)
    closing.callback(inputs.opponents.close)
    inputs.opponents.begin(paths, start.version, trained, inputs.slices, inputs.locks.sampler)
    _open_serving(config, inputs, side, lockstep, closing)
    observer = make_observer(config.metrics, side, lockstep, inputs.serving)
    outlets = make_outlets(
        config, learner, side, observer, checkpoints, console, lockstep, start.version
    )
    trainer = make_trainer(config, learner, side, outlets, lockstep, paths.root, turn)
    start.restore(trainer, side.buffer, side.rollouts, side.prompts)
    return Parts(
        paths=paths,
        policy=policy,
        trainer=trainer,
        sampling=side.sampling,
        rollouts=side.rollouts,
        scorers=inputs.scorers,
        envs=inputs.envs,
        buffer=side.buffer,
        schedule=records.schedule,
        watchdog=make_watchdog(config, side, trainer, paths, console),
        notices=_notices(config, inputs, side, context),
        serving=inputs.serving,
        plays=lockstep.plays,
        base_path=run.base_path,
        label=run.label,
    )


def _open_records(
    run: RunStart, start: StartingPoint, lockstep: Lockstep, closing: ExitStack, *, scheduled: bool
) -> Records:
    """Open the run's records, which begin with the metrics of a warm start."""
    opened = run.config, run.paths, start, run.inputs.recorded, lockstep, closing
    records = open_records(*opened, continued=run.continued, scheduled=scheduled)
    if run.warm_metrics:
        records.recorder.log(0, run.warm_metrics)
    return records


def _notices(config: Config, inputs: Inputs, side: RolloutSide, context: RunContext) -> Notices:
    """Make the console's notices of outages and of the buffer."""
    return Notices(
        inputs.outages,
        side.buffer.stats,
        context.console.notice,
        groups_per_step=config.algorithm.groups_per_step // context.lockstep.players,
    )


def _open_serving(
    config: Config, inputs: Inputs, side: RolloutSide, lockstep: Lockstep, closing: ExitStack
) -> None:
    """Open the endpoint for agent programs, if the task has some."""
    serving = inputs.serving
    closing.callback(serving.close)
    if serving.needed and lockstep.plays:
        chat = run_chat_format(config.data, config.model, inputs.tokenizer)
        serving.open(config, side.sampling.router, inputs.tokenizer, chat)
