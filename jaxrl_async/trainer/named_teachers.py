"""Log-probs of a step's episodes by named teachers (teacher.source=teachers), as rows.

    scores: each episode's TeacherLogprobs ──┐
    passes of the teachers on these chips ───┴──> gaps (form=advantage) or top k (form=loss)

A teacher at an address was asked while its group waited. One in a folder computes here, over the
episodes that name it and no others.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import Columns
from jaxrl_async.config.schema import FollowingTeacher
from jaxrl_async.mesh import DeviceGuard
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.flops import forward_flops
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.pack import TrainSequence, pack
from jaxrl_async.trainer.row_index import RowIndex
from jaxrl_async.trainer.step_data import PackedStep
from jaxrl_async.types import (
    NOT_DRAWN,
    BoolArray,
    Episode,
    FloatArray,
    IntArray,
    PackedBatch,
    TeacherLogprobs,
)

log = logging.getLogger(__name__)
ByEpisode = Sequence[Sequence[TeacherLogprobs]]
"""The teachers of each episode of a step."""


class LocalTeacher(NamedTuple):
    """A teacher on the trainer's chips."""

    params: Params
    logprob_pass: LogprobPass


class FollowingTeachers(NamedTuple):
    """The teachers that are the policy itself."""

    params: Mapping[str, Params]  # at the start of the run, by name
    moves: Mapping[str, FollowingTeacher]
    logprob_pass: LogprobPass


class Advice(NamedTuple):
    """The teachers' columns of a step; [rows, length] float32."""

    gap: FloatArray  # sum over an episode's teachers of weight (log behaviour - log teacher)
    # teacher_ids, teacher_logprobs and teacher_weights, and with spans teacher_spans and
    # teacher_span_logprobs; empty: no top k
    columns: Columns
    report: dict[str, float]  # by the names of metrics
    reference: FloatArray | None = None  # log-probs of the teacher that is the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTeachers:
    """The teachers of a run. Owned by the trainer's thread."""

    top_k: int  # likeliest tokens that the loss compares; 0: none
    local: Mapping[str, LocalTeacher]  # those on these chips, by name
    aligned: bool = False  # whether one has another tokenizer: spans are compared then
    reference: str | None = None  # the one whose log-probs are the reference's
    following: FollowingTeachers | None = None  # None: no teacher is the policy

    def __call__(
        self,
        step: PackedStep,
        device_lock: DeviceGuard,
        following: Mapping[str, Callable[[], Params]] = MappingProxyType({}),
    ) -> Advice:
        """Return the teachers' columns of a packed step, and their report.

        following: return the weights of the teachers that are the policy, by name.
        """
        teachers = [list(s.teachers) for g in step.data.groups for s in g.scores]
        others = [[t for t in of_one if t.teacher != self.reference] for of_one in teachers]
        flops = 0.0
        for name, teacher in self._on_chips(following):
            flops += self._compute(step, name, teacher, others, device_lock)
        report = {"teacher/flops": flops} if self.local or following else {}
        gap, measured = _gap(step, others)
        columns: Columns = {}
        if self.top_k:
            known = _with_top(others, self.top_k)
            columns = _columns(step, known, self.top_k)
            if self.aligned:
                columns |= _span_columns(step, known, columns["teacher_weights"].shape)
        reference = None
        if self.reference is not None:
            refers = [[t for t in of_one if t.teacher == self.reference] for of_one in teachers]
            reference = _reference(step, refers)
            measured |= _gap(step, refers)[1]
        return Advice(gap, columns, {**report, **measured}, reference)

    def _on_chips(
        self, following: Mapping[str, Callable[[], Params]]
    ) -> Iterator[tuple[str, Callable[[], LocalTeacher]]]:
        """Yield the teachers that compute here, by name; their weights are made when needed."""
        for name, teacher in self.local.items():
            yield name, partial(LocalTeacher, *teacher)
        for name, params in following.items():
            assert self.following is not None, "they are its teachers"
            yield name, partial(_made, params, self.following.logprob_pass)

    def _compute(
        self,
        step: PackedStep,
        name: str,
        make: Callable[[], LocalTeacher],
        teachers: list[list[TeacherLogprobs]],
        device_lock: DeviceGuard,
    ) -> float:
        """Fill in a local teacher's log-probs of the episodes that name it; return its FLOPs."""
        named = {n: t for n, of_one in enumerate(teachers) for t in of_one if t.teacher == name}
        if not named:
            return 0.0
        params, run = make()
        flops = 0.0
        for reading in _readings(step, named):
            index, run_on = RowIndex.of(reading.batch), (params, reading.batch, device_lock)
            logprobs = index.to_sequences(run.logprobs(*run_on))
            top: tuple[IntArray, FloatArray] | None = None
            if self.top_k:
                ids, likely = run.top(*run_on)
                top = ids.reshape(-1, self.top_k), likely.reshape(-1, self.top_k)
            flops += forward_flops(run.spec, reading.batch) * (2 if self.top_k else 1)
            for number, sequence, positions, token_ids in reading.episodes:
                known = np.flatnonzero((positions >= 0) & (token_ids < run.spec.vocab))
                read = positions[known]
                filled: dict[str, Any] = {
                    "places": known.astype(np.int32),
                    "logprobs": logprobs[sequence][read],
                    "opening": None,
                    "replaced": 0,
                }
                if top is not None:
                    flat = index.sequences[sequence][read]
                    filled |= {"top_ids": top[0][flat], "top_logprobs": top[1][flat]}
                teachers[number] = [
                    replace(t, **filled) if t.teacher == name else t for t in teachers[number]
                ]
        return flops


