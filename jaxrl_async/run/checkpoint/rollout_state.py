"""The state of the rollouts in a checkpoint of rl, and how a run is resumed from it.

    buffer, rollouts, ledger, prompts ──save──> Checkpoints ──restore──> the same, in a new process

All active groups are restored, each in its process; at max_staleness 0 they are sampled again. A
run must be resumed by the number of processes with rollouts that saved it: one, if the samplers are
separate processes, with any number of samplers and of trainer hosts.
"""

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.data.images import ImageStore
from jaxrl_async.data.prompts import Ended, PromptStream
from jaxrl_async.errors import CheckpointError
from jaxrl_async.later import Later
from jaxrl_async.metrics.recorder import set_aside
from jaxrl_async.rollout.rollout_loop import RolloutLoop
from jaxrl_async.rollout.running_groups import SAVED_KINDS, SavedGroup
from jaxrl_async.run.checkpoint.inputs_digest import warn_of_changes
from jaxrl_async.run.checkpoint.store import Checkpoints, Saved, check_resumed, check_scale
from jaxrl_async.run.lockstep import Accounts, Lockstep
from jaxrl_async.run.replay.recording import OrderedPrompts
from jaxrl_async.trainer.learner import Learner
from jaxrl_async.trainer.trainer import Trainer

if TYPE_CHECKING:
    from jaxrl_async.data.mixed_prompts import MixedPrompts
    from jaxrl_async.run.checkpoint import resumed_masks
else:
    resumed_masks = Later("jaxrl_async.run.checkpoint.resumed_masks")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsState:
    """All active groups between two updates: in the buffer, and in the rollouts."""

    buffer: BufferState  # in the process's own numbers
    groups: tuple[SavedGroup, ...] = ()  # the buffer's pending ones
    others: tuple["RolloutsState", ...] = ()  # of process 1, 2, ...; then this one is process 0's


NOTHING_YET = RolloutsState(buffer=BufferState(next_group=0, next_untaken=0))
ROLLOUT_KINDS: tuple[type, ...] = (RolloutsState, BufferState, *SAVED_KINDS)
"""Records in a checkpoint, in addition to the records of types.py."""


def rollouts_state(buffer: ReplayBuffer, rollouts: RolloutLoop, *, active: bool) -> RolloutsState:
    """Read buffer and rollouts while both run. active: with groups that are ready or in progress.

    The rollouts are read first: groups that they finish before the second read are in the buffer. A
    burst that was admitted in between, with the highest numbers, is left out, including its
    finished groups: a resumed run admits it again, with the same prompts.
    """
    playing = {g.ticket.group: g for g in (rollouts.progress() if active else ())}
    state = buffer.state(active=active)
    unknown = [t.group for t in state.pending if t.group not in playing]
    end = min([state.next_group, *unknown])
    state = replace(
        state,
        next_group=end,
        pending=tuple(t for t in state.pending if t.group < end),
        ready=tuple(g for g in state.ready if g.ticket.group < end),
    )
    return RolloutsState(buffer=state, groups=tuple(playing[t.group] for t in state.pending))


def ended_for(buffer: BufferState) -> Ended:
    """Return whether a group, by number, has ended in this state: the prompts are read after it,
    and groups end meanwhile."""
    again = {ticket.group for ticket in buffer.pending}
    return lambda number: number < buffer.next_group and number not in again


def gathered_state(
    own: RolloutsState, accounts: Accounts, ledger: Ledger, lockstep: Lockstep
) -> RolloutsState:
    """Gather the states of all processes into one; all must call it.

    Args:
        own: this process's.
        accounts: brings the ledger to the lines of the states.
        ledger: the run's.
        lockstep: the processes; if there is one, its own state is returned.
    """
    if lockstep.count == 1:
        return own
    accounts.settle(own.buffer.ledger_lines)
    lines = lockstep.gather_json(ledger.lines)[0]
    states = [
        loads(np.frombuffer(message, np.uint8), ROLLOUT_KINDS)
        for message in lockstep.gather(dumps(own).tobytes())
    ]
    states = states[: lockstep.players]
    first = replace(states[0], buffer=replace(states[0].buffer, ledger_lines=lines))
    return replace(first, others=tuple(states[1:]))


def local_share(state: RolloutsState, lockstep: Lockstep) -> RolloutsState:
    """Return this process's part of a run's state. Raises CheckpointError if another number of
    processes saved it."""
    if state is NOTHING_YET:
        return state
    if len(state.others) + 1 != lockstep.players:
        raise CheckpointError(
            f"the checkpoint is of {len(state.others) + 1} processes with rollouts, and now there "
            f"are {lockstep.players}. Resume with as many; model.path=.../policy starts from a "
            "finished run's weights."
        )
    if not lockstep.plays:
        return NOTHING_YET
    return (replace(state, others=()), *state.others)[lockstep.index]


