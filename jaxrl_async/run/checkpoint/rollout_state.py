"""What a checkpoint of rl holds beside what learns, and how a run goes on from it.

    buffer, rollouts, ledger, prompts ──save──> Checkpoints ──restore──> the same, in a new process

Everything that is active comes back, in each process what was active there; at max_staleness 0 it
is drawn anew. As many processes are needed as there were.
"""

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferState, ReplayBuffer
from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.errors import CheckpointError
from jaxrl_async.metrics.recorder import set_aside
from jaxrl_async.rollout.rollout_loop import SAVED_KINDS, RolloutLoop, SavedGroup
from jaxrl_async.run.checkpoint.store import Checkpoints
from jaxrl_async.run.lockstep import Lockstep, SharedSource
from jaxrl_async.trainer.learner import Learner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsState:
    """All that lies between two updates: the buffer, and the groups that are being played."""

    buffer: BufferState  # in the process's own numbers
    groups: tuple[SavedGroup, ...] = ()  # the buffer's pending ones
    others: tuple["RolloutsState", ...] = ()  # of process 1, 2, ...; this is then of process 0


NOTHING_YET = RolloutsState(buffer=BufferState(next_group=0, next_untaken=0))
ROLLOUT_KINDS: tuple[type, ...] = (RolloutsState, BufferState, *SAVED_KINDS)
"""Records that a checkpoint holds."""


def rollouts_state(buffer: ReplayBuffer, rollouts: RolloutLoop, *, active: bool) -> RolloutsState:
    """Read while everything runs. active: with what is ready or being drawn.

    The rollouts are read first: what they finish meanwhile is found in the buffer. A burst that was
    admitted meanwhile, with the highest numbers, is left out, also what of it is finished already:
    a resumed run admits it again, with the same prompts.
    """
    playing = {g.ticket.group: g for g in (rollouts.progress() if active else ())}
    state = buffer.state(active=active)
    unknown = [t.group for t in state.pending if t.group not in playing]
    place = min([state.next_group, *unknown])
    state = replace(
        state,
        next_group=place,
        pending=tuple(t for t in state.pending if t.group < place),
        ready=tuple(g for g in state.ready if g.ticket.group < place),
    )
    return RolloutsState(buffer=state, groups=tuple(playing[t.group] for t in state.pending))


def shared_state(
    mine: RolloutsState, shared: SharedSource, ledger: Ledger, lockstep: Lockstep
) -> RolloutsState:
    """Of several processes; all must call it. ledger: the run's, which then tells of each group as
    much as the state does."""
    shared.settle(mine.buffer.ledger_lines)
    lines = lockstep.gather_json(ledger.lines)[0]
    states = [
        loads(np.frombuffer(message, np.uint8), ROLLOUT_KINDS)
        for message in lockstep.gather(dumps(mine).tobytes())
    ]
    first = replace(states[0], buffer=replace(states[0].buffer, ledger_lines=lines))
    return replace(first, others=tuple(states[1:]))


def local_share(state: RolloutsState, lockstep: Lockstep) -> RolloutsState:
    """This process's part of a run's state. Raises CheckpointError where there were more or fewer
    processes."""
    if state is NOTHING_YET:
        return state
    if len(state.others) + 1 != lockstep.count:
        raise CheckpointError(
            f"the checkpoint is of {len(state.others) + 1} processes, and these are "
            f"{lockstep.count}. Resume with as many; a finished run's weights are taken over by "
            "model.path=.../policy."
        )
    return (replace(state, others=()), *state.others)[lockstep.index]


def save(
    config: Config,
    checkpoints: Checkpoints,
    prompts: PromptStream | Curriculum,
    buffer: ReplayBuffer,
    rollouts: RolloutLoop,
    ledger: Ledger,
    shared: SharedSource | None,
    lockstep: Lockstep,
    turns: AbstractContextManager[Any],
    learner: Learner,
    version: int,
    numbers: Mapping[str, int],
) -> None:
    """Write the whole run: what learns, the buffer, what is being drawn, and where everything is.

    At max_staleness 0 what is being drawn is left out: drawn anew it is the same, bit for bit,
    while half of it on its own would run on another schedule. shared: where there are several
    processes; one that failed alone writes nothing, since the others could not follow. turns: with
    the sampler, on whose devices, too, orbax compares the folder's name between processes.
    """
    if shared is not None and shared.alone:
        log.error("version %d is not saved: this process failed alone", version)
        return
    state = rollouts_state(buffer, rollouts, active=config.staleness.max_staleness > 0)
    place = prompts.state(state.buffer.next_group)
    if shared is not None:
        state = shared_state(state, shared, ledger, lockstep)
    loop = {
        "job": "rl",
        "version": version,
        "config": dump(config),
        "numbers": learner.numbers(),
        "trainer": dict(numbers),
        "prompts": lockstep.gather_json(place),
    }
    with turns:
        rollouts_bytes = functools.partial(dumps, state)
        checkpoints.save(version, state=learner.tree(), loop=loop, rollouts=rollouts_bytes)


def resuming_if_possible(config: Config, checkpoints: Checkpoints) -> Config:
    """The same, without run.resume where there is no checkpoint yet, which is logged."""
    if not config.run.resume or checkpoints.latest() is not None:
        return config
    log.warning("%s: no checkpoint yet; the run starts from its beginning", checkpoints.directory)
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})


def reopened(path: Path, was: RolloutsState, version: int, resumes: bool) -> Ledger:
    """The ledger; of a resumed run, without what is from after its checkpoint.

    Not one line of before is taken out: the same checkpoint may be gone on from several times, and
    counts them.
    """
    if not resumes:
        return Ledger(path)
    set_aside(path, lambda number, _: number < was.buffer.ledger_lines)
    ledger = Ledger(path)
    places = [state.buffer.next_group for state in (was, *was.others)]
    where = {"places": places} if was.others else {"next_group": places[0]}
    ledger.write("resumed", version=version, **where)
    return ledger