class _Reading(NamedTuple):
    """Rows that a local teacher reads."""

    batch: PackedBatch
    # of each episode: its number in the step and in the rows, the index in the sequence in the rows
    # of each of its tokens [length] (-1: of those that it did not generate, or are not there), and
    # the tokens
    episodes: list[tuple[int, int, NDArray[np.int64], IntArray]]


def _readings(step: PackedStep, named: Mapping[int, TeacherLogprobs]) -> Iterator[_Reading]:
    """Yield the rows of the episodes that a teacher reads as they are, and of those with another
    beginning. named: its log-probs of episodes, by their numbers in the step."""
    episodes = [e for g in step.data.groups for e in g.episodes]
    if plain := [n for n, t in named.items() if t.opening is None]:
        batch = step.rows.at(step.index.select(np.array(plain))).batch
        chosen = ((n, episodes[n]) for n in plain)
        indices = ((n, np.where(e.drawn, np.arange(len(e.drawn)), -1), e) for n, e in chosen)
        yield _Reading(batch, [(n, n, index, e.token_ids) for n, index, e in indices])
    if shown := [n for n, t in named.items() if t.opening is not None]:
        length, unread = step.batch.mask.shape[1], 0
        sequences: list[TrainSequence] = []
        read: list[tuple[int, int, NDArray[np.int64], IntArray]] = []
        for number in shown:
            episode = episodes[number]
            sequence, positions = _with_opening(episode, named[number], length)
            read.append((number, len(sequences), positions, episode.token_ids))
            sequences.append(sequence)
            unread += episode.num_drawn - int(np.count_nonzero(positions >= 0))
        if unread:
            log.warning(
                "%d generated tokens are beyond a row's %d tokens behind what their teacher reads "
                "in place of the prompt, and have no teacher. Raise trainer.row_length.",
                unread,
                length,
            )
        batch = pack(sequences, length)
        if step.batch.task_ids is not None:  # tasks may have temperatures of their own
            of_rows = step.batch.task_ids.ravel()
            of_shown = [of_rows[step.index.sequences[number][0]] for number in shown]
            task_ids = np.array([*of_shown, 0], np.int32)[batch.sequence_ids]  # -1 is padding
            batch = replace(batch, task_ids=task_ids)
        yield _Reading(batch, read)


