"""Teachers by name in a step: their gaps and divergences against float64, and whom they move."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.shaping import mask_truncated, shape
from jaxrl_async.config import schema
from jaxrl_async.mesh import NO_DEVICE_LOCK, make_slices
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.divergence import divergence_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.distill import (
    TeacherSpans,
    TeacherTop,
    Unmatched,
    distill_rows,
    distill_spans,
)
from jaxrl_async.trainer.flops import forward_flops
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.named_teachers import FollowingTeachers, LocalTeacher, NamedTeachers
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, policy_update
from jaxrl_async.trainer.step_data import PackedStep, pack_step
from jaxrl_async.trainer.update_programs import Frozen
from jaxrl_async.types import (
    Episode,
    EpisodeGroup,
    Prompt,
    Score,
    StopReason,
    TeacherLogprobs,
    Ticket,
)

pytestmark = pytest.mark.full

VOCAB, ROW, K = 24, 16, 3
SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=24), VOCAB
)
MESH = make_slices(schema.MeshSection(), jax.devices()).trainer
TRAINER = schema.TrainerSection(micro_batch_tokens=4 * ROW, logprob_chunk=32)
SETTINGS = LearningSettings(mesh=MESH, trainer=TRAINER, row_length=ROW)
PARAMS = init_params(SPEC, jax.random.key(0), jnp.float32)
OTHER = jax.tree.map(lambda p: 3 * p, init_params(SPEC, jax.random.key(1), jnp.float32))
ALGORITHM = schema.AlgorithmSection(
    learning_rate=1e-2, group_size=2, groups_per_step=4, advantage="group_mean", loss="reinforce"
)
KINDS = ("forward", "reverse", "js")


def scored(name: str, weight: float, episode: Episode, rng: np.random.Generator) -> TeacherLogprobs:
    """Log-probs that a teacher could say, at some of the generated tokens."""
    indices = np.flatnonzero(episode.drawn)[: max(1, episode.num_drawn - 1)].astype(np.int32)
    logits = rng.normal(size=(len(indices), VOCAB)) * 2
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    order = np.argsort(-logprobs, axis=-1)[:, :K].astype(np.int32)
    return TeacherLogprobs(
        teacher=name,
        weight=weight,
        places=indices,
        logprobs=np.take_along_axis(logprobs, episode.token_ids[indices][:, None], -1)[:, 0],
        top_ids=order,
        top_logprobs=np.take_along_axis(logprobs, order, -1),
    )


def group(number: int, teachers: dict[str, float]) -> EpisodeGroup:
    """Two episodes, the second in two contexts, with these teachers and their weights."""
    rng = np.random.default_rng(number)
    episodes = []
    for starts in ((0,), (0, 6)):
        length = int(rng.integers(9, ROW - 2))
        sampled = (np.arange(length) >= 2) & (np.arange(length) != 6)
        episodes.append(
            Episode(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                drawn=sampled,
                logprobs=np.where(sampled, -3.2 - rng.random(length) / 5, 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                stop=StopReason.EOS,
                starts=starts,
            )
        )
    scores = tuple(
        Score(reward=float(i), teachers=tuple(scored(n, w, e, rng) for n, w in teachers.items()))
        for i, e in enumerate(episodes)
    )
    prompt = Prompt(
        prompt_id=number, position=number, token_ids=np.zeros(2, np.int32), text="", reference=""
    )
    ticket = Ticket(group=number, version=0)
    return EpisodeGroup(prompt=prompt, episodes=tuple(episodes), scores=scores, ticket=ticket)


GROUPS = (group(0, {"a": 1.0}), group(1, {"b": 0.5, "a": 2.0}), group(2, {}), group(3, {"b": 1.0}))


def packed(groups: Sequence[EpisodeGroup], *, share_prefixes: bool = False) -> PackedStep:
    return pack_step(shape(step_data(groups)), ROW, share_prefixes=share_prefixes)


def asked(step: PackedStep, top_k: int = 0, **local: LocalTeacher) -> Any:
    return NamedTeachers(top_k=top_k, local=local)(step, NO_DEVICE_LOCK)


def by_episode(groups: Sequence[EpisodeGroup]) -> list[tuple[Episode, Score]]:
    return [pair for g in groups for pair in zip(g.episodes, g.scores, strict=True)]


# ---- on-policy distillation: the gap of the sampled token


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_the_gap_is_the_weighted_sum_of_log_ratios(share_prefixes: bool) -> None:
    step = packed(GROUPS, share_prefixes=share_prefixes)
    advice = asked(step)
    found = step.index.to_sequences(advice.gap)
    totals: dict[str, list[float]] = {"a": [], "b": []}
    for (episode, score), gap in zip(by_episode(GROUPS), found, strict=True):
        wanted = np.zeros(len(episode.token_ids))
        for teacher in score.teachers:
            for index, logprob in zip(teacher.places, teacher.logprobs, strict=True):
                difference = float(episode.logprobs[index]) - float(logprob)
                wanted[index] += teacher.weight * difference
                totals[teacher.teacher].append(difference)
        np.testing.assert_allclose(gap, wanted, rtol=1e-6)
    for name, differences in totals.items():
        assert advice.report[f"teacher/{name}/tokens"] == len(differences)
        assert advice.report[f"teacher/{name}/kl"] == pytest.approx(np.mean(differences), rel=1e-9)
    assert advice.columns == {}
    assert all(metric_of(key) for key in advice.report)


@pytest.mark.parametrize("unsaid", [np.nan, -np.inf])
def test_tokens_without_a_samplers_log_prob_have_no_gap(unsaid: float) -> None:
    episode = GROUPS[0].episodes[0]
    logprobs = episode.logprobs.copy()
    logprobs[3] = unsaid
    unknown = replace(episode, logprobs=logprobs)
    changed = replace(GROUPS[0], episodes=(unknown, GROUPS[0].episodes[1]))
    step = packed([changed])
    advice = asked(step)
    gap = step.index.to_sequences(advice.gap)[0]
    assert gap[3] == 0 and gap[2] != 0 and np.isfinite(advice.report["teacher/a/kl"])
    whole = asked(packed([GROUPS[0]])).report["teacher/a/tokens"]
    assert advice.report["teacher/a/tokens"] == whole - 1


def test_a_masked_episode_has_no_gap_and_no_part_of_the_kl() -> None:
    cut, other = GROUPS[0].episodes
    changed = replace(GROUPS[0], episodes=(replace(cut, stop=StopReason.LENGTH), other))
    step = pack_step(shape(step_data([changed]), [mask_truncated]), ROW)
    advice = asked(step)
    first, second = step.index.to_sequences(advice.gap)
    assert not first.any() and second.any()
    assert advice.report["teacher/a/tokens"] == len(GROUPS[0].scores[1].teachers[0].places)


# ---- divergences over the top k with the rest


def softmax(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(x) / np.exp(x).sum(-1, keepdims=True), np.float64)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_divergence_is_the_weighted_sum_over_each_teachers_top_k_and_rest(kind: Any) -> None:
    step = packed(GROUPS)
    columns, batch, beta = asked(step, K).columns, step.batch, 0.3
    assert columns["teacher_weights"].shape == (*batch.mask.shape, 2)
    found = distill_rows(
        SPEC,
        PARAMS,
        TokenRows(batch.token_ids, batch.positions, batch.segment_ids),
        TeacherTop(*(columns[f"teacher_{n}"] for n in ("ids", "logprobs", "weights"))),
        divergence_of(kind, beta),
        DecoderSettings(chunk=7),
    )
    arrays = (batch.token_ids, batch.positions, batch.segment_ids)
    hidden = np.asarray(row_states(SPEC, PARAMS, *arrays), np.float64)
    student = np.roll(softmax(hidden @ np.asarray(PARAMS["embed"].T, np.float64)), 1, axis=1)
    students = [student.reshape(-1, VOCAB)[indices] for indices in step.index.sequences]
    divergences = step.index.to_sequences(np.asarray(found.divergence))
    masks = step.index.to_sequences(batch.mask)
    for (_, score), q_all, gap, mask in zip(
        by_episode(GROUPS), students, divergences, masks, strict=True
    ):
        wanted = np.zeros(len(mask))
        for teacher in score.teachers:
            for index, ids, logprobs in zip(
                teacher.places, teacher.top_ids, teacher.top_logprobs, strict=True
            ):
                p, q = np.exp(logprobs.astype(np.float64)), q_all[index][ids]
                p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
                middle = beta * p + (1 - beta) * q
                wanted[index] += (
                    teacher.weight
                    * {
                        "forward": kl(p, q),
                        "reverse": kl(q, p),
                        "js": beta * kl(p, middle) + (1 - beta) * kl(q, middle),
                    }[kind]
                )
        np.testing.assert_allclose(gap[mask], wanted[mask], atol=2e-5)


def test_a_resumed_run_may_compare_another_number_of_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = packed(GROUPS)
    whole, fewer = asked(step, K).columns, asked(step, K - 1).columns
    for name in ("teacher_ids", "teacher_logprobs"):
        of_each = whole[name].reshape(*step.batch.mask.shape, 2, K)[..., : K - 1]
        np.testing.assert_array_equal(fewer[name].reshape(of_each.shape), of_each)
    np.testing.assert_array_equal(fewer["teacher_weights"], whole["teacher_weights"])
    assert not caplog.records
    more = asked(step, K + 1).columns
    assert more["teacher_ids"].shape[-1] == K + 1 and not more["teacher_weights"].any()
    message = "8 answers of teachers about episodes are not used"
    assert message in caplog.text


# ---- spans of a teacher with another tokenizer


def in_spans(teacher: TeacherLogprobs, sizes: Sequence[int], *, likely: bool) -> TeacherLogprobs:
    """The same log-probs as if the teacher's tokens were spans of these sizes in turn. Every second
    token that is a span of its own keeps its likely tokens, but for one that the policy lacks.

    likely: how likely that one is, is known."""
    count = len(teacher.places)
    begins = np.diff(teacher.places, prepend=-9) > 1  # a span does not go on behind others' tokens
    spans, number, room = np.zeros(count, np.int32), -1, 0
    for i in range(count):
        if begins[i] or not room:
            number += 1
            room = sizes[number % len(sizes)]
        spans[i], room = number, room - 1
    last = np.append(spans[1:] != spans[:-1], True)
    single = (np.bincount(spans) == 1)[spans] & (spans % 2 == 0)
    ids = np.where(single[:, None], teacher.top_ids, -1)
    ids[:, 1] = -1
    return replace(
        teacher,
        logprobs=np.where(last, teacher.logprobs, 0).astype(np.float32),
        top_ids=ids,
        top_logprobs=np.where(
            (ids < 0) & ~(likely & single)[:, None], -1e4, teacher.top_logprobs
        ).astype(np.float32),
        spans=spans,
    )


def with_spans(
    groups: Sequence[EpisodeGroup], sizes: Sequence[int], *, likely: bool = False
) -> list[EpisodeGroup]:
    """The same groups with teacher b of another tokenizer."""
    return [
        replace(
            g,
            scores=tuple(
                replace(
                    s,
                    teachers=tuple(
                        in_spans(t, sizes, likely=likely) if t.teacher == "b" else t
                        for t in s.teachers
                    ),
                )
                for s in g.scores
            ),
        )
        for g in groups
    ]


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_a_token_has_the_gap_of_its_whole_span(share_prefixes: bool) -> None:
    groups = with_spans(GROUPS, (2, 1, 3))
    step = packed(groups, share_prefixes=share_prefixes)
    advice = asked(step)
    found = step.index.to_sequences(advice.gap)
    total, count = 0.0, 0
    for (episode, score), gap in zip(by_episode(groups), found, strict=True):
        wanted = np.zeros(len(episode.token_ids))
        for teacher in score.teachers:
            spans = np.arange(len(teacher.places)) if teacher.spans is None else teacher.spans
            for span in set(spans.tolist()):
                inside = np.flatnonzero(spans == span)
                difference = sum(
                    float(episode.logprobs[teacher.places[i]]) - float(teacher.logprobs[i])
                    for i in inside
                )
                wanted[teacher.places[inside]] += teacher.weight * difference
                if teacher.teacher == "b":
                    total, count = total + difference, count + len(inside)
        np.testing.assert_allclose(gap, wanted, rtol=1e-6)
    assert advice.report["teacher/b/kl"] == pytest.approx(total / count, rel=1e-9)
    assert advice.report["teacher/b/tokens"] == count


def test_a_span_of_which_a_token_has_no_log_prob_has_no_gap() -> None:
    (whole,) = with_spans([GROUPS[3]], (2,))
    episode = whole.episodes[0]
    logprobs = episode.logprobs.copy()
    logprobs[3] = np.nan
    changed = replace(whole, episodes=(replace(episode, logprobs=logprobs), whole.episodes[1]))
    gaps, before = (
        (step := packed([g])).index.to_sequences(asked(step).gap)[0] for g in (changed, whole)
    )
    assert not gaps[2:4].any() and before[2:4].all()
    np.testing.assert_array_equal(gaps[4:], before[4:])


@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_spans_are_compared_as_a_whole_where_no_tokens_match(
    kind: Any, share_prefixes: bool
) -> None:
    groups, beta = with_spans(GROUPS, (2, 1, 1, 3)), 0.3
    step = packed(groups, share_prefixes=share_prefixes)
    teachers = NamedTeachers(top_k=K, local={}, aligned=True)
    columns, batch = teachers(step, NO_DEVICE_LOCK).columns, step.batch
    names = ("ids", "logprobs", "weights")
    found = distill_rows(
        SPEC,
        PARAMS,
        TokenRows(batch.token_ids, batch.positions, batch.segment_ids),
        TeacherTop(
            *(jnp.asarray(columns[f"teacher_{n}"]) for n in names),
            TeacherSpans(
                jnp.asarray(columns["teacher_spans"]), jnp.asarray(columns["teacher_span_logprobs"])
            ),
        ),
        divergence_of(kind, beta),
        DecoderSettings(chunk=7),
    )
    assert isinstance(found.logprobs, jax.Array)
    arrays = (batch.token_ids, batch.positions, batch.segment_ids)
    hidden = np.asarray(row_states(SPEC, PARAMS, *arrays), np.float64)
    student = np.roll(softmax(hidden @ np.asarray(PARAMS["embed"].T, np.float64)), 1, axis=1)
    students = [student.reshape(-1, VOCAB)[indices] for indices in step.index.sequences]
    divergences = step.index.to_sequences(np.asarray(found.divergence))

    def divergence(p: np.ndarray, q: np.ndarray) -> float:
        middle = beta * p + (1 - beta) * q
        return {
            "forward": kl(p, q),
            "reverse": kl(q, p),
            "js": beta * kl(p, middle) + (1 - beta) * kl(q, middle),
        }[kind]

    wholes = singles = 0
    for (episode, score), q_all, got in zip(by_episode(groups), students, divergences, strict=True):
        wanted = np.zeros(len(got))
        for teacher in score.teachers:
            spans = np.arange(len(teacher.places)) if teacher.spans is None else teacher.spans
            for span in set(spans.tolist()):
                inside = np.flatnonzero(spans == span)
                last, indices = inside[-1], teacher.places[inside]
                named = teacher.top_ids[last] >= 0
                ids, logprobs = teacher.top_ids[last][named], teacher.top_logprobs[last][named]
                if named.any():
                    singles += not named.all()
                    p = np.exp(logprobs.astype(np.float64))
                    q = q_all[indices[-1]][ids]
                else:
                    wholes += 1
                    p = np.exp(teacher.logprobs[inside].astype(np.float64).sum(keepdims=True))
                    q = np.prod(q_all[indices, episode.token_ids[indices]], keepdims=True)
                p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
                wanted[indices[-1]] += teacher.weight * divergence(p, q)
        np.testing.assert_allclose(got[episode.drawn], wanted[episode.drawn], atol=3e-5)
    assert wholes > 3 and singles > 0


ALONE = np.arange(VOCAB) % 3 == 0


def order_distances(groups: Sequence[EpisodeGroup], step: PackedStep) -> list[np.ndarray]:
    """Of each episode's tokens, the weighted distance of what only one side has, by its order."""
    arrays = (step.batch.token_ids, step.batch.positions, step.batch.segment_ids)
    hidden = np.asarray(row_states(SPEC, PARAMS, *arrays), np.float64)
    student = np.roll(softmax(hidden @ np.asarray(PARAMS["embed"].T, np.float64)), 1, axis=1)
    found = []
    for indices, (episode, score) in zip(step.index.sequences, by_episode(groups), strict=True):
        of_token, wanted = student.reshape(-1, VOCAB)[indices], np.zeros(len(episode.token_ids))
        for teacher in score.teachers:
            for index, ids, logprobs in zip(
                teacher.places, teacher.top_ids, teacher.top_logprobs, strict=True
            ):
                teachers = np.sort(np.exp(logprobs[(ids < 0) & (logprobs > -1e3)]))[::-1]
                students = np.sort(of_token[index][ALONE])[::-1][: len(teachers)]
                wanted[index] += teacher.weight * np.abs(students - teachers).sum()
        found.append(wanted)
    return found


