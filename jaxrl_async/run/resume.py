"""What a checkpoint of rl holds beside what learns, and how a run goes on from it.

    buffer, rollouts, ledger, prompts ──save──> Checkpoints ──restore──> the same, in a new process

With one process, everything that is active comes back. With several, what is active is drawn anew:
each admits its part again from the place of the last group that was used.
"""

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferState, ReplayBuffer
from jaxrl_async.codec import dumps
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.metrics.recorder import set_aside
from jaxrl_async.rollout.loop import SAVED_KINDS, RolloutLoop, SavedGroup
from jaxrl_async.run.checkpoint import Checkpoints
from jaxrl_async.run.lockstep import Lockstep, SharedSource, local_place
from jaxrl_async.trainer.learner import Learner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsState:
    """All that lies between two updates: the buffer, and the groups that are being played."""

    buffer: BufferState
    groups: tuple[SavedGroup, ...] = ()  # the buffer's pending ones


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


def shared_state(buffer: ReplayBuffer, ledger: Ledger, lockstep: Lockstep) -> RolloutsState:
    """Of several processes, in the run's numbers; all must call it. ledger: the run's."""
    mine = buffer.state(active=False)
    told = lockstep.gather_json([mine.next_group, ledger.lines])
    used = [(n - 1) * lockstep.count + i + 1 for i, (n, _) in enumerate(told) if n]
    place = max(used, default=0)
    state = BufferState(next_group=place, next_untaken=place, ledger_lines=told[0][1])
    return RolloutsState(buffer=state)


def local_share(state: RolloutsState, lockstep: Lockstep) -> RolloutsState:
    """This process's part of a run's state, in the process's numbers."""
    if lockstep.count == 1:
        return state
    place = local_place(state.buffer.next_group, lockstep)
    return RolloutsState(buffer=BufferState(next_group=place, next_untaken=place))


def stream_place(state: RolloutsState, lockstep: Lockstep) -> dict[str, int]:
    """What of the saved place in the prompts is another in this process than in the one that
    wrote it."""
    if lockstep.count == 1:
        return {}
    place = local_place(state.buffer.next_group, lockstep)
    return {"process_index": lockstep.index, "next": place}


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
    if shared is None:
        active = config.staleness.max_staleness > 0
        state = rollouts_state(buffer, rollouts, active=active)
    elif shared.alone:
        log.error("version %d is not saved: this process failed alone", version)
        return
    else:
        shared.settle()
        state = shared_state(buffer, ledger, lockstep)
    loop = {
        "job": "rl",
        "version": version,
        "config": dump(config),
        "numbers": learner.numbers(),
        "trainer": dict(numbers),
        "prompts": prompts.state(local_place(state.buffer.next_group, lockstep)),
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


def reopened(path: Path, state: BufferState, version: int, resumes: bool) -> Ledger:
    """The ledger; of a resumed run, without what is from after its checkpoint.

    Not one line of before is taken out: the same checkpoint may be gone on from several times, and
    counts them.
    """
    if not resumes:
        return Ledger(path)
    set_aside(path, lambda number, _: number < state.ledger_lines)
    ledger = Ledger(path)
    ledger.write("resumed", version=version, next_group=state.next_group)
    return ledger