def _with_opening(
    episode: Episode, teacher: TeacherLogprobs, length: int
) -> tuple[TrainSequence, NDArray[np.int64]]:
    """Return an episode as a teacher reads it, each context with at most `length` tokens, and the
    index there of each token that the policy generated, [length of the episode]; -1: of others."""
    assert teacher.opening is not None
    head, count = episode.token_ids[: teacher.replaced], len(episode.token_ids)
    positions = np.full(count, -1, np.int64)
    parts: list[IntArray] = []
    starts: list[int] = []
    total = 0
    for start, end in zip(episode.starts, (*episode.starts[1:], count), strict=True):
        own, begins = episode.token_ids[start:end], start
        opening = own[:0]
        if np.array_equal(own[: len(head)], head):
            own, begins, opening = own[len(head) :], start + len(head), teacher.opening
        ids = np.concatenate([opening, own])[:length].astype(np.int32)
        kept = max(0, len(ids) - len(opening))
        positions[begins : begins + kept] = total + len(opening) + np.arange(kept)
        parts.append(ids)
        starts.append(total)
        total += len(ids)
    positions[~episode.drawn] = -1
    nothing = np.zeros(total, np.float32)
    sequence = TrainSequence(
        token_ids=np.concatenate(parts),
        mask=np.zeros(total, np.bool_),
        behavior_logprobs=nothing,
        versions=np.full(total, NOT_DRAWN, np.int32),
        advantages=nothing,
        starts=tuple(starts),
    )
    return sequence, positions


def _made(params: Callable[[], Params], logprob_pass: LogprobPass) -> LocalTeacher:
    return LocalTeacher(params(), logprob_pass)


def _marked(
    step: PackedStep, teachers: ByEpisode
) -> Iterator[tuple[int, TeacherLogprobs, NDArray[np.int64], BoolArray]]:
    """Yield each teacher of each episode, with its number there, the flat index in the rows of each
    token that it knows and that the episode's own context trains, and which tokens these are."""
    mask = step.batch.mask.ravel()
    for number, of_one in enumerate(teachers):
        indices, owned = step.index.sequences[number], step.index.owned[number]
        for slot, teacher in enumerate(of_one):
            flat = indices[teacher.places]
            used = owned[teacher.places] & mask[flat]
            yield slot, teacher, flat[used], used


def _gap(step: PackedStep, teachers: ByEpisode) -> tuple[FloatArray, dict[str, float]]:
    """Return the weighted gaps of the trained tokens, and each teacher's KL and tokens.

    A token in a span has the gap of the whole span: the policy chose the span's text with all of
    its tokens.
    """
    behavior = step.batch.behavior_logprobs.ravel().astype(np.float64)
    gap = np.zeros(behavior.shape, np.float64)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _, teacher, flat, used in _marked(step, teachers):
        difference = behavior[flat] - teacher.logprobs[used]
        known = np.isfinite(difference)  # an external sampler may give no log-probs
        of_spans = difference
        if teacher.spans is not None:
            known, of_spans = _of_whole_spans(teacher.spans, used, difference, known)
        gap[flat[known]] += teacher.weight * of_spans[known]
        totals[teacher.teacher][0] += float(difference[known].sum())
        totals[teacher.teacher][1] += float(np.count_nonzero(known))
    report: dict[str, float] = {}
    for name, (total, count) in totals.items():
        report[f"teacher/{name}/tokens"] = count
        if count:
            report[f"teacher/{name}/kl"] = total / count
    return gap.reshape(step.batch.mask.shape).astype(np.float32), report


def _reference(step: PackedStep, teachers: ByEpisode) -> FloatArray:
    """Return the log-probs of the reference, [rows, length]; the sampler's for trained tokens that
    it does not know, which are logged."""
    logprobs = step.batch.behavior_logprobs.copy()
    flat_of_rows, known = logprobs.reshape(-1), 0
    for _, teacher, flat, used in _marked(step, teachers):
        flat_of_rows[flat] = teacher.logprobs[used]
        known += len(flat)
    if missing := int(np.count_nonzero(step.batch.mask)) - known:
        log.warning(
            "reference.teacher does not know %d of the step's tokens: they are trained as if it "
            "gave them the sampler's log-probs",
            missing,
        )
    return logprobs


