"""What is saved of the rollouts while everything runs."""

from contextlib import nullcontext

import numpy as np
import pytest

from jaxrl_async.audit import Rules, audit
from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.codec import dumps, loads
from jaxrl_async.config.schema import Config
from jaxrl_async.data.mixed_prompts import MixedPrompts, TaskMix
from jaxrl_async.data.prompts import PromptStream
from jaxrl_async.data.records import Record
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.rollout.episode import SavedEpisode
from jaxrl_async.rollout.running_groups import SavedGroup
from jaxrl_async.run.checkpoint.rollout_state import (
    ROLLOUT_KINDS,
    RolloutsState,
    RunSaver,
    reopened,
    rollouts_state,
)
from jaxrl_async.run.lockstep import Lockstep, OwnAccounts
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import Drop

pytestmark = pytest.mark.full


class Rollouts:
    """Says that the groups 0 to 3 are being played; meanwhile `goes_on` happens."""

    def __init__(self, tickets, goes_on):
        self.tickets, self.goes_on = tickets, goes_on

    def progress(self):
        saved = tuple(
            SavedGroup(ticket=t, prompt=make_prompt(t.group), episodes=(SavedEpisode(),))
            for t in self.tickets
        )
        self.goes_on()
        return saved


SETTINGS = BufferSettings(groups_per_step=2, max_staleness=1)


def started():
    buffer = ReplayBuffer(SETTINGS)
    tickets = buffer.admit(0)
    return buffer, tickets


def trained(buffer, tickets):
    for ticket in tickets:
        buffer.put(make_group(ticket, [ticket.version]))
    buffer.draw(0, 0)
    buffer.set_live(1)


def test_what_is_finished_meanwhile_is_ready_and_the_rest_is_pending():
    buffer, tickets = started()
    rollouts = Rollouts(tickets, lambda: buffer.put(make_group(tickets[2], [0])))
    state = loads(dumps(rollouts_state(buffer, rollouts, active=True)), ROLLOUT_KINDS)
    assert [t.group for t in state.buffer.pending] == [0, 1, 3]
    assert [g.ticket.group for g in state.groups] == [0, 1, 3]
    assert [g.ticket.group for g in state.buffer.ready] == [2] and state.buffer.next_group == 4


def test_a_burst_that_is_admitted_meanwhile_comes_again_whole():
    buffer, tickets = started()
    trained(buffer, tickets[:2])

    def goes_on():
        burst = buffer.admit(0)
        assert [t.group for t in burst] == [4, 5]
        buffer.put(make_group(burst[1], [1]))

    state = rollouts_state(buffer, Rollouts(tickets[2:], goes_on), active=True)
    assert [g.ticket.group for g in buffer.state().ready] == [5]
    assert state.buffer.next_group == 4 and state.buffer.ready == ()
    assert [g.ticket.group for g in state.groups] == [2, 3]
    resumed = ReplayBuffer(SETTINGS)
    resumed.restore(state.buffer, 1)
    assert [t.group for t in resumed.admit(0)] == [4, 5]


def test_one_checkpoint_can_be_resumed_again_and_again(tmp_path):
    """Killed each time before the next checkpoint, and once more after it."""
    path, rules = tmp_path / "ledger.jsonl", Rules(max_staleness=1, groups_per_step=2)
    buffer = ReplayBuffer(SETTINGS, ledger=Ledger(path))
    tickets = buffer.admit(0)
    trained(buffer, tickets[:2])
    meanwhile = Rollouts(tickets[2:], lambda: buffer.admit(0))
    state = rollouts_state(buffer, meanwhile, active=True).buffer
    assert state.next_group == 4 and [t.group for t in buffer.state().pending] == [2, 3, 4, 5]
    buffer.close()
    for _ in range(3):
        ledger = reopened(path, RolloutsState(buffer=state), 1, resumes=True)
        buffer = ReplayBuffer(SETTINGS, ledger=ledger)
        buffer.restore(state, 1)
        for ticket in (*state.pending, *buffer.admit(0)):
            buffer.put(make_group(ticket, [1]))
        buffer.draw(1, 0)
        buffer.close()
        found = audit(read_lines(path), rules)
        assert found.problems == () and found.steps == 2 and found.trained == 4


