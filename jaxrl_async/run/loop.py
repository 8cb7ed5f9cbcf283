"""The run: starts the parts, waits, and stops them in order. The diagram of all threads of rl.

    main            train(): assembles, waits for the trainer or the first failure, stops everybody
    trainer         Trainer.run(): draw -> pack -> step -> publish -> report
    sampler         Sampler: poll weights -> plan -> prefill, insert -> decode block, without end
    router          Router: a sampler that died or hangs -> out -> started again in its place
    rollouts        one asyncio loop: RolloutLoop.run(): admit -> play -> score -> put
    watchdog        Watchdog.run(): stop a run that makes no progress, and name the part
    notices         Notices.run(): say what the run waits for, on the console and in the log
    checkpoint      Checkpoints: begin a save, wait for orbax's own threads, add checksums
    (executors      user rewards and the reward model)

        rollouts ──Request──> sampler ──Completion──> rollouts ──EpisodeGroup──> ReplayBuffer
            ^                    ^                                                    │
            └──── Ticket ── gate │ VersionedParams                                    v
                             WeightChannel <──────────── publish ──────────────── trainer

State shared by several threads has a lock: ReplayBuffer, WeightChannel, Router and Sampler,
Recording or Replay, Curriculum, Recorder, Tokenizer, FaultCounts, and the locks of shared devices.
Sessions end first: agents get the reason. Parts stop in the order of the data: buffer (no thread
waits for groups or tickets any more), channel (nor for weights), rollouts, sampler. The other jobs
have one thread: offline.py.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxrl_async.config.rules import check_rules
from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.config.several import folders_of, runs_of
from jaxrl_async.errors import ConfigError, Stopped, StopTraining
from jaxrl_async.host import limit_arenas, only_new_garbage
from jaxrl_async.later import Later
from jaxrl_async.metrics.console import Console, OnStep
from jaxrl_async.metrics.json_logs import add_labels, logs_as
from jaxrl_async.metrics.recorder import RunLog, read_lines, record_start
from jaxrl_async.metrics.series import accuracy_points, points
from jaxrl_async.metrics.spans import recorded_spans, write_spans
from jaxrl_async.metrics.trackers import check_trackers, remembered
from jaxrl_async.run import features
from jaxrl_async.run.assemble import RunContext, assemble
from jaxrl_async.run.builders.devices import (
    CACHE_FOLDER,
    claim_devices,
    keep_compiled_programs,
    with_dtype,
)
from jaxrl_async.run.checkpoint.storage import bring_back
from jaxrl_async.run.exits import exits_refused, no_user_exits
from jaxrl_async.run.folder import Paths, claimed, look, settled, write_config
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.optional_parts import CopyOfRun
from jaxrl_async.run.shown_answers import before_and_after
from jaxrl_async.run.signals import Stop, preempted
from jaxrl_async.run.start_checks import check_paths, with_hub_folders
from jaxrl_async.run.threads import run_threads
from jaxrl_async.run.warm_start import forget_warm_start
from jaxrl_async.shown_environment import hide_secrets, key_variables
from jaxrl_async.tasks.task import Task
from jaxrl_async.trainer.optimizer import check_optimizer

if TYPE_CHECKING:
    from jaxrl_async.run import callbacks as user_callbacks
    from jaxrl_async.run import offline
    from jaxrl_async.run.callbacks import Callback, Callbacks
    from jaxrl_async.run.checkpoint import bucket_start
else:
    user_callbacks = Later("jaxrl_async.run.callbacks")
    offline = Later("jaxrl_async.run.offline")
    bucket_start = Later("jaxrl_async.run.checkpoint.bucket_start")

Job = Callable[[Config, RunContext], Path | None]
"""Runs a job to its end; returns the folder of the weights, if there is one."""


@exits_refused()
def train(
    config: Config,
    on_step: OnStep | None = None,
    task: Task | None = None,
    callbacks: Sequence["Callback"] = (),
) -> Path:
    """Run a configuration to its end; return its folder, which holds the results.

    On another thread than the main one no signal stops the run, which is logged. Raises JaxrlError
    kinds.

    Args:
        config: the whole configuration.
        on_step: called after each update; training continues when it returns. StopTraining ends the
            run, any other exception fails it, SystemExit as ProcessEndRefused.
        task: the caller's object; config.task is then HANDED_OVER. None: the named task.
        callbacks: the caller's objects, called after run.callbacks.
    """
    check_rules(config)  # a configuration that was made in Python has not been through `load`
    hide_secrets(key_variables(config.model_dump()))
    limit_arenas()
    if jax.distributed.is_initialized():
        claim_devices(config)
    lockstep = Lockstep(
        first_plays=config.mesh.remote,
        colocated=config.mesh.colocated and config.run.job == "rl",
    )
    config = with_hub_folders(check_together(config, lockstep))
    for one in runs_of(config).values() if config.runs else (config,):
        check_paths(one)
        check_trackers(one.metrics)
        check_optimizer(one.trainer)
    hooks = _callbacks_of(config, on_step, callbacks)
    paths = Paths(Path(config.run.dir) / config.run.name)
    config = _with_dtype_of_first(config, lockstep, paths.config)
    with RunLog() as run_log:
        return _train(config, paths, lockstep, hooks, task, run_log)


def _train(
    config: Config,
    paths: Paths,
    lockstep: Lockstep,
    hooks: "Callbacks | None",
    task: Task | None,
    run_log: RunLog,
) -> Path:
    """Run a checked configuration to its end; return its folder. kept: opened in the folder."""
    with ExitStack() as closing:
        closing.enter_context(no_user_exits())
        closing.enter_context(logs_as(config.run.logs, run=config.run.name, role="trainer"))
        add_labels(process=str(lockstep.index))
        # ends late: it brings the trace there, too
        copy = closing.enter_context(features.run_copy(config.run))
        trace, held = _trace_file(config, paths, lockstep), threading.Event()
        closing.enter_context(recorded_spans(trace, f"trainer {lockstep.index}", held.is_set))
        quiet = None if lockstep.writes else closing.enter_context(open(os.devnull, "w"))
        stop = closing.enter_context(Stop(grace_s=config.checkpoint.grace_s))
        stop.answer = "stopping as soon as the run is prepared, and saving"
        on_step = None if hooks is None else _stopping(stop)(hooks.step)
        live = False if config.runs else None  # several write a line each
        keep = run_log.line if lockstep.writes else None
        shown = Console(config.run.steps, stream=quiet, live=live, on_step=on_step, keep=keep)
        console = closing.enter_context(shown)

        def claim(config: Config) -> tuple[Config, Paths]:
            claimed_run = claim_together(closing, lockstep, config, copy, run_log)
            held.set()
            if hooks is not None:
                with _stopping(stop):
                    hooks.begin(claimed_run[0], claimed_run[1].root)
            return claimed_run

        context = RunContext(
            claim=claim,
            stop=stop,
            console=console,
            lockstep=lockstep,
            task=task,
            on_saved=None if hooks is None else hooks.saved,
        )
        console.phase("preparing")
        weights, early = _run_job(config, context)
        if hooks is not None:
            with _stopping(stop):
                hooks.end(paths.root, weights)
        if not lockstep.writes:
            return paths.root
        write_spans()  # for the report
        achieved, where = _all_results(config) if config.runs else _run_results(paths, weights)
    console.summary([*achieved, early, *where, *copy.verdict()])
    return paths.root


def _callbacks_of(
    config: Config, on_step: OnStep | None, callbacks: Sequence["Callback"]
) -> "Callbacks | None":
    """Return the run's callbacks; None: it has no callbacks. Raises ConfigError."""
    if on_step is None and not callbacks and not config.run.callbacks:
        return None
    made = user_callbacks.load_callbacks(config.run.callbacks)
    return user_callbacks.Callbacks([*made, *callbacks], on_step)