def test_what_only_one_side_has_is_compared_by_its_order_next_to_the_divergence() -> None:
    lost, known = (with_spans(GROUPS, (1, 1, 2), likely=likely) for likely in (False, True))
    step = packed(known)

    def of_rows(groups: Sequence[EpisodeGroup], unmatched: Unmatched | None) -> list[np.ndarray]:
        teachers = NamedTeachers(top_k=K, local={}, aligned=True)
        columns, batch = teachers(packed(groups), NO_DEVICE_LOCK).columns, step.batch
        of_top, of_spans = (
            [jnp.asarray(columns[f"teacher_{n}"]) for n in names]
            for names in (("ids", "logprobs", "weights"), ("spans", "span_logprobs"))
        )
        found = distill_rows(
            SPEC,
            PARAMS,
            TokenRows(batch.token_ids, batch.positions, batch.segment_ids),
            TeacherTop(*of_top, TeacherSpans(*of_spans)),
            divergence_of("reverse"),
            DecoderSettings(chunk=7),
            unmatched,
        )
        return step.index.to_sequences(np.asarray(found.divergence))

    plain = of_rows(known, None)
    for one, other in zip(plain, of_rows(lost, None), strict=True):
        np.testing.assert_array_equal(one, other)
    both = of_rows(known, Unmatched(jnp.asarray(ALONE), 0.7))
    distances = order_distances(known, step)
    for (episode, _), more, less, wanted in zip(
        by_episode(known), both, plain, distances, strict=True
    ):
        slope = (more - less)[episode.drawn]
        np.testing.assert_allclose(slope, 0.7 * wanted[episode.drawn], atol=2e-5)
    assert sum(np.count_nonzero(wanted) for wanted in distances) > 3


