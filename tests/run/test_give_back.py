"""Groups drawn for a step that was never made: none is lost, in one process or in several."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from test_lockstep import Together

from jaxrl_async.audit import Rules, audit
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import BufferSettings, ReplayBuffer
from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import Closed
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.rollout.episode import SavedEpisode
from jaxrl_async.rollout.running_groups import SavedGroup
from jaxrl_async.run import lockstep
from jaxrl_async.run.checkpoint.rollout_state import (
    ROLLOUT_KINDS,
    gathered_state,
    local_share,
    reopened,
    rollouts_state,
)
from jaxrl_async.run.lockstep import SharedSource
from jaxrl_async.run.signals import Stop
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.trainer.evaluation import Outlets
from jaxrl_async.trainer.trainer import Trainer, TrainerSettings
from jaxrl_async.types import Drop

PER_STEP = 2


# ---- one process


def taken_once(reuse=1, ledger=None, **how):
    settings = BufferSettings(groups_per_step=PER_STEP, max_staleness=2, reuse=reuse, **how)
    buffer = ReplayBuffer(settings, ledger=ledger)
    for ticket in buffer.admit(0):
        buffer.put(make_group(ticket, [0]))
    return buffer, [g.ticket.group for g in buffer.draw(0, 0).groups]


@pytest.mark.parametrize("reuse", [1, 2])
def test_what_is_given_back_is_drawn_again_and_counts_once(reuse):
    buffer, first = taken_once(reuse)
    before, counted = buffer.state(), buffer.stats()
    if reuse > 1:  # the second draw takes kept groups, too
        buffer.set_live(1)
    again = [g.ticket.group for g in buffer.draw(1, 0).groups]
    buffer.give_back()
    buffer.give_back()
    after = buffer.state()
    assert after.next_untaken == before.next_untaken == max(first) + 1
    assert [g.ticket.group for g in after.ready] == [g.ticket.group for g in before.ready]
    assert [(g.ticket.group, uses) for g, uses in after.kept] == [
        (g.ticket.group, uses) for g, uses in before.kept
    ]
    assert (buffer.stats().trained, buffer.stats().mean_kept_tokens) == (
        counted.trained,
        counted.mean_kept_tokens,
    )
    assert [g.ticket.group for g in buffer.draw(1, 0).groups] == again


class Learner:
    """Fails at one version, before or after it has changed its weights."""

    def __init__(self, fails_at, tears):
        self.params, self.fails_at, self.tears = {"w": np.zeros(1)}, fails_at, tears

    def learn(self, groups, version, turns):
        if version == self.fails_at and not self.tears:
            raise MemoryError("too many rows")
        self.params = {"w": self.params["w"] + 1}
        if version == self.fails_at:
            raise MemoryError("too many rows")
        return {"train/skipped": 0.0}


class Publisher:
    """Weights are live at once."""

    def __init__(self, buffer):
        self.buffer = buffer

    def publish(self, version, params, probe_logprobs=None):
        self.buffer.set_live(version)
        play(self.buffer, version)

    def wait_taken(self):
        pass

    def wait_live(self, version, timeout_s, given_up=None):
        pass


def play(buffer, version):
    for ticket in buffer.admit(0):
        buffer.put(make_group(ticket, [version]))


def trained(folder, fails_at, tears, was=None, version=0, total=4):
    """A trainer on a real buffer and ledger; what it saved last, and its error."""
    path, saved = folder / "ledger.jsonl", {}
    ledger = Ledger(path) if was is None else reopened(path, was, version, resumes=True)
    buffer = ReplayBuffer(BufferSettings(groups_per_step=PER_STEP, max_staleness=1), ledger=ledger)
    if was is not None:
        buffer.restore(was.buffer, version)

    def save(learner, version, numbers):
        saved[version] = rollouts_state(buffer, SimpleNamespace(progress=lambda: ()), active=True)

    trainer = Trainer(
        learner=Learner(fails_at, tears),  # type: ignore[arg-type]
        source=buffer,
        publisher=Publisher(buffer),
        outlets=Outlets(
            evaluate=lambda version, last: {},
            report=lambda *_: lambda more: None,
            save=save,
            should_stop=lambda: False,
        ),
        settings=TrainerSettings(total_steps=total, save_every=1),
    )
    if was is not None:
        trainer.restore(version, {"skipped": 0, "limit": 0, "rest": 0})
    play(buffer, version)
    error = None
    try:
        trainer.run()
    except MemoryError as caught:
        error = caught
    buffer.close()
    ledger.close()
    return saved, error


@pytest.mark.parametrize("tears", [False, True], ids=["whole", "torn"])
def test_an_update_that_raises_is_not_counted_and_a_resumed_run_makes_its_step(tmp_path, tears):
    """Torn: the update before it is the newest that is saved."""
    rules = Rules(max_staleness=1, groups_per_step=PER_STEP)
    saved, error = trained(tmp_path, 2, tears)
    assert error is not None and max(saved) == 2
    found = audit(read_lines(tmp_path / "ledger.jsonl"), rules)
    assert found.problems == () and found.steps == 2 and found.trained == 2 * PER_STEP
    trained(tmp_path, None, False, was=saved[2], version=2)
    found = audit(read_lines(tmp_path / "ledger.jsonl"), rules)
    assert found.problems == () and found.steps == 4 and found.resumed == 1
    uses = [x["group"] for x in read_lines(tmp_path / "ledger.jsonl") if x["fate"] == "trained"]
    returned = [
        x["group"] for x in read_lines(tmp_path / "ledger.jsonl") if x["fate"] == "returned"
    ]
    assert sorted(set(uses)) == list(range(4 * PER_STEP)), "no group is left out"
    assert len(uses) == 4 * PER_STEP + len(returned)


# ---- several processes, each a thread with a real buffer


def run_together(folder, plan, was, version, how):
    """Two processes play the plan's rounds, and are then stopped while one of them has its
    groups and the other has not; the state that is saved, and its version. plan: of each round,
    the groups that fail, by process."""
    table, barrier = [b"", b""], threading.Barrier(2)
    results: list = [None, None]

    def process(index):
        together, stop, kept = Together(index, 2, table, barrier), Stop(), Ledger(keep=True)
        path = folder / "ledger.jsonl"
        ledger = Ledger()
        if together.writes:
            ledger = Ledger(path) if was is None else reopened(path, was, version, resumes=True)
        buffer = ReplayBuffer(BufferSettings(groups_per_step=PER_STEP, **how), ledger=kept)
        playing = {}
        if was is not None:
            own = local_share(was, together)
            buffer.restore(own.buffer, version)
            playing = {g.ticket.group: g.ticket for g in own.groups}
        source, now = SharedSource(buffer, together, stop, kept, ledger), version

        def finish(fails=()):
            for _ in range(2):  # what fails makes room for others
                playing.update({t.group: t for t in buffer.admit(0)})
                for number, ticket in sorted(playing.items()):
                    if number in fails:
                        buffer.fail(ticket, make_prompt(number), Drop.FAILED)
                    elif buffer.stats().ready < PER_STEP:
                        buffer.put(make_group(ticket, [ticket.version]))
                    else:
                        continue
                    del playing[number]

        for fails in plan:
            finish(fails[index])
            source.draw(now)
            now += 1
            buffer.set_live(now)
        playing.update({t.group: t for t in buffer.admit(0)})
        if index == 0:
            finish()
        else:
            stop.request("SIGTERM")
        with pytest.raises(Closed):
            source.draw(now)
        calls = tuple(
            SavedGroup(ticket=t, prompt=make_prompt(n), episodes=(SavedEpisode(),))
            for n, t in sorted(playing.items())
        )
        rollouts, active = SimpleNamespace(progress=lambda: calls), how["max_staleness"] > 0
        state = rollouts_state(buffer, rollouts, active=active)
        results[index] = gathered_state(state, source, ledger, together), now
        ledger.close()

    threads = [threading.Thread(target=process, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in results, "a process hangs or failed"
    (state, now), (same, _) = results
    assert dumps(state).tobytes() == dumps(same).tobytes()
    return loads(dumps(state), ROLLOUT_KINDS), now


NOTHING = ((), ())


@pytest.mark.full
@pytest.mark.parametrize(
    "plans",
    [[[NOTHING]], [[], [NOTHING]], [[((), (0, 1))], [((3,), ())], []]],
    ids=["the finding", "before the first step", "with groups that fail"],
)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_preempting_several_processes_while_one_waits_loses_no_group(
    tmp_path, plans, max_staleness, monkeypatch
):
    """Every group below the places that were reached is trained on, dropped, or saved, once; at
    max_staleness 0 the groups trained on are those of a run that was never stopped."""
    monkeypatch.setattr(lockstep, "ROUND_S", 0.01)
    how, was, version = {"max_staleness": max_staleness}, None, 0
    for plan in [*plans, [NOTHING] * 2]:
        was, version = run_together(tmp_path, plan, was, version, how)
    lines = read_lines(tmp_path / "ledger.jsonl")
    found = audit(
        lines, Rules(max_staleness=max_staleness, groups_per_step=2 * PER_STEP, waits=True)
    )
    assert found.problems == () and found.steps == version == sum(map(len, plans)) + 2
    states = (was, *was.others)
    saved = {
        t.group * 2 + i
        for i, state in enumerate(states)
        for t in (*state.buffer.pending, *(g.ticket for g in state.buffer.ready))
    }
    done = [x["group"] for x in lines if x["fate"] in ("trained", "dropped")]
    reached = {k * 2 + i for i, s in enumerate(states) for k in range(s.buffer.next_group)}
    assert len(done) == len(set(done)) and reached == set(done) | saved
    if max_staleness == 0:
        (tmp_path / "whole").mkdir()
        rounds = [fails for plan in plans for fails in plan]
        run_together(tmp_path / "whole", [*rounds, *[NOTHING] * 2], None, 0, how)
        whole = read_lines(tmp_path / "whole" / "ledger.jsonl")
        trained_on = [
            sorted((x["version"], x["group"]) for x in records if x["fate"] == "trained")
            for records in (lines, whole)
        ]
        assert trained_on[0] == trained_on[1]
