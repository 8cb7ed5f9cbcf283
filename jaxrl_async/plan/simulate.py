"""A discrete-event simulation of the pipeline: how busy each part and how stale the data will be.

    gate ──groups──> [ sampler: queue > columns > blocks of K steps ] x N ──> scorers ──> ready
      ^                        ^ swap, between two blocks                                  │
      └──── slots freed ── live in all <── transfer <── publish <── update <── P groups ───┘

It follows the rules of a run: the gate's bounds are from staleness.py, rows from
sampler/batch/shapes.py, the row takeovers in a block from sampler/device/decode.py. One event is
one block of one sampler, and its slots are NumPy arrays. The result depends only on pipeline and
seed. Lengths are keyed by the group's number, so two pipelines can be compared on the same answers.
Gate, buffer and trainer are here, the samplers in simulated_fleet.py.

Not simulated: running out of KV pages, failing requests, evaluations, several turns, groups that
are reused or dropped for lack of a signal; sampler.on_new_weights is "continue".
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan.pipeline import Pipeline, check_pipeline
from jaxrl_async.plan.simulated_fleet import FleetEvents, FleetTotals, SimulatedFleet
from jaxrl_async.plan.simulated_sampler import value_sampler
from jaxrl_async.plan.timeline import Timeline

STUCK_S = 86_400.0
"""Maximum simulated time without an update if samplers join and leave, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Measurements after the warm-up; shares as metrics.jsonl defines them."""

    updates: int
    wall_s: float
    updates_per_s: float
    trained_tokens_per_s: float  # answer tokens
    generated_tokens_per_s: float
    trainer_busy_share: float  # 1 - trainer/idle_share: share of step time spent learning
    sampler_busy_share: float  # sampler/busy_share, mean over samplers
    slot_occupancy: float  # sampler/slot_occupancy: share of decode steps x slots with a token
    staleness_mean: float  # staleness/mean, versions, over trained tokens
    staleness_max: int  # staleness/max, versions, of a trained group's oldest token
    wait_data_share: float  # of wall time: the trainer waited for groups
    wait_publish_share: float  # waited for samplers to take the last update, or sent weights
    wait_other_share: float  # wrote metrics and checkpoints
    sampler_idle_share: float  # of wall time: nothing to decode
    scoring_mean: float  # groups in the scorers or waiting for one, over wall time
    ready_mean: float  # groups waiting for the trainer, over wall time
    drawn_tokens: int  # since the start: trained + dropped + left + lost
    trained_tokens: int
    dropped_tokens: int
    left_tokens: int  # of groups in progress or waiting at the end
    dropped_groups: int
    # with samplers that join and leave; since the start unless noted
    samplers_mean: float = 1.0  # running samplers, over wall time, after the warm-up
    joins: int = 0
    leaves: int = 0  # with notice
    kills: int = 0
    moved_answers: int = 0  # unfinished answers that continued elsewhere
    begun_again_answers: int = 0
    lost_tokens: int = 0  # generated, and generated again elsewhere
    prefilled_again_tokens: int = 0  # of moved answers
    trainer_sent_bytes: float = 0.0  # of weights
    moved_transfers: int = 0  # that continued with another source
    replaced_versions: int = 0  # never offered, since a newer one was published
    live_s: float = 0.0  # mean, from publish until live in every sampler, after the warm-up


def simulate(
    pipeline: Pipeline, *, updates: int = 60, warm_up: int = 10, seed: int = 0
) -> SimulationResult:
    """Simulate a number of updates; shares and rates exclude the first `warm_up` of them.

    Raises ConfigError if a step could never be filled or a setting makes no sense.
    """
    if not 0 <= warm_up < updates:
        raise ConfigError(
            f"the warm-up takes {warm_up} of {updates} updates: nothing is left to measure. "
            "Simulate more updates than that."
        )
    check_pipeline(pipeline)
    run = _Run(pipeline, seed)
    before = run.to(warm_up)
    return _outcome(run, before, run.to(updates))


# ---- the state


@dataclass(slots=True, eq=False)
class _Group:
    """A prompt with its answers, from the gate to the trainer."""

    number: int
    unfinished: int  # answers
    oldest: int = -1  # version of its first token; -1: none yet
    tokens: int = 0  # of finished answers
    version_tokens: int = 0  # the sum of their versions
    ready: bool = False


@dataclass(slots=True)
class _Totals:
    """Counters since the start; a measurement is the difference of two."""

    at_s: float = 0.0
    updates: int = 0
    trained: int = 0  # tokens
    lag_tokens: int = 0  # sum of the trained tokens' staleness
    oldest: int = 0  # largest staleness of a group since the last reading
    train_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0
    publish_s: float = 0.0
    scoring_group_s: float = 0.0
    ready_group_s: float = 0.0
    fleet: FleetTotals = field(default_factory=FleetTotals)


class _Run:
    """The gate, the buffer and the trainer."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.p, self.version, self.time = pipeline, 0, Timeline()
        self.totals, self.dropped_tokens, self.dropped_groups = _Totals(), 0, 0
        self._lengths = value_sampler(pipeline.answer_tokens, np.random.default_rng([seed, 0]))
        self._scores = value_sampler(pipeline.score_s, np.random.default_rng([seed, 1]))
        # the gate and the buffer
        self.pending: dict[int, _Group] = {}  # admitted, neither taken nor dropped; ascending
        self.next_group = 0
        self.first_unready = 0  # lowest number of a pending group that is not ready
        self.leading = 0  # pending groups below that, all ready
        self.held_slots: dict[int, int] = {}  # version at the draw -> slots held until it is live
        self.num_ready = self.num_scoring = 0
        self.to_score: deque[_Group] = deque()  # wait for a scorer
        # the trainer
        self.waits = True  # whether it waits for groups
        self.step_from = self.trained_at = 0.0
        self.waits_to_publish = False
        events = FleetEvents(on_finished=self.finished, on_swap=self.swap_begun, on_live=self.freed)
        self.fleet = SimulatedFleet(pipeline, self.time, events, seed)
        self.admit()

    def to(self, updates: int) -> _Totals:
        """Simulate until `updates` updates are done; return the counters then.

        Raises ConfigError if samplers join and leave such that no step is ever filled.
        """
        updated_at = self.time.now
        while self.totals.updates < updates:
            before = self.totals.updates
            at_s, action, args = self.time.next()
            self._pass(at_s)
            action(*args)
            if self.totals.updates > before:
                updated_at = self.time.now
            elif self.p.turnover is not None and self.time.now - updated_at > STUCK_S:
                raise ConfigError(
                    f"no update within {STUCK_S / 3600:.0f} simulated hours: samplers leave before "
                    "they have generated a step's answers. Let fewer be preempted, or let them "
                    "hand their requests back."
                )
        reading = replace(self.totals, at_s=self.time.now, fleet=self.fleet.reading())
        self.totals.oldest = 0
        return reading

    def _pass(self, at_s: float) -> None:
        passed_s = at_s - self.time.now
        self.totals.scoring_group_s += passed_s * self.num_scoring
        self.totals.ready_group_s += passed_s * self.num_ready
        self.fleet.totals.present_s += passed_s * len(self.fleet.running)
        self.time.now = at_s

    # ---- the gate

    def admit(self) -> None:
        """Admit groups to all free slots."""
        active = len(self.pending) + sum(self.held_slots.values())
        for _ in range(max(0, self.p.capacity - active)):
            group = _Group(self.next_group, self.p.group_size)
            self.pending[group.number] = group
            self.next_group += 1
            self.fleet.submit(group.number, self._lengths(self.p.group_size))

    def freed(self, live: int) -> None:
        """Free the slots of the steps whose weights are live in every sampler."""
        self.held_slots = {at: n for at, n in self.held_slots.items() if at >= live}
        self.admit()

    def finished(self, answers: Sequence[list[int]]) -> None:
        """Score the groups whose last answer is done."""
        for tokens, versions, number, oldest in answers:
            group = self.pending[number]
            group.unfinished -= 1
            group.tokens += tokens
            group.version_tokens += versions
            group.oldest = oldest if group.oldest < 0 else min(group.oldest, oldest)
            if not group.unfinished:
                self.num_scoring += 1
                self.to_score.append(group)
        self.score()

    # ---- scorers and buffer

    def score(self) -> None:
        """Start scoring finished groups while scorers are free, in order of arrival."""
        most = self.p.scorers
        while self.to_score and (most is None or self.num_scoring - len(self.to_score) < most):
            seconds = float(self._scores(1)[0])
            self.time.after(seconds, self.scored, self.to_score.popleft())

    def scored(self, group: _Group) -> None:
        """Make a scored group ready."""
        self.num_scoring -= 1
        group.ready = True
        self.num_ready += 1
        self.score()
        self._advance()
        self.draw()

    def _advance(self) -> None:
        """Advance to the lowest pending group that is not ready."""
        while self.first_unready < self.next_group:
            group = self.pending.get(self.first_unready)
            if group is not None:
                if not group.ready:
                    return
                self.leading += 1
            self.first_unready += 1

    def _drop_stale(self) -> None:
        """Drop ready groups that are too stale, and admit new ones instead."""
        old = [
            g
            for g in self.pending.values()
            if g.ready and self.version - g.oldest > self.p.max_staleness
        ]
        for group in old:
            self._leave(group)
            self.dropped_groups += 1
            self.dropped_tokens += group.tokens
        if old:
            self.admit()

    def _leave(self, group: _Group) -> None:
        del self.pending[group.number]
        self.num_ready -= 1
        if group.number < self.first_unready:
            self.leading -= 1

    def selected(self) -> list[_Group]:
        """Select the next step's groups (as select.select, rank strict), or fewer if not full."""
        most = self.p.groups_per_step
        groups = list(islice(self.pending.values(), min(self.leading, most)))
        blocker = self.first_unready
        window = (self.pending.get(blocker + i) for i in range(1, self.p.lookahead + 1))
        groups += [g for g in window if g is not None and g.ready]
        return groups[:most]

    # ---- the trainer

    def draw(self) -> None:
        """Begin an update if the trainer waits and a step's groups are ready."""
        if not self.waits:
            return
        drops = self.p.when_too_old == "drop"
        if drops:
            self._drop_stale()
        if self.leading + self.p.lookahead < self.p.groups_per_step:
            return
        groups = self.selected()
        if len(groups) < self.p.groups_per_step:
            return
        self.waits = False
        for group in groups:
            self._leave(group)
        tokens = sum(g.tokens for g in groups)
        lag = self.version - min(g.oldest for g in groups)
        self.totals.trained += tokens
        self.totals.lag_tokens += tokens * self.version - sum(g.version_tokens for g in groups)
        self.totals.oldest = max(self.totals.oldest, lag)
        self.totals.data_s += self.time.now - self.step_from
        if drops:  # their slots are free immediately
            self.admit()
        else:
            self.held_slots[self.version] = len(groups)
        tokens += len(groups) * self.p.group_size * self.p.prompt_tokens
        update_s = self.p.update_s + tokens * self.p.update_token_s
        self.totals.train_s += update_s
        self.time.after(update_s, self.finish_update)

    def finish_update(self) -> None:
        """Finish an update, which makes a new version."""
        self.version += 1
        self.trained_at = self.time.now
        self.publish()

    def publish(self) -> None:
        """Publish it, once every sampler that is a thread has taken the previous version."""
        self.waits_to_publish = not self.fleet.may_publish
        if not self.waits_to_publish:
            self.time.after(self.p.publish_s, self.published)

    def swap_begun(self) -> None:
        """Publish the version that is waiting for the samplers."""
        if self.waits_to_publish:
            self.publish()

    def published(self) -> None:
        """Start the transfer to the samplers; the next step begins."""
        self.fleet.send(self.version)
        totals, now = self.totals, self.time.now
        totals.publish_s += now - self.trained_at
        totals.step_s += now - self.step_from
        totals.updates += 1
        saves = self.p.save_every and self.version % self.p.save_every == 0
        self.time.after(self.p.report_s + (self.p.save_s if saves else 0.0), self.begin_step)

    def begin_step(self) -> None:
        """Begin a step: wait for groups."""
        self.waits, self.step_from = True, self.time.now
        self.draw()


