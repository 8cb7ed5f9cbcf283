"""Fault injection: each function breaks one part of a run, once or a few times, while it runs.

For tests and for benchmarks/faults.py.

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
import jax.numpy as jnp
import numpy as np

from jaxrl_async.run import loop
from jaxrl_async.run.assemble import Parts
from jaxrl_async.types import Episode, Prompt, Score

Fault = Callable[[Parts], None]
"""Modifies a part of an assembled run before it starts, to inject a fault."""

LONG_S = 3600.0
"""Duration of an injected hang, seconds."""


@contextmanager
def injected(*faults: Fault) -> Iterator[list[Parts]]:
    """Inject these faults into every run started inside; the list receives each run's parts."""
    made: list[Parts] = []
    assemble: Any = vars(loop)["assemble"]

    def broken(*args: object) -> Parts:
        parts = assemble(*args)
        for fault in faults:
            fault(parts)
        made.append(parts)
        return parts

    with patch.object(loop, "assemble", broken):
        yield made


class Hits:
    """Strike `times` calls after the first `after`; `at` records when (time.monotonic seconds)."""

    def __init__(self, *, after: int = 0, times: int = 1) -> None:
        self.at: list[float] = []
        self._after, self._times, self._calls = after, times, 0
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        """Return True if the fault strikes this call."""
        with self._lock:
            self._calls += 1
            hit = self._after < self._calls and len(self.at) < self._times
            if hit:
                self.at.append(time.monotonic())
            return hit


# ---- samplers


def sampler_dies(hits: Hits, *, index: int = 0) -> Fault:
    """Raise an exception on a sampler's thread, in a block."""

    return sampler_raises(hits, RuntimeError("injected: the sampler dies"), index=index)


def sampler_raises(hits: Hits, error: Exception, *, index: int = 0) -> Fault:
    """Raise this exception on a sampler's thread, in a block."""

    def strike() -> None:
        raise error

    return _at_block(hits, index, strike)


def sampler_hangs(hits: Hits, *, index: int = 0, notice_s: float = 0.5) -> Fault:
    """Make a sampler's thread hang in a block.

    Until that sampler is replaced, any sampler without a block for `notice_s` seconds counts as
    hanging.
    """

    def fault(parts: Parts) -> None:
        def strike() -> None:
            fleet = parts.sampler.fleet
            limits = fleet.limits
            fleet.limits = replace(limits, hang_s=notice_s)
            while fleet.slots[index].is_active:
                time.sleep(0.01)
            fleet.limits = limits
            threading.Event().wait(LONG_S)

        _at_block(hits, index, strike)(parts)

    return fault


def _at_block(hits: Hits, index: int, strike: Callable[[], None]) -> Fault:
    def fault(parts: Parts) -> None:
        sampler: Any = parts.sampler.samplers[index]
        engine = sampler.engine  # its successors also use it
        generate = engine.generate

        def broken(*args: object, **settings: object) -> Any:
            if hits.strikes():
                strike()
            return generate(*args, **settings)

        engine.generate = broken

    return fault


def completions_are_nan(hits: Hits) -> Fault:
    """Return NaN log-probs, from any replica and its successors."""

    def spoil(answer: Any) -> None:
        if not answer.cancelled() and answer.exception() is None and hits.strikes():
            answer.result().logprobs[:] = np.nan

    def spoiled(replica: Any) -> Any:
        kind = type(replica)

        def broken(requests: Any) -> Any:
            answers = kind.start_many(replica, requests)
            for answer in answers:
                answer.add_done_callback(spoil)  # called before the router's own
            return answers

        replica.start_many = broken
        replica.successor = lambda: spoiled(kind.successor(replica))
        return replica

    def fault(parts: Parts) -> None:
        for replica in parts.sampler.samplers:
            spoiled(replica)

    return fault


# ---- scorers and environments


def scorer_raises(hits: Hits) -> Fault:
    """Make the scorer raise."""

    async def strike(score: Callable[[], object]) -> Any:
        raise RuntimeError("injected: the scorer fails")

    return _scorer(hits, strike)


def scorer_hangs(hits: Hits) -> Fault:
    """Make the scorer hang."""

    async def strike(score: Callable[[], object]) -> Any:
        await asyncio.sleep(LONG_S)

    return _scorer(hits, strike)


def scores_are(hits: Hits, change: Callable[[Any], Any]) -> Fault:
    """Change the scorer's scores before it returns them."""

    async def strike(score: Callable[[], Any]) -> Any:
        return change(await score())

    return _scorer(hits, strike)