def test_an_update_has_the_distance_in_its_loss_with_its_weight() -> None:
    groups = with_spans(GROUPS, (1, 1, 2), likely=True)
    without, weighed = (
        learner_of("loss", unmatched_weight=weight).learn(groups, 0)["policy/teacher_divergence"]
        for weight in (0.0, 0.7)
    )
    step = packed(groups)
    trained = [m.astype(bool) for m in step.index.to_sequences(step.batch.mask)]
    distances = zip(order_distances(groups, step), trained, strict=True)
    mean = sum(d[m].sum() for d, m in distances) / step.batch.mask.sum()
    assert mean > 1e-2
    assert weighed - without == pytest.approx(0.7 * mean, abs=1e-5)


def test_the_gradient_of_a_span_reaches_all_of_its_tokens() -> None:
    logprobs = jnp.log(jnp.array([[0.5, 0.25, 0.5, 0.9]]))
    spans = TeacherSpans(
        jnp.array([[[-1], [2], [2], [-1]]], jnp.int32),
        jnp.array([[[0.0], [0.0], [-0.5], [0.0]]]),
    )

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(distill_spans(x, spans, divergence_of("reverse")))

    s, t = 0.125, np.exp(-0.5)
    wanted = s * np.log(s / t) + (1 - s) * np.log((1 - s) / (1 - t))
    assert float(total(logprobs)) == pytest.approx(wanted, rel=1e-5)
    slope = s * (np.log(s / t) - np.log((1 - s) / (1 - t)))
    np.testing.assert_allclose(jax.grad(total)(logprobs), [[0, slope, slope, 0]], rtol=1e-5)


