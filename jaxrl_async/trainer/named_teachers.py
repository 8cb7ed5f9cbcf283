"""What the teachers of a step's episodes say, as rows: teachers by name (teacher.source=teachers).

    scores: each episode's TeacherLogprobs ──┐
    passes of the teachers on these chips ───┴──> gaps (form=advantage) or top k (form=loss)

A teacher at an address was asked while its group waited. One in a folder computes here, over the
episodes that name it and no others.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import Columns
from jaxrl_async.mesh import AnyDeviceLock
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.flops import forward_flops
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.row_index import RowIndex
from jaxrl_async.trainer.step_data import PackedStep
from jaxrl_async.types import BoolArray, FloatArray, IntArray, TeacherLogprobs

log = logging.getLogger(__name__)


class LocalTeacher(NamedTuple):
    """A teacher on the trainer's chips."""

    params: Params
    logprob_pass: LogprobPass


class Advice(NamedTuple):
    """What the teachers say about a step; [rows, length] float32."""

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
    aligned: bool = False  # whether one has another tokenizer, so that spans are compared
    reference: str | None = None  # the one whose log-probs are the reference's

    def __call__(self, step: PackedStep, device_lock: AnyDeviceLock) -> Advice:
        """Return what the teachers of a packed step's episodes say."""
        told = [list(s.teachers) for g in step.data.groups for s in g.scores]
        given = [[t for t in of_one if t.teacher != self.reference] for of_one in told]
        flops = 0.0
        for name, teacher in self.local.items():
            flops += self._compute(step, name, teacher, given, device_lock)
        report = {"teacher/flops": flops} if self.local else {}
        gap, measured = _gap(step, given)
        columns: Columns = {}
        if self.top_k:
            known = _with_top(given, self.top_k)
            columns = _columns(step, known, self.top_k)
            if self.aligned:
                columns |= _span_columns(step, known, columns["teacher_weights"].shape)
        reference = None
        if self.reference is not None:
            refers = [[t for t in of_one if t.teacher == self.reference] for of_one in told]
            reference = _reference(step, refers)
            measured |= _gap(step, refers)[1]
        return Advice(gap, columns, {**report, **measured}, reference)

    def _compute(
        self,
        step: PackedStep,
        name: str,
        teacher: LocalTeacher,
        given: list[list[TeacherLogprobs]],
        device_lock: AnyDeviceLock,
    ) -> float:
        """Fill in a local teacher's log-probs of the episodes that name it; return its FLOPs."""
        numbers = [n for n, of_one in enumerate(given) if any(t.teacher == name for t in of_one)]
        if not numbers:
            return 0.0
        batch = step.rows.at(step.index.places_of(np.array(numbers))).batch
        index, params, run = RowIndex.of(batch), teacher.params, teacher.logprob_pass
        logprobs = index.to_sequences(run.logprobs(params, batch, device_lock))
        top: list[tuple[IntArray, FloatArray]] | None = None
        if self.top_k:
            ids, likely = run.top(params, batch, device_lock)
            top = [
                (ids.reshape(-1, self.top_k)[p], likely.reshape(-1, self.top_k)[p])
                for p in index.sequences
            ]
        episodes = [e for g in step.data.groups for e in g.episodes]
        for number in numbers:
            one = episodes[number]
            known = one.drawn & (one.token_ids < run.spec.vocab)
            places = np.flatnonzero(known).astype(np.int32)
            filled: dict[str, Any] = {"places": places, "logprobs": logprobs[number][places]}
            if top is not None:
                ids_of_one, likely_of_one = top[number]
                filled |= {"top_ids": ids_of_one[places], "top_logprobs": likely_of_one[places]}
            given[number] = [
                replace(t, **filled) if t.teacher == name else t for t in given[number]
            ]
        return forward_flops(run.spec, batch) * (2 if self.top_k else 1)


def _marked(
    step: PackedStep, given: Sequence[Sequence[TeacherLogprobs]]
) -> Iterator[tuple[int, TeacherLogprobs, NDArray[np.int64], BoolArray]]:
    """Yield each teacher of each episode, with its number there, the flat index in the rows of each
    token that it knows and that the episode's own context trains, and which tokens these are."""
    mask = step.batch.mask.ravel()
    for number, of_one in enumerate(given):
        places, own = step.index.sequences[number], step.index.own[number]
        for slot, teacher in enumerate(of_one):
            flat = places[teacher.places]
            used = own[teacher.places] & mask[flat]
            yield slot, teacher, flat[used], used