def _outcome(run: _Run, before: _Totals, after: _Totals) -> SimulationResult:
    wall_s = max(after.at_s - before.at_s, 1e-12)
    updates = after.updates - before.updates
    first, last, tree = before.fleet, after.fleet, run.fleet.tree
    trained, sampled = after.trained - before.trained, last.sampled - first.sampled
    slot_steps = last.slot_steps - first.slot_steps
    step_s, data_s = after.step_s - before.step_s, after.data_s - before.data_s
    publish_s, train_s = after.publish_s - before.publish_s, after.train_s - before.train_s
    present_s = max(last.present_s - first.present_s, 1e-12)
    idle = (last.idle_s - first.idle_s) / present_s
    return SimulationResult(
        updates=updates,
        wall_s=wall_s,
        updates_per_s=updates / wall_s,
        trained_tokens_per_s=trained / wall_s,
        generated_tokens_per_s=sampled / wall_s,
        trainer_busy_share=train_s / step_s if step_s else 1.0,
        sampler_busy_share=1.0 - idle,
        slot_occupancy=sampled / slot_steps if slot_steps else 0.0,
        staleness_mean=(after.lag_tokens - before.lag_tokens) / trained,
        staleness_max=after.oldest,
        wait_data_share=data_s / wall_s,
        wait_publish_share=publish_s / wall_s,
        wait_other_share=max(0.0, 1.0 - (data_s + publish_s + train_s) / wall_s),
        sampler_idle_share=idle,
        scoring_mean=(after.scoring_group_s - before.scoring_group_s) / wall_s,
        ready_mean=(after.ready_group_s - before.ready_group_s) / wall_s,
        drawn_tokens=last.sampled,
        trained_tokens=after.trained,
        dropped_tokens=run.dropped_tokens,
        left_tokens=run.fleet.left_tokens + sum(g.tokens for g in run.pending.values()),
        dropped_groups=run.dropped_groups,
        samplers_mean=present_s / wall_s,
        joins=last.joins,
        leaves=last.leaves,
        kills=last.kills,
        moved_answers=last.moved,
        begun_again_answers=last.restarted,
        lost_tokens=last.lost,
        prefilled_again_tokens=last.prefilled_again,
        trainer_sent_bytes=tree.sent_bytes if tree is not None else 0.0,
        moved_transfers=tree.moved if tree is not None else 0,
        replaced_versions=tree.replaced if tree is not None else 0,
        live_s=(last.live_s - first.live_s) / max(1, last.versions - first.versions),
    )