# ---- teachers on the trainer's chips


def test_tokens_in_no_span_belong_to_no_span_that_ends_a_row() -> None:
    logprobs = np.log([[0.5, 0.25, 0.5, 0.5]])
    spans = TeacherSpans(
        jnp.asarray([[[-1], [-1], [3], [3]]], jnp.int32),
        jnp.asarray([[[0.0], [0.0], [0.0], [np.log(0.5)]]], jnp.float32),
    )
    found = distill_spans(jnp.asarray(logprobs, jnp.float32), spans, divergence_of("reverse"))
    student, teacher = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    np.testing.assert_allclose(found[0, :, 0], [0, 0, 0, kl(student, teacher)], atol=1e-6)


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_a_local_teacher_computes_its_own_episodes_alone(share_prefixes: bool) -> None:
    local = LogprobPass(SPEC, SETTINGS, top_k=K)
    nothing = TeacherLogprobs(
        teacher="here",
        weight=0.5,
        places=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        top_ids=np.zeros((0, 0), np.int32),
        top_logprobs=np.zeros((0, 0), np.float32),
    )
    scores = tuple(replace(s, teachers=(nothing,)) for s in GROUPS[2].scores)
    groups = (GROUPS[0], replace(GROUPS[2], scores=scores), GROUPS[3])
    step = packed(groups, share_prefixes=share_prefixes)
    advice = asked(step, K, here=LocalTeacher(OTHER, local))
    whole, (ids, likely) = local.logprobs(OTHER, step.batch), local.top(OTHER, step.batch)
    of_teacher, gaps = step.index.to_sequences(whole), step.index.to_sequences(advice.gap)
    for number in (2, 3):
        episode = groups[1].episodes[number - 2]
        wanted = np.where(episode.drawn, 0.5 * (episode.logprobs - of_teacher[number]), 0)
        np.testing.assert_allclose(gaps[number], wanted, atol=1e-5)
    mine = np.isin(step.batch.sequence_ids, (2, 3)) & step.batch.mask
    np.testing.assert_array_equal(advice.columns["teacher_ids"][mine], ids[mine])
    np.testing.assert_allclose(advice.columns["teacher_logprobs"][mine], likely[mine], atol=1e-5)
    assert (advice.columns["teacher_weights"][mine] == 0.5).all()
    named = step.rows.at(step.index.select(np.array([2, 3]))).batch
    assert advice.report["teacher/flops"] == 2 * forward_flops(SPEC, named)
    assert len(named.token_ids) < len(step.batch.token_ids), "the others' rows are left out"
    trained = sum(e.num_drawn for e in groups[1].episodes)
    assert advice.report["teacher/here/tokens"] == trained