def _gap(
    step: PackedStep, given: Sequence[Sequence[TeacherLogprobs]]
) -> tuple[FloatArray, dict[str, float]]:
    """Return the weighted gaps of the trained tokens, and each teacher's KL and tokens.

    A token in a span has the gap of the whole span: the policy chose the span's text with all of
    its tokens.
    """
    behavior = step.batch.behavior_logprobs.ravel().astype(np.float64)
    gap = np.zeros(behavior.shape, np.float64)
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _, teacher, flat, used in _marked(step, given):
        apart = behavior[flat] - teacher.logprobs[used]
        known = np.isfinite(apart)  # an external sampler may give no log-probs
        whole = apart
        if teacher.spans is not None:
            known, whole = _of_whole_spans(teacher.spans, used, apart, known)
        gap[flat[known]] += teacher.weight * whole[known]
        totals[teacher.teacher][0] += float(apart[known].sum())
        totals[teacher.teacher][1] += float(np.count_nonzero(known))
    report: dict[str, float] = {}
    for name, (total, count) in totals.items():
        report[f"teacher/{name}/tokens"] = count
        if count:
            report[f"teacher/{name}/kl"] = total / count
    return gap.reshape(step.batch.mask.shape).astype(np.float32), report


def _reference(step: PackedStep, given: Sequence[Sequence[TeacherLogprobs]]) -> FloatArray:
    """Return the log-probs of the reference, [rows, length]; the sampler's for trained tokens that
    it does not know, which are logged."""
    found = step.batch.behavior_logprobs.copy()
    flat_of_rows, known = found.reshape(-1), 0
    for _, teacher, flat, used in _marked(step, given):
        flat_of_rows[flat] = teacher.logprobs[used]
        known += len(flat)
    if missing := int(np.count_nonzero(step.batch.mask)) - known:
        log.warning(
            "reference.teacher does not know %d of the step's tokens: they are trained as if it "
            "gave them the sampler's log-probs",
            missing,
        )
    return found


def _of_whole_spans(
    spans: IntArray, used: BoolArray, values: NDArray[np.float64], known: BoolArray
) -> tuple[BoolArray, NDArray[np.float64]]:
    """Return which of the used tokens are in a span of which all tokens are used and known, and the
    sum of its values over its span for each.

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
    sums = np.bincount(of_used[known], weights=values[known], minlength=size)
    return known, sums[of_used]


def _with_top(
    given: Sequence[Sequence[TeacherLogprobs]], top_k: int
) -> list[list[TeacherLogprobs]]:
    """Return the same with `top_k` tokens each, without teachers that gave fewer: groups from
    before a run was resumed may have been asked about with another number."""
    few = [t for of_one in given for t in of_one if t.top_ids.shape[1] < top_k and t.places.size]
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
        for of_one in given
    ]


def _columns(step: PackedStep, given: Sequence[Sequence[TeacherLogprobs]], top_k: int) -> Columns:
    """Return the columns of the divergence in the loss. Each teacher of an episode has k entries of
    a token: [rows, length, teachers * k], and one weight: [rows, length, teachers]."""
    teachers = max((len(of_one) for of_one in given), default=0) or 1
    shape = step.batch.mask.shape
    ids = np.zeros((step.batch.mask.size, teachers, top_k), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    weights = np.zeros(ids.shape[:2], np.float32)
    for slot, teacher, flat, used in _marked(step, given):
        ids[flat, slot] = teacher.top_ids[used]
        logprobs[flat, slot] = teacher.top_logprobs[used]
        weights[flat, slot] = teacher.weight
    return {
        "teacher_ids": ids.reshape(*shape, teachers * top_k),
        "teacher_logprobs": logprobs.reshape(*shape, teachers * top_k),
        "teacher_weights": weights.reshape(*shape, teachers),
    }


def _span_columns(
    step: PackedStep, given: Sequence[Sequence[TeacherLogprobs]], shape: tuple[int, ...]
) -> Columns:
    """Return the columns of the spans that are compared as a whole: those whose one token has no
    likely tokens of its own, and those of several tokens. shape: [rows, length, teachers]."""
    length = shape[1]
    last = np.full((shape[0] * length, shape[2]), -1, np.int32)
    logprobs = np.zeros(last.shape, np.float32)
    for slot, teacher, flat, used in _marked(step, given):
        if teacher.spans is None:
            continue
        alone = (teacher.top_ids < 0).all(axis=-1)
        known, totals = _of_whole_spans(
            teacher.spans, used, teacher.logprobs[used].astype(np.float64), alone[used]
        )
        places, spans = flat[known], teacher.spans[used][known]
        if not len(places):
            continue
        ends = np.zeros(int(spans.max()) + 1, np.int64)
        np.maximum.at(ends, spans, places)
        begins = np.full(len(ends), np.iinfo(np.int64).max)
        np.minimum.at(begins, spans, places)
        in_one_row = (begins // length == ends // length)[spans]
        last[places[in_one_row], slot] = ends[spans][in_one_row] % length
        logprobs[ends[spans][in_one_row], slot] = totals[known][in_one_row]
    return {
        "teacher_spans": last.reshape(shape),
        "teacher_span_logprobs": logprobs.reshape(shape),
    }
