"""Faults for a run that is assembled and not started: each function breaks one part, once or a few
times, while the run goes on. For tests and for benchmarks/faults.py.

    with injected(sampler_dies(after=20), scorer_raises(times=2)):
        train(config)
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from jaxrl_async.run import loop
from jaxrl_async.run.assemble import Parts

Fault = Callable[[Parts], None]
"""Breaks a part of a run before it starts."""

LONG_S = 3600.0
"""How long what hangs would hang, seconds."""


@contextmanager
def injected(*faults: Fault) -> Iterator[list[Parts]]:
    """Every run that begins inside is broken so; the parts of each are in the list."""
    made: list[Parts] = []
    assemble: Any = vars(loop)["assemble"]

    def broken(*args: Any) -> Parts:
        parts = assemble(*args)
        for fault in faults:
            fault(parts)
        made.append(parts)
        return parts

    with patch.object(loop, "assemble", broken):
        yield made


class Hits:
    """When a fault struck, seconds of time.monotonic; it strikes `times` times, after the first
    `after` calls."""

    def __init__(self, *, after: int = 0, times: int = 1) -> None:
        self.at: list[float] = []
        self._after, self._times, self._calls = after, times, 0
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        """Whether this call is hit."""
        with self._lock:
            self._calls += 1
            hit = self._after < self._calls and len(self.at) < self._times
            if hit:
                self.at.append(time.monotonic())
            return hit


# ---- samplers


def sampler_dies(hits: Hits, *, index: int = 0) -> Fault:
    """An exception on a sampler's thread, at a block."""

    def strike() -> None:
        raise RuntimeError("injected: the sampler dies")

    return _at_block(hits, index, strike)


def sampler_hangs(hits: Hits, *, index: int = 0, notice_s: float = 0.5) -> Fault:
    """A sampler's thread that stands still in a block. Until it is taken out, a sampler that does
    nothing for `notice_s` seconds counts as hanging."""

    def fault(parts: Parts) -> None:
        def strike() -> None:
            mine = threading.current_thread()
            sampler = next(s for s in parts.sampler.samplers if s._thread is mine)
            limits = parts.sampler._limits
            parts.sampler._limits = replace(limits, hang_s=notice_s)
            while not sampler._closed:
                time.sleep(0.01)
            parts.sampler._limits = limits
            threading.Event().wait(LONG_S)

        _at_block(hits, index, strike)(parts)

    return fault


def _at_block(hits: Hits, index: int, strike: Callable[[], None]) -> Fault:
    def fault(parts: Parts) -> None:
        engine = parts.sampler.samplers[index].engine  # its successors have it too
        generate = engine.generate

        def broken(*args: Any, **how: Any) -> Any:
            if hits.strikes():
                strike()
            return generate(*args, **how)

        engine.generate = broken

    return fault


def completions_are_nan(hits: Hits) -> Fault:
    """Log-probs that are NaN, from whichever sampler."""

    def fault(parts: Parts) -> None:
        router: Any = parts.sampler
        answered = router._answered

        def broken(index: int, job: Any, inner: Any) -> None:
            if not inner.cancelled() and inner.exception() is None and hits.strikes():
                inner.result().logprobs[:] = np.nan
            answered(index, job, inner)

        router._answered = broken

    return fault


# ---- scorers and environments


def scorer_raises(hits: Hits) -> Fault:
    """A scorer that fails."""

    async def strike(score: Callable[[], Any]) -> Any:
        raise RuntimeError("injected: the scorer fails")

    return _scorer(hits, strike)


def scorer_hangs(hits: Hits) -> Fault:
    """A scorer that does not come back."""

    async def strike(score: Callable[[], Any]) -> Any:
        await asyncio.sleep(LONG_S)

    return _scorer(hits, strike)


def scores_are(hits: Hits, change: Callable[[Any], Any]) -> Fault:
    """A scorer whose scores are changed before they are given back."""

    async def strike(score: Callable[[], Any]) -> Any:
        return change(await score())

    return _scorer(hits, strike)


def _scorer(hits: Hits, strike: Callable[[Callable[[], Any]], Any]) -> Fault:
    def fault(parts: Parts) -> None:
        guard: Any = parts.rollouts._scorer
        inner = guard._scorer

        async def broken(*args: Any) -> Any:
            return await (strike(lambda: inner(*args)) if hits.strikes() else inner(*args))

        guard._scorer = broken

    return fault


def env_replies(hits: Hits, strike: Callable[[], Any]) -> Fault:
    """An environment whose reply is what `strike` returns, awaited."""

    def fault(parts: Parts) -> None:
        guard: Any = parts.rollouts._make_env
        make = guard._make_env

        def broken(prompt: Any) -> Any:
            env = make(prompt)
            step = env.step

            async def reply(*args: Any) -> Any:
                return await (strike() if hits.strikes() else step(*args))

            env.step = reply
            return env

        guard._make_env = broken

    return fault


async def forever() -> None:
    """For env_replies: no reply."""
    await asyncio.sleep(LONG_S)


# ---- weights and trainer


def transfer_fails(hits: Hits) -> Fault:
    """Copies to the last sampler that cannot be started."""

    def strike(move: Callable[[], Any]) -> Any:
        raise RuntimeError("injected: the copy cannot be started")

    return _move(hits, strike)


def transfer_tears(hits: Hits) -> Fault:
    """Copies to the last sampler in which one array is not what was sent."""

    def strike(move: Callable[[], Any]) -> Any:
        leaves, tree = jax.tree.flatten(move())
        leaves[0] = jax.device_put(leaves[0] * 0 + 1, leaves[0].sharding)
        return jax.tree.unflatten(tree, leaves)

    return _move(hits, strike)


def _move(hits: Hits, strike: Callable[[Callable[[], Any]], Any]) -> Fault:
    def fault(parts: Parts) -> None:
        end: Any = parts.channel._ends[-1]
        move = end.move
        end.move = lambda held: strike(lambda: move(held)) if hits.strikes() else move(held)

    return fault


def out_of_memory(hits: Hits) -> Fault:
    """Passes of the trainer's update for which memory does not suffice."""

    def fault(parts: Parts) -> None:
        step: Any = parts.trainer.learner.policy_update
        accumulate = step.accumulate

        def broken(*args: Any) -> Any:
            if hits.strikes():
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
            return accumulate(*args)

        step.accumulate = broken

    return fault


def trainer_stalls(hits: Hits, *, bark_s: float = 1.0) -> Fault:
    """An update that does not come back; the watchdog waits for so long from then on."""

    def fault(parts: Parts) -> None:
        learner: Any = parts.trainer.learner
        learn = learner.learn

        def broken(*args: Any) -> Any:
            if hits.strikes():
                parts.watchdog._limit_s = bark_s
                threading.Event().wait(LONG_S)
            return learn(*args)

        learner.learn = broken

    return fault


def all_of(faults: Sequence[Fault]) -> Fault:
    """Several at once."""

    def fault(parts: Parts) -> None:
        for one in faults:
            one(parts)

    return fault