# ---- whom a teacher moves


def learner_of(form: str, kind: str = "reverse", unmatched_weight: float = 0.0) -> Learner:
    section = schema.TeacherSection(
        source="teachers",
        form=form,
        kind=kind,
        top_k=K if form == "loss" else 0,
        unmatched_weight=unmatched_weight,
        rewards=0.0,
    )
    step = policy_update(
        SPEC,
        SETTINGS,
        ALGORITHM,
        total_steps=20,
        teacher=section,
        unmatched=ALONE if unmatched_weight else None,
    )
    teachers = NamedTeachers(top_k=section.top_k, local={}, aligned=True)
    return Learner(
        step,
        step.init(jax.tree.map(jnp.copy, PARAMS)),
        LearnerSettings(algorithm=ALGORITHM, row_length=ROW, teacher=section),
        Companions(own_pass=LogprobPass(SPEC, SETTINGS), teachers=teachers),
    )


def gradient(learner: Learner, groups: Sequence[EpisodeGroup]) -> tuple[Any, np.ndarray]:
    """The gradient of a whole step, and the advantages [rows, length]."""
    step = packed(groups)
    results = learner.run_passes(step.batch)
    results, _ = learner._ask_teachers(step, results, NO_DEVICE_LOCK)
    step, _ = learner.credit(step, results, 0.0)
    objective = learner._objective
    data = PolicyData(step.batch, step.rows.columns)
    context = objective.context(data)
    total = jax.tree.map(jnp.zeros_like, PARAMS)
    for micro in objective.micro_batches(data, SETTINGS.micro_sizes()):
        part = jax.grad(lambda p, m=micro: objective.loss(p, Frozen(), m, context)[0])(PARAMS)
        total = jax.tree.map(jnp.add, total, part)
    return total, step.batch.advantages


