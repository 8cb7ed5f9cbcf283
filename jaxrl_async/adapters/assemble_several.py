"""Build several runs from one configuration: shared parts once, all others for each run.

check all ──> claim RUN ──> base (warm start, quantised) ──> samplers with a slot for each adapter
                  └──> RUN/NAME, for each: its own adapter, learner, data, buffer, checkpoints
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TextIO

from jaxrl_async.adapters.shared_samplers import make_shared_samplers
from jaxrl_async.algorithms.preflight import with_correction
from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import runs_of
from jaxrl_async.data.prompts import FittingPairs
from jaxrl_async.errors import ConfigError, StalledError
from jaxrl_async.mesh import DeviceGuard, make_slices
from jaxrl_async.metrics.console import Console
from jaxrl_async.model.policy import Policy
from jaxrl_async.ports.run import Clock
from jaxrl_async.run.assemble import Parts, RunContext, RunStart, SharedParts, connect, with_copies
from jaxrl_async.run.builders.devices import Locks, claim_devices, make_locks
from jaxrl_async.run.builders.initial_policy import make_policy, with_base_of, with_new_adapter
from jaxrl_async.run.builders.inputs import Inputs, check_inputs
from jaxrl_async.run.builders.learning import warm_started
from jaxrl_async.run.builders.samplers import run_probe_ids
from jaxrl_async.run.checkpoint.rollout_state import resuming_if_possible
from jaxrl_async.run.checkpoint.store import Checkpoints, open_checkpoints
from jaxrl_async.run.folder import Paths, claimed, write_config
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.signals import Stop

CHECK_S = 1.0
"""Interval at which a waiting run checks how long the lock has been held, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One of several runs, checked but not built yet."""

    config: Config
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """One of several runs with its folder."""

    config: Config  # run.resume: whether it has a checkpoint to continue from
    inputs: Inputs
    paths: Paths
    checkpoints: Checkpoints
    continued: bool  # whether its folder existed before


def assemble_several(
    config: Config, context: RunContext, closing: ExitStack, stream: TextIO | None = None
) -> tuple[dict[str, Parts], DeviceGuard]:
    """Build all parts of all runs, by name. Only the samplers' threads are started. Also returns
    the lock to hold while the trainer's slice computes. Arguments as for `assemble`.

    stream: receives each run's progress; None: stdout.
    """
    stop, lockstep = context.stop, context.lockstep
    checked, locks = check_runs(config, lockstep)
    shared_config = config.model_copy(update={"runs": {}})
    pairs = check_inputs(shared_config, lockstep, locks)[1] if config.warm_start.steps else None
    config, paths = context.claim(config)
    opened = {n: _open_run(one, config, paths, context, closing) for n, one in checked.items()}
    base, warm_metrics = _base(config, opened, pairs, paths, context.console, stop, lockstep)

    def count(fault: str, number: int = 1) -> None:
        for one in opened.values():
            one.inputs.faults.add(fault, number)

    inputs = next(iter(opened.values())).inputs
    slices = inputs.slices
    samplers = make_shared_samplers(config, base, slices, locks, count, run_probe_ids(inputs))
    closing.callback(samplers.router.close)
    lock, parts = StepLock(config.faults.watchdog_s), dict[str, Parts]()
    for name, one in opened.items():
        begun = RunStart(
            config=one.config,
            inputs=one.inputs,
            paths=one.paths,
            checkpoints=one.checkpoints,
            continued=one.continued,
            policy=with_new_adapter(one.config.model, one.config.run.seed, base, slices),
            warm_metrics={} if one.config.run.resume else warm_metrics,
            base_path=config.model.path or str(paths.base),
            label=name,
        )
        keep = context.console.keep
        console = Console(one.config.run.steps, stream=stream, live=False, keep=keep, name=name)
        shared = SharedParts(sampling=samplers.of_run(name), turn=lock)
        parts[name] = connect(begun, replace(context, console=console), closing, shared)
    return parts, lock


def check_runs(config: Config, lockstep: Lockstep) -> tuple[dict[str, CheckedRun], Locks]:
    """Read and check the inputs of each run, by name; also return the devices' locks.
    Raises JaxrlError subclasses; a ConfigError names the run."""
    configs = {name: with_correction(own) for name, own in runs_of(config).items()}
    claim_devices(config)
    named = (one for own in configs.values() for one in own.named_teachers.values())
    shares = any(one.chips == "sampler" for one in named)
    locks = make_locks(config.reward, make_slices(config.mesh), lockstep, shares_sampler=shares)
    checked: dict[str, CheckedRun] = {}
    for name, own in configs.items():
        try:
            check_rules(own)
            inputs, _ = check_inputs(own, lockstep, locks)
            if inputs.serving.needed:
                raise ConfigError(
                    "a task that is played by a program needs its own endpoint, which is not "
                    "available when several adapters are trained in one run. Run it separately."
                )
            _check_same_model(inputs, next(iter(checked.values())).inputs if checked else inputs)
        except ConfigError as error:
            raise ConfigError(f"runs.{name}: {error}") from error
        checked[name] = CheckedRun(config=own, inputs=inputs)
    return checked, locks


def _check_same_model(inputs: Inputs, first: Inputs) -> None:
    """Raise ConfigError unless a run has the same model and vocabulary as the first run."""
    if inputs.tokenizer.hf.get_vocab() != first.tokenizer.hf.get_vocab():
        raise ConfigError(
            "its vocabulary differs from the first run's, but all runs share one base model. Give "
            "all runs the same data.tokenizer, and tasks that add no tokens."
        )
    if inputs.spec != first.spec:
        raise ConfigError(
            "its model differs from the first run's, but all runs share one base model. Set "
            "trainer.row_length and the tokenizer alike."
        )


def _open_run(
    one: CheckedRun, config: Config, paths: Paths, context: RunContext, closing: ExitStack
) -> OpenedRun:
    """Create or find the folder of one of several runs, and hold it until `closing`."""
    exists = config.run.resume and (paths.root / one.config.run.name).is_dir()
    changes = {"dir": str(paths.root), "resume": exists, "resume_or_start": False}
    run = one.config.run.model_copy(update=changes)
    own = one.config.model_copy(update={"run": run})
    folder = closing.enter_context(claimed(run))
    write_config(own, folder)
    tokenizer, count = one.inputs.tokenizer, one.inputs.faults.add
    on_saved = with_copies(own, folder, tokenizer, context.stop, context.on_saved, count)
    checkpoints = closing.enter_context(
        open_checkpoints(own.checkpoint, folder, lambda: context.stop.preempted, on_saved)
    )
    return OpenedRun(
        config=resuming_if_possible(own, checkpoints),
        inputs=one.inputs,
        paths=folder,
        checkpoints=checkpoints,
        continued=exists,
    )


def _base(
    config: Config,
    opened: Mapping[str, OpenedRun],
    pairs: FittingPairs | None,
    paths: Paths,
    console: Console,
    stop: Stop,
    lockstep: Lockstep,
) -> tuple[Policy, dict[str, float]]:
    """Return the shared base in the form that model.lora specifies, and its warm start's metrics.
    If any run has a checkpoint, the earlier base is used."""
    continued = config.run.resume
    resumes = any(one.config.run.resume for one in opened.values())
    run = config.run.model_copy(update={"resume": resumes})
    config = config.model_copy(update={"run": run})
    inputs = next(iter(opened.values())).inputs
    slices = inputs.slices
    policy = make_policy(
        config.model, config.run, inputs.spec, inputs.tokenizer, slices, paths.base
    )
    warm_metrics: dict[str, float] = {}
    if pairs is not None and not resumes:
        policy, warm_metrics = warm_started(
            config, policy, slices, pairs, paths, continued, console, stop, lockstep
        )
    policy = with_base_of(config.model, policy, slices, paths.base, resumed=resumes)
    return policy, warm_metrics


class StepLock:
    """A first-come, first-served lock. A run asks for it once its groups are ready, so the run
    whose batch is ready first steps next. No run waits for more than one step of each other run.
    """

    def __init__(self, limit_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        """limit_s: maximum time that a run may hold it while others wait, seconds; 0: no limit."""
        self._limit_s, self._clock = limit_s, clock
        self._lock = threading.Lock()
        self._held, self._since = False, 0.0
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Wait for the lock. Raises StalledError if another run does not release it."""
        with self._lock:
            if not self._held:
                self._held, self._since = True, self._clock()
                return
            event = threading.Event()
            self._waiting.append(event)
        while not event.wait(CHECK_S if self._limit_s else None):
            self._check_wait(event)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._since = self._clock()
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._held = False

    def _check_wait(self, event: threading.Event) -> None:
        """Leave the queue and raise StalledError once the lock has been held for too long."""
        with self._lock:
            held_s = self._clock() - self._since
            if held_s < self._limit_s or event.is_set():
                return
            self._waiting.remove(event)
        raise StalledError(
            f"another run has held the trainer's slice for {held_s:.0f} s while this one waits. "
            "Check which run made no step; raise faults.watchdog_s if it only needs longer."
        )