# ---- saving


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSaver:
    """Saves a run of rl: the learner, the buffer, active groups, and every position."""

    config: Config
    checkpoints: Checkpoints
    prompts: "PromptStream | Curriculum | MixedPrompts"
    buffer: ReplayBuffer
    rollouts: RolloutLoop
    ledger: Ledger  # the run's
    accounts: Accounts
    lockstep: Lockstep
    images: ImageStore | None  # images in token ids; None: there are no images
    digests: Mapping[str, str]  # see inputs_digest.py
    lock: AbstractContextManager[object]  # orbax compares names on the samplers' devices, too

    def save(self, learner: Learner, version: int, numbers: Mapping[str, int]) -> None:
        """Start to write a checkpoint of this version. numbers: the trainer's counters.

        At max_staleness 0 active groups are left out: sampled again they are the same, bit for bit,
        while restored halves would run on another schedule. A process that failed alone writes
        nothing, since the others cannot take part.
        """
        if self.accounts.failed_alone:
            log.error("version %d is not saved: this process failed alone", version)
            return
        active = self.config.staleness.max_staleness > 0
        state = rollouts_state(self.buffer, self.rollouts, active=active)
        position = None  # without rollouts no prompt is taken
        if self.lockstep.plays:
            position = self.prompts.state(state.buffer.next_group, ended_for(state.buffer))
        state = gathered_state(state, self.accounts, self.ledger, self.lockstep)
        loop = {
            "job": "rl",
            "version": version,
            "config": dump(self.config),
            "numbers": learner.numbers(),
            "trainer": dict(numbers),
            "images": None if self.images is None else self.images.identity(),
            "digests": dict(self.digests),
            "prompts": self.lockstep.gather_json(position)[: self.lockstep.players],
        }
        with self.lock:
            self.checkpoints.save(
                version,
                state=learner.tree(),
                loop=loop,
                rollouts=functools.partial(dumps, state),
            )


# ---- resuming


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Start of a run: version 0, or a checkpoint."""

    version: int = 0
    whole: RolloutsState = NOTHING_YET  # of all processes
    share: RolloutsState = NOTHING_YET  # of this one
    numbers: Mapping[str, int] | None = None  # the trainer's counters; None: a new run

    def restore(
        self,
        trainer: Trainer,
        buffer: ReplayBuffer,
        rollouts: RolloutLoop,
        prompts: PromptStream | OrderedPrompts,
    ) -> None:
        """Restore these parts; `resumed` has restored learner and prompts."""
        if self.numbers is not None:
            trainer.restore(self.version, self.numbers)
        buffer.restore(self.share.buffer, self.version)
        rollouts.restore(self.share.groups)
        if isinstance(prompts, OrderedPrompts):
            prompts.restore(self.share.buffer.next_group)


def resumed(
    config: Config,
    checkpoints: Checkpoints,
    learner: Learner,
    prompts: "PromptStream | Curriculum | MixedPrompts",
    lockstep: Lockstep,
    images: ImageStore | None,
    digests: Mapping[str, str],
) -> StartingPoint:
    """Restore learner and prompts from the newest readable checkpoint with run.resume; return the
    starting point of the other parts. images: the images in token ids; None: no images. digests:
    see inputs_digest.py; a change is logged. Raises CheckpointError, DataError before a file of the
    run is changed."""
    if not config.run.resume:
        return StartingPoint()
    saved = checkpoints.restore(None, learner.tree())
    check_resumed(saved, config, checkpoints.directory)
    check_scale(saved, config, checkpoints.directory)
    check_same_images(saved, images, checkpoints.directory)
    warn_of_changes(saved.loop.get("digests"), digests, checkpoints.directory)
    learner.restore(saved.state, saved.loop["numbers"])
    assert saved.rollouts is not None, "every checkpoint of rl has them"
    whole = resumed_masks.with_masks(
        loads(saved.rollouts, ROLLOUT_KINDS), saved, config, checkpoints.directory
    )
    share = local_share(whole, lockstep)
    prompts.restore(saved.loop["prompts"][lockstep.player])
    if not isinstance(prompts, PromptStream | Curriculum):
        prompts.restore_running({g.ticket.group: g.prompt.task for g in share.groups})
    return StartingPoint(
        version=saved.step, whole=whole, share=share, numbers=saved.loop["trainer"]
    )


def check_same_images(saved: Saved, images: ImageStore | None, folder: Path) -> None:
    """Raise CheckpointError if image ids in a checkpoint's answers mean other images now."""
    before = saved.loop.get("images")
    if before is None or (images is not None and images.identity() == before):
        return
    raise CheckpointError(
        f"{folder / str(saved.step)}: its answers refer to images by their index in the records, "
        "and the records now have other images, or have them in another order. Restore the "
        "files of data.jsonl and their images, or choose another run.name; "
        "model.path=.../policy starts from a finished run's weights."
    )


def resuming_if_possible(config: Config, checkpoints: Checkpoints) -> Config:
    """Return the configuration, without run.resume if no checkpoint exists yet."""
    if not config.run.resume or checkpoints.latest() is not None:
        return config
    log.warning("%s: no checkpoint yet; the run starts from its beginning", checkpoints.directory)
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})


def reopened(path: Path, state: RolloutsState, version: int, resumes: bool) -> Ledger:
    """Open the run's ledger; in a resumed run, move aside the lines from after its checkpoint.

    Earlier lines are kept. A checkpoint may be resumed more than once; its saved line count decides
    where to cut.
    """
    if not resumes:
        return Ledger(path)
    set_aside(path, lambda number, line: "fate" in line and number < state.buffer.ledger_lines)
    ledger = Ledger(path)
    positions = [of_process.buffer.next_group for of_process in (state, *state.others)]
    facts = {"places": positions} if state.others else {"next_group": positions[0]}
    ledger.write("resumed", version=version, **facts)
    return ledger