def without(groups: Sequence[EpisodeGroup], name: str) -> list[EpisodeGroup]:
    """The same groups as if this teacher had not been asked."""
    return [
        replace(
            g,
            scores=tuple(
                replace(s, teachers=tuple(t for t in s.teachers if t.teacher != name))
                for s in g.scores
            ),
        )
        for g in groups
    ]


@pytest.mark.parametrize("other_tokens", [False, True])
@pytest.mark.parametrize(
    ("form", "kind"), [("advantage", "reverse"), *(("loss", k) for k in KINDS)]
)
def test_two_teachers_each_move_only_their_own_records(
    form: str, kind: str, other_tokens: bool
) -> None:
    groups = [group(4, {"a": 1.0}), group(5, {"b": 1.0}), group(6, {})]
    if other_tokens:  # of teacher b
        groups = with_spans(groups, (2, 1, 3))
    learner = learner_of(form, kind)
    both, advantages = gradient(learner, groups)
    of_a, a_alone = gradient(learner, without(groups, "b"))
    of_b, b_alone = gradient(learner, without(groups, "a"))
    size = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(both))
    assert size > 1e-3
    jax.tree.map(
        lambda x, a, b: np.testing.assert_allclose(x, a + b, atol=1e-5 * size), both, of_a, of_b
    )
    for part in (of_a, of_b):
        assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(part)) > 1e-2 * size
    if form == "advantage":
        records = packed(groups).batch.group_ids
        np.testing.assert_array_equal(advantages[records == 0], a_alone[records == 0])
        np.testing.assert_array_equal(advantages[records == 1], b_alone[records == 1])
        assert not a_alone[records == 1].any() and not b_alone[records == 0].any()
        assert not advantages[records == 2].any()


def test_the_advantage_is_the_rewards_less_the_coefficient_times_the_gap() -> None:
    section = schema.TeacherSection(
        source="teachers", form="advantage", rewards=0.5, coefficient=0.25
    )
    step = policy_update(SPEC, SETTINGS, ALGORITHM, total_steps=20, teacher=section)
    learner = Learner(
        step,
        step.init(jax.tree.map(jnp.copy, PARAMS)),
        LearnerSettings(algorithm=ALGORITHM, row_length=ROW, teacher=section),
        Companions(teachers=NamedTeachers(top_k=0, local={})),
    )
    data = packed(GROUPS)
    results, report = learner._ask_teachers(data, learner.run_passes(data.batch), NO_DEVICE_LOCK)
    mixed, credit = learner.credit(data, results, 0.0)
    plain = np.where(data.batch.mask, np.where(data.batch.sequence_ids % 2, 0.5, -0.5), 0.0)
    gap = np.asarray(results.teachers_gap)
    np.testing.assert_allclose(mixed.batch.advantages, 0.5 * plain - 0.25 * gap, rtol=1e-6)
    assert credit["policy/teacher_gap"] == pytest.approx(gap[data.batch.mask].mean(), rel=1e-5)
    assert set(report) == {f"teacher/{n}/{x}" for n in "ab" for x in ("kl", "tokens")}


def test_a_whole_step_learns_with_and_without_teachers_in_it() -> None:
    learner = learner_of("loss")
    first = learner.learn(GROUPS, 0)
    assert first["teacher/a/tokens"] > 0 and first["policy/teacher_divergence"] > 0
    second = learner.learn([group(7, {}), group(8, {})], 1)
    assert second["policy/teacher_divergence"] == 0 and "teacher/a/kl" not in second
    assert all(metric_of(key) for key in (*first, *second))


def test_a_whole_step_learns_from_spans() -> None:
    learner, groups = learner_of("loss"), with_spans([group(5, {"b": 1.0})], (2, 3))
    first, *_, last = (
        learner.learn(groups, version)["policy/teacher_divergence"] for version in range(4)
    )
    assert 0 < last < first


# ---- the reference


