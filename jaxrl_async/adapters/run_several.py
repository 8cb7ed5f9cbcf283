"""Train several adapters in one run: each is an RL run with its own threads.

    main               run_several(): assembles all, waits for all, and reports failures
    run NAME           run_threads(): the trainer, rollouts and watchdog of NAME, until it ends
    sampler, router    shared; they end with the last run

The trainers step alternately (assemble_several.StepLock). A run that fails ends alone while the
others continue; a sampler that fails permanently ends them all.
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from jaxrl_async.adapters.assemble_several import assemble_several
from jaxrl_async.config.schema import Config
from jaxrl_async.config.several import folders_of
from jaxrl_async.errors import JaxrlError, RunsFailed
from jaxrl_async.host import only_new_garbage
from jaxrl_async.mesh import DeviceGuard
from jaxrl_async.metrics.spans import write_spans
from jaxrl_async.run import features
from jaxrl_async.run.assemble import Parts, RunContext
from jaxrl_async.run.exits import exits_refused
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.signals import LOOK_S, Stop, preempted
from jaxrl_async.run.threads import run_threads
from jaxrl_async.run.warm_start import forget_warm_start

log = logging.getLogger(__name__)


def run_several(config: Config, context: RunContext, stream: TextIO | None = None) -> None:
    """Run all of config.runs to completion, and write each one's policy and report. Raises
    RunsFailed after all have ended if any failed.

    stream: receives each run's progress; None: stdout.
    """
    stop = context.stop
    with ExitStack() as closing:
        parts, lock = assemble_several(config, context, closing, stream)
        with only_new_garbage():
            errors = run_all(parts, stop, lock)
    write_spans()  # for the reports
    for folder in folders_of(config).values():
        if Paths(folder).metrics.exists():
            features.write_report(folder)
    if errors:
        raise _failed(errors, len(parts))
    forget_warm_start(Paths(Path(config.run.dir) / config.run.name))
    if stop.preempted:
        versions = ", ".join(f"{n}: version {p.trainer.version}" for n, p in parts.items())
        raise preempted(stop, versions)


def run_all(runs: Mapping[str, Parts], stop: Stop, lock: DeviceGuard) -> dict[str, BaseException]:
    """Run all in parallel until each has ended; return the errors of the failed ones.

    lock: held while a policy is assembled, on the slice where the others step.
    """
    errors: dict[str, BaseException] = {}

    def run(name: str, parts: Parts) -> None:
        try:
            with exits_refused():
                run_threads(parts, stop)
            if not stop.preempted:
                with lock:
                    parts.save_policy()
        except BaseException as error:
            errors[name] = error
            expected = isinstance(error, JaxrlError)
            log.error("run %s failed: %s", name, error, exc_info=None if expected else error)

    threads = [
        threading.Thread(target=run, args=one, name=f"run {one[0]}", daemon=True)
        for one in runs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # in short waits: signals are handled between them
            thread.join(LOOK_S)
    return errors


def _failed(errors: Mapping[str, BaseException], count: int) -> RunsFailed:
    """Return the error to raise after some of `count` runs have failed."""
    reasons = "\n".join(f"  {name}: {type(e).__name__}: {e}" for name, e in errors.items())
    rest = count - len(errors)
    failed = RunsFailed(
        f"{len(errors)} of {count} runs failed; {rest} ended normally:\n{reasons}\nTheir progress "
        "is saved; --resume continues each from its newest checkpoint."
    )
    failed.__cause__ = next(iter(errors.values()))
    return failed
