"""The run: starts the parts, waits, and stops them in order. The drawing of all threads of rl.

    main            train(): assembles, waits for the trainer or the first failure, stops everybody
    trainer         Trainer.run(): draw -> pack -> step -> publish -> report
    sampler         Sampler: poll weights -> plan -> prefill, insert -> decode block, without end
    router          Router: a sampler that died or hangs -> out -> started again in its place
    rollouts        one asyncio loop: RolloutLoop.run(): admit -> play -> score -> put
    watchdog        Watchdog.run(): stop a run in which nothing gets on, and name the part
    (checkpoints are written by orbax's own threads)

        rollouts ──Request──> sampler ──Completion──> rollouts ──EpisodeGroup──> ReplayBuffer
            ^                    ^                                                    │
            └──── Ticket ── gate │ VersionedParams                                    v
                             WeightChannel <──────────── publish ──────────────── trainer

What several threads touch is behind a lock: ReplayBuffer, WeightChannel, Router, FaultCounts,
and a Curriculum, which the rollouts draw from and the trainer saves.
Stopping goes the way of the data: buffer (nobody waits for groups or tickets), channel (nobody
waits for weights), rollouts, sampler. The other jobs have one thread: offline.py.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import Closed, ConfigError
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.metrics.report import write_report
from jaxrl_async.run import offline
from jaxrl_async.run.assemble import Parts, assemble, claim_devices
from jaxrl_async.run.folder import Paths, claimed, prepare, settled
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.memory import limit_arenas
from jaxrl_async.run.signals import Stop, preempted

JOIN_S = 60.0
"""Longest wait for a thread to end after everything it waits on was closed, seconds."""

log = logging.getLogger(__name__)


class Failure:
    """The first exception of any thread, and the event that one has happened or the work is
    done."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def guard(self, work: Callable[[], None], *, ends_run: bool) -> Callable[[], None]:
        """`work` as a thread's target: its exception is kept and ends the run."""

        def target() -> None:
            try:
                work()
            except Closed:
                log.debug("%s ended: closed", threading.current_thread().name)
            except BaseException as error:
                self.error = self.error or error
                self.done.set()
            finally:
                if ends_run:
                    self.done.set()

        return target


def train(config: Config) -> None:
    """Run a configuration to its end; the results lie in its run folder. Raises JaxrlError
    kinds."""
    limit_arenas()
    if jax.distributed.is_initialized():
        claim_devices(config)
    lockstep = Lockstep()
    config, paths = prepare_together(config, lockstep)
    with ExitStack() as closing:
        quiet = None if lockstep.writes else closing.enter_context(open(os.devnull, "w"))
        stop = closing.enter_context(Stop(grace_s=config.checkpoint.grace_s))
        console = closing.enter_context(Console(config.run.steps, stream=quiet))
        if lockstep.writes:
            closing.enter_context(claimed(paths))
        console.phase("preparing")
        work = run_rl if config.run.job == "rl" else offline.run
        weights = work(config, paths, stop, console, lockstep)
        if not lockstep.writes:
            return
        report = write_report(paths.root)
    results = {
        f"{weights.name.replace('_', ' ')} (Hugging Face directory)": weights,
        "metrics, samples, checkpoints": paths.root,
        "report": report,
    }
    width = max(map(len, results))
    console.summary(
        [
            *headline(paths.metrics),
            f"stopped early by {stop.reason}: everything is saved; --resume continues"
            if stop.reason
            else "",
            *(f"{what:<{width}}  {where}" for what, where in results.items()),
        ]
    )


def prepare_together(config: Config, lockstep: Lockstep) -> tuple[Config, Paths]:
    """Process 0 makes or finds the run's folder; all learn what came of it. Raises ConfigError."""
    found: dict[str, Any] = {}
    if lockstep.writes:
        try:
            run = settled(config.run)
            prepare(run)
            found = {"resume": run.resume}
        except ConfigError as error:
            found = {"error": str(error)}
    found = lockstep.gather_json(found)[0]
    if "error" in found:
        raise ConfigError(found["error"])
    run = config.run.model_copy(update={"resume": found["resume"]})
    paths = Paths(Path(run.dir) / run.name)
    if not all(lockstep.gather_json(paths.root.is_dir())):
        raise ConfigError(
            f"{paths.root} is not the same folder in all processes: run.dir must lie on storage "
            "that they share, such as a bucket or NFS."
        )
    return config.model_copy(update={"run": run}), paths


def run_rl(config: Config, paths: Paths, stop: Stop, console: Console, lockstep: Lockstep) -> Path:
    """Reinforcement learning (run.job=rl) to its end; the folder of the policy."""
    parts = assemble(config, paths, stop, console, lockstep)
    try:
        run_threads(parts, stop)
    finally:
        if parts.recorder is not None:
            parts.recorder.close()
        parts.ledger.close()
        parts.checkpoints.close()
    if stop.preempted:
        raise preempted(stop, parts.trainer.version)
    console.phase("writing the policy and the report")
    return parts.save_policy()


def headline(metrics: Path) -> list[str]:
    """What the run achieved, in a few lines."""
    lines = read_lines(metrics)
    told: list[str] = []
    for key in ("accuracy", "loss", "reward"):
        values = [(x["step"], x[f"eval/{key}"]) for x in lines if f"eval/{key}" in x]
        if values and not (key == "reward" and told):
            (first, start), (last, end) = values[0], values[-1]
            told.append(f"held-out {key} {start:.3f} at step {first}, {end:.3f} at step {last}")
    if told:
        seconds = lines[-1].get("time/elapsed_s", 0.0)
        told.append(f"{lines[-1]['step']} updates in {seconds:.0f} s")
    return told


def run_threads(parts: Parts, stop: Stop) -> None:
    """Start sampler, rollouts and trainer; wait for the trainer, a failure or a stop; stop in
    order."""
    failure = Failure()
    threads = [
        threading.Thread(
            target=failure.guard(lambda: asyncio.run(parts.rollouts.run()), ends_run=False),
            name="rollouts",
            daemon=True,
        ),
        threading.Thread(
            target=failure.guard(parts.trainer.run, ends_run=True), name="trainer", daemon=True
        ),
        threading.Thread(
            target=failure.guard(parts.watchdog.run, ends_run=False), name="watchdog", daemon=True
        ),
    ]
    parts.buffer.pause()  # until the trainer has evaluated the first weights
    parts.sampler.start()
    for thread in threads:
        thread.start()
    try:
        while not failure.done.wait(0.2):
            if parts.sampler.error is not None:
                failure.error = failure.error or parts.sampler.error
                break
    finally:
        parts.schedule.close()
        parts.watchdog.stop()
        parts.buffer.close()
        parts.channel.close()
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)
        parts.sampler.close()
    if failure.error is not None:
        raise failure.error