def refers(groups: Sequence[EpisodeGroup], params: Any) -> list[EpisodeGroup]:
    """The same groups with what a teacher r with these weights says about all generated tokens."""
    step = packed(groups)
    of_rows = step.index.to_sequences(LogprobPass(SPEC, SETTINGS).logprobs(params, step.batch))
    found, number = [], 0
    for g in groups:
        scores = []
        for episode, score in zip(g.episodes, g.scores, strict=True):
            indices = np.flatnonzero(episode.drawn).astype(np.int32)
            known = TeacherLogprobs(
                teacher="r",
                weight=0.0,
                places=indices,
                logprobs=of_rows[number][indices],
                top_ids=np.zeros((len(indices), 0), np.int32),
                top_logprobs=np.zeros((len(indices), 0), np.float32),
            )
            scores.append(replace(score, teachers=(*score.teachers, known)))
            number += 1
        found.append(replace(g, scores=tuple(scores)))
    return found


@pytest.mark.parametrize("kl", ["k1", "k3"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("distils", [False, True])
def test_a_teacher_as_the_reference_trains_as_a_reference_on_the_chips(
    kl: str, kl_in: str, distils: bool
) -> None:
    algorithm = ALGORITHM.model_copy(update={"kl": kl, "kl_in": kl_in, "kl_coefficient": 0.5})
    section = schema.TeacherSection(source="teachers", form="loss", top_k=K) if distils else None

    def learner(**companions: Any) -> Learner:
        step = policy_update(SPEC, SETTINGS, algorithm, total_steps=20, teacher=section)
        return Learner(
            step,
            step.init(jax.tree.map(jnp.copy, PARAMS)),
            LearnerSettings(algorithm=algorithm, row_length=ROW, teacher=section),
            Companions(own_pass=LogprobPass(SPEC, SETTINGS), **companions),
        )

    held = learner(reference=OTHER, teachers=NamedTeachers(top_k=K if distils else 0, local={}))
    asked_for = NamedTeachers(top_k=K if distils else 0, local={}, reference="r")
    asks = learner(teachers=asked_for)
    groups = list(GROUPS) if distils else without(without(GROUPS, "a"), "b")
    with_r = refers(groups, OTHER)
    for version in range(2):
        wanted, got = held.learn(groups, version), asks.learn(with_r, version)
        assert got["policy/kl_reference"] == pytest.approx(wanted["policy/kl_reference"], abs=1e-5)
        assert got["policy/kl_coefficient"] == 0.5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), held.params, asks.params)
    assert asks.frozen.reference is None and "reference" not in asks.tree()
    assert got["train/flops"] < wanted["train/flops"]
    sampled = sum(e.num_drawn for g in groups for e in g.episodes)
    assert got["teacher/r/tokens"] == sampled and all(metric_of(key) for key in got)


def test_tokens_that_the_reference_does_not_know_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (whole,) = refers([GROUPS[2]], OTHER)
    (known,) = whole.scores[0].teachers
    fewer = {n: getattr(known, n)[1:] for n in ("places", "logprobs", "top_ids", "top_logprobs")}
    scores = (replace(whole.scores[0], teachers=(replace(known, **fewer),)), whole.scores[1])
    step = packed([replace(whole, scores=scores)])
    advice = NamedTeachers(top_k=0, local={}, reference="r")(step, NO_DEVICE_LOCK)
    assert advice.reference is not None and not advice.gap.any()
    rows = step.index.to_sequences(advice.reference)
    np.testing.assert_array_equal(rows[0][known.places[1:]], known.logprobs[1:])
    assert rows[0][known.places[0]] == whole.episodes[0].logprobs[known.places[0]]
    assert "does not know 1 of the step's tokens" in caplog.text


# ---- the policy as its own teacher, and other contexts


def in_other_contexts(teacher: TeacherLogprobs, replaced: int, opening: Sequence[int]) -> Any:
    """What a scorer leaves for the trainer to compute."""
    few: dict[str, Any] = {
        name: getattr(teacher, name)[:0]
        for name in ("places", "logprobs", "top_ids", "top_logprobs")
    }
    return replace(teacher, **few, opening=np.array(opening, np.int32), replaced=replaced)


def with_contexts(groups: Sequence[EpisodeGroup], openings: Sequence[Sequence[int]]) -> Any:
    """The groups with a teacher c, which reads one of these in place of the first two tokens."""
    found = []
    numbers = iter(range(99))
    for g in groups:
        scores = tuple(
            replace(
                s,
                teachers=(
                    in_other_contexts(
                        scored("c", 0.5, e, np.random.default_rng(0)),
                        2,
                        openings[next(numbers) % len(openings)],
                    ),
                ),
            )
            for e, s in zip(g.episodes, g.scores, strict=True)
        )
        found.append(replace(g, scores=scores))
    return found