def _scorer(hits: Hits, strike: Callable[[Callable[[], Any]], Any]) -> Fault:
    def fault(parts: Parts) -> None:
        guard = parts.scorers.training
        inner = guard.scorer

        async def broken(episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
            if not hits.strikes():
                return await inner(episodes, prompt)
            scores: tuple[Score, ...] = await strike(lambda: inner(episodes, prompt))
            return scores

        guard.scorer = broken

    return fault


def env_replies(hits: Hits, strike: Callable[[], Any]) -> Fault:
    """Replace an environment's reply by the awaited result of `strike`."""

    def fault(parts: Parts) -> None:
        make = parts.envs.make_env

        def broken(prompt: Any) -> Any:
            env: Any = make(prompt)
            step = env.step

            async def reply(*args: Any) -> Any:
                return await (strike() if hits.strikes() else step(*args))

            env.step = reply
            return env

        parts.envs.make_env = broken

    return fault


async def forever() -> None:
    """Never reply, for env_replies."""
    await asyncio.sleep(LONG_S)


# ---- weights and trainer


def transfer_fails(hits: Hits) -> Fault:
    """Refuse to start a copy of weights to the last sampler."""

    def strike(move: Callable[[], object]) -> Any:
        raise RuntimeError("injected: the copy cannot be started")

    return _move(hits, strike)


def transfer_tears(hits: Hits) -> Fault:
    """Change one array of a copy of weights to the last sampler."""

    def strike(move: Callable[[], object]) -> Any:
        leaves, tree = jax.tree.flatten(move())
        leaves[0] = jax.device_put(leaves[0] * 0 + 1, leaves[0].sharding)
        return jax.tree.unflatten(tree, leaves)

    return _move(hits, strike)


def transfer_scrambles(hits: Hits) -> Fault:
    """Flip the first axis of every array of a copy of weights to the last sampler: layers get other
    layers' weights, and tokens other tokens' embeddings."""

    def strike(move: Callable[[], object]) -> Any:
        moved = move()
        return jax.tree.map(lambda x: jax.device_put(jnp.flip(x, 0), x.sharding), moved)

    return _move(hits, strike)


def _move(hits: Hits, strike: Callable[[Callable[[], Any]], object]) -> Fault:
    def fault(parts: Parts) -> None:
        link: Any = parts.channel.links[-1]
        move = link.move
        link.move = lambda cast: strike(lambda: move(cast)) if hits.strikes() else move(cast)

    return fault


def out_of_memory(hits: Hits) -> Fault:
    """Make a pass of the trainer's update run out of memory."""

    def fault(parts: Parts) -> None:
        step: Any = parts.trainer.learner._step
        accumulate = step.programs.accumulate

        def broken(*args: object) -> Any:
            if hits.strikes():
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
            return accumulate(*args)

        step.programs.accumulate = broken

    return fault


def trainer_stalls(hits: Hits, *, limit_s: float = 1.0) -> Fault:
    """Make an update hang; from then on the watchdog waits `limit_s` seconds."""

    def fault(parts: Parts) -> None:
        learner: Any = parts.trainer.learner
        learn = learner.learn

        def broken(*args: object) -> Any:
            if hits.strikes():
                parts.watchdog.limit_s = limit_s
                threading.Event().wait(LONG_S)
            return learn(*args)

        learner.learn = broken

    return fault


def update_lasts(hits: Hits, seconds: float) -> Fault:
    """Make an update spend this time inside an XLA program, which cannot be interrupted."""

    def spin(turns: object) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, x: jnp.sin(x), jnp.ones((1 << 14,)))

    def fault(parts: Parts) -> None:
        learner: Any = parts.trainer.learner
        learn, program = learner.learn, jax.jit(spin)

        def broken(*args: object) -> Any:
            if not hits.strikes():
                return learn(*args)
            jax.block_until_ready(program(1))
            begin, tried = time.monotonic(), 1000
            jax.block_until_ready(program(tried))
            turns = int(tried * seconds / (time.monotonic() - begin))
            jax.block_until_ready(program(turns))
            return learn(*args)

        learner.learn = broken

    return fault


def all_of(faults: Sequence[Fault]) -> Fault:
    """Inject several faults."""

    def fault(parts: Parts) -> None:
        for inner in faults:
            inner(parts)

    return fault