def _run_job(config: Config, context: RunContext) -> tuple[Path | None, str]:
    """Run the job to its end; return the folder of its weights, and why it stopped early."""
    work: Job = run_rl if config.run.job == "rl" else offline.run
    if config.runs:
        work = features.several_runs()
    weights, stop = None, context.stop
    try:
        weights = work(config, context)
        early = f"stopped early by {stop.reason}" if stop.reason else ""
    except Stopped as error:
        early = str(error)
    return weights, f"{early}: everything is saved; --resume continues" if early else ""


def _with_dtype_of_first(config: Config, lockstep: Lockstep, before: Path) -> Config:
    """Return the configuration with model.dtype as process 0 chooses it, if it is null."""
    if config.model.dtype is not None:
        return config
    chosen = lockstep.gather_json(with_dtype(config, before).model.dtype)[0]
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": chosen})})


def _trace_file(config: Config, paths: Paths, lockstep: Lockstep) -> Path | None:
    """Return the file for this process's spans; None: metrics.spans is off."""
    of_all = runs_of(config).values() if config.runs else (config,)
    if not any(one.metrics.spans for one in of_all):
        return None
    number = f".{lockstep.index}" if lockstep.index else ""
    return paths.root / f"trace{number}.json"


def _run_results(paths: Paths, weights: Path | None) -> tuple[list[str], list[str]]:
    """Write the report of a run; return what it achieved, and where its results are."""
    results: dict[str, Path] = (
        {}
        if weights is None
        else {f"{weights.name.replace('_', ' ')} (Hugging Face directory)": weights}
    )
    report = features.write_report(paths.root)
    results |= {"metrics, samples, checkpoints": paths.root, "report": report}
    shown = {**results, **{name: of["link"] for name, of in remembered(paths.root).items()}}
    width = max(map(len, shown))
    where = [f"{what:<{width}}  {location}" for what, location in shown.items()]
    return [*achievements(paths.metrics), *before_and_after(paths.answers)], where