def test_a_local_teacher_reads_other_contexts_than_the_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    openings = ([7, 3, 1], [5], [4] * 9)
    groups = with_contexts([GROUPS[0], GROUPS[2]], openings)
    step, local = packed(groups), LogprobPass(SPEC, SETTINGS, top_k=K)
    advice = asked(step, K, c=LocalTeacher(OTHER, local))
    gaps = step.index.to_sequences(advice.gap)
    flat_ids = advice.columns["teacher_ids"].reshape(-1, K)
    ids = [flat_ids[indices] for indices in step.index.sequences]
    unread = 0
    for number, (episode, _) in enumerate(by_episode(groups)):
        opening = np.array(openings[number % 3], np.int32)
        ends = (*episode.starts[1:], len(episode.token_ids))
        for start, end in zip(episode.starts, ends, strict=True):
            own = episode.token_ids[start:end]
            shown = np.array_equal(own[:2], episode.token_ids[:2])
            begins = start + 2 if shown else start
            read = np.concatenate([opening if shown else own[:0], episode.token_ids[begins:end]])
            row = read[None, :ROW].astype(np.int32)
            arrays = (row, np.arange(row.shape[1], dtype=np.int32)[None], np.ones_like(row))
            hidden = np.asarray(row_states(SPEC, OTHER, *arrays), np.float64)[0]
            probs = softmax(hidden @ np.asarray(OTHER["embed"].T, np.float64))
            for index in np.flatnonzero(episode.drawn[start:end]) + start:
                at = index - begins + (len(opening) if shown else 0)
                if at >= ROW:
                    unread += 1
                    assert gaps[number][index] == 0
                    continue
                logprob = np.log(probs[at - 1, episode.token_ids[index]])
                wanted = 0.5 * (float(episode.logprobs[index]) - logprob)
                assert gaps[number][index] == pytest.approx(wanted, abs=2e-5)
                likely = np.argsort(-probs[at - 1])[:K]
                assert ids[number][index].tolist() == likely.tolist()
    assert unread > 0 and f"{unread} generated tokens are beyond a row's 16 tokens" in caplog.text


def test_a_teacher_reads_other_contexts_at_the_temperatures_of_their_tasks() -> None:
    """A context that begins with the prompt's own tokens is the policy's, and so is its gap."""
    tasks, local = ("cold", "warm"), LogprobPass(SPEC, replace(SETTINGS, temperatures=(0.5, 2.0)))
    groups = [
        replace(g, prompt=replace(g.prompt, task=task))
        for g, task in zip((GROUPS[0], GROUPS[2]), reversed(tasks), strict=True)
    ]

    def gap(opened: bool) -> Any:
        with_teachers = [
            replace(
                g,
                scores=tuple(
                    replace(
                        s,
                        teachers=(
                            in_other_contexts(
                                scored("c", 1.0, e, np.random.default_rng(0)), 2, e.token_ids[:2]
                            )
                            if opened
                            else scored("c", 1.0, e, np.random.default_rng(0)),
                        ),
                    )
                    for e, s in zip(g.episodes, g.scores, strict=True)
                ),
            )
            for g in groups
        ]
        step = pack_step(shape(step_data(with_teachers)), ROW, tasks=tasks)
        return asked(step, c=LocalTeacher(OTHER, local)).gap

    assert np.abs(gap(opened=False)).max() > 0.1
    np.testing.assert_allclose(gap(opened=True), gap(opened=False), atol=2e-5)


@pytest.mark.parametrize("how", [{"average": 0.75}, {"every": 2}])
def test_the_policy_as_a_teacher_follows_the_policy(how: dict[str, Any]) -> None:
    section = schema.TeacherSection(source="teachers", form="loss", top_k=K, rewards=0.0)
    step = policy_update(SPEC, SETTINGS, ALGORITHM, total_steps=20, teacher=section)
    own = LogprobPass(SPEC, SETTINGS, top_k=K)

    def learner() -> Learner:
        following = FollowingTeachers(
            {"c": jax.tree.map(jnp.copy, PARAMS)}, {"c": schema.FollowingTeacher(**how)}, own
        )
        return Learner(
            step,
            step.init(jax.tree.map(jnp.copy, PARAMS)),
            LearnerSettings(algorithm=ALGORITHM, row_length=ROW, teacher=section),
            Companions(
                own_pass=own, teachers=NamedTeachers(top_k=K, local={}, following=following)
            ),
        )

    one = learner()
    teacher = policy = jax.tree.map(np.asarray, PARAMS)
    for version in range(4):
        report = one.learn(with_contexts([GROUPS[0]], ([7, 3, 1],)), version)
        assert report["policy/teacher_divergence"] > 0 and report["teacher/c/tokens"] > 0
        policy = jax.tree.map(np.asarray, one.params)
        if "average" in how:
            teacher = jax.tree.map(lambda t, p: 0.75 * t + 0.25 * p, teacher, policy)
        elif version % 2:
            teacher = policy
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            one.frozen.teachers["c"],
            teacher,
        )
        if version == 1:
            kept = jax.tree.map(jnp.copy, one.tree()), one.numbers()
    again = learner()
    again.restore(*kept)
    for version in (2, 3):
        again.learn(with_contexts([GROUPS[0]], ([7, 3, 1],)), version)
    for a, b in ((again.params, one.params), (again.frozen.teachers, one.frozen.teachers)):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)
