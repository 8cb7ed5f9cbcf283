"""The threads of one run of rl: started together, and stopped in the order of the data."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from jaxrl_async.errors import Closed
from jaxrl_async.run.assemble import Parts
from jaxrl_async.run.signals import Stop

JOIN_S = 60.0
"""Longest wait for a thread to end after everything it waits on was closed, seconds."""

log = logging.getLogger(__name__)


class Failure:
    """The first exception of any thread, and an event for it or for the end of the work."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def guard(self, work: Callable[[], None], *, ends_run: bool) -> Callable[[], None]:
        """Return `work` as the target of a thread. Its exception is kept and ends the run.

        ends_run: its return ends the run, too.
        """

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


def run_threads(parts: Parts, stop: Stop) -> None:
    """Start all threads, wait until the trainer ends or one fails, and stop them in order. Raises
    the first failure."""
    failure = Failure()

    def new_thread(
        name: str, work: Callable[[], None], *, ends_run: bool = False
    ) -> threading.Thread:
        return threading.Thread(
            target=failure.guard(work, ends_run=ends_run), name=name, daemon=True
        )

    of = f" of {parts.label}" if parts.label else ""
    threads = [new_thread(f"trainer{of}", parts.trainer.run, ends_run=True)]
    threads += [new_thread(f"watchdog{of}", parts.watchdog.run)]
    if parts.plays:
        threads += [new_thread(f"rollouts{of}", lambda: asyncio.run(parts.rollouts.run()))]
    processes = parts.sampling.processes
    if processes is not None:
        threads += [new_thread("sampler processes", processes.run)]
    parts.buffer.pause()  # until the trainer has evaluated the first weights
    with ExitStack() as stopping:  # each is done whatever the one before raises
        stopping.callback(parts.sampling.dismiss)
        stopping.callback(parts.sampling.close)
        stopping.callback(parts.sampling.begin_to_dismiss)
        for thread in reversed(threads):
            stopping.callback(_join, thread)
        if processes is not None:
            stopping.callback(processes.stop)
        stopping.callback(parts.channel.close)
        stopping.callback(parts.buffer.close)
        stopping.callback(parts.watchdog.stop)
        stopping.callback(parts.schedule.close)
        stopping.callback(parts.serving.end_sessions)
        if parts.plays:
            parts.sampler.start()
        for thread in threads:
            thread.start()
        while not failure.done.wait(0.2):
            if parts.sampler.error is not None:
                failure.error = failure.error or parts.sampler.error
                break
    if failure.error is not None:
        raise failure.error


def _join(thread: threading.Thread) -> None:
    if thread.ident is None:  # never started
        return
    thread.join(JOIN_S)
    if thread.is_alive():
        log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)