def _all_results(config: Config) -> tuple[list[str], list[str]]:
    """Return the achievements of each of several runs, and where its results are."""
    of_all = folders_of(config)
    lines = {
        name: [*achievements(Paths(folder).metrics), *before_and_after(Paths(folder).answers)]
        for name, folder in of_all.items()
    }
    achieved = [f"{name}  {line}" for name, own in lines.items() for line in own]
    where = [f"{name}  {folder}" for name, folder in of_all.items() if folder.is_dir()]
    for name, folder in of_all.items():
        where += [f"{name}  {of['link']}" for of in remembered(folder).values()]
    return achieved, where


@contextmanager
def _stopping(stop: Stop) -> Iterator[None]:
    """Make StopTraining a stop of the run; also a decorator."""
    try:
        yield
    except StopTraining as error:
        stop.request(str(error) or "the caller")


def check_together(config: Config, lockstep: Lockstep) -> Config:
    """Have process 0 check the run's folder without changing it, or bring it back from its copy;
    return the configuration with run.resume settled, the same in all processes. Raises
    ConfigError."""

    def prepare(run: RunSection) -> RunSection:
        features.bring_back(run)
        exists = bring_back(config.checkpoint, run)
        run = settled(run)
        return run.model_copy(update={"resume": True}) if exists else run

    return _settled_by_first(config, lockstep, look, prepare)