def _of_whole_spans(
    spans: IntArray, used: BoolArray, values: NDArray[np.float64], known: BoolArray
) -> tuple[BoolArray, NDArray[np.float64]]:
    """Return which of the used tokens are in a span whose tokens are all used and known, and for
    each token the sum of the values over its span.

    Args:
        spans: [n] number of each token's span.
        used: [n].
        values: of the used tokens.
        known: of the used tokens.
    """
    of_used = spans[used]
    size = int(spans.max(initial=-1)) + 1
    complete = np.bincount(of_used[known], minlength=size) == np.bincount(spans, minlength=size)
    known = known & complete[of_used]
    sums = np.zeros(size, np.float64)
    np.add.at(sums, of_used[known], values[known])
    return known, sums[of_used]


def _with_top(teachers: ByEpisode, top_k: int) -> list[list[TeacherLogprobs]]:
    """Return the same with `top_k` tokens each, without teachers that gave fewer: groups from
    before a run was resumed may have been asked about with another number."""
    few = [t for of_one in teachers for t in of_one if t.top_ids.shape[1] < top_k and t.places.size]
    if few:
        log.warning(
            "%d answers of teachers about episodes are not used: they were asked for with "
            "teacher.top_k=%d, before the run was resumed with teacher.top_k=%d",
            len(few),
            few[0].top_ids.shape[1],
            top_k,
        )
    return [
        [
            replace(t, top_ids=t.top_ids[:, :top_k], top_logprobs=t.top_logprobs[:, :top_k])
            for t in of_one
            if t.top_ids.shape[1] >= top_k
        ]
        for of_one in teachers
    ]


def _columns(step: PackedStep, teachers: ByEpisode, top_k: int) -> Columns:
    """Return the columns of the divergence in the loss. Each teacher of an episode has k entries of
    a token: [rows, length, teachers * k], and one weight: [rows, length, teachers]."""
    width = max((len(of_one) for of_one in teachers), default=0) or 1
    shape = step.batch.mask.shape
    ids = np.zeros((step.batch.mask.size, width, top_k), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    weights = np.zeros(ids.shape[:2], np.float32)
    for slot, teacher, flat, used in _marked(step, teachers):
        ids[flat, slot] = teacher.top_ids[used]
        logprobs[flat, slot] = teacher.top_logprobs[used]
        weights[flat, slot] = teacher.weight
    return {
        "teacher_ids": ids.reshape(*shape, width * top_k),
        "teacher_logprobs": logprobs.reshape(*shape, width * top_k),
        "teacher_weights": weights.reshape(*shape, width),
    }


def _span_columns(step: PackedStep, teachers: ByEpisode, shape: tuple[int, ...]) -> Columns:
    """Return the columns of the spans that are compared as a whole: spans of several tokens, and
    spans whose one token has no likely tokens. shape: [rows, length, teachers]."""
    length = shape[1]
    last = np.full((shape[0] * length, shape[2]), -1, np.int32)
    logprobs = np.zeros(last.shape, np.float32)
    for slot, teacher, flat, used in _marked(step, teachers):
        if teacher.spans is None:
            continue
        alone: BoolArray = np.all(teacher.top_ids < 0, axis=-1)
        known, totals = _of_whole_spans(
            teacher.spans, used, teacher.logprobs[used].astype(np.float64), alone[used]
        )
        indices, spans = flat[known], teacher.spans[used][known]
        if not len(indices):
            continue
        ends = np.zeros(int(spans.max()) + 1, np.int64)
        np.maximum.at(ends, spans, indices)
        begins = np.full(len(ends), np.iinfo(np.int64).max)
        np.minimum.at(begins, spans, indices)
        in_one_row = begins[spans] // length == ends[spans] // length
        last[indices[in_one_row], slot] = ends[spans][in_one_row] % length
        logprobs[ends[spans][in_one_row], slot] = totals[known][in_one_row]
    return {
        "teacher_spans": last.reshape(shape),
        "teacher_span_logprobs": logprobs.reshape(shape),
    }