def test_what_fails_meanwhile_is_gone():
    buffer, tickets = started()
    fails = Rollouts(tickets, lambda: buffer.fail(tickets[1], make_prompt(1), Drop.FAILED))
    state = rollouts_state(buffer, fails, active=True)
    assert [t.group for t in state.buffer.pending] == [0, 2, 3] and state.buffer.next_group == 4


def test_without_what_is_active_nothing_is_asked():
    buffer, tickets = started()
    trained(buffer, tickets[:2])
    state = rollouts_state(buffer, None, active=False)
    assert state.groups == () and state.buffer.pending == () and state.buffer.next_group == 2


def test_prompts_that_are_taken_again_are_saved_as_not_taken():
    """Two groups of a burst were admitted while the rollouts were read: their prompts, too, have
    left the stream, and a resumed run begins with them."""
    buffer, tickets = started()
    trained(buffer, tickets[:2])
    prompts = prompts_of(9)
    for _ in range(6):
        next(prompts)
    saved = saved_of(buffer, Rollouts(tickets[2:], lambda: buffer.admit(0)), prompts)
    assert [p["next"] for p in saved["prompts"]] == [4]


class ReadBuffer:
    """A buffer of which more happens as soon as it has been read."""

    def __init__(self, buffer, goes_on):
        self.buffer, self.goes_on = buffer, goes_on

    def state(self, *, active):
        saved = self.buffer.state(active=active)
        self.goes_on()
        return saved


def test_the_mix_has_just_the_drops_that_the_buffer_has():
    """Groups fail before, between and after the reads of rollouts, buffer and mix."""
    mix = MixedPrompts(
        {name: prompts_of(4) for name in "ab"},
        {name: TaskMix(weight=1.0, most=9.0) for name in "ab"},
    )
    buffer = ReplayBuffer(SETTINGS, dropped=mix.dropped)
    tickets, taken = [*buffer.admit(0)], [next(mix) for _ in range(4)]
    assert [prompt.task for prompt in taken] == ["a", "b", "a", "b"]

    def fails(number):
        buffer.fail(tickets[number], taken[number], Drop.FAILED)

    def fails_later():
        fails(2)
        tickets.extend(buffer.admit(0))
        taken.append(next(mix))
        fails(4)

    fails(0)
    rollouts = Rollouts(tickets[1:], lambda: fails(1))
    saved = saved_of(ReadBuffer(buffer, fails_later), rollouts, mix)
    (state,) = saved["prompts"]
    assert {name: own["dropped"] for name, own in state["tasks"].items()} == {"a": 1, "b": 1}
    held = loads(saved["rollouts"](), ROLLOUT_KINDS)
    assert [g.ticket.group for g in held.groups] == [2, 3]
    assert held.buffer.dropped == {"failed": 2}


def prompts_of(count):
    ids = np.zeros(1, np.int32)
    return PromptStream([Record(token_ids=ids, text="", reference="", answer="")] * count, seed=0)


def saved_of(buffer, rollouts, prompts):
    """Return what a checkpoint has of a run."""
    saved = {}

    class Kept:
        def save(self, version, *, state, loop, rollouts):
            saved.update(loop, rollouts=rollouts)

    class Learns:
        def tree(self):
            return {}

        def numbers(self):
            return {}

    RunSaver(
        config=Config(staleness={"max_staleness": 1}),
        checkpoints=Kept(),
        prompts=prompts,
        buffer=buffer,
        rollouts=rollouts,
        ledger=Ledger(),
        accounts=OwnAccounts(),
        lockstep=Lockstep(),
        images=None,
        digests={},
        lock=nullcontext(),
    ).save(Learns(), 1, {})
    return saved


def test_a_ledger_is_cut_behind_the_lines_of_its_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for number in range(5):
        ledger.write("admitted", group=number, version=0)
    ledger.close()
    state = BufferState(next_group=3, next_untaken=0, ledger_lines=3)
    reopened(path, RolloutsState(buffer=state), 1, resumes=True).close()
    lines = [line["fate"] for line in read_lines(path)]
    assert lines == ["admitted"] * 3 + ["resumed"]