def claim_together(
    closing: ExitStack,
    lockstep: Lockstep,
    config: Config,
    copy: CopyOfRun | None = None,
    run_log: RunLog | None = None,
) -> tuple[Config, Paths]:
    """Have process 0 make or find the run's folder, lock it until `closing`, write its
    `run_log` there and begin its `copy`; return the settled configuration and the paths, the same
    in all processes. Raises ConfigError.
    """

    def hold(run: RunSection) -> None:
        paths = closing.enter_context(claimed(run))
        if config.checkpoint.dir is not None:
            bucket_start.begin_writing(config.checkpoint, run)
        write_config(config.model_copy(update={"run": run}), paths)
        record_start(paths.root)
        if run_log is not None:
            run_log.open(paths.root)
        if copy is not None:
            copy.begin(run, config.checkpoint.keep)

    config = _settled_by_first(config, lockstep, hold)
    paths = Paths(Path(config.run.dir) / config.run.name)
    if config.checkpoint.dir is not None:  # nothing that the processes share is in the folder
        paths.root.mkdir(parents=True, exist_ok=True)
    if not all(lockstep.gather_json(paths.root.is_dir())):
        raise ConfigError(
            f"{paths.root} is not the same folder in all processes: run.dir must lie on storage "
            "that they share, such as a mounted bucket or NFS; or set checkpoint.dir=gs://..."
        )
    keep_compiled_programs(paths.root.parent / CACHE_FOLDER)
    return config, paths


def _settled_by_first(
    config: Config,
    lockstep: Lockstep,
    act: Callable[[RunSection], object],
    settle: Callable[[RunSection], RunSection] = settled,
) -> Config:
    """Settle run.resume and call `act` in process 0; return the configuration with it, or raise
    process 0's error, in all."""
    outcome: dict[str, Any] = {}
    if lockstep.writes:
        try:
            run = settle(config.run)
            act(run)
            outcome = {"resume": run.resume}
        except ConfigError as error:
            outcome = {"error": str(error)}
        except OSError as error:
            if lockstep.count == 1:
                raise
            outcome = {
                "error": f"process 0 cannot use run.dir={config.run.dir}: {error}. Correct it."
            }
    outcome = lockstep.gather_json(outcome)[0]
    if "error" in outcome:
        raise ConfigError(outcome["error"])
    run = config.run.model_copy(update={"resume": outcome["resume"]})
    return config.model_copy(update={"run": run})


def run_rl(config: Config, context: RunContext) -> Path:
    """Run reinforcement learning (run.job=rl) to its end; return the folder of the policy."""
    stop = context.stop
    with ExitStack() as closing:
        parts = assemble(config, context, closing)
        parts.sampling.wait_for_samplers(stop)
        with only_new_garbage():
            run_threads(parts, stop)
    if context.lockstep.writes:
        forget_warm_start(parts.paths)
    if stop.preempted:
        raise preempted(stop, f"version {parts.trainer.version}")
    context.console.phase("writing the policy and the report")
    return parts.save_policy()


def _achieved_by_name(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a line for each evaluation by name: its accuracy, or else its reward."""
    texts = []
    for name in sorted({key.split("/")[1] for x in lines for key in x if key.count("/") == 2}):
        kinds = ("accuracy", "reward")
        kind = next((k for k in kinds if points(lines, f"eval/{name}/{k}")), "")
        if values := points(lines, f"eval/{name}/{kind}"):
            (first, start), (last, end) = values[0], values[-1]
            texts.append(f"{name}: {kind} {start:.3f} at step {first}, {end:.3f} at step {last}")
    return texts


def achievements(metrics: Path) -> list[str]:
    """Return the achievements of the run, in a few lines."""
    lines = read_lines(metrics)
    achieved: list[str] = []
    for key in ("accuracy", "loss", "reward"):
        values = accuracy_points(lines) if key == "accuracy" else points(lines, f"eval/{key}")
        if values and not (key == "reward" and achieved):
            (first, start), (last, end) = values[0], values[-1]
            achieved.append(f"held-out {key} {start:.3f} at step {first}, {end:.3f} at step {last}")
    achieved += _achieved_by_name(lines)
    if achieved:
        seconds = lines[-1].get("time/elapsed_s", 0.0)
        achieved.append(f"{lines[-1]['step']} updates in {seconds:.0f} s")
    return achieved
