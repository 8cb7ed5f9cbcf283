"""The threads of one run of rl: started together, and stopped in the order of the data."""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

from jaxrl_async.errors import Closed
from jaxrl_async.run.assemble import Parts
from jaxrl_async.run.signals import Stop
from jaxrl_async.stuck_threads import register_stuck
from jaxrl_async.tasks.usercode import run_loop

JOIN_S = 60.0
"""Maximum wait for a thread to end after everything it waits for was closed, seconds."""

UPDATES = 3.0
"""Multiple of its longest update for which the trainer, which may be in one, is waited for."""
SILENT_S = 5.0
"""Time for which the trainer is waited for before the wait is logged, seconds."""

log = logging.getLogger(__name__)


class Failure:
    """The first exception of any thread, and an event for it or for the end of the work."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def guard(self, work: Callable[[], None], *, ends_run: bool) -> Callable[[], None]:
        """Return `work` as the target of a thread. Its exception is kept and ends the run.

        ends_run: whether the return of `work` ends the run as well.
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
    the first failure, once the threads have ended or are left behind (stuck_threads)."""
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
    threads += [new_thread(f"notices{of}", parts.notices.run)]
    if parts.plays:
        threads += [new_thread(f"rollouts{of}", lambda: run_loop(parts.rollouts.run()))]
    processes = parts.sampling.processes
    if processes is not None:
        threads += [new_thread("sampler processes", processes.run)]
    parts.buffer.pause()  # until the trainer has evaluated the first weights
    with ExitStack() as stopping:  # each callback runs even if one before raised
        stopping.callback(parts.sampling.dismiss)
        stopping.callback(parts.sampling.close)
        stopping.callback(parts.sampling.begin_to_dismiss)
        for thread in reversed(threads[1:]):
            stopping.callback(_join, thread)
        stopping.callback(_join_trainer, threads[0], parts)
        if processes is not None:
            stopping.callback(processes.stop)
        stopping.callback(parts.channel.close)
        stopping.callback(parts.buffer.close)
        stopping.callback(parts.notices.stop)
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


def _join_trainer(thread: threading.Thread, parts: Parts) -> None:
    """Wait for the trainer, which saves its state: as long as a running update may take, since
    nothing interrupts one."""
    longest_s = max(JOIN_S, UPDATES * parts.trainer.longest_update_s)
    if thread.ident is not None:
        register_stuck(thread, longest_s)
        thread.join(SILENT_S)
        if thread.is_alive():
            log.warning(
                "the run ends: waiting at most %.0f s for the trainer (%s), which cannot be "
                "interrupted",
                longest_s,
                parts.trainer.clock.doing,
            )
    _join(thread, longest_s)


def _join(thread: threading.Thread, longest_s: float | None = None) -> None:
    """Wait for a thread that was started; leave it behind if it does not end or the wait is
    interrupted."""
    if thread.ident is None:
        return
    longest_s = JOIN_S if longest_s is None else longest_s
    register_stuck(thread, longest_s)
    thread.join(longest_s)
    if thread.is_alive():
        log.warning("thread %s did not end within %.0f s", thread.name, longest_s)
